"""Locks as JSON files, and the result of checking a lock as text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from shardplan.core.mesh import named_sizes
from shardplan.core.plan import variant_words
from shardplan.core.plan_lock import LockCheck, LockedQuestion, PlanLock
from shardplan.core.user_files import CannotRead, parse_json

from .color import Paint
from .json import json_text
from .text import text
from .width import printable

VERSION = "1"  # the version of the form of locks


def lock_text(lock: PlanLock) -> str:
    """The content of a lock's file."""
    return json_text({"lock": VERSION, **asdict(lock)}) + "\n"


def read_lock(content: str) -> PlanLock:
    """The lock in a file. The content is checked: data of the types that `lock_text` writes, with the sizes of a mesh.

    Raises:
        ValueError: the content is not a lock.
    """
    try:
        data = parse_json(content)
    except CannotRead as error:
        raise ValueError(f"it {error.reason}") from None
    if not isinstance(data, dict) or data.get("lock") != VERSION:
        raise ValueError(f'no lock of version {VERSION}: it does not have "lock": "{VERSION}"')
    for field in fields(PlanLock):
        if field.name not in data:
            raise ValueError(f"the lock does not have {field.name!r}")
    for name in ("versions", "files", "parameters", "sections"):
        if not _is_map(data[name]):
            raise ValueError(f"{name} must be an object of texts")
    if not isinstance(data["digest"], str):
        raise ValueError("digest must be a text")
    if not isinstance(data["variants"], dict):
        raise ValueError("variants must be an object: variant -> module -> a list of facts")
    variants = {name: _facts(facts) for name, facts in data["variants"].items()}
    rest = {name: data[name] for name in ("versions", "files", "parameters", "sections", "digest")}
    return PlanLock(asked=_asked(data["asked"]), variants=variants, **rest)


def _asked(asked: Any) -> LockedQuestion:
    known = {field.name for field in fields(LockedQuestion)}
    if not isinstance(asked, dict) or not {"model", "plan", "mesh"} <= asked.keys() <= known:
        raise ValueError(f"asked must have the fields {', '.join(sorted(known))}")
    for name, types in _TYPES.items():
        if name in asked and not isinstance(asked[name], types):
            wanted = " or ".join(_WORDS[one] for one in types)
            raise ValueError(f"asked.{name} must be {wanted}, not {asked[name]!r:.40}")
    if not all(isinstance(value, bool | int | float | str | None) for value in asked.get("settings", {}).values()):
        raise ValueError("asked.settings must be an object: name -> a number, a text, true, false or null")
    named_sizes(asked["mesh"])
    return LockedQuestion(**asked)


_TYPES: dict[str, tuple[type, ...]] = {
    "model": (str,),
    "plan": (str,),
    "mesh": (dict,),
    "sequence_parallel": (bool, type(None)),
    "settings": (dict,),
    "inputs": (str, type(None)),
    "reduced": (str, type(None)),
    "trust_remote_code": (bool,),
    "derive": (bool,),
}
_WORDS = {str: "a text", dict: "an object", bool: "true or false", type(None): "null"}


def _is_map(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(one, str) for one in value.values())


def _facts(facts: Any) -> Mapping[str, tuple[str, ...]]:
    lines = facts.values() if isinstance(facts, dict) else (None,)
    if not all(isinstance(one, list) and all(isinstance(fact, str) for fact in one) for one in lines):
        raise ValueError("variants must be objects: module -> a list of facts")
    return {name: tuple(listed) for name, listed in facts.items()}


def check_text(check: LockCheck, *, color: bool) -> str:
    """The text of the differences from the lock."""
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
    if check.unexplained:
        parts.append(
            "the digests differ, and nothing that the lock lists does: it was edited, or is of another shardplan"
        )
    asked = check.lock.asked
    said = f"{printable(asked.plan)} is bound to {printable(asked.model)} "
    parts.append(
        paint("good" if check.ok else "error", said + ("as before" if check.ok else "differently than before"))
    )
    return "\n\n".join(parts)


def _line(line: str, paint: Paint) -> str:
    shown = f"  {printable(line)}"
    return paint("error", shown) if line.startswith("- ") else paint("good", shown) if line.startswith("+ ") else shown
