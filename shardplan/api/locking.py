"""Writing a bound plan to a file, and comparing it with later bindings."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from shardplan.compiler.compare_programs import bound_fields, module_facts, own_layer
from shardplan.compiler.pipeline import Given, look_up
from shardplan.compiler.user_inputs import Model
from shardplan.core.by_key import by_key
from shardplan.core.diagnostics import PlanError
from shardplan.core.mesh import AXES, MeshSizes, named_sizes
from shardplan.core.plan import variant_name
from shardplan.core.plan_lock import Facts, LockCheck, LockedQuestion, PlanLock
from shardplan.core.suggest import with_known_names
from shardplan.core.tree import ModuleTree, full_name
from shardplan.core.versions import installed_versions
from shardplan.model.model_words import classify
from shardplan.report.errors import raise_errors, sources_of
from shardplan.report.short_names import fold_names

from .comparing import compiled, sized
from .deriving import deriving
from .one_at_a_time import one_at_a_time

if TYPE_CHECKING:
    from shardplan.compiler.lower import Program
    from shardplan.core.sources import SourceMap

_T = TypeVar("_T")


@with_known_names
@one_at_a_time
def lock_plan(asked: LockedQuestion, *, progress: Callable[[str], None] = lambda text: None) -> PlanLock:
    """Record how a plan is bound to a model: what a rank stores and moves for each module, the fields of the sections, the model's
    parameters, and digests. The plan is checked as by `compile_plan`, but not proven.

    Args:
        asked: the model, the plan and the mesh, in the words of the command line. Without a tp size, it is the smallest above 1
            that the plan allows; the result has it.
        progress: called with what is being done.

    Raises:
        PlanError: all findings about the model or the plan.
        ValueError: a wrong axis or size.
    """
    given, sizes = _look_up(asked, progress)
    return _locked(asked, given, sizes, progress)


class NamesCode(ValueError):
    """A lock names code that its caller has not named.

    Args:
        what: the field of `LockedQuestion` with the name.
        word: the name of the code.
    """

    def __init__(self, what: str, word: str):
        super().__init__(
            f"the lock's {what} is {word}, which imports code: a lock is data, and does not say what may be imported"
        )
        self.what, self.word = what, word


@with_known_names
@one_at_a_time
def check_lock(
    lock: PlanLock,
    *,
    code: Collection[str] = (),
    trust_remote_code: bool = False,
    progress: Callable[[str], None] = lambda text: None,
) -> LockCheck:
    """Bind the plan of a lock to its model again, and compare. Renamed parameters and changed shapes are reported even where the
    plan now has errors.

    Args:
        lock: what `lock_plan` made.
        code: the `module:callable`s of the lock (its model, `inputs`, `reduced`) that may be imported.
        trust_remote_code: run code in the model's folder, whatever the lock says.
        progress: called with what is being done.

    Raises:
        PlanError: the model or the plan cannot be read; the model has code of its own, which is not trusted (SP506).
        NamesCode: the lock names a `module:callable` that is not in `code`; a ValueError.
        ValueError: a wrong axis or size.
    """
    named = lock.asked
    imported = {"inputs": named.inputs, "reduced": named.reduced}
    if classify(named.model).kind == "callable":
        imported["model"] = named.model
    for what, word in imported.items():
        if word is not None and word not in code:
            raise NamesCode(what, word)
    asked = replace(named, trust_remote_code=trust_remote_code)
    given, sizes = _look_up(asked, progress)
    parameters = _parameters(given.both[0].tree)
    about = tuple(_about(lock, given.sources))
    changed = tuple(_differences(lock.parameters, parameters))
    try:
        now = _locked(asked, given, sizes, progress)
    except PlanError as error:
        return LockCheck(lock, None, changed, about=about, findings=error.diagnostics, sources=sources_of(error))
    variants = dict.fromkeys((*lock.variants, *now.variants))
    modules = {on: tuple(_module_lines(lock.variants.get(on, {}), now.variants.get(on, {}))) for on in variants}
    return LockCheck(
        lock,
        now,
        changed,
        {on: lines for on, lines in modules.items() if lines},
        tuple(_differences(lock.sections, now.sections)),
        about,
    )


def _look_up(asked: LockedQuestion, progress: Callable[[str], None]) -> tuple[Given, MeshSizes]:
    model = Model(asked.model, dict(asked.settings), asked.inputs, asked.reduced, asked.trust_remote_code)
    sizes = named_sizes(asked.mesh)
    sizes.check_ep()
    on = asked.sequence_parallel
    derive = deriving(model, sizes, derive=asked.derive, sequence_parallel=on, progress=progress)
    progress(f"reading {asked.model}")
    given = look_up(model, asked.plan, split=sizes.needs_rules, derive=derive)
    raise_errors(given.findings, given.sources)
    return given, sized([given], sizes)


def _locked(asked: LockedQuestion, given: Given, sizes: MeshSizes, progress: Callable[[str], None]) -> PlanLock:
    programs = compiled(given, sizes, asked.sequence_parallel, progress)
    variants = {variant_name(on): _facts(program) for on, program in programs.items()}
    fields = bound_fields(next(iter(programs.values())).resolved)
    sections = {
        name: value if isinstance(value, str) else ", ".join(fold_names(value)) for name, value in fields.items()
    }
    parameters = _parameters(given.both[0].tree)
    facts = [program.describe().partition("\n")[2] for program in programs.values()]  # without the plan's name
    mesh = {str(axis): sizes.of(axis) for axis in AXES if sizes.of(axis) > 1 or axis == "tp"}
    return PlanLock(
        replace(asked, mesh=mesh),
        installed_versions(),
        _files(given.sources),
        parameters,
        variants,
        sections,
        _digest([facts, {name: str(value) for name, value in fields.items()}, parameters]),
    )


def _digest(data: object) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def _files(sources: SourceMap) -> dict[str, str]:
    texts = {name: "\n".join(source.lines) for name, source in sources.files.items() if source.lines}
    return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}


def _parameters(tree: ModuleTree) -> dict[str, str]:
    """Folded parameter names -> shape, dtype, and what they are tied to."""
    tied = {name: group[0] for group in tree.tied for name in group[1:]}
    said = {}
    for name, module in tree.modules.items():
        for parameter in module.parameters:
            full = full_name(name, parameter.name)
            frozen = "" if parameter.requires_grad else ", frozen"
            same = f", tied to {tied[full]}" if full in tied else ""
            said[full] = f"{list(parameter.shape)} {parameter.dtype}{frozen}{same}"
    return _folded(said)


def _facts(program: Program) -> Facts:
    """Folded module names -> what happens there; the number of the module's own layer is written `*`."""
    return _folded({name: own_layer(name, facts) for name, facts in module_facts(program).items()})


