"""With what a row was judged: releases, our code and the plan. What has another key now is judged again, and all else is left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

from shardplan.language import builtin_plans, parse_plan

ROOT = Path(__file__).parents[2]
# No judgement imports these rooms of the package.
NOT_RUN = {"cli", "export", "convert", "compat"}
JUDGES = ("tests/zoo", "tests/soundness", "tests/variants", "tests/data/published")
READ = (".py", ".json")
PACKAGES = ("torch", "transformers", "diffusers")
UNKNOWN = "releases that were not noted"


class Judged(Protocol):
    """A row of a table."""

    @property
    def plan(self) -> str | None: ...
    @property
    def judged(self) -> Mapping[str, str]: ...


def key(plan: str | None) -> str:
    """What a judgement depends on, in words and a digest: the releases, the files of our code that a judgement runs, and those of the plan.

    Args:
        plan: a built-in plan; anything else: `auto` found none, so which plan is for which type counts.
    """
    releases = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    return f"{releases}, {ours(plan) if plan in builtin_plans() else ours()}"


def ours(*plans: str, judges: tuple[str, ...] = JUDGES) -> str:
    """The digest of what a judgement depends on besides the releases.

    Args:
        plans: built-in plans of a type; without, which plan is for which type counts.
        judges: files of tests that judge, and folders of such.
    """
    return _digest(code(judges), *map(_text, plans), *([] if plans else [_types()]))


@cache
def code(judges: tuple[str, ...]) -> str:
    """The digest of our code, whose judgements are compared; as text, since a judge's Python may not be that of the environment it judges."""
    files = [
        *(path for path in (ROOT / "shardplan").rglob("*.py") if path.relative_to(ROOT).parts[1] not in NOT_RUN),
        *(path for name in judges for path in (ROOT / name, *(ROOT / name).rglob("*")) if path.suffix in READ),
        *(ROOT / "plans").glob("*.toml"),
        ROOT / "tests" / "model_settings.py",
        ROOT / "tests" / "diffusion_models.py",
    ]
    return _digest(*(f"{path.relative_to(ROOT)}\n{path.read_text('utf-8')}" for path in sorted(files)))


def is_current(row: Judged, part: str) -> bool:
    """Whether a row has what would be found out now."""
    return row.judged.get(part) == key(row.plan)


def releases(rows: Iterable[Judged], parts: Mapping[str, str]) -> str:
    """What the rows of a table were judged with, as lines.

    Args:
        parts: as in `judged` -> what the page calls them.
    """
    lines = []
    for part, title in parts.items():
        counts = Counter(
            ", ".join(one.judged[part].split(", ")[:-1]) if part in one.judged else UNKNOWN for one in rows
        )
        lines.append(f"- {title}: " + "; ".join(f"{n} with {said}" for said, n in counts.most_common()) + ".")
    return "\n".join(lines)


@cache
def _text(plan: str) -> str:
    """A plan and those that it extends."""
    text = (ROOT / "plans" / f"{plan}.yaml").read_text("utf-8")
    parent = next((line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("extends:")), None)
    return text if parent is None else text + _text(parent)


@cache
def _types() -> str:
    plans: dict[str, Any] = {name: parse_plan(name).plan for name in builtin_plans()}
    return repr(sorted((name, sorted(plan.models)) for name, plan in plans.items()))


def _digest(*texts: str) -> str:
    return sha256("\0".join(texts).encode()).hexdigest()[:12]
