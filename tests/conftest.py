"""Shared set-up: one thread per process, no waiting for a hub, deterministic property tests."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("suite", deadline=None, derandomize=True)
settings.load_profile("suite")

ROOT = Path(__file__).resolve().parent.parent
LONGEST_FIRST = ("test_orchestrator_run.py", "test_workers.py", "test_recipe.py", "test_orchestrator_cli.py")
"""Files that take a minute or more; begun last, they would keep one process busy while the others wait."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest files; the others stay in their order."""
    items.sort(key=lambda item: item.path.name not in LONGEST_FIRST)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of real benchmark problems beside the repository; tests that want it skip where it is absent."""
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("real benchmark files are not here")
    return folder


@pytest.fixture(autouse=True)
def repository_root(monkeypatch) -> None:
    """Run each test from the repository's root, which relative model paths count from."""
    monkeypatch.chdir(ROOT)
