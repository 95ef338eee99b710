"""The core works where only torch and Transformers are installed."""

import subprocess
import sys

PROGRAM = """
import importlib, importlib.abc, pkgutil, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in {absent}:
            raise ModuleNotFoundError(f"{{name}} is absent", name=name)

sys.meta_path.insert(0, Absent())
import evals, trainers
for package in (evals, trainers):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
        print(module.name)
"""
ABSENT = {
    "ray", "vllm", "mlflow", "datasets", "pandas", "pyarrow", "matplotlib", "math_verify", "pebble", "peft",
    "pydantic", "typer", "rich", "latex2sympy2_extended", "gguf", "sqlalchemy",
}  # fmt: skip


def test_trainers_and_evals_import_without_the_rest():
    told = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(absent=ABSENT)], capture_output=True, text=True, timeout=120
    )
    assert told.returncode == 0, told.stderr
    assert {"trainers.grpo", "trainers.workers", "evals.evaluate", "evals.engines.vllm_engine"} <= set(
        told.stdout.split()
    )
