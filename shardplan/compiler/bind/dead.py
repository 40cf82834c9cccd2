"""Keys that match nothing, and the names that were probably meant."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from functools import lru_cache

from shardplan.core.diagnostics import Code, Diagnostic, Edit, Label, Location, Rewrite, Severity
from shardplan.core.plan import PlanFile, section_at
from shardplan.core.suggest import closest
from shardplan.core.tree import ModuleTree, named
from shardplan.language.globs import Glob, Segment

from .matching import Names

DEAD = Code("SP201")


def dead(
    names: Names,
    glob: Glob,
    location: Location,
    *,
    lenient: bool = False,
    inherited: bool = False,
    modules_only: bool = False,
    listed: bool = False,
    having: str | None = None,
) -> Diagnostic:
    """The finding for a pattern that matches nothing.

    Args:
        names: the model's names.
        glob: the pattern.
        location: its place.
        lenient: make it a warning, for plans that were not written for this very model.
        inherited: whether the pattern is in a plan that this plan extends.
        modules_only: whether only modules could have matched.
        listed: whether it is in a list, whose entries have no options.
        having: what matching modules would need below them.
    """
    model = names.tree.class_names[0] if names.tree.class_names else "the model"
    lacks = having is not None and bool(names.reach(glob))
    close = () if lacks else suggestions(glob, names.starred(modules_only))
    # One name for each alternative; together they are one key again.
    as_one = len(close) == len(glob.alternatives) and " and " not in named(close)
    keys = [named(close)] if as_one else close
    near = " or ".join(f"`{key}`" for key in keys)
    proposals: tuple[Edit | Rewrite, ...] = ()
    if inherited:
        section = section_at(location.path)
        proposals = (Edit(section, glob.pattern, "none"),) if section is not None else ()
        help = f"remove the inherited rule with `{glob.pattern}: none`" + (f"; this model has {near}" if near else "")
    elif lacks:
        help = f"remove `having: {having}`, or name what is below them, or write `optional: true` if only some models have it"
    else:
        help = f"write {near}" if near else "remove it"
        proposals = tuple(Rewrite(location, key) for key in keys) or (Rewrite(location, None),)
        help += "" if modules_only or listed else ", or write `optional: true` if only some models have it"
    nothing = f"no module of {model}" if modules_only or lacks else f"no module and no parameter of {model}"
    nothing += f" that has `{having}`" if lacks else ""
    return Diagnostic(
        code=DEAD,
        severity=Severity.WARNING if lenient else Severity.ERROR,
        message=f"`{glob.pattern}` matches {nothing}",
        primary=Label(location, "matches nothing"),
        help=help,
        proposals=proposals,
    )


def dead_arguments(plan: PlanFile, tree: ModuleTree) -> Iterator[Diagnostic]:
    """The findings for `refused_arguments` that the model's forward does not take."""
    model = tree.modules.get("")
    if model is None or model.arguments is None:  # it takes any name
        return
    for name, location in plan.refused.items():
        if name not in model.arguments:
            near = closest(name, model.arguments)
            yield Diagnostic(
                code=DEAD,
                severity=Severity.ERROR,
                message=f"the forward of {model.class_name} has no argument {name}",
                primary=Label(location, "is no argument"),
                help=f"write `{near}`" if near else "remove it",
                proposals=(Rewrite(location, near),),
            )


# Suggestions: the real names that differ little from a key, segment by segment.
MOST = 3  # suggestions, and alternatives of the key that are considered
LONGEST = 60  # characters of a segment, and segments of a key; longer ones are not compared
SIMILAR = 0.6  # of two segments, by difflib's measure; below it they are different words
MISSING = 0.3  # the price of a segment that the key leaves out (a short name); a misspelled one costs its difference
SURPLUS = 0.6  # the price of a segment that the name does not have
FARTHEST = 1.25  # the price up to which a name is suggested: four segments left out, or three words misspelled


def suggestions(glob: Glob, names: Sequence[str]) -> tuple[str, ...]:
    """The nearest names for each alternative of the key, the nearest first; none if nothing is near.

    Args:
        glob: a key that matches nothing.
        names: all names, list indices as `*`.
    """
    found: dict[str, None] = {}
    alternatives = glob.alternatives[:MOST]
    for alternative in alternatives:
        if len(alternative) <= LONGEST:
            priced = sorted((price, name) for name in names if (price := _price(alternative, name)) is not None)
            found.update((name, None) for price, name in priced if price == priced[0][0])
    return tuple(found)[:MOST]


def _price(alternative: tuple[Segment, ...], name: str) -> float | None:
    """The price of changing an alternative into the name, or None if it is too high. The last segments, which carry the
    meaning, must be alike."""
    segments = tuple(name.split("."))
    if _unlike(alternative[-1], segments[-1]) is None:
        return None
    row = [MISSING * i for i in range(len(segments) + 1)]
    for i, wanted in enumerate(alternative, 1):
        above, row = row, [SURPLUS * i]
        for j, segment in enumerate(segments, 1):
            unlike = _unlike(wanted, segment)
            changed = above[j - 1] + unlike if unlike is not None else FARTHEST + 1
            row.append(min(changed, above[j] + SURPLUS, row[j - 1] + MISSING))
    return round(row[-1], 6) if row[-1] <= FARTHEST else None


@lru_cache(maxsize=65536)
def _unlike(wanted: Segment, segment: str) -> float | None:
    """0 for a segment that fits, up to 1 - SIMILAR for a misspelled one, None for another word."""
    if wanted.matches(segment) or (segment == "*" and wanted.text.isdecimal()):
        return 0.0
    if segment == "*" or len(wanted.text) > LONGEST or len(segment) > LONGEST:
        return None
    matcher = SequenceMatcher(None, wanted.text.lower(), segment.lower(), autojunk=False)
    return 1 - matcher.ratio() if matcher.quick_ratio() >= SIMILAR and matcher.ratio() >= SIMILAR else None
