"""Where in a completion is the final answer?

The order, first that applies:
1. `<think>...</think>` is removed; a think block that is never closed means the completion is not finished.
2. The last `\\boxed{...}` (also `\\fbox{...}`, and `\\boxed 5`); a last box that is never closed was cut off, and gives nothing.
3. The last `Answer: ...` line (DAPO's form), or the last "final answer is ..." / "answer is ..." sentence,
   whichever comes later.
4. The mathematics of the last line that has any: its last `$...$`, else its longest closing stretch of
   formula-like text.
"""

import re

MAX_SEARCHED_CHARS = 2_000_000
_BOX = re.compile(r"\\(?:boxed|fbox)\s*")
_ANSWER_LINE = re.compile(
    r"(?:^|\n)[ \t>#]*[*_]*(?:the\s+)?(?:final\s+)?answer[*_]*\s*:[ \t]*[*_]*[ \t]*\n?(?P<answer>[^\n]+)", re.IGNORECASE
)
_ANSWER_SENTENCE = re.compile(
    r"\banswer(?:\s+to\s+[^.\n]{1,120}?)?\s+(?:is|are)\s*:?\s*[*_]*(?P<answer>[^\n]+)", re.IGNORECASE
)
_INLINE_MATH = re.compile(r"\$\$(.+?)\$\$|(?<!\\)\$(.+?)(?<!\\)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_SENTENCE_END = re.compile(r"[.!?](?=\s+[A-Z]|\s*$)")
_FORMULA_WORD = re.compile(
    r"^(?:[-+*/^=<>|,;:()\[\]{}.!%\d\\_'√π∞±×÷·−°²³≤≥∪∈]+|\S*\d\S*|\S*\\\S*|[-+(\[{|]*[A-Za-z](?:[-+*/^=_(,|].*|[)\]},|!'’]*)"
    r"|(?:sqrt|sin|cos|tan|log|ln|exp|pi|np\.|math\.)\S*|and|or)$"
)


def extract_answer(completion: str) -> str | None:
    """The final answer's text, or None when the completion has none (see the module's order)."""
    text = strip_thinking(completion)
    if text is None:
        return None
    box = _last_box(text)
    if box is not None:
        return box or None
    return _stated_answer(text) or _closing_mathematics(text)


def strip_thinking(completion: str) -> str | None:
    """The text after the reasoning block; None when the block was never closed."""
    end = completion.rfind("</think>")
    if end >= 0:
        completion = completion[end + len("</think>") :]
    return None if "<think>" in completion else completion


def matching_brace(text: str, start: int) -> int | None:
    """The index of the brace that closes the one at `start`, None when it stays open; `\\{` and `\\}` do not count."""
    depth, i = 0, start
    while i < len(text):
        char = text[i]
        if char == "\\":
            i += 2
            continue
        depth += (char == "{") - (char == "}")
        if depth == 0:
            return i
        i += 1
    return None


def _last_box(text: str) -> str | None:
    """The content of the last box; an empty string when it is empty or was cut off; None without any box."""
    last = None
    for last in _BOX.finditer(text):
        pass
    if last is None:
        return None
    start = last.end()
    if start < len(text) and text[start] == "{":
        end = matching_brace(text, start)
        return "" if end is None else text[start + 1 : end].strip()
    bare = re.match(r"\$?([^\s$]+)", text[start : start + 200])
    return bare.group(1).rstrip(".,") if bare else ""


def _stated_answer(text: str) -> str | None:
    found = [*_ANSWER_LINE.finditer(text), *_ANSWER_SENTENCE.finditer(text)]
    for match in sorted(found, key=lambda match: match.start("answer"), reverse=True):
        answer = _tidy(match.group("answer"))
        if answer:
            return answer
    return None


def _tidy(line: str) -> str:
    """The answer within the rest of its line: its formulas if it has any, else the words up to the sentence's end."""
    line = line.strip().strip("*_` \t")
    formulas = list(_INLINE_MATH.finditer(line))
    if formulas:
        outside = _INLINE_MATH.sub("", line)
        if re.search(r"[A-Za-z]{3,}", re.sub(r"\b(?:and|or)\b", "", outside)):
            return _inside(formulas[0])
        return line.rstrip(" .")
    return _SENTENCE_END.split(line)[0].strip(" .*_`:")


def _inside(match: re.Match[str]) -> str:
    return next(group for group in match.groups() if group is not None).strip()


def _closing_mathematics(text: str) -> str | None:
    for line in reversed(text.strip().splitlines()[-3:]):
        formulas = list(_INLINE_MATH.finditer(line))
        if formulas:
            return _inside(formulas[-1])
        words = line.strip().rstrip(".!").split()
        start = len(words)
        while start and _FORMULA_WORD.match(words[start - 1]):
            start -= 1
        while start < len(words) and words[start] in ("a", "I", "and", "or", "A", "=", ":"):
            start += 1
        if start < len(words):
            return " ".join(words[start:])
    return None
