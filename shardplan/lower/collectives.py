"""The collectives of one training step on the tp axis, read off a program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from shardplan.core.layout import Layout, P, R
from shardplan.core.moves import move_ops
from shardplan.core.program import ModuleProgram

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")


def expected_collectives(modules: Mapping[str, ModuleProgram]) -> dict[str, Counter[str]]:
    """How many collectives a step runs, forward and backward, if every module runs once.

    A partial embedding's reduction is counted where it happens: at the door. Activation checkpointing runs a block's
    forward collectives again; FSDP's are on another axis.
    """
    counts: dict[str, Counter[str]] = {"forward": Counter(), "backward": Counter()}
    for program in modules.values():
        for forward, backward in _operations(program):
            counts["forward"][forward] += forward in COLLECTIVES
            counts["backward"][backward] += backward in COLLECTIVES
        counts["backward"]["all_reduce"] += bool(program.group)
    return {when: Counter({op: n for op, n in counter.items() if n}) for when, counter in counts.items()}


def _operations(program: ModuleProgram) -> Iterator[tuple[str, str]]:
    for boundary in program.enter:
        if boundary.shared_with is None:
            yield _of_move(boundary.src, boundary.dst)
        if boundary.regather:
            yield "identity", "all_gather"
    if program.leave is not None and program.link != "source" and program.joins is None:
        yield _of_move(program.leave.src, program.leave.dst)
    if program.features is not None:
        yield _of_move(P, R)
    if program.tail:
        yield "identity", "all_reduce"


def _of_move(src: Layout, dst: Layout) -> tuple[str, str]:
    ops = move_ops(src, dst)
    assert ops is not None, (src, dst)  # the layout check lets no other move through
    return ops.forward, ops.backward
