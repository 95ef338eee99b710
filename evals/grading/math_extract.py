"""Where in a completion is the final answer?

The order, the first that applies:

1. `<think>...</think>` is removed; a think block that is never closed means that the completion is unfinished.
2. The last `\\boxed{...}` (also `\\fbox{...}` and `\\boxed 5`). A last box that was cut off or is empty
   gives no answer.
3. The last statement of an answer: a line `Answer: ...` (DAPO's form), `#### ...` (GSM8K's), or a sentence with
   `the answer is ...`.
4. In the last line that is not blank: its last formula between dollar signs, else its closing stretch of formula-like
   words, else its last number.
"""

import re

from evals.grading.math_text import closing

MAX_LINE_CHARS = 4000
_BOX = re.compile(r"\\(?:boxed|fbox)\s*")
_STATEMENT = re.compile(
    r"(?:^|\n)[ \t>#*_]*(?:(?:the|my)\s+)?(?:(?:final|correct)\s+)?answer[*_]*\s*:[*_\s]*(?P<line>[^\n]+)"
    r"|(?:^|\n)[ \t]*####[ \t]*(?P<gsm>[^\n]+)"
    r"|\banswer(?:\s+to\s+[^.\n]{1,120}?)?\s+(?:is|are)\b\s*:?[*_\s]*(?P<sentence>[^\n]+)",
    re.IGNORECASE,
)
_FORMULA = re.compile(r"\$\$(.+?)\$\$|(?<!\\)\$(.+?)(?<!\\)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]")
_END_OF_STATEMENT = re.compile(r"[.!?](?=\s|$)|[,;]?\s+(?:because|since|as|which|so|where)\b")
_FILLER = re.compile(
    r"^(?:(?:therefore|thus|then|just|simply|exactly|equal to|approximately|about|given by|the)\b[\s,:]*)+",
    re.IGNORECASE,
)
_FORMULA_WORD = re.compile(
    r"[-+*/^=<>|,;:()\[\]{}.!%\d\\_'√π∞±×÷·−°²³≤≥≠∪∈]+|\S*\d\S*|\S*\\\S*|[-+(\[{|]*[A-Za-z](?:[-+*/^=_(,|]\S*|[)\]},|!'’]*)"
    r"|(?:sqrt|sin|cos|tan|log|ln|exp|pi|np\.|math\.)\S*|and|or"
)
_NUMBER = re.compile(r"-?\\?\$?\d[\d,]*(?:\.\d+)?(?:/\d+)?%?")


def extract_answer(completion: str) -> str | None:
    """The final answer's text, or None when the completion has none (see the module for the order)."""
    text = _without_thinking(completion)
    if text is None:
        return None
    box = _last_box(text)
    if box is not None:
        return box or None
    return _stated_answer(text) or _closing_mathematics(text)


def _without_thinking(completion: str) -> str | None:
    """The text after the reasoning block, None when the block was never closed."""
    text = completion.rpartition("</think>")[2]
    return None if "<think>" in text else text


def _last_box(text: str) -> str | None:
    """The content of the last box: empty when it is blank or was cut off, None without any box."""
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    opening = _BOX.match(text, start) if start >= 0 else None
    if opening is None:
        return None
    if text[opening.end() : opening.end() + 1] == "{":
        end = closing(text, opening.end())
        return "" if end is None else text[opening.end() + 1 : end].strip()
    bare = re.match(r"[^\s$]{1,200}", text[opening.end() : opening.end() + 200])
    return bare.group().rstrip(".,") if bare else ""


def _stated_answer(text: str) -> str | None:
    for match in reversed(list(_STATEMENT.finditer(text))):
        answer = _statement(next(group for group in match.groups() if group is not None))
        if answer:
            return answer
    return None


def _statement(line: str) -> str:
    """The answer at the start of a line: its formula, or all of it up to the end of the sentence."""
    line = _FILLER.sub("", line[:MAX_LINE_CHARS].strip("*_` \t"))
    formulas = list(_FORMULA.finditer(line))
    if not formulas:
        return _END_OF_STATEMENT.split(line + " ")[0].strip(" .*_`:")
    around = re.sub(r"\b(?:and|or)\b", "", _FORMULA.sub("", line))
    return _inside(formulas[0]) if re.search(r"[A-Za-z]{3,}", around) else line.rstrip(" .*_")


def _inside(formula: re.Match[str]) -> str:
    return next(group for group in formula.groups() if group is not None).strip()


def _closing_mathematics(text: str) -> str | None:
    line = text.rstrip().rpartition("\n")[2][-MAX_LINE_CHARS:]
    formulas = list(_FORMULA.finditer(line))
    if formulas:
        return _inside(formulas[-1])
    words = line.strip().rstrip(".!*_").split()
    start = len(words)
    while start and _FORMULA_WORD.fullmatch(words[start - 1]):
        start -= 1
    while start < len(words) and words[start] in ("a", "A", "I", "and", "or", "=", ":"):
        start += 1
    if start < len(words):
        return " ".join(words[start:])
    numbers = _NUMBER.findall(line)
    return numbers[-1].rstrip(",") if numbers else None
