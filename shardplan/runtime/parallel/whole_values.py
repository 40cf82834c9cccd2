"""The modules of a planned model where values are whole on every tp rank, and their gradients complete."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from shardplan.core.by_key import by_key
from shardplan.core.module_program import ModuleProgram
from shardplan.core.tree import ancestors, parent


def whole_values(
    names: Iterable[str], variants: Mapping[str, Mapping[str, ModuleProgram]], home: str, plain: str
) -> frozenset[str]:
    """The modules among `names` that take and return whole values while the model runs as `home`. Code that reads or changes these values
    acts as it does on the unsharded model. Excluded are siblings of a module that takes or returns a rank's share, because the program does not
    say which values they get.

    Args:
        variants: `Program.by_name`.
        home: the variant that the plan was applied with.
        plain: the variant without sequence parallelism.
    """
    if plain not in variants:
        return frozenset()
    programs, running = variants[plain], variants[home]
    around, inner = {above for name in programs for above in ancestors(name)}, inside(programs)
    parents = {parent(name) for name in programs if name not in around and unfit(name, programs, inner)}
    whole = {n for n in names if (n in around or parent(n) not in parents) and not unfit(n, programs, inner)}
    if home != plain:  # between the embedding and the end of the scope, values are split over the sequence
        scopes = {name for name, one in running.items() if one.link == "scope"}
        sources = {name for name, one in running.items() if one.link == "source"}
        inner = inside(running)
        split = {name for name in whole if scopes.intersection(ancestors(name)) or unfit(name, running, inner)}
        whole = whole - split | sources if scopes else set()
    return frozenset(whole)


def inside(programs: Iterable[str]) -> Mapping[str, Sequence[str]]:
    """A module -> the modules with programs that are in it, and itself; the root -> itself."""
    return by_key((above, name) for name in programs for above in (name, *ancestors(name)) if above or not name)


def unfit(name: str, plain: Mapping[str, ModuleProgram], inner: Mapping[str, Sequence[str]]) -> str:
    """Why a module cannot take and return whole values without sequence parallelism; empty where it can.

    Args:
        inner: `inside(plain)`.
    """
    for above in ancestors(name):
        if (one := plain.get(above)) is not None and (one.enter or one.slices or one.experts):
            return (
                f"its inputs and outputs are this tp rank's share of the values of {above or 'the model'}. Call "
                f"{above or 'the model'}, or a module around it"
            )
    instead = "Call a module around it, or the model that the plan was applied to"
    own = plain.get(name)
    if own is not None and not _takes_whole(own):
        return f"its input or output is a tp rank's share. {instead}"
    if any(one.leave is not None and one.leave.dst.kind == "R" for one in _between_blocks(name, plain, inner)):
        return f"its output has readers whose gradients are partial sums. {instead}"
    return ""


def _takes_whole(own: ModuleProgram) -> bool:
    if any(move.src.kind not in "IP" for move in own.enter) or (own.leave and own.leave.dst.kind not in "IR"):
        return False
    kinds = {parameter.computed.kind for parameter in own.parameters}
    if "V" in kinds:
        returns = own.leave is not None or own.logits is not None
        return returns and (bool(own.enter) or own.vocabulary is not None)
    return bool(own.enter) or kinds <= {"I"}


def _between_blocks(
    name: str, plain: Mapping[str, ModuleProgram], inner: Mapping[str, Sequence[str]]
) -> Iterator[ModuleProgram]:
    """The module and the modules in it whose values are whole."""
    for other in inner.get(name, ()):
        above = (plain.get(a) for a in ancestors(other) if a == name or a.startswith(f"{name}."))
        if not any(a is not None and (a.enter or a.slices or a.experts) for a in above):
            yield plain[other]
