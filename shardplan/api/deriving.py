"""PLAN `auto` for a model that no built-in plan is for: its plan is derived, or was derived before."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Literal, TypedDict

from shardplan.compiler.automatic import Derive, ReadPlan
from shardplan.compiler.user_inputs import Model
from shardplan.core.derived_plan import DerivedPlan
from shardplan.core.mesh import MeshSizes
from shardplan.core.plan import NO_OVERLAYS

if TYPE_CHECKING:
    from shardplan.model import FoundModel

SHOWN = "<derived>"  # what findings call the plan's file
SECTIONS: tuple[Literal["sequence_parallel", "expert_parallel"], ...] = ("sequence_parallel", "expert_parallel")
SMALLEST = 2  # the size for which a plan is derived where none was asked for


class Wanted(TypedDict):
    """What a plan is derived for, as for `new_plan`."""

    tp: int
    sequence_parallel: bool
    expert_parallel: bool


Text = tuple[str, str | None]  # a plan, and why it could not be kept
Share = Callable[[Callable[[], Text]], Text]


def alone(make: Callable[[], Text]) -> Text:
    """One process derives for itself."""
    return make()


def deriving(
    model: Model,
    sizes: MeshSizes,
    *,
    derive: bool,
    sequence_parallel: bool | None,
    progress: Callable[[str], None] = lambda text: None,
    share: Share = alone,
) -> Derive | None:
    """What derives a plan for a model, as `init_plan` does, without proving it: it is checked and proven as any plan afterwards.
    None where it may not.

    Args:
        model: as the user named it.
        derive: whether it may.
        sizes: the mesh's. It is derived for their tp, without one above 1 for the smallest; and with a section that distributes the
            experts where ep is above 1.
        sequence_parallel: whether it has an overlay.
        progress: called with what is being done.
        share: calls a function on one of several ranks, and returns its result on all.
    """
    if not derive:
        return None
    wanted = Wanted(
        tp=max(sizes.tp or 1, SMALLEST), sequence_parallel=bool(sequence_parallel), expert_parallel=sizes.ep > 1
    )

    def read(found: FoundModel) -> ReadPlan:
        from shardplan.language.parsing import parse_text

        text, unkept = share(partial(_text, found, wanted, progress))
        parsed = parse_text(text, file=SHOWN)
        assert parsed.plan is not None, text
        return ReadPlan.of(parsed, _derived(found, ReadPlan.of(parsed), text, unkept, _command(model, wanted)))

    return read


def _text(found: FoundModel, wanted: Wanted, progress: Callable[[str], None]) -> Text:
    """The plan file, from the cache or derived."""
    from shardplan.authoring.init.kept_plans import digest_of, keep, kept
    from shardplan.authoring.init.new import new_plan

    digest = digest_of(found, **wanted)
    if digest is not None and (text := kept(digest)) is not None:
        return text, None
    made = new_plan(found, **wanted, name="derived", progress=progress)
    return made.text, None if digest is None else keep(digest, made.text)


def _derived(found: FoundModel, read: ReadPlan, text: str, kept: str | None, save: str) -> DerivedPlan:
    from shardplan.compiler.lower import split_parameters
    from shardplan.compiler.variants import bind_variants
    from shardplan.core.coverage import covered

    assert read.plan is not None
    resolved = bind_variants(read.plan, found.tree, MeshSizes(), {NO_OVERLAYS}).resolved[NO_OVERLAYS]
    split, whole = covered(found.tree, split_parameters(resolved))
    return DerivedPlan(text, read.plan.description, save, split, whole, kept)


def _command(model: Model, wanted: Wanted) -> str:
    """What writes the plan to a file: a command line, for a model that the command line can name."""
    if not isinstance(model.name, str):
        given = [f"{name}={name}" for name in ("inputs", "reduced") if getattr(model, name) is not None]
        named = f"shardplan.Model(model, {', '.join(given)})" if given else "model"
        options = [f"tp={wanted['tp']}", *(f"{section}=True" for section in SECTIONS if wanted[section])]
        return f"shardplan.init_plan({named}, {', '.join(options)}).text"
    words = ["shardplan", "init", model.name, "-o", "plan.yaml", "--tp", str(wanted["tp"])]
    words += [f"--{section.replace('_', '-')}" for section in SECTIONS if wanted[section]]
    words += [word for name, value in (model.settings or {}).items() for word in ("--set", f"{name}={value}")]
    words += ["--inputs", model.inputs] if isinstance(model.inputs, str) else []
    words += ["--reduced", model.reduced] if isinstance(model.reduced, str) else []
    words += ["--trust-remote-code"] if model.trust_remote_code else []
    return shlex.join(words)
