"""Tables of entries: a page, and its data next to it as JSON."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Protocol, TypeVar

from tests.sampling import add_share

from .entry import Entry

Page = Callable[[Sequence[Entry]], str]


class Row(Protocol):
    """What a table has."""

    @property
    def data(self) -> dict[str, Any]: ...


E = TypeVar("E", bound=Row)


def arguments(program: str) -> argparse.ArgumentParser:
    """The command line of what fills a table."""
    parser = argparse.ArgumentParser(prog=program)
    parser.add_argument("types", nargs="*", help="types (all)")
    add_share(parser)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--table", type=Path, help="write the page to this file, and its data next to it as JSON")
    return parser


def fill(
    before: Iterable[Entry], make: Callable[[Entry], Entry], page: Page, said: Callable[[Entry], Any], **given: Any
) -> list[Entry]:
    """Find out about the types of some entries, several at a time; other rows of the table stay.

    Args:
        before: as the table has them, or empty.
        make: the entry of a type, from the one before.
        said: what to print of an entry.
        given: of the command line.
    """
    file: Path | None = given["table"]
    found: list[Entry] = []
    with get_context("spawn").Pool(given["jobs"], maxtasksperchild=8) as pool:
        for one in pool.imap(make, before):
            found.append(one)
            print(one.name, said(one), file=sys.stderr, flush=True)
            if file is not None:
                write(file, {**read(file), one.name: one}, page)
    if file is None:
        print(page(found))
    return found


def read(file: Path | None, kind: type[E] = Entry) -> dict[str, E]:
    """The entries of a table; none where there is no file."""
    if file is None or not (data := file.with_suffix(".json")).exists():
        return {}
    return {row["name"]: kind(**row) for row in json.loads(data.read_text("utf-8"))}


def write(file: Path, found: Mapping[str, E], page: Callable[[Sequence[E]], str]) -> None:
    """The page, and its data next to it."""
    entries = [found[name] for name in sorted(found)]
    file.write_text(page(entries), "utf-8")
    rows = [json.dumps(e.data) for e in entries]
    file.with_suffix(".json").write_text("[\n" + ",\n".join(rows) + "\n]\n", "utf-8")