def _folded(said: Mapping[str, _T]) -> dict[str, _T]:
    groups = by_key((value, name) for name, value in said.items())
    return {name or "(model)": value for value, names in groups.items() for name in fold_names(names)}


def _differences(old: Mapping[str, str], new: Mapping[str, str]) -> Iterator[str]:
    for name in dict.fromkeys((*old, *new)):
        if old.get(name) != new.get(name):
            if name in old:
                yield f"- {name}: {old[name]}"
            if name in new:
                yield f"+ {name}: {new[name]}"


def _module_lines(old: Facts, new: Facts) -> Iterator[str]:
    for name in dict.fromkeys((*old, *new)):
        before, after = old.get(name, ()), new.get(name, ())
        if before != after:
            yield name
            yield from (f"- {fact}" for fact in _only(before, after))
            yield from (f"+ {fact}" for fact in _only(after, before))


def _only(facts: Iterable[str], others: tuple[str, ...]) -> Iterator[str]:
    return (fact for fact in facts if fact not in others)


def _about(lock: PlanLock, sources: SourceMap) -> Iterator[str]:
    now = installed_versions()
    for name in dict.fromkeys((*lock.versions, *now)):
        if lock.versions.get(name) != now.get(name):
            yield f"{name}: {lock.versions.get(name, '-')} -> {now.get(name, '-')}"
    files = _files(sources)
    for name in dict.fromkeys((*lock.files, *files)):
        if name not in files:
            yield f"{name}: is not read any longer"
        elif lock.files.get(name) != files[name]:
            yield f"{name}: {'the text has changed' if name in lock.files else 'was not read'}"
