"""Columns of a dump as numbers: what a reward, a length, a group or a flag looks like in other people's files.

A column is a pyarrow array (parquet) or a list of plain values (JSON lines, CSV). Every function returns arrays with
one entry per row and leaves it to the caller which rows to use.
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

Column = Any
"""A pyarrow array or a list."""
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
CountTokens = Callable[[Sequence[str]], list[int]]

CUT_WORDS = {"length", "max_tokens", "max_length", "true", "yes"}
"""Finish reasons and spellings that mean that a response was cut at the length limit."""
MIX = np.uint64(0x9E3779B97F4A7C15)


def numbers(column: Column) -> tuple[Floats, Flags]:
    """(N,) values, NaN where there is none, and (N,) true where there is something that is not a number."""
    if isinstance(column, pa.Array):
        column = _decoded(column)
        kind = column.type
        if pa.types.is_null(kind):
            return np.full(len(column), np.nan), np.zeros(len(column), dtype=bool)
        if pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind):
            return pc.cast(column, pa.float64(), safe=False).to_numpy(zero_copy_only=False), np.zeros(len(column), bool)
        column = column.to_pylist()
    try:
        values = np.array(column, dtype=np.float64)
        if values.ndim == 1:
            return values, np.zeros(len(values), dtype=bool)
    except (TypeError, ValueError):
        pass
    read = [_number(value) for value in column]
    return np.array([math.nan if x is None else x for x in read]), np.array([x is None for x in read], dtype=bool)


def sizes(column: Column) -> tuple[Floats, Flags]:
    """As `numbers`, where a list (of token ids) stands for its length."""
    if isinstance(column, pa.Array) and _is_list(column.type):
        lengths = pc.cast(pc.list_value_length(column), pa.float64())
        return lengths.to_numpy(zero_copy_only=False), np.zeros(len(column), dtype=bool)
    if not isinstance(column, pa.Array) and any(isinstance(value, list) for value in column):
        column = [len(value) if isinstance(value, list) else value for value in column]
    return numbers(column)


def flags(column: Column) -> tuple[Floats, Flags]:
    """(N,) 1 where a response was cut at the length limit, else 0, NaN where unknown; and what is neither."""
    if isinstance(column, pa.Array):
        column = _decoded(column)
        if not pa.types.is_string(column.type) and not pa.types.is_large_string(column.type):
            values, bad = numbers(column)
            return np.where(np.isnan(values), np.nan, values != 0), bad
        column = column.to_pylist()
    if any(isinstance(value, str) for value in column):
        column = [_cut(value) if isinstance(value, str) else value for value in column]
    values, bad = numbers(column)
    return np.where(np.isnan(values), np.nan, values != 0), bad


def keys(columns: Sequence[Column], suffix: str | None = None) -> tuple[NDArray[np.uint64], Flags]:
    """(N,) 64-bit keys, equal where all columns are; and (N,) true where the first column has no value.

    `suffix` is a regular expression for what to cut off the end of text first.
    """
    combined, missing = _keys(columns[0], suffix)
    for column in columns[1:]:
        with np.errstate(over="ignore"):
            combined = (combined ^ (combined >> np.uint64(29))) * MIX + _keys(column, suffix)[0]
    return combined, missing


def text_lengths(
    column: Column, prompts: Column | None, count_tokens: CountTokens | None, end_tokens: int
) -> tuple[Floats, Flags]:
    """(N,) length of each response in tokens, or in characters without `count_tokens`; NaN where there is none.

    Args:
        column: texts, or chat messages, of which the assistant's count.
        prompts: the prompt that each text starts with, to be left out; None where texts are responses alone.
        count_tokens: number of tokens of each of several texts.
        end_tokens: added to every count of tokens, for an end-of-sequence token that the text no longer shows.
    """
    if isinstance(column, pa.Array):
        column = _decoded(column)
        is_text = pa.types.is_string(column.type) or pa.types.is_large_string(column.type)
        if is_text and prompts is None and count_tokens is None:
            lengths = pc.cast(pc.utf8_length(column), pa.float64())
            return lengths.to_numpy(zero_copy_only=False), np.zeros(len(column), dtype=bool)
        if prompts is None and count_tokens is None and _is_chat(column.type):
            return _chat_lengths(column), np.zeros(len(column), dtype=bool)
        column = column.to_pylist()
    if prompts is not None:
        prompts = prompts.to_pylist() if isinstance(prompts, pa.Array) else prompts
        column = [
            text[len(prompt) :] if isinstance(text, str) and isinstance(prompt, str) else text
            for text, prompt in zip(column, prompts, strict=True)
        ]
    texts = [response_text(value) for value in column]
    missing = np.array([value is None for value in column], dtype=bool)
    bad = np.array([text is None for text in texts], dtype=bool) & ~missing
    filled = [text or "" for text in texts]
    if count_tokens is None:
        lengths = np.array([len(text) for text in filled], dtype=np.float64)
    else:
        lengths = np.array(count_tokens(filled), dtype=np.float64) + end_tokens
    lengths[missing | bad] = np.nan
    return lengths, bad


def response_text(value: Any) -> str | None:
    """The generated text of a response: itself, or what the assistant says in a list of chat messages."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        return None
    return "".join(_message_text(message) for message in value if message.get("role", "assistant") == "assistant")


