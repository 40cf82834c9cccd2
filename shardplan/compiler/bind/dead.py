"""Keys that match nothing, and the names that were probably meant."""

from __future__ import annotations

from collections.abc import Iterator

from shardplan.core.diagnostics import Code, Diagnostic, Edit, Label, Location, Rewrite, Severity
from shardplan.core.plan import PlanFile, section_at
from shardplan.core.suggest import closest
from shardplan.core.tree import ModuleTree, named
from shardplan.language.globs import Glob

from .matching import Names
from .suggestions import suggestions

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
