"""Which fast tests run the places that mutants change: files of tests are run once, in a copy of the project that notes them."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .sites import ROOT, RULES, Site

NOTED = "noted-places"
# Ranks are kept from test to test: what they run, all tests of the file may. Tests change the environment, the user and the size of files.
MODULE = f"""
import os, sys
from pathlib import Path
_KEPT, _SEEN = "forkserver" in " ".join(sys.orig_argv), set()
def reached_site(place):
    test = "" if _KEPT else os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
    if (place, test) not in _SEEN:
        _SEEN.add((place, test))
        try:
            with (Path(__file__).parents[1] / "{NOTED}").open("a") as file:
                file.write(f"{{place}}\\t{{test}}\\n")
        except OSError:
            pass
"""


def key(site: Site) -> str:
    return f"{site.path}:{site.lines[0]} {site.operator} {site.number}"


def with_notes(path: str, sites: Iterable[Site]) -> str:
    """A file of the package that notes when the statements of these changes run."""
    tree = ast.parse((ROOT / path).read_text())
    changes = list(RULES["code"][1](tree))
    places: dict[ast.AST, tuple[list[Any], ast.stmt]] = {}
    for node in ast.walk(tree):  # the inner ones come later
        for name in ("body", "orelse", "finalbody"):
            statements = getattr(node, name, None)
            for one in statements if isinstance(statements, list) else ():
                places |= dict.fromkeys(ast.walk(one), (statements, one))
    notes = defaultdict[tuple[int, int], list[str]](list)
    for site in sites:
        statements, one = places[changes[site.number][1]]
        notes[id(statements), id(one)].append(key(site))
    for statements in [found for found, _ in places.values()]:
        for one in [*statements]:
            for place in notes.pop((id(statements), id(one)), ()):
                statements.insert(statements.index(one), ast.parse(f"_reached_site({place!r})").body[0])
    first = next(i for i, one in enumerate(tree.body) if not _is_first(one))
    tree.body.insert(first, ast.parse("from shardplan._reached import reached_site as _reached_site").body[0])
    return ast.unparse(ast.fix_missing_locations(tree))


def _is_first(one: ast.stmt) -> bool:
    is_future = isinstance(one, ast.ImportFrom) and one.module == "__future__"
    return is_future or (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))


def reaching(noted: str, tests: Mapping[str, bool]) -> dict[str, list[str]]:
    """The tests that ran each place, in their order.

    Args:
        noted: lines of the notes.
        tests: those that ran -> whether they passed. One that failed may run anything: the notes are in its way.
    """
    found = defaultdict[str, set[str]](set)
    for line in noted.splitlines():
        place, _, test = line.partition("\t")
        found[place].add(re.sub(r"\x00", "(null)", test))
    failed = {test for test, passed in tests.items() if not passed}
    return {
        place: [test for test in tests if test in by or test in failed or "" in by or not by & tests.keys()]
        for place, by in found.items()
    }


def folder_of_notes(folder: Path) -> Path:
    return folder / NOTED
