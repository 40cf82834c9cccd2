"""The pages of figures: one section for each benchmark, between two markers, replaced when it runs again."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / name
    for name in (
        "docs/benchmarks.md",
        "docs/benchmarks-checks.md",
        "docs/benchmarks-gpu.md",
        "docs/published-runs.md",
        "reports/communication.md",
    )
]


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def write_section(name: str, text: str) -> None:
    """Put a section into its place on one of the pages.

    Args:
        name: of the benchmark.
        text: in Markdown, beginning with a heading of the second level.
    """
    section = f"<!-- {name} -->\n{text.strip()}\n<!-- end of {name} -->"
    place = re.compile(f"<!-- {name} -->.*<!-- end of {name} -->", re.DOTALL)
    (page,) = [page for page in PAGES if place.search(page.read_text("utf-8"))]
    page.write_text(place.sub(lambda _: section, page.read_text("utf-8")), "utf-8")


def ratio_text(measured: Sequence[float], base: Sequence[float]) -> str:
    """The median of the ratios of pairs measured in turns, and the quarter of them on each side of it."""
    ratios = sorted(m / b for m, b in zip(measured, base, strict=True))
    low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
    return f"{statistics.median(ratios):.2f} ({low:.2f} to {high:.2f})"
