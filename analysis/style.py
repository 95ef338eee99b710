"""How each rule looks in every figure, and how figures reach the disk."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.style
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

STYLE_FILE = Path(__file__).with_name("rules.mplstyle")
DASHES = "solid", (0, (4.5, 3)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5))


@dataclass(frozen=True)
class RuleStyle:
    """Colour, line style and marker each tell the rules apart, so that print may lose any of them."""

    label: str
    color: str
    linestyle: Any
    marker: str
    linewidth: float
    zorder: float

    def line(self, **changes: Any) -> dict[str, Any]:
        """Keyword arguments for `Axes.plot`."""
        return {
            "color": self.color,
            "linestyle": self.linestyle,
            "linewidth": self.linewidth,
            "zorder": self.zorder,
        } | changes


# `balanced` is a broad light line below a thin dark dashed `sequence`: the two coincide exactly in some
# figures (sign mass with binary rewards), and both must stay visible there.
RULE_STYLES = {
    "sequence": RuleStyle("sequence (GRPO)", "#12357a", DASHES[1], "o", 1.4, 4),
    "token": RuleStyle("token (DAPO)", "#d55e00", DASHES[2], "s", 1.8, 3),
    "balanced": RuleStyle("balanced (BA)", "#2fb89a", DASHES[0], "D", 2.6, 2),
    "constant": RuleStyle("constant (Dr. GRPO)", "#b0b0b0", DASHES[3], "^", 2.6, 2),
}
OTHER_COLORS = "#7b3294", "#000000", "#b8860b"


def rule_styles(rules: list[str]) -> dict[str, RuleStyle]:
    """The style of each rule in the order of legends; rules added to the suite get the spare colours."""
    others = [rule for rule in sorted(rules) if rule not in RULE_STYLES]
    spare = {
        rule: RuleStyle(rule, OTHER_COLORS[i % len(OTHER_COLORS)], DASHES[i % len(DASHES)], "v", 1.2, 2.5)
        for i, rule in enumerate(others)
    }
    return {rule: style for rule, style in (RULE_STYLES | spare).items() if rule in rules}


def legend_handles(styles: dict[str, RuleStyle], *, markers: bool = False, lines: bool = True) -> list[Line2D]:
    return [
        Line2D(
            [], [], label=style.label, marker=style.marker if markers else "",
            **style.line(**({} if lines else {"linestyle": "none", "markersize": 6, "markeredgecolor": "white"})),
        )
        for style in styles.values()
    ]  # fmt: skip


@contextmanager
def look() -> Iterator[None]:
    """The suite's matplotlib settings, for what is drawn or saved inside the context."""
    with matplotlib.style.context(STYLE_FILE):
        yield


@look()
def save(figure: Figure, stem: Path) -> list[Path]:
    """Write `stem`.png and `stem`.pdf without dates or version stamps; return both paths."""
    png, pdf = stem.with_suffix(".png"), stem.with_suffix(".pdf")
    figure.savefig(png, metadata={"Software": None})
    figure.savefig(pdf, metadata={"CreationDate": None, "Creator": None, "Producer": None})
    return [png, pdf]
