"""Every built-in plan: loss, logits and every gradient are those of the unsharded model."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from shardplan import Model, compile_plan
from shardplan.model.reduced.weights import randomise
from tests.proofs import (
    PLANS,
    Case,
    Results,
    assert_equal,
    case,
    compare_results,
    differing,
    on_ranks,
    program_of,
    reduced_model,
)
from tests.simulation import rank_values


@dataclass(frozen=True)
class Corner:
    """One case of the matrix."""

    plan: str
    kind: str
    tp: int
    sp: bool
    tied: bool
    logits: str

    def __str__(self) -> str:
        words = (self.kind, f"tp{self.tp}", "sp" if self.sp else "", "tied" if self.tied else "untied", self.logits)
        return "-".join((self.plan, *filter(None, words)))


def kinds(plan: str) -> tuple[str, ...]:
    return ("text", "image") if plan == "gemma3" else ("text",)


MATRIX = tuple(
    Corner(plan, kind, *values)
    for plan in PLANS
    for kind in kinds(plan)
    for values in product((2, 4), (False, True), (True, False), ("replicated", "sharded"))
)


def fast(corner: Corner) -> bool:
    """A third of the cases, so that for each plan and kind of input every pair of axis values is there."""
    sharded = corner.logits == "sharded"
    if corner.tp == 4:
        return corner.tied == corner.sp != sharded
    return (corner.sp + corner.tied + sharded) % 2 == 1


FAST = tuple(filter(fast, MATRIX))
MORE = tuple(corner for corner in MATRIX if corner not in FAST)
SAMPLE = random.Random(0).sample(MORE, 36)
# On four ranks those of three plans on every change: of heads that all have their own, of a fused projection, of experts.
ON_FOUR = ("gpt2", "llama", "mixtral")
EVERY_CHANGE = [pytest.param(c, marks=() if c.tp == 2 or c.plan in ON_FOUR else pytest.mark.slow) for c in FAST]
SEEN_ALREADY = [plan if plan in ON_FOUR else pytest.param(plan, marks=pytest.mark.slow) for plan in PLANS]


def prove(corner: Corner) -> None:
    rows = case(corner.plan, corner.tp, sp=corner.sp, tied=corner.tied, logits=corner.logits, kind=corner.kind).rows()
    assert_equal(rows)
    assert {"loss", "logits"} <= {row.name for row in rows}
    unproven = {row.name for row in rows if row.verdict == "unproven"}
    # A bias on all keys moves every score of a query alike, and softmax does not see it: this gradient is zero. (Under
    # rotary embeddings it is not.)
    zero = {row.name for row in rows if "vision_tower" in row.name and row.name.endswith("k_proj.bias")}
    assert unproven == zero, "their gradients say nothing"


@pytest.mark.parametrize("corner", EVERY_CHANGE, ids=str)
def test_equal_to_the_unsharded_model(corner):
    prove(corner)


@pytest.mark.slow
@pytest.mark.parametrize("corner", SAMPLE, ids=str)
def test_equal_to_the_unsharded_model_in_a_sample(corner):
    prove(corner)


@pytest.mark.exhaustive
@pytest.mark.parametrize("corner", [c for c in MORE if c not in SAMPLE], ids=str)
def test_equal_to_the_unsharded_model_in_every_case(corner):
    prove(corner)


def test_the_fast_part_has_every_plan_and_every_pair_of_axis_values():
    for plan in PLANS:
        for kind in kinds(plan):
            mine = [c for c in FAST if (c.plan, c.kind) == (plan, kind)]
            for axes in product(("tp", "sp", "tied", "logits"), repeat=2):
                values = {tuple(getattr(c, axis) for axis in axes) for c in mine}
                assert len(values) == (2 if axes[0] == axes[1] else 4), (plan, axes, values)


def test_the_comparison_sees_an_error_of_one_part_in_ten_thousand():
    reference = Results({"loss": torch.tensor(1.0)}, {"w": torch.tensor([1.0, 2.0])})
    result = Results({"loss": [("rank 0", torch.tensor(1.0))]}, {"w": [("rank 1", torch.tensor([1.0, 2.0002]))]})
    ((name, error),) = differing(compare_results(reference, result)).items()
    assert name == "w" and error == pytest.approx(1e-4, rel=1e-2)


@pytest.mark.parametrize("sp", [pytest.param(False, marks=pytest.mark.slow), True], ids=["tp", "sp"])
@pytest.mark.parametrize("experts", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize("plan", ["mixtral", "qwen3_moe"])
def test_experts_that_are_multiplied_together(plan, experts, sp):
    """The matrix runs experts one by one: torch's grouped multiplication takes neither float64 nor shards whose rows
    are not a multiple of 16 bytes, as those of a reduced model are. Here a rank's rows are 16 floats."""
    small = reduced_model(plan, 4)
    config = copy.deepcopy(small.config)
    config.intermediate_size = config.moe_intermediate_size = 64

    def build():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, experts_implementation=experts)
        randomise(model, 0)
        return model.train()

    assert_equal(Case(build, small.inputs(), plan, 4, options={"sequence_parallel": sp}).rows())


