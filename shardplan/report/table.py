"""Tables, drawn by rich."""

from __future__ import annotations

import io
import sys
from collections.abc import Collection, Iterable, Sequence


def table(rows: Iterable[Sequence[str]], *, right: Collection[int] = (), width: int | None = None) -> list[str]:
    """The lines of a table, with two blanks between columns and none at the end of a line.

    Args:
        rows: the cells, the same number in each row: printable text with `Paint`'s colours. Blanks before a cell's text indent
            all its lines.
        right: the right-aligned columns.
        width: the largest number of columns of a line; longer cells are folded, at blanks if they have any. None sets no limit.
    """
    from rich.console import Console  # the import takes longer than linting a plan
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    first, *others = rows
    drawn = Table.grid(padding=(0, 2, 0, 0))
    for i in range(len(first)):
        drawn.add_column(justify="right" if i in right else "left", overflow="fold")
    for row in (first, *others):
        texts = [cell.lstrip(" ") for cell in row]
        indents = [len(cell) - len(text) for cell, text in zip(row, texts, strict=True)]
        drawn.add_row(*(Padding(Text.from_ansi(text), (0, 0, 0, n)) for text, n in zip(texts, indents, strict=True)))
    # The cells have the colours: the console must not look for a terminal or read the environment.
    screen = Console(
        file=io.StringIO(), width=width or sys.maxsize, color_system="standard", no_color=False, force_terminal=False
    )
    with screen.capture() as shown:
        screen.print(drawn)
    return [line.rstrip() for line in shown.get().splitlines()]
