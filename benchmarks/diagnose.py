"""Cost of `balagg diagnose` and coverage of its intervals.

    python benchmarks/diagnose.py parquet                # a million responses with their texts: seconds, peak memory
    python benchmarks/diagnose.py jsonl --gigabytes 5    # a large file: seconds, peak memory
    python benchmarks/diagnose.py coverage               # how often 95 % intervals hold the truth, of 1,000 draws

Files are made in a temporary folder and deleted. `--keep DIR` makes and leaves them there.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from analysis.diagnose import measure, negative_share
from analysis.dumps import Responses

GROUP = 8
PROMPTS = 64
COVERAGE_RUNS = (
    # steps, prompts per step, standard deviation of the gap over steps, its correlation from one step to the next
    (1, 64, 0.0, 0.0),
    (3, 16, 0.1, 0.0),
    (10, 8, 0.1, 0.0),
    (40, 8, 0.1, 0.0),
    (40, 8, 0.1, 0.5),
    (100, 4, 0.1, 0.6),
)
MEAN_GAP = -0.3


def simulate(
    rng: np.random.Generator, steps: int, prompts: int, sd_step: float = 0.1, correlation: float = 0.0, first: int = 1
) -> Responses:
    """Rollouts whose relative gap is `MEAN_GAP` on average, differs by group, and wanders from step to step."""
    num_groups = steps * prompts
    drift = np.empty(steps)
    state = rng.normal()
    for step in range(steps):
        drift[step] = state
        state = correlation * state + np.sqrt(1 - correlation**2) * rng.normal()
    gap = np.repeat(MEAN_GAP + sd_step * drift, prompts) + rng.normal(0, 0.2, num_groups)
    right = (rng.random((num_groups, GROUP)) < rng.uniform(0.1, 0.9, (num_groups, 1))).astype(float)
    shape = 1 + gap[:, None] * (right - 0.5) + rng.normal(0, 0.25, right.shape)
    lengths = np.maximum(np.round(rng.lognormal(6, 0.5, (num_groups, 1)) * shape), 1)
    return Responses(
        step=np.repeat(np.arange(first, first + steps), prompts * GROUP),
        group=np.repeat(np.arange(num_groups), GROUP).astype(np.uint64),
        length=lengths.ravel(),
        reward=right.ravel(),
        advantage=np.full(num_groups * GROUP, np.nan),
        truncated=np.full(num_groups * GROUP, np.nan),
    )


def coverage(draws: int) -> None:
    """Print, for each kind of run and quantity, how many of the intervals hold the truth and how wide they are."""
    print(" steps prompts step_sd corr.  quantity                  truth  covered    width")
    for steps, prompts, sd_step, correlation in COVERAGE_RUNS:
        names = ("sign_gap_rel", "length_ratio", negative_share("token"), "group_cv")
        drawn = [
            measure([simulate(np.random.default_rng([seed, steps]), steps, prompts, sd_step, correlation)])
            for seed in range(draws)
        ]
        for name in names:
            # The truth of a ratio of sums: what all draws together give, a sample a thousand times as large.
            truth = sum(m.numerators[name].sum() for m in drawn) / sum(m.denominators[name].sum() for m in drawn)
            found = [m.estimate(name) for m in drawn]
            covered = np.mean([estimate.low <= truth <= estimate.high for estimate in found])
            width = np.mean([estimate.high - estimate.low for estimate in found])
            run = f"{steps:6} {prompts:7} {sd_step:7} {correlation:5}"
            print(f"{run}  {name:22} {truth:8.4f} {covered:8.3f} {width:8.4f}", flush=True)


def tables(num_responses: int) -> Iterator[dict[str, list]]:
    """A step's rows at a time, as a trainer would dump them, with texts of about three characters a token."""
    text = "".join(chr(97 + i % 26) if i % 6 else " " for i in range(20_000))
    per_step = PROMPTS * GROUP
    for step in range(1, -(-num_responses // per_step) + 1):
        found = simulate(np.random.default_rng(step), 1, PROMPTS, first=step)
        yield {
            "step": found.step.tolist(),
            "prompt": [f"Question {step}-{group}: " + text[group : group + 200] for group in found.group.tolist()],
            "completion": [text[int(n) % 97 :][: 3 * int(n)] for n in found.length],
            "right": found.reward.tolist(),
            "advantage": (found.reward - np.repeat(found.reward.reshape(-1, GROUP).mean(1), GROUP)).tolist(),
        }


def write_parquet(path: Path, num_responses: int) -> None:
    writer = None
    for columns in tables(num_responses):
        table = pa.table(columns)
        writer = writer or pq.ParquetWriter(path, table.schema, compression="snappy")
        writer.write_table(table)
    if writer:
        writer.close()


def write_jsonl(path: Path, gigabytes: float) -> None:
    written = 0
    with path.open("w") as file:
        for columns in tables(2**60):
            for step, prompt, output, score, _ in zip(*columns.values(), strict=True):
                row = {"input": prompt, "output": output, "gts": "7", "score": score, "step": step}
                written += file.write(json.dumps(row) + "\n")
            if written >= gigabytes * 1e9:
                return


def timed(path: Path, out: Path) -> None:
    """Run the command on a file and print its wall time and its peak memory."""
    start = time.perf_counter()
    command = [
        sys.executable,
        "-c",
        "from orchestrator.cli import app; app()",
        "diagnose",
        str(path),
        "--out",
        str(out),
    ]
    subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    seconds = time.perf_counter() - start
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = used.ru_utime + used.ru_stime
    memory = f"peak memory {used.ru_maxrss / 2**10:.0f} MiB"
    print(f"\n{path.name}: {path.stat().st_size / 1e9:.2f} GB, {seconds:.1f} s ({cpu:.1f} s of CPU), {memory}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["parquet", "jsonl", "coverage"])
    parser.add_argument("--responses", type=int, default=1_000_000)
    parser.add_argument("--gigabytes", type=float, default=5.0)
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--keep", type=Path)
    options = parser.parse_args()
    if options.what == "coverage":
        coverage(options.draws)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        path = folder / f"dump.{options.what}"
        if not path.exists():
            if options.what == "parquet":
                write_parquet(path, options.responses)
            else:
                write_jsonl(path, options.gigabytes)
        timed(path, Path(temporary) / "figures")


if __name__ == "__main__":
    main()
