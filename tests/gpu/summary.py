"""The records as a page in Markdown. The standard library alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .table import Part

Record = Mapping[str, Any]


def summary(records: Iterable[Record], parts: Sequence[Part]) -> str:
    """What was run, a line for each part, and the rows of each."""
    records = list(records)
    runs = [record["run"] for record in records if "run" in record]
    lines = ["# What ran on this device", ""]
    lines += [f"- {name}: {value}" for run in runs for name, value in run.items()]
    ended = {record["part"]: record for record in records if "status" in record}
    rows: dict[str, list[Record]] = {part.name: [] for part in parts}
    for record in records:
        if "row" in record:
            rows[record["part"]].append(record["row"])
    header = ("part", "what it tells", "status", "rows", "wrong", "seconds")
    lines += ["", *_table(header, (_overview(part, ended.get(part.name), rows[part.name]) for part in parts))]
    for part in parts:
        record = ended.get(part.name)
        if rows[part.name]:
            columns = list(dict.fromkeys(name for row in rows[part.name] for name in row))
            cells = ([row.get(name, "") for name in columns] for row in rows[part.name])
            lines += ["", f"## {part.name}", "", *_table(columns, cells)]
        if record and record["output"] and (record["status"] != "passed" or not rows[part.name]):
            lines += ["", f"The last lines of {part.name}:", "", "```", *record["output"], "```"]
    return "\n".join(lines) + "\n"


def _overview(part: Part, ended: Record | None, rows: Sequence[Record]) -> list[Any]:
    status = "" if ended is None else ": ".join(filter(None, (ended["status"], ended["why"])))
    wrong = sum(row.get("ok") is False for row in rows)
    return [part.name, part.about, status, len(rows), wrong, "" if ended is None else ended["seconds"]]


def _table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(map(_cell, line)) + " |" for line in lines]


def _cell(value: Any) -> str:
    if value is True or value is False:
        return "yes" if value else "NO"
    text = (
        f"{value:.4g}"
        if isinstance(value, float)
        else ", ".join(map(str, value))
        if isinstance(value, list)
        else str(value)
    )
    return text.replace("|", "\\|").replace("\n", " ")
