"""Keys that match nothing, and the names that they probably should be."""

from __future__ import annotations

from shardplan.core.diagnostics import Code, Diagnostic, Edit, Label, Location, Rewrite, Severity
from shardplan.core.plan import section_at
from shardplan.core.tree import named
from shardplan.language.globs import Glob

from .matching import Names
from .suggestions import suggestions

DEAD = Code(
    code="SP201",
    title="a key that matches nothing",
    text="""Every key of a plan must match a module or a parameter of the model by its whole dotted name. A rule that
matches nothing leaves whole what it should split; torch's `parallelize_module` only warns. Write `optional: true` in
a rule that only some models need. A child plan removes an inherited rule with the style `none`.

The patterns of `units` and `modules` must match modules.""",
    bad="""# shardplan validate llama-3.1-8b.json mine.yaml
version: "1"
name: mine
tensor_parallel:
  model.layers.*.mlp.{gate,up}_proj: colwise
  model.layers.*.mlp.down_proj: rowwise
  lm_heads: colwise_gather_output
""",
    good="""# shardplan validate llama-3.1-8b.json mine.yaml
version: "1"
name: mine
tensor_parallel:
  model.layers.*.mlp.{gate,up}_proj: colwise
  model.layers.*.mlp.down_proj: rowwise
  lm_head: colwise_gather_output
""",
)


def dead(
    names: Names,
    glob: Glob,
    location: Location,
    *,
    lenient: bool = False,
    inherited: bool = False,
    modules_only: bool = False,
) -> Diagnostic:
    """The finding that a pattern matches nothing.

    Args:
        names: the model's names.
        glob: the pattern.
        location: where it stands.
        lenient: a warning, for plans that were not written for this very model.
        inherited: the pattern stands in a plan that the plan in question extends.
        modules_only: whether only modules could have matched.
    """
    nothing = "no module" if modules_only else "no module and no parameter"
    model = names.tree.class_names[0] if names.tree.class_names else "the model"
    close = suggestions(glob, names.starred(modules_only))
    # One name for each alternative: they are one key again.
    as_one = len(close) == len(glob.alternatives) and " and " not in named(close)
    keys = [named(close)] if as_one else close
    near = " or ".join(f"`{key}`" for key in keys)
    proposals: tuple[Edit | Rewrite, ...] = ()
    if inherited:
        section = section_at(location.path)
        proposals = (Edit(section, glob.pattern, "none"),) if section is not None else ()
        help = f"remove the inherited rule with `{glob.pattern}: none`" + (f"; this model has {near}" if near else "")
    else:
        help = f"write {near}" if near else "remove it"
        proposals = tuple(Rewrite(location, key) for key in keys) or (Rewrite(location, None),)
        help += "" if modules_only else ", or write `optional: true` if only some models have it"
    return Diagnostic(
        code=DEAD.code,
        severity=Severity.WARNING if lenient else Severity.ERROR,
        message=f"`{glob.pattern}` matches {nothing} of {model}",
        primary=Label(location, "matches nothing"),
        help=help,
        proposals=proposals,
    )