def load_tokenizer(source: str) -> CountTokens:
    """A function that counts tokens, from a `tokenizer.json`, a folder that holds one, or a hub id.

    Raises:
        ValueError: there is no such tokenizer.
    """
    from tokenizers import Tokenizer

    path = Path(source)
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        tokenizer = Tokenizer.from_file(str(file)) if file.exists() else Tokenizer.from_pretrained(source)
    except Exception as error:  # the library raises bare exceptions of many kinds
        raise ValueError(
            f"--tokenizer {source}: neither a tokenizer.json, a folder with one, nor a hub id that can be "
            f"loaded from here ({error})"
        ) from error

    def count(texts: Sequence[str]) -> list[int]:
        return [len(encoding.ids) for encoding in tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    return count


def _decoded(column: pa.Array) -> pa.Array:
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind)


def _is_chat(kind: pa.DataType) -> bool:
    """Whether a column holds lists of messages with a role and plain text, which need not become Python objects."""
    if not _is_list(kind) or not pa.types.is_struct(kind.value_type):
        return False
    fields = {entry.name: entry.type for entry in kind.value_type}
    return fields.keys() == {"role", "content"} and all(pa.types.is_string(entry) for entry in fields.values())


def _chat_lengths(column: pa.Array) -> Floats:
    """As `text_lengths`, in characters."""
    messages = pc.list_flatten(column)
    role, content = (pc.struct_field(messages, name) for name in ("role", "content"))
    said = pc.fill_null(pc.equal(role, "assistant"), True)
    characters = pc.if_else(said, pc.fill_null(pc.utf8_length(content), 0), 0).to_numpy(zero_copy_only=False)
    lengths = np.bincount(pc.list_parent_indices(column).to_numpy(), characters, minlength=len(column))
    return np.where(np.asarray(column.is_null()), np.nan, lengths)


def _chat_keys(column: pa.Array) -> NDArray[np.uint64]:
    """As `_keys`: a sum over the messages of a row, each mixed with its place."""
    messages, rows = pc.list_flatten(column), pc.list_parent_indices(column).to_numpy()
    starts = np.flatnonzero(np.diff(rows, prepend=-1))
    place = np.arange(len(rows)) - np.repeat(starts, np.diff(np.append(starts, len(rows))))
    role, content = (_keys(pc.struct_field(messages, name), None)[0] for name in ("role", "content"))
    keys = np.zeros(len(column), dtype=np.uint64)
    with np.errstate(over="ignore"):
        mixed = ((content * MIX) ^ (role >> np.uint64(7))) * (place.astype(np.uint64) * np.uint64(2) + np.uint64(1))
        np.add.at(keys, rows, mixed ^ (mixed >> np.uint64(31)))
    return keys


def _number(value: Any) -> float | None:
    """The number that a value stands for; NaN for no value, None for what is not a number."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if value is None or (isinstance(value, str) and not value.strip()):
        return math.nan
    if isinstance(value, str | int | float):
        try:
            return float(value)
        except (ValueError, OverflowError):
            return None
    return None


def _cut(word: str) -> str | float:
    word = word.strip().lower()
    try:
        return float(word)
    except ValueError:
        return word if not word else float(word in CUT_WORDS)


def _keys(column: Column, suffix: str | None) -> tuple[NDArray[np.uint64], Flags]:
    if isinstance(column, pa.Array):
        if pa.types.is_integer(column.type):
            values = column.fill_null(0).to_numpy().astype(np.int64).view(np.uint64)
            return values * MIX, np.asarray(column.is_null())
        if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
            encoded = column.dictionary_encode()
            codes = encoded.indices.fill_null(0).to_numpy()
            hashed = np.array([_hash(value, suffix) for value in encoded.dictionary.to_pylist()] or [0], np.uint64)
            return hashed[codes], np.asarray(column.is_null())
        if _is_chat(column.type):
            return _chat_keys(column), np.asarray(column.is_null())
        column = column.to_pylist()
    seen: dict[Any, int] = {}
    hashed = np.empty(len(column), dtype=np.uint64)
    for row, value in enumerate(column):
        known = value if value.__hash__ else json.dumps(value, sort_keys=True, default=str)
        if known not in seen:
            seen[known] = _hash(value, suffix)
        hashed[row] = seen[known]
    return hashed, np.array([value is None for value in column], dtype=bool)


def _hash(value: Any, suffix: str | None) -> int:
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)
    if suffix is not None:
        text = re.sub(suffix + r"\Z", "", text)
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest())


def _message_text(message: dict[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(part.get("text") or "" for part in content if isinstance(part, dict))
    reasoning = message.get("reasoning_content")
    return (reasoning if isinstance(reasoning, str) else "") + (content if isinstance(content, str) else "")
