"""Locks as JSON files, and what a check of one finds, as text and data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any, Literal

from shardplan.core.plan_lock import LockCheck, LockedQuestion, PlanLock
from shardplan.core.report import Report

from .color import Paint
from .diff_words import variant_words
from .json import json_text, to_json
from .records import Finding
from .text import text
from .width import printable

VERSION = "1"  # of the form of locks


@dataclass(frozen=True, slots=True)
class LockReport:
    """What `shardplan lock --check --json` prints. Lines that begin with `-` are in the lock, those with `+` are new."""

    kind: Literal["lock"]
    version: Literal["1"]
    ok: Annotated[bool, "whether the plan is bound as it was"]
    model: str
    plan: str
    parameters: Annotated[tuple[str, ...], "of the model: that are gone, new or changed"]
    modules: Annotated[dict[str, tuple[str, ...]], "variant -> modules that are stored or run differently"]
    sections: Annotated[tuple[str, ...], "fields that differ"]
    about: Annotated[tuple[str, ...], "versions and files that are not those of the lock; they decide nothing"]
    findings: Annotated[tuple[Finding, ...], "of the plan with the model of today"]


def lock_text(lock: PlanLock) -> str:
    """The file."""
    return json_text({"lock": VERSION, **asdict(lock)}) + "\n"


def read_lock(content: str) -> PlanLock:
    """The lock of a file.

    Raises:
        ValueError: it is none.
    """
    try:
        data = json.loads(content)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(data, dict) or data.get("lock") != VERSION:
        raise ValueError(f'no lock of version {VERSION}: it does not have "lock": "{VERSION}"')
    names = {field.name for field in fields(PlanLock)}
    if missing := sorted(names - data.keys()):
        raise ValueError(f"the lock does not have {missing[0]!r}")
    asked = data["asked"]
    known = {field.name for field in fields(LockedQuestion)}
    if not isinstance(asked, dict) or not {"model", "plan", "mesh"} <= asked.keys() <= known:
        raise ValueError(f"`asked` must have the fields {', '.join(sorted(known))}")
    if not isinstance(asked["model"], str) or not isinstance(asked["plan"], str):
        raise ValueError("`model` and `plan` must be texts")
    maps = ("versions", "files", "parameters", "sections")
    wrong = [name for name in maps if not _is_map(data[name])]
    if wrong or not isinstance(asked["mesh"], dict) or not isinstance(data["variants"], dict):
        raise ValueError(f"{(*wrong, 'mesh or variants')[0]} must be an object of texts")
    variants = {name: _facts(facts) for name, facts in data["variants"].items()}
    rest = {name: data[name] for name in (*maps, "digest")}
    return PlanLock(asked=LockedQuestion(**asked), variants=variants, **rest)


def _is_map(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(one, str) for one in value.values())


def _facts(facts: Any) -> Mapping[str, tuple[str, ...]]:
    if not isinstance(facts, dict) or not all(isinstance(lines, list) for lines in facts.values()):
        raise ValueError("`variants` must be objects: module -> a list of facts")
    return {name: tuple(map(str, lines)) for name, lines in facts.items()}


def check_text(check: LockCheck, *, color: bool) -> str:
    """What differs from the lock."""
    paint = Paint(color)
    parts = []
    if check.findings:
        parts.append(text(check.findings, check.sources, color=color))
    groups = [("parameters of the model", check.parameters)]
    groups += [(f"modules, {variant_words(section)}", lines) for section, lines in check.modules.items()]
    groups.append(("sections", check.sections))
    if not check.ok:
        groups.append(("what else is different", check.about))
    for head, lines in groups:
        if lines:
            parts.append("\n".join([paint("strong", head), *(_line(line, paint) for line in lines)]))
    asked = check.lock.asked
    said = f"{printable(asked.plan)} is bound to {printable(asked.model)} "
    parts.append(
        paint("good" if check.ok else "error", said + ("as it was" if check.ok else "in another way than it was"))
    )
    return "\n\n".join(parts)


def _line(line: str, paint: Paint) -> str:
    shown = f"  {printable(line)}"
    return paint("error", shown) if line.startswith("- ") else paint("good", shown) if line.startswith("+ ") else shown


def check_json(check: LockCheck) -> dict[str, Any]:
    """The same as data."""
    findings = to_json(Report(check.findings, sources=check.sources))["findings"]
    asked = check.lock.asked
    modules = {str(section): lines for section, lines in check.modules.items()}
    changes = (check.parameters, modules, check.sections, check.about, findings)
    return asdict(LockReport("lock", "1", check.ok, asked.model, asked.plan, *changes))
