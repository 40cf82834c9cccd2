"""A program as stable text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from shardplan.core.layout import I, LayoutKind, R
from shardplan.core.mesh import Axis
from shardplan.core.module_program import (
    ArgumentSlice,
    ContextProgram,
    Draws,
    ExpertsProgram,
    InputMove,
    ModuleProgram,
    OutsideReads,
    ParameterProgram,
)
from shardplan.core.nesting import when
from shardplan.core.plan import Overlays, ResolvedPlan
from shardplan.core.tree import starred
from shardplan.styles.boundary import returns_tokens

NUMBERS: dict[Draws, str] = {
    "common": "the same on all tp ranks",
    "own": "each tp rank's own",
    "unseen": "none, or an error",
    "inside": "those of the compiled module around it",
}
# How the gradient of a read value arrives, by its layout.
GRADIENTS: dict[LayoutKind, str] = {"V": "shard", "I": "complete", "R": "partial", "P": "divided"}


def describe(resolved: ResolvedPlan, variants: Mapping[Overlays, Mapping[str, ModuleProgram]]) -> str:
    """One line per fact, in the tree's order; equal programs give equal text.

    Args:
        resolved, variants: the fields of a `Program`.
    """
    lines = [
        f"plan {resolved.plan.name} version {resolved.plan.version}",
        f"tp {resolved.sizes.tp} sequence_parallel {str(resolved.sequence_parallel).lower()}"
        + (f" ep {resolved.sizes.ep}" if resolved.sizes.ep > 1 else "")
        + (f" cp {resolved.sizes.cp}" if resolved.context_parallel else "")
        + (" tokens" if returns_tokens(resolved.on_cp) else ""),
    ]
    for overlays, modules in variants.items():
        lines += ["without sequence parallelism"] if overlays != resolved.overlays else []
        lines += [line for module in modules.values() for line in module_lines(module)]
    if resolved.data_parallel is not None:
        lines += [f"data_parallel {resolved.data_parallel.backend} {name}" for name in resolved.dp_units]
    lines += [f"data_parallel part {name}" for name in resolved.dp_parts]
    lines += [f"data_parallel ignored {name}" for name in sorted(resolved.dp_ignored)]
    lines += [f"activation_checkpointing {name}" for name in resolved.ac_modules]
    lines += [f"compile {name}" for name in resolved.compile_modules]
    lines += [f"matrices {name} dim {one.dim}: {list(one.sizes)}" for name, one in resolved.matrices.items()]
    return "\n".join(lines) + "\n"


def module_lines(module: ModuleProgram) -> Iterator[str]:
    """The facts about one module, its name and style first."""
    yield f"{module.name or '<model>'}: {module.style or '-'}{f' ({module.link})' if module.link else ''}"
    for parameter in module.parameters:
        yield f"  {parameter.name}: {placement(parameter)}, gradient {GRADIENTS[parameter.computed.kind]}"
    for move in module.enter:
        again = ", gathered again in backward" if move.regather else ""
        shared = f", once with {move.shared_with}" if move.shared_with is not None else ""
        yield f"  in {_argument(move)}: {move.src} -> {move.dst}{again}{shared}"
    for buffer in module.buffers:
        yield f"  buffer {buffer.name}: {share(buffer)}"
    for part in module.slices:
        yield f"  in {part.argument}: {slicing(part)}"
    if module.leave is not None:
        yield f"  out: {leaving(module)}"
    if module.logits is not None:
        yield f"  out: {'made by the loss' if module.later else 'DTensor Shard(-1)'} of {module.logits}"
    if module.means is not None:
        yield f"  means over all {module.means.features} features: P -> R"
    if module.tail:
        yield f"  out, last {module.tail}: I -> R"
    if module.outside is not None:
        yield from (f"  out[{position}]: {reading(module.outside)}" for position in module.outside.positions)
    if module.experts is not None:
        yield f"  {experts(module.experts)}"
    if module.on_cp is not None:
        yield from context_lines(module.on_cp)
    for attribute, by in module.divide:
        yield f"  {attribute} divided by {by}"
    for attribute, number in module.settings:
        yield f"  {attribute} set to {number}"
    if not module.fused:
        yield "  no kernel for it and the modules below together"
    if module.draws is not None:
        yield f"  random numbers: {NUMBERS[module.draws]}"
    for one in module.shared:
        yield f"  one gather from {one.copies} ranks: " + ", ".join(_member(*names) for names in one.parameters)
    if module.group is not None:
        yield "  one gradient all-reduce: " + ", ".join(_member(*names) for names in module.group.parameters)


def context_lines(moves: ContextProgram) -> Iterator[str]:
    """The facts about one module on the axis cp."""
    yield f"  cp: {moves.style}" + (", reads the tokens of a hollow argument" if moves.takes else "")
    if moves.hollow is not None:
        yield f"  cp, in {moves.hollow or '(first)'}: hollow"
    for part in moves.slices:
        yield f"  cp, in {part.argument}: its share of dim {part.dim}" + (f", {part.heads} heads" if part.heads else "")
    for share in (*moves.shares, *((moves.features,) if moves.features is not None else ())):
        what = "features of" if share is moves.features else "share of buffer" if share.buffer else "share of"
        name = ".".join(filter(None, (share.owner, share.over_both.name)))
        parts = f", parts {share.over_both.parts}, copies {share.over_both.copies}" if share.over_both.parts else ""
        yield f"  cp, {what} {name}: {share.over_both.stored} read as {share.over_both.computed}, of tp {share.tp} x cp {share.cp}, {share.size} in all{parts}"
    if moves.means is not None:
        yield f"  cp, means of {moves.means.features} features over {moves.means.ranks} ranks"
    for move in moves.enter:
        again = ", gathered again in backward" if move.regather else ""
        yield f"  cp, in {_argument(move)}: {move.src} -> {move.dst}{again}, {when(move.src, move.dst)} tp"
    if moves.outside is not None:
        yield from (
            f"  cp, out[{at}]: {moves.outside.source} -> R, {_hooks(moves.outside)}after tp"
            for at in moves.outside.positions
        )
    if moves.leave is not None:
        yield f"  cp, out: {moves.leave.src} -> {moves.leave.dst}, {when(moves.leave.src, moves.leave.dst)} tp"


def reading(outside: OutsideReads) -> str:
    """How a result gets to its readers outside of the block, in words."""
    if outside.source == I:
        return "I"
    return f"{outside.source} -> I" + (", where a hook reads it" if outside.source != R and outside.by_hooks else "")


def _hooks(outside: OutsideReads) -> str:
    return "where a hook reads it, " if outside.by_hooks else ""


def experts(program: ExpertsProgram) -> str:
    """How whole experts run, in words."""
    if program.exchange is None:
        return f"its own of {program.count} experts, on all tokens"
    sent = {"once": "once to each rank with some of its experts", "pairs": "once for each of its experts"}[
        program.exchange
    ]
    of = "this rank's slice of the tokens" if program.sliced else "this rank's tokens"
    return f"{program.count} experts over ep: {of}, each sent {sent}"


def _member(module: str, parameter: str) -> str:
    return f"{module}.{parameter}" if module else parameter


def _argument(move: InputMove) -> str:
    return {None: "first argument", "*": "every floating-point argument"}.get(move.argument, str(move.argument))


def slicing(part: ArgumentSlice) -> str:
    """A rank's share of an argument, in words."""
    return f"R -> V({part.dim})" + (f" of each {part.heads}" if part.heads is not None else "")


