"""The collectives of one training step on an axis, read off a program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from shardplan.core.layout import Layout, P, R
from shardplan.core.mesh import Axis
from shardplan.core.module_program import ModuleProgram
from shardplan.core.moves import move_ops

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")


def expected_collectives(modules: Mapping[str, ModuleProgram], axis: Axis = Axis.TP) -> dict[str, Counter[str]]:
    """The number of collectives that a step runs on an axis, forward and backward, if every module runs once.

    A partial embedding's reduction is counted where it happens: at the block input. Activation checkpointing runs a
    block's forward collectives again; FSDP's are on another axis.
    """
    counts: dict[str, Counter[str]] = {"forward": Counter(), "backward": Counter()}
    for program in modules.values():
        for one, forward, backward in _operations(program):
            counts["forward"][forward] += one is axis and forward in COLLECTIVES
            counts["backward"][backward] += one is axis and backward in COLLECTIVES
    return {when: Counter({op: n for op, n in counter.items() if n}) for when, counter in counts.items()}


def _operations(program: ModuleProgram) -> Iterator[tuple[Axis, str, str]]:
    for parameter in program.parameters:
        if parameter.gathered and not parameter.shared:
            yield _of_move(parameter.stored, parameter.computed)
    for one in program.shared:
        yield one.axis, "all_gather", "all_gather"  # gathered values are not kept for backward
        if one.trained:
            yield one.axis, "identity", "reduce_scatter"
    if program.group is not None:
        yield program.group.axis, "identity", "all_reduce"
    for boundary in program.enter:
        if boundary.shared_with is None:
            yield _of_move(boundary.src, boundary.dst)
        if boundary.regather:
            yield boundary.src.axis, "identity", "all_gather"
    if program.leave is not None and program.link != "source" and program.joins is None:
        yield _of_move(program.leave.src, program.leave.dst)
    if (on_cp := program.on_cp) is not None:
        yield from (_of_move(move.src, move.dst) for move in (*on_cp.enter, on_cp.leave) if move is not None)
        yield from ((Axis.CP, "identity", "all_gather") for move in on_cp.enter if move.regather)
        if (outside := on_cp.outside) is not None and not outside.by_hooks:
            yield from (_of_move(outside.source, R.on(Axis.CP)) for _ in outside.positions)
    if program.means is not None:
        yield _of_move(P, R)
    if program.experts is not None and program.experts.sliced:
        yield Axis.TP, "all_gather", "all_gather"  # for the results, and for the tokens' gradient
        yield Axis.TP, "identity", "all_gather"  # for the gradient of the weights
        if program.also_reads:
            yield Axis.TP, "identity", "all_reduce"  # for those of the parameters that all experts share
    if program.outside is not None and program.outside.source.kind == "V" and not program.outside.by_hooks:
        yield from ((Axis.TP, "all_gather", "identity") for _ in program.outside.positions)
    if program.tail:
        yield Axis.TP, "identity", "all_reduce"


def _of_move(src: Layout, dst: Layout) -> tuple[Axis, str, str]:
    ops = move_ops(src, dst)
    assert ops is not None, (src, dst)  # the layout check lets no other move through
    return src.axis, ops.forward, ops.backward
