"""The core works where only torch and Transformers are installed."""

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
sys.path[:0] = {paths}
import importlib, pkgutil
import evals, trainers
for package in (evals, trainers):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
        print(module.name)
for name in ("ray", "mlflow", "pandas", "pebble", "math_verify", "datasets", "pyarrow", "peft"):
    assert importlib.util.find_spec(name) is None, name
"""


def with_requirements(*names: str) -> dict[str, importlib.metadata.Distribution]:
    """Distributions and all that they require, extras left out."""
    found: dict[str, importlib.metadata.Distribution] = {}
    waiting = list(names)
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in found:
            continue
        try:
            found[name] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # for another platform
        requires = found[name].requires or []
        waiting += [re.match(r"[\w.-]+", line)[0] for line in requires if "extra ==" not in line]
    return found


def test_trainers_and_evals_import_without_the_rest(tmp_path):
    for distribution in with_requirements("torch", "transformers").values():
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (tmp_path / top).exists():
                (tmp_path / top).symlink_to(Path(distribution.locate_file(top)))
    program = PROGRAM.format(paths=[str(Path.cwd()), str(tmp_path)])
    told = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert told.returncode == 0, told.stderr
    modules = set(told.stdout.split())
    assert {"trainers.grpo", "trainers.workers", "evals.evaluate", "evals.engines.vllm_engine"} <= modules
