"""What two judgements of the same types or classes say otherwise: `python -m tests.zoo.differences BEFORE.json AFTER.json`.

Both are the data next to a table. A verdict that one of them lacks is not compared.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]


def differences(before: Sequence[Row], after: Sequence[Row]) -> tuple[int, list[tuple[str, str, str]]]:
    """How many rows are in both, and (name, before, after) of those whose verdicts, or kinds of input, differ."""
    known = {row["name"]: row for row in before}
    both = [(known[row["name"]], row) for row in after if row["name"] in known]
    found = []
    for old, new in both:
        compared = old["verdicts"].keys() & new["verdicts"].keys()
        said = [
            {**{key: row["verdicts"][key] for key in sorted(compared)}, "inputs": row.get("inputs")}
            for row in (old, new)
        ]
        if said[0] != said[1]:
            found.append((new["name"], *(_words(one, other) for one, other in (said, reversed(said)))))
    return len(both), found


def _words(one: Row, other: Row) -> str:
    """What one row says otherwise than the other."""
    return ", ".join(f"{key} {value}" for key, value in one.items() if value != other[key])


def main(argv: list[str]) -> int:
    before, after = (json.loads(Path(file).read_text("utf-8")) for file in argv)
    count, found = differences(before, after)
    print(f"{count - len(found)} of {count} are as before.")
    if found:
        print("\n| | before | after |\n|---|---|---|")
        print("\n".join(f"| {name} | {old} | {new} |" for name, old, new in found))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
