"""On what and where was a run trained? Facts that only the training process knows, left in its folder."""

import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path

import torch

from evals.problems import Problem, problems_digest
from evals.sources import LoadReport

FILE = "provenance.json"


def record_provenance(cell_dir: Path, dataset: str, problems: Sequence[Problem], report: LoadReport) -> None:
    """Write provenance.json: the training problems (name, source, number, digest), host, GPU and torch.

    A resumed run writes it again: the file tells about the machine that went on last.
    """
    facts = {
        "dataset": {
            "name": dataset,
            "source": report.source,
            "problems": len(problems),
            "digest": problems_digest(problems),
        },
        "host": platform.node(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    partial = cell_dir / f".{FILE}.partial"
    partial.write_text(json.dumps(facts, indent=2) + "\n")
    os.replace(partial, cell_dir / FILE)
