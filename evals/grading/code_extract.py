"""Find the program in a model's completion."""

import re
import textwrap
from dataclasses import dataclass

_PYTHON_TAGS = frozenset({"python", "python3", "py", "py3", "python2", "pypy", "pypy3"})
_FENCE = re.compile(r"^[ \t>]*(`{3,}|~{3,})[ \t]*(.*?)[ \t]*$")
_STATEMENT = re.compile(
    r"^(?:(?:async )?def \w+\s*\(|class \w+|import \w|from \w[\w.]* import|@\w|(?:for|while|if|with)\b.*:|try:"
    r"|(?:print|exec|exit)\s*\(|[\w.]+\.\w+\(|[A-Za-z_][\w.,\[\]]*+(?: ++[\w.,\[\]]++)*+ *+(?:[-+*/|&^]|//)?=[^=])",
    re.MULTILINE,
)
"""A line that begins a Python statement; for text whose author did not say what it is."""

_LEADING_COMMENTS = re.compile(r"\A(?:[ \t]*(?:#.*)?\n)*")


@dataclass(frozen=True)
class _Block:
    tag: str
    text: str
    closed: bool


def extract_program(completion: str) -> str | None:
    """The program in a completion, None when there is none.

    The last code block that is marked as Python; else the last unmarked block that reads like Python; else, for a
    completion without any block, all of it when it reads like Python. A block that is never closed counts only where
    no closed one is marked as Python. What a `<think>` holds is left out, and an unclosed one leaves nothing.
    """
    text = completion.replace("\r\n", "\n")
    if "</think>" in text:
        text = text.rpartition("</think>")[2]
    if "<think>" in text:
        return None
    blocks = _blocks(text)
    python = [block for block in blocks if block.tag in _PYTHON_TAGS and block.text.strip()]
    unmarked = [block for block in blocks if not block.tag and _STATEMENT.search(block.text)]
    choice = [block for block in python if block.closed] or python or unmarked
    if choice:
        return choice[-1].text
    return text if not blocks and _STATEMENT.match(_LEADING_COMMENTS.sub("", text)) else None


def _blocks(text: str) -> list[_Block]:
    """The fenced blocks of Markdown, in order; a fence closes with at least as many of the same characters."""
    blocks: list[_Block] = []
    fence, tag, lines = "", "", list[str]()
    for line in text.split("\n"):
        found = _FENCE.match(line)
        if not fence:
            if found and "`" not in found[2]:
                fence, tag, lines = found[1], _tag(found[2]), []
        elif (found and not found[2] and found[1].startswith(fence)) or line.rstrip().endswith(fence):
            # Models also close a block at the end of its last line.
            rest = line.rstrip().rstrip(fence[0])
            blocks.append(_Block(tag, _dedent([*lines, rest]), closed=True))
            fence = ""
        else:
            lines.append(line)
    if fence:
        blocks.append(_Block(tag, _dedent(lines), closed=False))
    return blocks


def _tag(info: str) -> str:
    """The language of a fence: `python`, `Python3 title=x` and `{.python}` are all Python."""
    words = re.findall(r"[\w+#-]+", info.lower())
    return words[0] if words else ""


def _dedent(lines: list[str]) -> str:
    return textwrap.dedent("\n".join(lines)).rstrip() + "\n"
