"""The pages of the diagnostic codes: docs/diagnostics/SPnnn.md."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from shardplan.core.data_files import data_folder

RUN = "\n## What it prints\n"  # the text after it is made from a test, for readers of the site


@dataclass(frozen=True, slots=True)
class Page:
    """The page of a code: its meaning, why it matters, what it looks like, and how to fix it.

    Args:
        code: `SPnnn`.
        title: a few words, lower case.
        body: Markdown: the text, then usually a wrong and a right example.
    """

    code: str
    title: str
    body: str

    @property
    def text(self) -> str:
        """The body without its examples."""
        return self.body.partition("\n\nWrong:\n")[0]

    def __str__(self) -> str:
        return f"{self.code}: {self.title}\n\n{self.body}"


@cache
def pages() -> dict[str, Page]:
    """The page of each code, in the order of the codes."""
    files = sorted(data_folder("docs/diagnostics").glob("SP*.md"))
    return {path.stem: read_page(path.read_text("utf-8")) for path in files}


def read_page(text: str) -> Page:
    """The page in a file: its fields, one per line, between two lines `---`, then the body."""
    _, fields, rest = text.split("---\n", 2)
    return Page(**dict(line.split(": ", 1) for line in fields.splitlines()), body=rest.partition(RUN)[0].strip("\n"))
