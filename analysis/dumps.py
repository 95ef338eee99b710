"""Rollout dumps of any trainer as streams of numbers: step, group, length, reward, advantage, truncated.

    dump = open_dump([Path("completions")], ReadOptions())
    for responses in dump.batches(): ...

Parquet, JSON lines (also gzipped) and CSV are read a piece at a time and texts are dropped as soon as their length is
known, so memory does not grow with the files. Rows that cannot be used are counted, with where they are and why.
"""

import csv
import glob
import gzip
import io
import itertools
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from analysis.diagnose_columns import Column, CountTokens, flags, keys, numbers, sizes, text_lengths
from analysis.diagnose_formats import DumpError, Layout, find_layout, flatten, is_trace, listed

SUFFIXES = (".parquet", ".jsonl", ".ndjson", ".csv", ".jsonl.gz", ".csv.gz")
CHUNK_BYTES = 32 * 2**20
MOST_CHUNK_ROWS = 65_536
LONGEST_LINE = 256 * 2**20
SAMPLE_ROWS = 100
"""Rows of a JSON lines file that are looked at to learn its columns."""
MOST_PLACES = 3
NO_STEP = 0
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
STEP_IN_NAME = re.compile(r"(?:step|iteration|iter|completions)[_-]?(\d+)", re.IGNORECASE)


class Responses(NamedTuple):
    """Numbers of N responses; entry i of every array belongs to response i."""

    step: NDArray[np.int64]
    group: NDArray[np.uint64]
    """Equal for the responses to one prompt."""
    length: NDArray[np.float64]
    """Tokens or characters, see `Dump.length_unit`."""
    reward: NDArray[np.float64]
    """NaN where the dump has none."""
    advantage: NDArray[np.float64]
    """NaN where the dump has none."""
    truncated: NDArray[np.float64]
    """1 where cut at the length limit, else 0; NaN where unknown."""

    def rows(self, chosen: Any) -> "Responses":
        return Responses(*(values[chosen] for values in self))


