"""What passed with a pair and with our code as it is, so that a judge that was ended goes on where it was."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from .environment import BUILD, ROOT

RIGHT = "right"
READ = ("shardplan", "plans", "tests")  # whose files a note is for


@dataclass(frozen=True)
class Passed:
    """A file with a line for each thing that passed."""

    file: Path

    @classmethod
    def of(cls, pair: str) -> Passed:
        """Of a pair's environment and the code in this folder."""
        return cls(BUILD / "passed" / f"{pair}-{digest(ROOT)}.txt")

    def said(self, what: str) -> str:
        """What was noted of a thing; nothing if it did not pass."""
        lines = self.file.read_text("utf-8").splitlines() if self.file.exists() else []
        return next((line.removeprefix(f"{what}: ") for line in lines if line.startswith(f"{what}: ")), "")

    def note(self, what: str, said: str) -> None:
        """A line more."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("a", encoding="utf-8") as file:
            file.write(f"{what}: {said}\n")


def digest(root: Path) -> str:
    """Of the names and the text of our files."""
    found = sha256()
    for path in sorted(one for folder in READ for one in (root / folder).rglob("*") if one.is_file()):
        if "__pycache__" not in path.parts:
            found.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return found.hexdigest()[:12]
