"""How long do figures and report take on a large study, and how much memory?

    python benchmarks/analysis_speed.py FOLDER [--seeds 5]

Logs a simulated study to MLflow (SQLite) under FOLDER, unless it is there from an earlier call: 3 rules x 4 models x 5
data sets x 5 seeds = 300 runs of 200 steps and 36 metrics, with rollout samples and per-problem scores. Then times
`draw_all` and `write_report` in processes of their own.
"""

import argparse
import resource
import subprocess
import sys
import time
from pathlib import Path

from analysis.synthetic import Lengths, Study, log_study

EXPERIMENT = "balagg-large"
JOBS = {
    "figures": "from analysis.figures import draw_all as job",
    "report": "from analysis.report import write_report as job",
}


def large_study(num_seeds: int) -> Study:
    """300 runs with five seeds; the benchmarks are as large as the real ones."""
    return Study(
        models={f"model-{place}": Lengths(gap=-0.15 * place, cv=0.3 + 0.05 * place) for place in range(4)},
        datasets=tuple(f"data-{place}" for place in range(5)),
        seeds=num_seeds,
        steps=200,
        benchmarks={"math": 500, "olympiad": 674, "minerva": 272, "aime-1": 30, "aime-2": 30, "code": 175},
        checkpoints=(0.0, 0.25, 0.5, 0.75, 1.0),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    folder = arguments.folder.absolute()
    uri = f"sqlite:///{folder / 'mlflow.db'}"
    if not (folder / "complete").exists():
        folder.mkdir(parents=True, exist_ok=True)
        log_study(large_study(arguments.seeds), uri, EXPERIMENT, folder / "artifacts")
        (folder / "complete").touch()
    for name, imported in JOBS.items():
        code = f"import sys; from pathlib import Path; {imported}; job(sys.argv[1], sys.argv[2], Path(sys.argv[3]))"
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", code, uri, EXPERIMENT, str(folder / name)], check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds, cpu = time.perf_counter() - start, after.ru_utime - before.ru_utime
        print(f"{name}: {seconds:.1f} s, {cpu:.1f} s on the CPU, at most {after.ru_maxrss / 2**20:.2f} GiB")


if __name__ == "__main__":
    main()
