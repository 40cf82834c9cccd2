"""Compare how large the parts of the project are with the rows of `tools/sizes.txt`, which say how large they may be.

    python tools/sizes.py          print the table; it fails where a part is above its row
    python tools/sizes.py --write  bring the rows down to what is there

A row has the part, its lines, its statements (of Python), and the reason of its last rise. Only a hand raises it, in the commit that needs it.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
ROWS = "tools/sizes.txt"
FOLDERS = ("tests", "tools", "benchmarks", "demo", "examples")
RISE = (
    "{part}: {lines} lines and {statements} statements are more than its row in {rows} allows. "
    "Make it smaller, or raise the row in this commit, with the reason at its end."
)
GONE = "{part}: there is no such part. `python tools/sizes.py --write` removes its row from {rows}."

Row = tuple[int, int, str]  # lines, statements, reason of the last rise


def parts(root: Path) -> dict[str, list[Path]]:
    """Part -> its files: the rooms of the package, the folders next to it, and what the package reads as data."""
    package = root / "shardplan"
    found = {f"shardplan/{room.name}": list(room.rglob("*.py")) for room in sorted(package.iterdir())}
    found |= {"shardplan": list(package.glob("*.py"))}
    found |= {folder: list((root / folder).rglob("*.py")) for folder in FOLDERS}
    data = [path for path in package.rglob("*.*") if path.suffix not in (".py", ".pyc")]
    found |= {"data of shardplan": data, "plans": list((root / "plans").glob("*.yaml"))}
    return {part: files for part, files in found.items() if files}


def size(path: Path) -> tuple[int, int]:
    """Lines and statements of a file."""
    text = path.read_text("utf-8")
    tree = ast.walk(ast.parse(text)) if path.suffix == ".py" else ()
    return len(text.splitlines()), sum(isinstance(node, ast.stmt) for node in tree)


def measured(root: Path) -> dict[str, tuple[int, int]]:
    """Part -> its lines and statements."""
    counted = {part: [size(path) for path in files] for part, files in parts(root).items()}
    return {part: (sum(n for n, _ in sizes), sum(n for _, n in sizes)) for part, sizes in counted.items()}


def read(file: Path) -> dict[str, Row]:
    """Part -> its row."""
    rows = (line.split("|") for line in file.read_text("utf-8").splitlines())
    return {part.strip(): (int(lines), int(statements), why.strip()) for part, lines, statements, why in rows}


def main(argv: list[str], root: Path = ROOT) -> int:
    file, found = root / ROWS, measured(root)
    rows = read(file)
    if argv == ["--write"]:
        rows = {part: (*map(min, found[part], row), row[2]) for part, row in rows.items() if part in found}
        lines = (f"{part:20}|{n:7} |{m:7} | {why}".rstrip() + "\n" for part, (n, m, why) in rows.items())
        file.write_text("".join(lines), "utf-8")
    print(f"{'':20}  lines   allowed   statements   allowed")
    problems = [GONE.format(part=part, rows=ROWS) for part in rows if part not in found]
    for part, (lines, statements) in found.items():
        most, most_statements, _ = rows.get(part, (0, 0, ""))
        print(f"{part:20}{lines:7}{most:10}{statements:13}{most_statements:10}")
        if lines > most or statements > most_statements:
            problems.append(RISE.format(part=part, lines=lines, statements=statements, rows=ROWS))
    package = [sizes for part, sizes in found.items() if part.startswith("shardplan")]
    print(f"{'all of shardplan':20}{sum(n for n, _ in package):7}{'':10}{sum(n for _, n in package):13}")
    print(*problems, sep="\n", file=sys.stderr, end="\n" if problems else "")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