@pytest.mark.parametrize("tp", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("plan", PLANS)
def test_parameters_are_really_sharded(plan, tp):
    """Every matrix of the language model is split: a rank holds 1/tp of it. Whole are vectors, a router, learned
    positions, the vision tower and its projector."""
    whole_words = ("norm", "bias", "ln_", "mlp.gate.weight", "wpe", "vision_tower", "multi_modal_projector")
    model = reduced_model(plan, tp).build()
    shapes = {name: p.shape for name, p in model.named_parameters(remove_duplicate=False)}
    with on_ranks(model, plan, tp):
        pass
    for name, parameter in model.named_parameters(remove_duplicate=False):
        assert isinstance(parameter, DTensor), name
        placement, locals_ = parameter.placements[0], rank_values(parameter._local_tensor)
        if parameter.ndim >= 2 and not any(word in name for word in whole_words):
            assert placement.is_shard(), name
        if placement.is_shard():
            assert locals_.keys() == set(range(tp)), name
            whole, dim = shapes[name], placement.dim
            held = [x.shape[dim] for x in locals_.values()]
            assert held[0] == -(-whole[dim] // tp) and sum(held) == whole[dim], name
            assert all(
                (*x.shape[:dim], *x.shape[dim + 1 :]) == (*whole[:dim], *whole[dim + 1 :]) for x in locals_.values()
            )
        else:
            assert all(x.shape == shapes[name] for x in locals_.values()), name
        assert parameter.shape == shapes[name], name


@pytest.mark.parametrize("plan", SEEN_ALREADY)
def test_a_rank_holds_little_more_than_its_share_of_the_real_model(plan):
    """At tp 2 of the model type's default size: half of every matrix, so at most 51 % of the language model."""
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "summary_first_dropout": 0.0}
    program = compile_plan(Model(plan, settings=off if plan == "gpt2" else {}), {"tp": 2}, plan)
    tree = program.resolved.tree
    total = held = 0
    for module in program.modules.values():
        if "vision_tower" in module.name:
            continue
        for parameter in module.parameters:
            size = tree.modules[module.name].parameter(parameter.name).numel
            total += size
            held += size // 2 if parameter.dim is not None else size
    assert held <= 0.51 * total


# With sequence parallelism the program has both variants.
@pytest.mark.parametrize("sp", [pytest.param(False, marks=pytest.mark.slow), True], ids=["tp", "sp"])
@pytest.mark.parametrize("plan", PLANS)
def test_the_whole_compiler_gives_the_program_that_is_proven_here(plan, sp):
    """The layout check refuses no built-in plan, and the optimiser finds nothing to merge in one. Without its run, more
    parameters may be read by modules around their own than are."""
    model = reduced_model(plan, 2).build()
    compiled = compile_plan(model, {"tp": 2}, plan, sequence_parallel=sp)
    proven = program_of(model, plan, 2, sequence_parallel=sp)
    assert compiled.variants.keys() == proven.variants.keys()
    for overlays, one in compiled.variants.items():
        other = proven.variants[overlays]
        assert one.keys() == other.keys()
        for name, module in one.items():
            assert replace(module, also_reads=other[name].also_reads) == other[name]
            assert set(module.also_reads) <= set(other[name].also_reads)
