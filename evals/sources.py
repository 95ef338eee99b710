"""Where rows come from: a file under `--data-dir` first, else the Hugging Face hub.

Rows are read one at a time. A row that cannot be used is reported with its file and line number and counted; it
never vanishes silently.
"""

import gzip
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evals.problems import Problem

log = logging.getLogger(__name__)

SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")
NUM_SHOWN = 3  # bad rows quoted in a message; all of them are in the report


class RowError(ValueError):
    """A row that cannot be made into a problem."""


class SourceUnavailable(FileNotFoundError):
    """Neither the local file nor the hub could be read."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """One table of rows.

    Attributes:
        hub_id, config, split, revision: the data set on the hub; with `revision` None, its newest state.
        files: names looked for under the data directory, in order, each with one of `SUFFIXES`.
        parts: names that together make the table; used when all of them are there and none of `files` is.
        stream: read the hub's copy without downloading it whole (hidden tests of gigabytes).
    """

    hub_id: str | None = None
    config: str | None = None
    split: str = "train"
    revision: str | None = None
    files: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    stream: bool = False


@dataclass
class LoadReport:
    """What became of the rows: `rows` read, of which `bad`, `duplicates` and `conflicting` were left out."""

    source: str = ""
    rows: int = 0
    bad: list[str] = field(default_factory=list)
    duplicates: int = 0
    conflicting: int = 0

    def counts(self) -> dict[str, Any]:
        """The report as plain values, for results."""
        return {
            "source": self.source,
            "rows": self.rows,
            "bad_rows": len(self.bad),
            "duplicates": self.duplicates,
            "conflicting": self.conflicting,
        }


def read_problems(
    name: str,
    source: Source,
    parse: Callable[[dict[str, Any], str], Problem | None],
    *,
    data_dir: Path | str | None = None,
    report: LoadReport | None = None,
) -> Iterator[Problem]:
    """Yield the problems of a source in order. `parse(row, fallback_id)` returns None for a row to pass over.

    Raises:
        SourceUnavailable: neither a local file nor the hub can be read.
        ValueError: there are no rows, or not one could be used.
    """
    report = report if report is not None else LoadReport()
    num_kept = 0
    try:
        for where, row in _read_rows(name, source, data_dir, report):
            try:
                problem = parse(row, f"{name}-{report.rows - 1}")
            except RowError as error:
                report.bad.append(f"{where}: {error}")
                continue
            if problem is not None:
                num_kept += 1
                yield problem
    finally:  # also when the caller has enough and stops early
        if report.bad and num_kept:
            log.warning(_left_out(name, report))
    if not num_kept and (report.bad or not report.rows):
        raise ValueError(_left_out(name, report) if report.bad else f"{name}: no rows in {report.source}")


def quote(messages: list[str]) -> str:
    """The first few of a list of messages, and how many more there are."""
    more = f"; and {len(messages) - NUM_SHOWN} more" if len(messages) > NUM_SHOWN else ""
    return "; ".join(messages[:NUM_SHOWN]) + more


def _left_out(name: str, report: LoadReport) -> str:
    return f"{name}: {len(report.bad)} of {report.rows} rows cannot be used: {quote(report.bad)}"


def column(row: dict[str, Any], *names: str) -> Any:
    """The first of the named columns that the row has a value for.

    Raises:
        RowError: it has none of them.
    """
    for name in names:
        if row.get(name) is not None:
            return row[name]
    raise RowError(f"no column {' or '.join(map(repr, names))} (columns: {', '.join(row)})")


def text(row: dict[str, Any], *names: str) -> str:
    """Like `column`, for a text or a number, as text.

    Raises:
        RowError: the column is missing, empty or of another type.
    """
    value = column(row, *names)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise RowError(f"column {names[0]!r} holds a {type(value).__name__}, not a text")
    if not str(value).strip():
        raise RowError(f"column {names[0]!r} is empty")
    return str(value)


def json_lines(path: Path, bad: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number from 1, object) of a .jsonl or .jsonl.gz file; lines that are no objects go to `bad`."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                bad.append(f"{path}:{number}: not JSON ({error})")
                continue
            if isinstance(row, dict):
                yield number, row
            else:
                bad.append(f"{path}:{number}: a JSON {type(row).__name__}, not an object")


def find_files(source: Source, data_dir: Path | str | None) -> list[Path]:
    """The local files of a source, empty when there are none.

    Raises:
        FileNotFoundError: `data_dir` itself does not exist.
    """
    if data_dir is None:
        return []
    folder = Path(data_dir)
    if not folder.is_dir():
        raise FileNotFoundError(f"data directory {folder} does not exist")
    for name in source.files:
        if found := _with_suffix(folder, name):
            return [found]
    parts = [_with_suffix(folder, name) for name in source.parts]
    return [part for part in parts if part] if parts and all(parts) else []


def _with_suffix(folder: Path, name: str) -> Path | None:
    return next((path for suffix in SUFFIXES if (path := folder / (name + suffix)).is_file()), None)


def _read_rows(
    name: str, source: Source, data_dir: Path | str | None, report: LoadReport
) -> Iterator[tuple[str, dict[str, Any]]]:
    files = find_files(source, data_dir)
    if files:
        report.source = "file " + ", ".join(path.name for path in files)
        for path in files:
            yield from _parquet_rows(path, report) if path.suffix == ".parquet" else _json_rows(path, report)
        return
    rows = _open_hub(name, source, data_dir)
    report.source = f"hub {source.hub_id}@{source.revision or 'newest'}"
    for index, row in enumerate(rows):
        report.rows += 1
        yield f"{source.hub_id} row {index}", row


def _json_rows(path: Path, report: LoadReport) -> Iterator[tuple[str, dict[str, Any]]]:
    num_bad = len(report.bad)
    for number, row in json_lines(path, report.bad):
        report.rows += 1 + len(report.bad) - num_bad
        yield f"{path}:{number}", row
        num_bad = len(report.bad)
    report.rows += len(report.bad) - num_bad


def _parquet_rows(path: Path, report: LoadReport) -> Iterator[tuple[str, dict[str, Any]]]:
    import datasets

    table = datasets.load_dataset("parquet", data_files=str(path), split="train", streaming=True)
    for index, row in enumerate(table):
        report.rows += 1
        yield f"{path} row {index}", row


def _open_hub(name: str, source: Source, data_dir: Path | str | None) -> Any:
    places = ["/".join(source.parts)] if source.parts and not source.files else list(source.files)
    looked_for = f"{' or '.join(places)} ({', '.join(SUFFIXES)})"
    local = f"in {data_dir} there is no {looked_for}" if data_dir else f"no --data-dir was given (for {looked_for})"
    if source.hub_id is None:
        raise SourceUnavailable(f"{name}: {local}; this set is read from local files alone: pass --data-dir DIR")
    try:
        import datasets

        return datasets.load_dataset(
            source.hub_id, source.config, split=source.split, revision=source.revision, streaming=source.stream
        )
    except (OSError, ImportError) as error:
        raise SourceUnavailable(
            f"{name}: {local}, and {source.hub_id} cannot be read from the Hugging Face hub "
            f"({type(error).__name__}: {error}). Connect to the hub, or put the file into a folder and pass "
            "--data-dir DIR"
        ) from error
