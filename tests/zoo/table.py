"""Tables of entries: a page, and its data next to it as JSON."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from tests.sampling import add_share

from .entry import Entry
from .judged_with import is_current, key
from .workers import SECONDS, each

E = TypeVar("E")
Page = Callable[[Sequence[E]], str]


def arguments(program: str) -> argparse.ArgumentParser:
    """The command line of what fills a table."""
    parser = argparse.ArgumentParser(prog=program)
    parser.add_argument("types", nargs="*", help="types (all)")
    add_share(parser)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--seconds", type=int, default=SECONDS, help="of processor time, for a type")
    parser.add_argument("--table", type=Path, help="write the page to this file, and its data next to it as JSON")
    return parser


def fill(
    before: Iterable[E],
    make: Callable[[E], E],
    page: Page[E],
    said: Callable[[E], Any],
    part: str,
    **given: Any,
) -> tuple[list[E], bool]:
    """Find out about the types of some entries, several at a time; other rows of the table stay. Those that were judged with what there is
    now are left out unless they are named, so a run that was ended goes on where it was.

    Args:
        before: as the table has them, or empty.
        make: the entry of a type, from the one before.
        said: what to print of an entry.
        part: what is found out, as `Entry.judged` has it.
        given: of the command line.

    Returns:
        The entries, those that were left out too; none of a type that takes too long or ends its process: its row stays as old as it is.
        And whether all have one, and none that the table has otherwise.
    """
    file: Path | None = given["table"]
    rows = list(before)
    found = [] if given["types"] else [one for one in rows if is_current(one, part)]
    names = {one.name for one in found}
    wanted = [one for one in rows if one.name not in names]
    if found:
        print(f"{part}: {len(found)} of {len(rows)} types are judged with what there is now", file=sys.stderr)
    begun = time.monotonic()
    lost, other = [], []
    results = each(partial(_judged, make, part), wanted, given["jobs"], given["seconds"])
    for count, (row, one, seconds) in enumerate(results, 1):
        if isinstance(one, str):
            lost.append(row.name)
            print(f"{row.name} {one}", file=sys.stderr, flush=True)
            continue
        found.append(one)
        other += [one.name] if part in row.judged and one != row else []
        minutes = (time.monotonic() - begun) / 60
        progress = f"[{part} {count}/{len(wanted)}, {seconds:.0f} s of processor time; about {minutes / count * (len(wanted) - count):.0f} minutes left]"
        print(progress, one.name, said(one), file=sys.stderr, flush=True)
        if file is not None:
            write(file, {**read(file, type(one)), one.name: one}, page)
    if file is None:
        print(page(sorted(found, key=lambda one: one.name)))
    return found, told(part, lost, other)


def told(part: str, lost: Sequence[str], other: Sequence[str]) -> bool:
    """Say which rows have no verdict, or another one than before. Returns whether there is none."""
    for said, names in (("no verdict on", lost), ("not as the table had it:", other)):
        if names:
            print(f"{part}: {said} {', '.join(names)}", file=sys.stderr)
    return not lost and not other


def _judged(make: Callable[[E], E], part: str, before: E) -> E:
    one = make(before)
    return replace(one, judged={**before.judged, part: key(one.plan)})


def read(file: Path | None, kind: type[E] = Entry) -> dict[str, E]:
    """The entries of a table; none where there is no file."""
    if file is None or not (data := file.with_suffix(".json")).exists():
        return {}
    return {row["name"]: kind(**row) for row in json.loads(data.read_text("utf-8"))}


def write(file: Path, found: Mapping[str, E], page: Page[E]) -> None:
    """The page, and its data next to it."""
    entries = [found[name] for name in sorted(found)]
    file.write_text(page(entries), "utf-8")
    rows = [json.dumps(asdict(e)) for e in entries]
    file.with_suffix(".json").write_text("[\n" + ",\n".join(rows) + "\n]\n", "utf-8")
