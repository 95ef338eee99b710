"""How does a grid run on after its terminal is gone? The same command, in a session of its own, with a log file."""

import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from orchestrator.errors import UserError

STARTED = ("work left", "cells done")
"""What a run says once it has checked everything that a person may have got wrong."""

CHECKS_S = 120.0
"""How long to wait for that, while the cluster and the MLflow store are asked."""


def start_detached(arguments: Sequence[str], runs_dir: Path, grid: str) -> tuple[int, Path]:
    """Start `balagg ARGUMENTS` in its own session.

    Args:
        arguments: of the command line, without `--detach`.
        runs_dir, grid: the log file goes to `runs/<grid>/run-<time>.log`.

    Returns:
        process id and log file.

    Raises:
        UserError: it ended at once with an error; says what it said.
    """
    log = runs_dir / grid / f"run-{datetime.now():%Y%m%d-%H%M%S}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "orchestrator", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    deadline = time.monotonic() + CHECKS_S
    while process.poll() is None and time.monotonic() < deadline:
        if any(words in log.read_text() for words in STARTED):
            break
        time.sleep(0.1)
    if process.poll():
        raise UserError(f"the command ended at once with exit status {process.returncode}:\n{log.read_text().strip()}")
    return process.pid, log


def how_to_watch(pid: int, log: Path, which: Sequence[str]) -> str:
    """What to type to see how far it is, and to end it.

    Args:
        which: the options of the command that say which cells are meant.
    """
    chosen = shlex.join(which)
    return "\n".join(
        [
            f"running as process {pid}, also when this terminal is closed",
            f"  watch:  balagg status --watch {chosen}".rstrip(),
            f"          tail -f {shlex.quote(str(log))}",
            f"  stop:   balagg stop {chosen}".rstrip(),
            f"          kill {pid}   (at once; the next run goes on from the last checkpoints)",
        ]
    )
