"""`python -m analysis`: draw every figure and the table of one experiment (`make figures`)."""

import argparse
import os
import sys
from pathlib import Path

from analysis.figures import draw_all


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m analysis", description=__doc__)
    parser.add_argument("--experiment", default="balagg-laptop", help="MLflow experiment (balagg-<grid>)")
    parser.add_argument("--tracking-uri", default=os.environ.get("MLFLOW_TRACKING_URI", "sqlite:///mlruns/mlflow.db"))
    parser.add_argument("--out", type=Path, default=Path("figures"))
    options = parser.parse_args()
    try:
        paths = draw_all(options.tracking_uri, options.experiment, options.out)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{len(paths)} files in {options.out}: {', '.join(sorted({path.stem for path in paths}))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
