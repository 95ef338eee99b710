"""Which column of a rollout dump means what: the formats of known trainers, and what `--map` says.

A layout gives each role (step, group, prompt, response, length, reward, advantage, truncated) the columns that fill it.
Formats were read from TRL 1.16, verl 0.9.1, OpenRLHF 0.11.2 and prime-rl with verifiers 0.1 to 0.4.
"""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROLES = ("step", "group", "prompt", "response", "length", "reward", "advantage", "truncated")

NAMES: dict[str, tuple[str, ...]] = {
    "step": ("step", "global_step", "training_step", "iteration"),
    "group": ("group", "group_id", "uid", "prompt_id", "problem_id", "question_id", "example_id"),
    "prompt": ("prompt", "input", "question", "problem", "query"),
    "response": ("response", "completion", "output", "generation"),
    "length": (
        "length", "response_length", "completion_length", "num_tokens", "response_tokens", "completion_tokens",
        "output_tokens", "num_output_tokens", "token_usage.output_tokens", "response_ids", "completion_ids",
    ),
    "reward": ("reward", "score", "rewards"),
    "advantage": ("advantage", "advantages"),
    "truncated": ("truncated", "is_truncated", "finish_reason"),
}  # fmt: skip
"""Usual names of each role's column, the likeliest first."""


class DumpError(ValueError):
    """A file cannot be read as a dump or as curves; the message says what, where and what to do."""


@dataclass(frozen=True)
class Format:
    """A trainer's way of writing rollouts, told by the columns that it always writes."""

    name: str
    columns: frozenset[str]
    roles: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Roles whose columns the usual names would not find."""
    other_numbers_are_rewards: bool = False
    cut_prompt: bool = False
    """The response's text starts with its prompt."""
    end_tokens: int = 1
    """Tokens at the end of a response that its text no longer shows."""
    repeats_steps: bool = False
    """A batch that is trained on for several steps is written again at each."""
    key_suffix: str | None = None
    """What ends a group key without telling groups apart, as a regular expression."""


TRACES = "prime-rl traces"
FORMATS = (
    Format("balagg", frozenset({"prompt_id", "group", "length", "reward", "advantage", "truncated"})),
    Format(TRACES, frozenset({"from_trace"})),
    Format(
        "prime-rl",
        frozenset({"example_id", "completion", "reward"}),
        roles={"group": ("env_name", "task", "example_id")},
    ),
    Format(
        "TRL",
        frozenset({"step", "prompt", "completion", "advantage"}),
        other_numbers_are_rewards=True,
        repeats_steps=True,
    ),
    # verl's newer trainer writes as uid the key of each response: group, then _rollout_output.
    Format("verl", frozenset({"input", "output", "score", "step"}), key_suffix=r"_\d+_\d+"),
    Format(
        "OpenRLHF reward function",
        frozenset({"query", "prompt", "reward"}),
        roles={"response": ("query",)},
        cut_prompt=True,
        end_tokens=0,
    ),
)
OTHER = Format("columns by name", frozenset())


@dataclass(frozen=True)
class Layout:
    format: Format
    roles: Mapping[str, tuple[str, ...]]
    """Role -> the columns that fill it; without an entry where there are none."""

    @property
    def needed(self) -> list[str]:
        """The columns to read, each once."""
        roles = ["step", "group" if "group" in self.roles else "prompt", "reward", "advantage", "truncated"]
        roles += ["length"] if "length" in self.roles else ["response"]
        roles += ["prompt"] if self.cuts_prompt else []
        return list(dict.fromkeys(column for role in roles for column in self.roles.get(role, ())))

    @property
    def cuts_prompt(self) -> bool:
        return self.format.cut_prompt and "length" not in self.roles and "prompt" in self.roles

    def differs_from(self, other: "Layout") -> str | None:
        """How two files of one dump may not differ: in words, or None where they agree."""
        if self.format.name != other.format.name:
            return f"one is {self.format.name}, the other {other.format.name}"
        for role in ("step", "group", "prompt", "response", "length", "advantage"):
            mine, theirs = self.roles.get(role), other.roles.get(role)
            if mine != theirs:
                return f"{role} is {_named(mine)} in one and {_named(theirs)} in the other"
        return None


