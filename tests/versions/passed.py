"""What passed with a pair, so that a judge that was ended goes on where it was, also after commits that change nothing for what passed.

A line counts as long as what can change its meaning is as it was. The file is of a pair. Of a type or a run the rest is the code that a proof
imports and the plans for the type; a private name or a quick test may read any of our files.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path

from shardplan.language import builtin_plans, parse_plan
from tests.zoo.judged_with import ours

from .environment import BUILD, ROOT

RIGHT = "right"
ONCE = ("names", "quick")  # parts with one line; the others have one for each run and each type
FILES = ("shardplan", "plans", "tests")
JUDGES = ("tests/versions/runs.py", "tests/versions/types.py", "tests/zoo/experts.py")


@dataclass(frozen=True)
class Passed:
    """A file with a line for each thing that passed."""

    file: Path

    @classmethod
    def of(cls, pair: str) -> Passed:
        """Of a pair's environment."""
        return cls(BUILD / "passed" / f"{pair}.txt")

    def said(self, what: str) -> str:
        """What was noted of a thing; nothing if it did not pass with what there is now."""
        begins = f"{what} {key(what)}: "
        lines = self.file.read_text("utf-8").splitlines() if self.file.exists() else []
        return next((line.removeprefix(begins) for line in lines if line.startswith(begins)), "")

    def note(self, what: str, said: str) -> None:
        """A line more."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("a", encoding="utf-8") as file:
            file.write(f"{what} {key(what)}: {said}\n")


def key(what: str) -> str:
    """The digest of what a line depends on."""
    return digest(ROOT) if what in ONCE else ours(*plans().get(what.split()[0], ()), judges=JUDGES)


@cache
def plans() -> dict[str, tuple[str, ...]]:
    """Model type -> the built-in plans for it."""
    found: dict[str, tuple[str, ...]] = {}
    for name in builtin_plans():
        for model in plan.models if (plan := parse_plan(name).plan) else ():
            found[model] = (*found.get(model, ()), name)
    return found


@cache
def digest(root: Path, folders: tuple[str, ...] = FILES) -> str:
    """Of the names and the text of files."""
    found = sha256()
    for path in sorted(one for folder in folders for one in (root / folder).rglob("*") if one.is_file()):
        if "__pycache__" not in path.parts:
            found.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return found.hexdigest()[:12]
