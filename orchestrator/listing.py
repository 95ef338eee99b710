"""A plain table that prints a thousand rows at once; rich's own takes a second for them."""

from collections.abc import Iterator, Sequence

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.segment import Segment
from rich.style import Style
from rich.text import Text

GAP = 2
NARROWEST = 8


class Listing:
    """Columns of text under bold titles; what is too wide is folded.

    Attributes:
        caption: a line under the table; empty for none.
    """

    def __init__(self, *columns: str) -> None:
        self._titles: list[str] = []
        self._right: list[bool] = []
        self._rows: list[Sequence[str | Text]] = []
        self.caption = ""
        for column in columns:
            self.add_column(column)

    def add_column(self, title: str, right: bool = False) -> None:
        """Another column, aligned to the left unless `right`."""
        self._titles.append(title)
        self._right.append(right)

    def add_row(self, *cells: str | Text) -> None:
        """One row; the cells' own style is kept."""
        self._rows.append(cells)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        widths = self._widths(options.max_width)
        yield from self._lines(self._titles, widths, console, Style(bold=True))
        for row in self._rows:
            yield from self._lines(row, widths, console, Style.null())
        if self.caption:
            yield Segment(self.caption, Style(italic=True))
            yield Segment.line()

    def _widths(self, available: int) -> list[int]:
        """What each column needs; the widest ones give way until the whole fits."""
        texts = [self._titles, *([str(cell) for cell in row] for row in self._rows)]
        widths = [max(cell_len(cell) for cell in column) for column in zip(*texts, strict=True)]
        while sum(widths) + GAP * (len(widths) - 1) > available and max(widths) > NARROWEST:
            widths[widths.index(max(widths))] -= 1
        return widths

    def _lines(
        self, cells: Sequence[str | Text], widths: Sequence[int], console: Console, style: Style
    ) -> Iterator[Segment]:
        texts = [str(cell) for cell in cells]
        styles = [console.get_style(cell.style) if isinstance(cell, Text) else style for cell in cells]
        height = max(-(-len(text) // width) if width else 1 for text, width in zip(texts, widths, strict=True))
        for line in range(max(1, height)):
            for i, (text, width) in enumerate(zip(texts, widths, strict=True)):
                part = text[line * width : (line + 1) * width]
                padding = " " * (width - cell_len(part))
                part = padding + part if self._right[i] else part + padding
                yield Segment(part + (" " * GAP if i + 1 < len(widths) else ""), styles[i])
            yield Segment.line()