def concatenate(parts: Sequence[Responses]) -> Responses:
    return Responses(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


@dataclass(frozen=True)
class ReadOptions:
    mapping: Mapping[str, str] = field(default_factory=dict)
    """Role -> column (`analysis.diagnose_formats.ROLES`)."""
    reward_columns: Sequence[str] = ()
    """Columns whose sum is the reward."""
    count_tokens: CountTokens | None = None
    """Counts the tokens of texts; without it texts are measured in characters."""
    max_length: int | None = None
    """Length limit in tokens; responses that reach it count as truncated where the dump does not say."""


class Piece(NamedTuple):
    """Some rows of a file: the needed columns, and the line or row of the file that each row is."""

    columns: Mapping[str, Column]
    places: NDArray[np.int64]


@dataclass
class Problem:
    """Rows that cannot be used for one reason."""

    count: int = 0
    places: list[str] = field(default_factory=list)
    """Where the first of them are."""


@dataclass
class Dump:
    """Files that were found to be one dump. `rows` and `problems` fill up while `batches` runs."""

    files: list[Path]
    layouts: list[Layout]
    options: ReadOptions
    rows: int = 0
    problems: dict[str, Problem] = field(default_factory=dict)

    @property
    def layout(self) -> Layout:
        return self.layouts[0]

    @property
    def reward_columns(self) -> list[str]:
        """All columns that are summed to the reward in some file."""
        return list(dict.fromkeys(column for layout in self.layouts for column in layout.roles.get("reward", ())))

    @property
    def length_unit(self) -> str:
        counted = "length" in self.layout.roles or self.options.count_tokens is not None
        return "tokens" if counted else "characters"

    @property
    def step_source(self) -> str | None:
        """Where step numbers come from: a column, the names of the files, or nowhere."""
        if "step" in self.layout.roles:
            return f"column {self.layout.roles['step'][0]!r}"
        return "the names of the files" if all(step_in_name(file) is not None for file in self.files) else None

    @property
    def unusable(self) -> int:
        return sum(problem.count for problem in self.problems.values())

    def batches(self) -> Iterator[Responses]:
        """The usable responses, in the order of the files.

        Raises:
            DumpError: there is no row, half of them or more cannot be used, or a file breaks off.
        """
        for path, layout in zip(self.files, self.layouts, strict=True):
            for piece in _to_the_end(path, self._pieces(path, layout)):
                self.rows += len(piece.places)
                yield self._responses(path, layout, piece)
        if not self.rows:
            raise DumpError(f"{listed([str(file) for file in self.files])}: no responses in it")
        if self.unusable * 2 >= self.rows:
            raise DumpError(
                f"{self.unusable} of {self.rows} rows cannot be used, so the rest may not stand for the run:\n"
                + "\n".join(self.problem_lines())
            )

    def problem_lines(self) -> list[str]:
        """One line for each kind of unusable row: how many, and where the first ones are."""
        return [
            f"{problem.count} {'row' if problem.count == 1 else 'rows'}: {reason} ({'; '.join(problem.places)}"
            f"{'; ...' if problem.count > MOST_PLACES else ''})"
            for reason, problem in self.problems.items()
        ]

    def _note(self, reason: str, count: int, places: Iterable[str]) -> None:
        problem = self.problems.setdefault(reason, Problem())
        problem.count += count
        problem.places += list(places)[: MOST_PLACES - len(problem.places)]

    def _pieces(self, path: Path, layout: Layout) -> Iterator[Piece]:
        def malformed(line: int, why: str) -> None:
            self.rows += 1
            self._note(why, 1, [f"{path} line {line}"])

        kind = kind_of(path)
        if kind == "parquet":
            return _parquet_pieces(path, layout.needed)
        read = _csv_rows if kind == "csv" else json_rows
        return _row_pieces(read(path, malformed), layout.needed)

    def _responses(self, path: Path, layout: Layout, piece: Piece) -> Responses:
        rows = _UsableRows(path, layout, piece, self._note)
        has_advantage = "advantage" in layout.roles
        group, step, length = rows.groups(), rows.steps(), rows.lengths(self.options)
        reward, advantage = rows.rewards(required=not has_advantage), rows.unknown()
        if has_advantage:
            advantage = rows.numbers("advantage")
        truncated = rows.unknown()
        if "truncated" in layout.roles:
            truncated = rows.cut()
        elif self.options.max_length is not None:
            truncated = (length >= self.options.max_length).astype(np.float64)
        return Responses(step, group, length, reward, advantage, truncated).rows(rows.usable)


class _UsableRows:
    """Reads one piece role by role, and keeps track of which rows are usable in all that was read so far."""

    def __init__(self, path: Path, layout: Layout, piece: Piece, note: Callable[[str, int, list[str]], None]) -> None:
        self.path, self.layout, self.piece, self.note = path, layout, piece, note
        self.usable = np.ones(len(piece.places), dtype=bool)

    def unknown(self) -> NDArray[np.float64]:
        return np.full(len(self.usable), np.nan)

    def groups(self) -> NDArray[np.uint64]:
        role = "group" if "group" in self.layout.roles else "prompt"
        suffix = self.layout.format.key_suffix if role == "group" else None
        group, missing = keys(self._columns(role), suffix)
        self._reject(missing, "is missing", role)
        return group

    def steps(self) -> NDArray[np.int64]:
        if "step" not in self.layout.roles:
            return np.full(len(self.usable), step_in_name(self.path) or NO_STEP, dtype=np.int64)
        return np.nan_to_num(self.numbers("step"), nan=NO_STEP, posinf=NO_STEP, neginf=NO_STEP).astype(np.int64)

    def lengths(self, options: ReadOptions) -> NDArray[np.float64]:
        if "length" in self.layout.roles:
            return self._lengths("length", *sizes(self._columns("length")[0]))
        prompts = self._columns("prompt")[0] if self.layout.cuts_prompt else None
        end_tokens = self.layout.format.end_tokens
        measured = text_lengths(self._columns("response")[0], prompts, options.count_tokens, end_tokens)
        return self._lengths("response", *measured)

    def rewards(self, *, required: bool) -> NDArray[np.float64]:
        """The sum of the reward columns. One that does not apply to a response gives it nothing, as in TRL."""
        total = self.unknown()
        for column in self._columns("reward"):
            values, bad = numbers(column)
            self._reject(bad | np.isinf(values), "is not a number", "reward")
            total = np.where(np.isnan(values), total, np.nan_to_num(total) + np.nan_to_num(values))
        if required:
            self._reject(np.isnan(total), "is missing", "reward")
        return total

    def numbers(self, role: str) -> NDArray[np.float64]:
        values, bad = numbers(self._columns(role)[0])
        self._reject(bad | np.isinf(values), "is not a number", role)
        self._reject(np.isnan(values), "is missing", role)
        return values

    def cut(self) -> NDArray[np.float64]:
        values, bad = flags(self._columns("truncated")[0])
        self._reject(bad, "does not say whether the response was cut", "truncated")
        return values

    def _lengths(self, role: str, length: NDArray[np.float64], bad: NDArray[np.bool_]) -> NDArray[np.float64]:
        self._reject(bad | np.isinf(length), f"is not {'a length' if role == 'length' else 'text'}", role)
        self._reject(np.isnan(length), "is missing", role)
        self._reject(length < 0, "is negative", role)
        return length

    def _columns(self, role: str) -> list[Column]:
        return [self.piece.columns[column] for column in self.layout.roles.get(role, ())]

    def _reject(self, rows: NDArray[np.bool_], what: str, role: str) -> None:
        """Leave out rows that were usable so far, and note which they are and what they hold."""
        bad = np.flatnonzero(rows & self.usable)
        if not len(bad):
            return
        names = self.layout.roles[role]
        word = "row" if kind_of(self.path) == "parquet" else "line"
        places = [f"{self.path} {word} {self.piece.places[row]}" for row in bad[:MOST_PLACES]]
        places[0] += f", {names[0]} = {_shown(self.piece.columns[names[0]][int(bad[0])])}"
        self.note(f"{' + '.join(map(repr, names))} {what}", len(bad), places)
        self.usable[bad] = False


def open_dump(paths: Sequence[str | Path], options: ReadOptions) -> Dump:
    """Find the files and learn the meaning of their columns, reading no more than the first rows of each.

    Raises:
        DumpError: a path leads nowhere, a file is of no known kind, a role has no column, or files differ in layout.
    """
    files = find_files(paths)
    layouts = [find_layout(file, columns_of(file), options.mapping, options.reward_columns) for file in files]
    for file, layout in zip(files, layouts, strict=True):
        if difference := layouts[0].differs_from(layout):
            raise DumpError(
                f"{files[0]} and {file} are not of one dump: {difference}. Give files of one kind at a time, or "
                "name the columns that they share with --map"
            )
    dump = Dump(files, layouts, options)
    if options.max_length is not None and dump.length_unit == "characters":
        raise DumpError(
            "--max-length counts tokens, but this dump has texts alone, which are measured in characters: add "
            "--tokenizer, or name a column of token counts with --map length=COLUMN"
        )
    return dump


def find_files(paths: Sequence[str | Path]) -> list[Path]:
    """The files that paths, folders and glob patterns mean, ordered by the numbers in their names.

    Of a folder's files, hidden ones are left out, and those of evaluation (`eval...`) where there are others.

    Raises:
        DumpError: a path leads nowhere.
    """
    files: list[Path] = []
    for given in paths:
        path = Path(given)
        if path.is_dir():
            inside = [file for file in path.rglob("*") if file.name.endswith(SUFFIXES) and not _hidden(file, path)]
            found = [file for file in inside if not file.name.startswith("eval")] or inside
        else:
            found = [path] if path.exists() else [Path(name) for name in glob.glob(str(given), recursive=True)]
        if not found:
            what = f"no {', '.join(SUFFIXES)} file in this folder" if path.is_dir() else "there is no such file"
            raise DumpError(f"{given}: {what}")
        files += sorted(found, key=_by_number)
    return list(dict.fromkeys(files))


def columns_of(path: Path) -> dict[str, bool]:
    """Name of every column, nested ones with a dot -> whether it holds numbers.

    Raises:
        DumpError: the file is empty, or is no parquet, JSON lines or CSV.
    """
    kind = kind_of(path)
    if kind == "parquet":
        with _parquet(path) as file:
            return dict(_schema_columns(file.schema_arrow))
    bad: list[str] = []
    read = (_csv_rows if kind == "csv" else json_rows)(path, lambda line, why: bad.append(f"line {line}: {why}"))
    columns: dict[str, bool] = {}
    for _, row in itertools.islice(read, SAMPLE_ROWS):
        for name, value in _flat_items(row):
            if value is not None:
                columns[name] = columns.get(name, True) and _is_number(value)
    if not columns:
        raise DumpError(f"{path}: {f'no row of data; {bad[0]}' if bad else 'the file has no rows'}")
    return columns


def kind_of(path: Path) -> str:
    """Which of "parquet", "jsonl" and "csv" a file is, from how it begins.

    Raises:
        DumpError: the file cannot be read, or holds one JSON array, which cannot be streamed.
    """
    try:
        with _open(path) as file:
            start = file.read(4096)
    except OSError as error:
        raise DumpError(f"{path}: {error.strerror or error}") from error
    if start[:4] == b"PAR1":
        return "parquet"
    text = start.removeprefix(BYTE_ORDER_MARK).lstrip()
    if text[:1] == b"[":
        raise DumpError(f"{path}: one JSON array; write one object a line instead (jq -c '.[]' {path} > rows.jsonl)")
    if b"\0" in start:
        raise DumpError(f"{path}: neither parquet, JSON lines nor CSV")
    return "jsonl" if text[:1] == b"{" else "csv"


def step_in_name(path: Path) -> int | None:
    """The step that a file's name (`12.jsonl`, `step-12.parquet`) or its folder's (`step_12`) gives."""
    stem = path.name.split(".")[0]
    if stem.isdecimal():
        return int(stem)
    found = STEP_IN_NAME.search(stem) or STEP_IN_NAME.fullmatch(path.parent.name)
    return int(found[1]) if found else None


def json_rows(path: Path, malformed: Callable[[int, str], None]) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line, row) of every JSON object; a trace is flattened to the responses in it."""
    with _open(path) as file:
        for number in itertools.count(1):
            line = file.readline(LONGEST_LINE)
            if not line:
                return
            if len(line) == LONGEST_LINE:
                raise DumpError(f"{path}: line {number} is longer than {LONGEST_LINE // 2**20} MiB: not JSON lines?")
            if number == 1:
                line = line.removeprefix(BYTE_ORDER_MARK)
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError:
                malformed(number, "not valid JSON")
                continue
            if not isinstance(row, dict):
                malformed(number, "not a JSON object")
            elif is_trace(row):
                yield from ((number, response) for response in flatten(row))
            else:
                yield number, row


def open_text(path: Path) -> io.TextIOWrapper:
    """A file of text, also a gzipped one; bytes that are not UTF-8 become the replacement character."""
    return io.TextIOWrapper(_open(path), encoding="utf-8-sig", errors="replace", newline="")


def _to_the_end(path: Path, pieces: Iterator[Piece]) -> Iterator[Piece]:
    """The pieces of a file, with what stops their reading as a message."""
    try:
        yield from pieces
    except (OSError, EOFError, zlib.error, pa.ArrowInvalid) as error:
        raise DumpError(f"{path}: cannot be read to its end ({error})") from error


def _parquet(path: Path) -> pq.ParquetFile:
    # Buffered, so that a row group of many gigabytes is not read at once.
    try:
        return pq.ParquetFile(path, buffer_size=2**20, pre_buffer=False)
    except pa.ArrowInvalid as error:
        raise DumpError(f"{path}: broken parquet ({error})") from error


def _parquet_pieces(path: Path, needed: Sequence[str]) -> Iterator[Piece]:
    with _parquet(path) as file:
        rows = max(file.metadata.num_rows, 1)
        width = sum(file.metadata.row_group(i).total_byte_size for i in range(file.metadata.num_row_groups)) / rows
        batch_rows = int(np.clip(CHUNK_BYTES / max(width, 1), 1, MOST_CHUNK_ROWS))
        first = 1
        # A nested column is read by its root: names with dots of their own would be ambiguous.
        roots = list(dict.fromkeys(name if name in file.schema_arrow.names else name.split(".")[0] for name in needed))
        for batch in file.iter_batches(batch_rows, columns=roots, use_threads=False):
            columns = {name: _nested(batch, name) for name in needed}
            yield Piece(columns, np.arange(first, first + batch.num_rows))
            first += batch.num_rows


def _nested(batch: pa.RecordBatch, name: str) -> pa.Array:
    if name in batch.schema.names:
        return batch.column(name)
    root, *path = name.split(".")
    return pc.struct_field(batch.column(root), path)


def _schema_columns(schema: pa.Schema | pa.StructType, prefix: str = "") -> Iterator[tuple[str, bool]]:
    for entry in schema:
        kind = entry.type
        yield prefix + entry.name, pa.types.is_floating(kind) or pa.types.is_integer(kind) or pa.types.is_null(kind)
        if pa.types.is_struct(kind):
            yield from _schema_columns(kind, f"{prefix}{entry.name}.")


def _row_pieces(rows: Iterator[tuple[int, dict[str, Any]]], needed: Sequence[str]) -> Iterator[Piece]:
    """Rows with only the values of the needed columns kept, as pieces of bounded size."""
    columns: dict[str, list[Any]] = {name: [] for name in needed}
    places: list[int] = []
    size = 0
    for line, row in rows:
        places.append(line)
        for name in needed:
            value = row[name] if name in row else _inside(row, name)
            columns[name].append(value)
            size += len(value) if isinstance(value, str) else 64
        if size >= CHUNK_BYTES or len(places) >= MOST_CHUNK_ROWS:
            yield Piece(columns, np.array(places))
            columns, places, size = {name: [] for name in needed}, [], 0
    if places:
        yield Piece(columns, np.array(places))


def _csv_rows(path: Path, malformed: Callable[[int, str], None]) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line, row) of every row below the header; the line is the row's last where values hold line breaks."""
    csv.field_size_limit(LONGEST_LINE)
    with open_text(path) as file:
        reader = csv.reader(file)
        header = next(reader, [])
        for row in reader:
            if len(row) == len(header):
                yield reader.line_num, dict(zip(header, row, strict=True))
            elif row:
                malformed(reader.line_num, f"not the {len(header)} fields of the header")


def _flat_items(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in row.items():
        yield prefix + name, value
        if isinstance(value, dict):
            yield from _flat_items(value, f"{prefix}{name}.")


def _inside(row: Mapping[str, Any], name: str) -> Any:
    """The value at a dotted name; None where there is none."""
    value: Any = row
    for part in name.split("."):
        if not isinstance(value, dict):
            return None
        value = value.get(part)
    return value


def _is_number(value: Any) -> bool:
    if isinstance(value, str):
        try:
            float(value)
        except ValueError:
            return False
        return True
    return isinstance(value, int | float) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    text = repr(value.as_py() if isinstance(value, pa.Scalar) else value)
    return text if len(text) <= 40 else text[:37] + "..."


def _open(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path)) if path.name.endswith(".gz") else path.open("rb")


def _hidden(file: Path, below: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(below).parts) or not file.is_file()


def _by_number(path: Path) -> list[tuple[int, str]]:
    """Sorts `9.jsonl` before `10.jsonl`."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", str(path))]
