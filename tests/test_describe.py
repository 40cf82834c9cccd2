"""The text of a program tells programs apart: ranks compare its digest, and a proof is known again by it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace

from shardplan.compiler.lower import Program
from shardplan.core.layout import I, P, R, V
from shardplan.core.mesh import Axis
from shardplan.core.module_program import (
    ArgumentSlice,
    ContextProgram,
    ExpertsProgram,
    FeatureMeans,
    GradientGroup,
    HeadShare,
    InputMove,
    ModuleProgram,
    OutputMove,
    OutsideReads,
    ParameterProgram,
    SharedGroup,
)
from shardplan.core.plan import NO_OVERLAYS, MatrixParts
from tests.proofs import program_of, reduced_model

V_CP, R_CP = replace(V(1), axis=Axis.CP), replace(R, axis=Axis.CP)
WEIGHT = ParameterProgram("weight", V(1), V(1))
BIAS = ParameterProgram("bias", I, I)
ENTER = InputMove(V(-1), I)
LEAVE = OutputMove(P, I)
MODULE = ModuleProgram("m", "rowwise", (WEIGHT, BIAS), (ENTER,), LEAVE)

Part = ModuleProgram | ParameterProgram | InputMove | OutputMove | ContextProgram

# Each says something else in one place.
OTHER_WEIGHTS = (
    replace(WEIGHT, name="table"),
    replace(WEIGHT, stored=V(0), computed=V(0)),
    replace(WEIGHT, computed=I),
    replace(WEIGHT, computed=R),
    replace(WEIGHT, parts=(4, 2)),
    replace(WEIGHT, parts=(4, 2), copies=(1, 2)),
    replace(WEIGHT, computed=replace(V(1), copies=2)),
)
OTHER_BIASES = (replace(BIAS, computed=R), replace(BIAS, computed=P), replace(BIAS, withheld="none"))
OTHER_ENTRANCES = (
    replace(ENTER, src=R),
    replace(ENTER, dst=R),
    replace(ENTER, argument="x"),
    replace(ENTER, regather=True),
    replace(ENTER, shared_with="n"),
)
OTHER_LEAVES = (replace(LEAVE, src=V(1)), replace(LEAVE, dst=R))
HEADS = HeadShare(ParameterProgram("weight", V(0), R), None, 16, 1, 2)
OVER_CP = ContextProgram("replicate_seq", (InputMove(V_CP, R_CP),), OutputMove(R_CP, V_CP))
OTHERS_OVER_CP = (
    replace(OVER_CP, style="split_seq_input"),
    replace(OVER_CP, enter=()),
    replace(OVER_CP, enter=(InputMove(V_CP, R_CP, "x"),)),
    replace(OVER_CP, leave=None),
    replace(OVER_CP, outside=OutsideReads((0,), V_CP)),
    replace(OVER_CP, outside=OutsideReads((0,), V_CP, by_hooks=True)),
    replace(OVER_CP, hollow=""),
    replace(OVER_CP, hollow="x"),
    replace(OVER_CP, takes=True),
    replace(OVER_CP, features=HEADS),
    replace(OVER_CP, slices=(ArgumentSlice("alibi", 0),)),
    replace(OVER_CP, means=FeatureMeans(8, 2)),
    *(
        replace(OVER_CP, shares=(share,))
        for share in (
            HEADS,
            replace(HEADS, over_both=WEIGHT),
            replace(HEADS, size=32),
            replace(HEADS, tp=2),
            replace(HEADS, cp=4),
            replace(HEADS, owner="conv"),
            replace(HEADS, buffer=True),
        )
    ),
)
OTHER_MODULES = (
    replace(MODULE, name="n"),
    replace(MODULE, style="colwise"),
    replace(MODULE, parameters=(WEIGHT,)),
    replace(MODULE, enter=(ENTER, ENTER)),
    replace(MODULE, leave=None),
    replace(MODULE, means=FeatureMeans(8, 2)),
    replace(MODULE, settings=(("groups", 8),)),
    replace(MODULE, slices=(ArgumentSlice("alibi", 0),)),
    replace(MODULE, slices=(ArgumentSlice("alibi", 1),)),
    replace(MODULE, slices=(ArgumentSlice("alibi", 0, 8),)),
    replace(MODULE, buffers=(ParameterProgram("decay", V(0), V(0)),)),
    replace(MODULE, fused=False),
    replace(MODULE, link="source"),
    replace(MODULE, joins="n"),
    replace(MODULE, logits=8),
    replace(MODULE, tail=2),
    replace(MODULE, outside=OutsideReads((1,))),
    replace(MODULE, divide=(("heads", 2),)),
    replace(MODULE, divide=(("heads", 4),)),
    replace(MODULE, shared=(SharedGroup((("", "weight"),), 2, True),)),
    replace(MODULE, draws="own"),
    replace(MODULE, experts=ExpertsProgram(8)),
    replace(MODULE, experts=ExpertsProgram(8, "once")),
    replace(MODULE, experts=ExpertsProgram(8, "once", sliced=True)),
    replace(MODULE, experts=ExpertsProgram(8, "pairs")),
    replace(MODULE, group=GradientGroup((("", "bias"),))),
    *(replace(MODULE, on_cp=moves) for moves in (OVER_CP, *OTHERS_OVER_CP)),
)
# What follows from the model or from another module's fields.
FOLLOWS = {"size", "vocabulary", "joined", "collects", "sum_rule", "reads_in", "layer", "also_reads", "read", "later"}


def modules() -> Iterator[ModuleProgram]:
    yield MODULE
    yield from OTHER_MODULES
    yield from (replace(MODULE, parameters=(weight, BIAS)) for weight in OTHER_WEIGHTS)
    yield from (replace(MODULE, parameters=(WEIGHT, bias)) for bias in OTHER_BIASES)
    yield from (replace(MODULE, enter=(move,)) for move in OTHER_ENTRANCES)
    yield from (replace(MODULE, leave=move) for move in OTHER_LEAVES)


def programs() -> Iterator[Program]:
    compiled = program_of(reduced_model("llama", 2).build(), "llama", 2, sequence_parallel=True)
    overlays = compiled.resolved.overlays
    whole = replace(compiled, variants={overlays: {"m": MODULE}})
    yield from (replace(whole, variants={overlays: {"m": module}}) for module in modules())
    yield replace(whole, variants={**whole.variants, NO_OVERLAYS: {"m": MODULE}})
    plan = whole.resolved
    for other in (
        replace(plan, sizes=replace(plan.sizes, tp=4)),
        replace(plan, sizes=replace(plan.sizes, ep=4)),
        replace(plan, overlays=NO_OVERLAYS),
        replace(plan, dp_units=("m",)),
        replace(plan, dp_parts=("m",)),
        replace(plan, dp_ignored=frozenset({"m.bias"})),
        replace(plan, ac_modules=("m",)),
        replace(plan, compile_modules=("m",)),
        replace(plan, matrices={"m": MatrixParts("parts", 0, (4, 4))}),
        replace(plan, matrices={"m": MatrixParts("parts", 1, (4, 4))}),
        replace(plan, matrices={"m": MatrixParts("parts", 0, (2, 6))}),
    ):
        yield replace(whole, resolved=other)


def test_programs_that_differ_in_one_field_have_different_texts() -> None:
    texts = [program.describe() for program in programs()]
    assert sorted(texts) == sorted(set(texts))


def test_every_field_is_in_the_text_or_follows() -> None:
    pairs: list[tuple[Part, Part]] = [
        *((MODULE, other) for other in OTHER_MODULES),
        *((WEIGHT, other) for other in OTHER_WEIGHTS),
        *((BIAS, other) for other in OTHER_BIASES),
        *((ENTER, other) for other in OTHER_ENTRANCES),
        *((LEAVE, other) for other in OTHER_LEAVES),
        *((OVER_CP, other) for other in OTHERS_OVER_CP),
    ]
    varied = {f.name for one, other in pairs for f in fields(one) if getattr(one, f.name) != getattr(other, f.name)}
    assert {f.name for one, _ in pairs for f in fields(one)} == varied | FOLLOWS