def share(buffer: ParameterProgram) -> str:
    """A rank's share of a buffer, in words."""
    parts = f" of parts {'+'.join(map(str, buffer.parts))}" if buffer.parts else ""
    return f"whole, read as {buffer.computed}{parts}"


def leaving(module: ModuleProgram) -> str:
    """What a module's output goes through, in words."""
    assert module.leave is not None
    if module.joins is not None:
        return f"{module.leave.src}, reduced at {starred(module.joins)}"  # so that equal layers are told in one line
    if module.link == "source":
        return f"{module.leave.src}, joins the partial sum" if module.leave.src == I else "P until the block input"
    return f"{module.leave.src} -> {module.leave.dst}"


def placement(parameter: ParameterProgram) -> str:
    """A parameter's placement on its axis in words: `Shard(0)`, `Shard(0) of parts 64+32+32`, `Shard(0), gathered`,
    `Replicate`."""
    if parameter.dim is None:
        return "Replicate" + (", added after the reduction" if parameter.withheld else "")
    return (
        f"Shard({parameter.dim})"
        + (f" over {parameter.stored.axis}" if parameter.stored.axis is not Axis.TP else "")
        + (f" of parts {'+'.join(map(str, parameter.parts))}" if parameter.parts else "")
        + _gathered(parameter)
    )


def _gathered(parameter: ParameterProgram) -> str:
    if parameter.gathered:
        return ", gathered"
    copies = parameter.copies or (parameter.computed.copies,)
    return f", gathered from {'+'.join(map(str, copies))} neighbouring ranks" if max(copies) > 1 else ""
