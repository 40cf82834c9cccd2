"""The text of a program tells programs apart: ranks compare its digest, and a proof is known again by it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace

from shardplan.core.layout import I, P, R, V
from shardplan.core.program import InputMove, ModuleProgram, OutputMove, ParameterProgram
from shardplan.lower import Program
from tests.proofs import program_of, twin

WEIGHT = ParameterProgram("weight", 1, "shard")
BIAS = ParameterProgram("bias", None, "complete")
ENTER = InputMove(V(-1), I)
LEAVE = OutputMove(P, I)
MODULE = ModuleProgram("m", "rowwise", (WEIGHT, BIAS), (ENTER,), LEAVE)

# Another value for each field.
OTHER_WEIGHT = {"name": "table", "dim": 0, "gradient": "divided", "parts": (4, 2)}
OTHER_BIAS = {"withheld": "none"}
OTHER_ENTER = {"src": R, "dst": R, "argument": "x", "regather": True, "shared_with": "n"}
OTHER_LEAVE = {"src": V(1), "dst": R}
OTHER_MODULE = {
    "name": "n",
    "style": "colwise",
    "parameters": (WEIGHT,),
    "enter": (ENTER, ENTER),
    "leave": None,
    "features": 8,
    "link": "source",
    "joins": "n",
    "logits": 8,
    "tail": 2,
    "outside": (1,),
    "divide": ("heads",),
    "group": (("", "bias"),),
}
# What follows from the model or from another module's fields.
FOLLOWS = {"size", "vocabulary", "joined", "collects", "sum_rule", "reads_in", "layer", "also_reads"}
OTHER_RESOLVED = {
    "dp_units": ("m",),
    "dp_parts": ("m",),
    "dp_ignored": frozenset({"m.bias"}),
    "ac_modules": ("m",),
    "compile_modules": ("m",),
    "sequence_parallel": False,
}


def modules() -> Iterator[ModuleProgram]:
    """One that differs in each field."""
    yield MODULE
    yield from (replace(MODULE, **{name: value}) for name, value in OTHER_MODULE.items())
    yield from (replace(MODULE, parameters=(replace(WEIGHT, **{n: v}), BIAS)) for n, v in OTHER_WEIGHT.items())
    yield from (replace(MODULE, parameters=(WEIGHT, replace(BIAS, **{n: v}))) for n, v in OTHER_BIAS.items())
    yield from (replace(MODULE, enter=(replace(ENTER, **{n: v}),)) for n, v in OTHER_ENTER.items())
    yield from (replace(MODULE, leave=replace(LEAVE, **{n: v})) for n, v in OTHER_LEAVE.items())


def programs() -> Iterator[Program]:
    compiled = program_of(twin("llama", 2).build(), "llama", 2, sequence_parallel=True)
    base = replace(compiled, tensor_parallel_modules=None)
    for module in modules():
        yield replace(base, modules={"m": module})
    base = replace(base, modules={"m": MODULE})
    yield replace(base, tensor_parallel_modules={"m": MODULE})
    yield replace(base, resolved=replace(base.resolved, sizes=replace(base.resolved.sizes, tp=4)))
    for name, value in OTHER_RESOLVED.items():
        yield replace(base, resolved=replace(base.resolved, **{name: value}))


def test_programs_that_differ_in_one_field_have_different_texts() -> None:
    texts = [program.describe() for program in programs()]
    assert sorted(texts) == sorted(set(texts))


def test_every_field_is_in_the_text_or_follows() -> None:
    tried = {**OTHER_MODULE, **OTHER_WEIGHT, **OTHER_BIAS, **OTHER_ENTER, **OTHER_LEAVE}.keys()
    kinds = (ModuleProgram, ParameterProgram, InputMove, OutputMove)
    assert {field.name for kind in kinds for field in fields(kind)} == tried | FOLLOWS
