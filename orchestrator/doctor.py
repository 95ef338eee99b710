"""Is this machine ready? One check a line, each with its remedy."""

import importlib.metadata
import os
import platform
import shutil
import sys
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


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
        _gpu,
        _sandbox,
        _shared_memory,
        lambda: _disk(runs_dir if runs_dir.exists() else root),
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
        return Finding("sandbox for code", False, str(error), "make setup")
    rung = available_rung()
    remedy = "install bubblewrap, or use Linux 5.13 or later with Landlock; code benchmarks are left out till then"
    return Finding("sandbox for code", rung is not None, rung or "none", remedy)


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


def _hub() -> Finding:
    remedy = "only models and data from the hub need it; --data-dir reads local files"
    address = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=5).close()
    except OSError as error:
        return Finding("Hugging Face hub", False, str(error), remedy, needed=False)
    return Finding("Hugging Face hub", True, address, needed=False)