def find_layout(
    path: Path, columns: Mapping[str, bool], mapping: Mapping[str, str], reward_columns: Sequence[str] = ()
) -> Layout:
    """The layout of a file.

    Args:
        path: for messages.
        columns: name of every column (nested ones with a dot) -> whether it holds numbers.
        mapping: role -> column, over what is found here.
        reward_columns: columns whose sum is the reward.

    Raises:
        DumpError: a named column does not exist, or a role that is needed has none.
    """
    for column in [*mapping.values(), *reward_columns]:
        if column not in columns:
            close = difflib.get_close_matches(column, columns, n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise DumpError(f"{path}: there is no column {column!r}{hint}; it has {listed(columns)}")
    known = next((f for f in FORMATS if f.columns <= columns.keys()), OTHER)
    roles: dict[str, tuple[str, ...]] = {}
    for role in ROLES:
        if role in mapping:
            roles[role] = (mapping[role],)
        elif role in known.roles:
            roles[role] = tuple(column for column in known.roles[role] if column in columns)
        elif found := next((name for name in NAMES[role] if name in columns), None):
            roles[role] = (found,)
    if reward_columns:
        roles["reward"] = tuple(reward_columns)
    elif "reward" not in mapping and "reward" not in roles:
        taken = {column for named in roles.values() for column in named}
        roles["reward"] = tuple(
            column
            for column, is_number in columns.items()
            if is_number and column not in taken and (known.other_numbers_are_rewards or column.startswith("reward"))
        )
    roles = {role: named for role, named in roles.items() if named}
    _check(path, roles, columns)
    return Layout(known, roles)


def parse_mapping(pairs: Sequence[str], keys: Sequence[str]) -> dict[str, str]:
    """`--map` values such as "prompt=question,length=n": key -> column.

    Raises:
        DumpError: a pair without "=", or a key that is not one of `keys`.
    """
    mapping = {}
    for pair in filter(None, (part.strip() for text in pairs for part in text.split(","))):
        key, equals, column = pair.partition("=")
        if not equals or not column or key not in keys:
            raise DumpError(f"--map {pair}: write KEY=COLUMN, with KEY one of {', '.join(keys)}")
        mapping[key] = column
    return mapping


def is_trace(row: Mapping[str, Any]) -> bool:
    """Whether a JSON object is a rollout as verifiers 0.2 and later write it, alone or in an episode."""
    return isinstance(row.get("traces"), list) or (isinstance(row.get("nodes"), list) and "rewards" in row)


def flatten(row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The responses in a trace or an episode of traces, as flat rows. Evaluation and untrained agents give none."""
    if isinstance(row.get("traces"), list):
        run = row.get("run") or {}
        work = run.get("work") or {}
        if work.get("type", run.get("type")) == "eval":
            return
        group = (row.get("group") or {}).get("id")
        for trace in row["traces"]:
            if (trace.get("agent") or {}).get("trainable", True):
                yield _trace_row(trace, group, work.get("step"))
        return
    routing = (row.get("info") or {}).get("prime_rl") or {}
    run = row.get("run") or {}
    if "eval" in (routing.get("kind"), run.get("type")):
        return
    yield _trace_row(row, routing.get("group_id"), run.get("step", routing.get("step")))


def listed(names: Sequence[str] | Mapping[str, Any], most: int = 30) -> str:
    """Names with commas between; the first of them where there are many."""
    shown = list(names)[:most]
    return (", ".join(shown) or "none") + (", ..." if len(names) > most else "")


def _trace_row(trace: Mapping[str, Any], group: str | None, step: int | None) -> dict[str, Any]:
    nodes, calls = trace["nodes"], trace.get("calls") or []
    masks = [node["mask"] for node in nodes if node.get("mask")]
    length = sum(map(sum, masks)) if masks else trace.get("num_output_tokens")
    credit = [value for node in nodes for value in node.get("advantages") or ()]
    task = trace.get("task") or {}
    scores = [] if trace.get("errors") else [_reward(reward) for reward in (trace.get("rewards") or {}).values()]
    finish = next((call.get("finish_reason") for call in reversed(calls) if not call.get("error")), None)
    limits = ("max_turns", "max_input_tokens", "max_output_tokens", "max_total_tokens", "compaction_failed")
    return {
        "from_trace": True,
        "step": step,
        "group": group or task.get("hash") or task,
        "length": length,
        "reward": sum(score for score in scores if score is not None) if scores else None,
        "advantage": _mean_of_nonzero(credit),
        "truncated": trace.get("stop_condition") in limits or finish == "length",
    }


def _reward(reward: Any) -> float | None:
    return reward["score"] * reward.get("weight", 1.0) if isinstance(reward, dict) else reward


def _mean_of_nonzero(credit: Sequence[float]) -> float | None:
    """The advantage that was spread over the tokens of a response; None where none was assigned."""
    assigned = [value for value in credit if value]
    return sum(assigned) / len(assigned) if assigned else (0.0 if credit else None)


def _check(path: Path, roles: Mapping[str, tuple[str, ...]], columns: Mapping[str, bool]) -> None:
    missing = []
    if "group" not in roles and "prompt" not in roles:
        missing.append("which prompt a response belongs to (--map prompt=COLUMN or group=COLUMN)")
    if "length" not in roles and "response" not in roles:
        missing.append("how long it is (--map length=COLUMN, or response=COLUMN for its text)")
    if "reward" not in roles and "advantage" not in roles:
        missing.append("its reward (--map reward=COLUMN or advantage=COLUMN)")
    if missing:
        raise DumpError(f"{path}: no column says {'; nor '.join(missing)}. It has the columns {listed(columns)}")


def _named(columns: tuple[str, ...] | None) -> str:
    return " and ".join(map(repr, columns)) if columns else "absent"
