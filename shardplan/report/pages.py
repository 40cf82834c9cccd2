"""The pages of the diagnostic codes: docs/diagnostics/SPnnn.md."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from shardplan.core.data_files import data_folder

RUN = "\n## What it prints\n"  # what follows is made from a test: for readers of the site


@dataclass(frozen=True, slots=True)
class Page:
    """The meaning of a code, why it matters, how it looks and how to fix it.

    Args:
        code: `SPnnn`.
        title: a few words, lower case.
        body: Markdown: the text, then mostly a wrong example and a right one.
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
    """A page from its file: the fields between two lines `---`, a line for each, then the body."""
    _, fields, rest = text.split("---\n", 2)
    return Page(**dict(line.split(": ", 1) for line in fields.splitlines()), body=rest.partition(RUN)[0].strip("\n"))
