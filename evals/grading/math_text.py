"""How is an answer written? One spelling for the many LaTeX, Unicode, code and plain-text spellings of it.

`normalise` maps commands for spacing, sizing and fonts to nothing, and the operators and relations to one character
each. What is left is read by `math_numbers`, `math_expressions` and `math_structure`.
"""

import re
import unicodedata
from functools import lru_cache

_SPACE = (
    "left right big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr Biggl Biggr middle displaystyle textstyle limits "
    "quad qquad enspace thinspace medspace thickspace negthinspace hfill newline nonumber notag allowbreak rm bf it "
    "cal scriptstyle nolimits"
)
_SPELLINGS = {
    "*": "cdot times ast",
    "/": "div",
    "≤": "leq le leqslant leqq",
    "≥": "geq ge geqslant geqq",
    "<": "lt",
    ">": "gt",
    "≠": "neq ne",
    "≈": "approx simeq",
    "≡": "equiv",
    "∈": "in",
    "∪": "cup bigcup",
    "∩": "cap bigcap",
    "∖": "setminus backslash smallsetminus",
    "∅": "emptyset varnothing",
    "∞": "infty infinity",
    "±": "pm",
    "∓": "mp",
    "…": "ldots dots cdots dotsc dotsb",
    "|": "lvert rvert vert mid",
    "⟨": "langle",
    "⟩": "rangle",
    ":": "colon",
    "°": "degree degrees",
    "'": "prime",
    "#or#": "lor vee",
    "#and#": "land wedge",
    "\\{": "lbrace",
    "\\}": "rbrace",
    "\\frac": "dfrac tfrac cfrac",
    "\\binom": "dbinom tbinom",
    "\\epsilon": "varepsilon",
    "\\phi": "varphi",
    "\\arcsin": "asin",
    "\\arccos": "acos",
    "\\arctan": "atan arctg",
    "\\tan": "tg",
    "\\cot": "ctg",
}
_COMMANDS = {name: symbol for symbol, names in _SPELLINGS.items() for name in names.split()}
_COMMANDS |= dict.fromkeys(_SPACE.split(), " ")
_UNICODE = str.maketrans(
    {
        "−": "-", "–": "-", "—": "-", "‐": "-", "‑": "-", "×": "*", "·": "*", "⋅": "*", "∙": "*", "∗": "*", "÷": "/",
        "⁄": "/", "∕": "/", "≦": "≤", "≧": "≥", "⩽": "≤", "⩾": "≥", "√": "\\sqrt ", "π": "\\pi ", "θ": "\\theta ",
        "α": "\\alpha ", "β": "\\beta ", "γ": "\\gamma ", "δ": "\\delta ", "ε": "\\epsilon ", "λ": "\\lambda ",
        "μ": "\\mu ", "µ": "\\mu ", "ρ": "\\rho ", "σ": "\\sigma ", "τ": "\\tau ", "φ": "\\phi ", "ϕ": "\\phi ",
        "ω": "\\omega ", "Δ": "\\Delta ", "Ω": "\\Omega ", "º": "°", "˚": "°", "′": "'", "’": "'", "ʹ": "'",
        "“": '"', "”": '"', "ℝ": "\\R ", "ℤ": "\\Z ", "ℕ": "\\N ", "ℚ": "\\Q ", "ℂ": "\\C ", "⌊": "\\lfloor ",
        "⌋": "\\rfloor ", "⌈": "\\lceil ", "⌉": "\\rceil ", "∧": " and ", "∨": " or ", "≅": "≈", "∣": "|",
        "\u200b": "", "\u2061": "", "\ufeff": "", "⋯": "…", "〈": "⟨", "〉": "⟩",
    }
)  # fmt: skip
_KEPT_UNICODE = set("⏎≤≥≠≈≡∈∪∩∖∅∞±∓…⟨⟩°")
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉₊₋ₙ", "0123456789+-n")
_FUNCTION_NAMES = frozenset([
    "sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "coth", "arcsin", "arccos", "arctan",
    "arccot", "arcsec", "arccsc", "ln", "log", "lg", "exp", "max", "min", "gcd", "lcm", "det", "dim", "deg",
])  # fmt: skip
_CURRENCY = re.compile(r"\\\$|[£€¥₹]|(?<![A-Za-z])(?:USD|US\$)(?![A-Za-z])")
_NEW_ROW = re.compile(r"\\\\(?:\s*\[\s*-?[\d.]+\s*(?:pt|em|ex|cm|mm)\s*\])?|\\cr(?![A-Za-z])")
ROW = "⏎"
_THOUSANDS_GAP = re.compile(r"(?<=\d)(?:,\s*\\!|\\!\s*,|\{,\})\s*(?=\d{3}(?!\d))")
_SPACED_THOUSANDS = re.compile(r"(?<![\d.])(\d{1,3})((?:(?:\\,|\\ |~|\\;|\\:|[\u00a0\u2009\u202f])\d{3})+)(?!\d)")
_PLAINLY_SPACED = re.compile(r"-?\d{1,3}(?: \d{3})+")
_WRAPPER = re.compile(
    r"\\(text|textbf|textit|textrm|textnormal|texttt|textsf|textsc|mbox|hbox|mathrm|mathbf|mathit|mathsf|mathtt|mathcal|"
    r"mathbb|mathop|mathnormal|operatorname\*?|boldsymbol|bm|vec|emph|underline|boxed|fbox|ensuremath|mathrel|mathbin)"
    r"\s*\{"
)
_COMMAND = re.compile(r"\\([A-Za-z]+)\*?")
_SMALL_GAPS = re.compile(r"\\[,!;:> ]|~|\\(?:hspace|[hv]?phantom|label|tag)\*?\{[^{}]*\}")
_SHORT_FRACTIONS = (
    (re.compile(r"\\frac\s*(\d)\s*(\d)"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\frac\s*(\d)\s*\{"), r"\\frac{\1}{"),
    (re.compile(r"\\frac\s*\{([^{}]*)\}\s*(\d)"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\frac\s*\{([^{}]*)\}\s+\{"), r"\\frac{\1}{"),
    (re.compile(r"\\frac\s+\{"), r"\\frac{"),
)
_REWRITES = (
    (re.compile(r"\^\s*\{\s*(['°])\s*\}|\^\s*(['°])"), lambda m: m.group(1) or m.group(2)),
    (re.compile(r"\^\s*\\circ(?![A-Za-z])|\^\s*\{\s*\\circ\s*\}"), "°"),
    (re.compile(r"\^\s*\{((?:'\s*)+)\}"), lambda m: m.group(1).replace(" ", "")),
    (re.compile(r"(?<![A-Za-z])(?:np|numpy|math|sympy|sp)\.(?=[a-z])"), ""),
    (re.compile(r"\*\*"), "^"),
    (re.compile(r"<\s*="), "≤"),
    (re.compile(r">\s*="), "≥"),
    (re.compile(r"!\s*=|<>"), "≠"),
    (re.compile(r"\+\s*/?\s*-(?=\s*[\d\\a-z(])"), "±"),
    (re.compile(r"\.\.\.+"), "…"),
    (re.compile(r",?\s*…"), ",…"),
    (re.compile(r"…\s*,?"), "…,"),
    (re.compile(r"(?<![A-Za-z\\])(?:infinity|Infinity|infty)(?![A-Za-z])"), "∞"),
    (re.compile(r"(?<![A-Za-z\\])(?:oo|inf)(?![A-Za-z])"), "∞"),
    (re.compile(r"\\%|(?<![A-Za-z])percent(?:age)?(?![A-Za-z])(?:\s+points?)?"), "%"),
    (re.compile(r"(?<=[\d}\])°])\s*degrees?(?![A-Za-z])"), "°"),
    (re.compile(r"\(?\bd ?([A-Za-z]|\\[a-z]+)\)?\s*/\s*\(?d ?([A-Za-z])\b\)?"), r"\\frac{d \1}{d \2}"),
    (re.compile(r"(?<=\d)\s*[xX]\s*(?=10\s*\^)"), "*"),
    (re.compile(r"(?:\\text\{)?\b[aA]ll real(?:s| numbers)\b\}?"), r"\\R"),
)
_WORD_JOINTS = {"and": " and ", "or": " or ", "percent": "%", "degrees": "°", "degree": "°", "percentage": "%"}


@lru_cache(maxsize=4096)
def normalise(text: str) -> str:
    """The answer in the one spelling that the rest of the grader reads."""
    text = _plain_characters(text)
    if "\\begin" not in text:
        text = re.sub(r"\\\\(?=[A-Za-z])", r"\\", text)  # commands escaped twice
    text = _NEW_ROW.sub(ROW, text)
    text = _THOUSANDS_GAP.sub("", text)
    text = text.replace("{,}", ".")  # the decimal comma; the thousands comma is gone by now
    if _PLAINLY_SPACED.fullmatch(text.strip()):
        text = text.replace(" ", "")
    text = _SPACED_THOUSANDS.sub(lambda m: m.group(1) + re.sub(r"\D", "", m.group(2)), text)
    text = _CURRENCY.sub("", text)
    text = re.sub(r"(?<!\\)\$|(?<!\\)\\[()\[\]]", " ", text)
    text = _SMALL_GAPS.sub(lambda m: "" if m.group() == r"\!" else " ", text)
    text = _unwrap(text)
    text = re.sub(r"\\(?:left|right)\s*\.", " ", text)
    text = _COMMAND.sub(_respell, text)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    for pattern, short in _SHORT_FRACTIONS:
        text = pattern.sub(short, text)
    text = re.sub(r"#(and|or)#", r" \1 ", text)
    text = re.sub(r"\s+", " ", text).strip()
    return _without_loose_ends(text)


def _plain_characters(text: str) -> str:
    if text.isascii():
        return text
    for fraction in set(re.findall(r"[¼-¾⅐-⅞]", text)):
        over, under = unicodedata.normalize("NFKC", fraction).split("⁄")
        text = text.replace(fraction, rf"\frac{{{over}}}{{{under}}}")
    text = re.sub(r"[⁰¹²³⁴-⁹⁺⁻ⁿ]+", lambda m: "^{" + m.group().translate(_SUPERSCRIPTS) + "}", text)
    text = re.sub(r"[₀-₉₊₋ₙ]+", lambda m: "_{" + m.group().translate(_SUBSCRIPTS) + "}", text)
    text = text.translate(_UNICODE)
    return "".join(c if c.isascii() or c in _KEPT_UNICODE else unicodedata.normalize("NFKC", c) for c in text)


def _unwrap(text: str) -> str:
    """Fonts and boxes removed; words keep one wrapper, `\\text{...}`, lest they be read as products of letters."""
    for _ in range(200):
        found = list(_WRAPPER.finditer(text))
        if not found:
            break
        match = found[-1]
        end = closing(text, match.end() - 1)
        if end is None:
            break
        inside = text[match.end() : end]
        text = text[: match.start()] + _rewrap(match.group(1).rstrip("*"), inside) + text[end + 1 :]
    return text.replace("\\#text{", "\\text{")


def _rewrap(wrapper: str, inside: str) -> str:
    word = inside.strip()
    if wrapper == "mathbb":
        return rf"\{word} " if word in ("R", "Z", "N", "Q", "C") else word
    if word in _FUNCTION_NAMES:
        return rf"\{word} "
    if word in _WORD_JOINTS:
        return _WORD_JOINTS[word]
    if wrapper in ("boxed", "fbox", "vec", "boldsymbol", "bm", "mathbf", "underline", "ensuremath"):
        return inside
    if not re.search(r"[A-Za-z]", word) or "#text" in word or re.search(r"[\\^=<>]", word):
        return f" {inside} "
    return rf"\#text{{{word}}}"  # hidden from the next round's search


def _respell(match: re.Match[str]) -> str:
    name = match.group(1)
    if name == "choose" or name not in _COMMANDS:
        return match.group()
    symbol = _COMMANDS[name]
    return symbol + " " if symbol.startswith("\\") and symbol[1].isalpha() else symbol


def _without_loose_ends(text: str) -> str:
    previous = None
    while previous != text:
        previous = text
        text = re.sub(r"(?<!\\)[;:\s]+$|⏎$|\\$", "", text)
        if not text.endswith("…,"):
            text = text.rstrip(",")
        if not text.endswith(".."):
            text = re.sub(r"\.$", "", text)
        text = text.lstrip(" ,;:")
    return text


def closing(text: str, start: int) -> int | None:
    """The index of the `}` matching the `{` at `start`; escaped braces do not count."""
    depth, i = 0, start
    while i < len(text):
        if text[i] == "\\":
            i += 2
            continue
        depth += (text[i] == "{") - (text[i] == "}")
        if depth == 0:
            return i
        i += 1
    return None


@lru_cache(maxsize=8192)
def compact(text: str) -> str:
    """A key for equality of normalised strings: no idle spaces, no braces around one character, no text wrappers."""
    text = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text)
    text = re.sub(r"\s+", " ", text).strip()
    text = re.sub(r"(?<![A-Za-z0-9]) | (?![A-Za-z0-9])", "", text)
    text = re.sub(r"([_^])\{([A-Za-z0-9])\}", r"\1\2", text)
    return re.sub(r"(?<![\d.])\.(?=\d)", "0.", text)


def outside_brackets(text: str) -> list[bool]:
    """For each character, whether it stands outside every kind of bracket; brackets themselves count as inside."""
    after = _depths(text)
    return [before == 0 == now for before, now in zip([0, *after], after, strict=False)]


def is_one_bracket(text: str) -> bool:
    """Whether the first bracket closes with the last character."""
    after = _depths(text)
    return bool(after) and after[-1] == 0 and all(after[:-1])


def _depths(text: str) -> list[int]:
    """How many brackets are open after each character."""
    depths: list[int] = []
    depth, i = 0, 0
    while i < len(text):
        width = 1
        if text[i] == "\\":
            width = 2 if not text[i + 1 : i + 2].isalpha() else 1
            opens = text.startswith(("\\{", "\\begin", "\\lfloor", "\\lceil"), i)
            closes = text.startswith(("\\}", "\\end", "\\rfloor", "\\rceil"), i)
        else:
            opens, closes = text[i] in "([{⟨", text[i] in ")]}⟩"
        depth = max(0, depth + opens - closes)
        depths.extend([depth + closes] * (width - 1) + [depth])
        i += width
    return depths[: len(text)]
