"""`balagg`, also called as `python -m orchestrator`."""

import gc


def main() -> None:
    """Run the command line."""
    # What is imported never becomes garbage, and looking for some in it takes a good part of a short command's time.
    gc.disable()
    from orchestrator.cli import app

    gc.freeze()
    gc.enable()
    app()


if __name__ == "__main__":
    main()
