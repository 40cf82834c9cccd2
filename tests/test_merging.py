"""One reduction for all that read a value, and for all that is added up: right on every batch, not on the recorded one alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import AotEagerAndRecordGraphs
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig

from shardplan import Model, compile_plan
from shardplan.compiler.bind import bind
from shardplan.compiler.check import check
from shardplan.compiler.layout import RecordedModel, check_layout
from shardplan.compiler.layout.names_in_model import Alike, disagreeing, incoming_of, shared_reads_of
from shardplan.compiler.layout.unsummed import acting, dropping
from shardplan.compiler.lower import Program, lower
from shardplan.compiler.lower.expected_collectives import expected_collectives
from shardplan.core.layout import I, R, V
from shardplan.core.mesh import MeshSizes
from shardplan.core.plan import overlays_of
from shardplan.language import from_hf_tp_plan, parse_plan
from shardplan.model import hf_tp_plan, tree_of
from shardplan.proof.steps import cast
from shardplan.runtime.apply.phases import apply_program
from shardplan.runtime.apply.plan_mesh import read_mesh
from shardplan.runtime.parallel.boundaries import Enter
from shardplan.runtime.parallel.waiting_sums import Collects, Waiting
from tests.collective_counter import CollectiveCounter
from tests.merging_models import (
    FLAT,
    JOINT,
    SPLIT,
    SUMMED,
    Flat,
    Joint,
    Separated,
    Stack,
    bound,
    checked,
    document,
    inputs_of,
    made,
)
from tests.model_settings import find
from tests.proofs import Case, assert_equal, collect, compare_results, differing, fake_mesh, ranked, unsharded
from tests.simulation import simulated_mesh
from tests.soundness.judge import _numbers, subject
from tests.zoo.entry import collectives

Build = Callable[..., nn.Module]


def call(model: nn.Module, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    result = model(**inputs)
    return {"loss": result.pow(2).mean(), "result": result}


def rows_in(dtype: torch.dtype, build: Build, plan, mode: str, tp: int, around: Callable[[nn.Module], Any]):
    inputs = inputs_of(build, dtype)
    reference = unsharded(made(build, mode, dtype), copy.deepcopy(inputs), call)
    model = made(build, mode, dtype)
    program = lower(plan)
    with simulated_mesh(tp) as mesh:
        apply_program(model, read_mesh(mesh), program, src_data_rank=0)
        around(model)
        values = call(model, ranked(inputs, tp))
        values["loss"].backward()
    assert all(table.moved is None for table in tables(model))
    return compare_results(reference, collect(model, values))


def rows(build: Build, plan, mode: str = "", *, tp: int = 2, around: Callable[[nn.Module], Any] = lambda model: None):
    """The sharded model in a mode against the unsharded one: in float32, else decided in float64."""
    found = rows_in(torch.float32, build, plan, mode, tp, around)
    return found if not differing(found) else rows_in(torch.float64, build, plan, mode, tp, around)


def tables(model: nn.Module) -> list[Any]:
    """Where the readers of a model share what they moved."""
    hooks = [hook for module in model.modules() for hook in module._forward_pre_hooks.values()]
    return [table for hook in hooks if isinstance(hook, Enter) for table in hook.reads.values() if table is not None]


def counted(build: Build, plan, mode: str = "", tp: int = 2) -> dict[str, dict[str, int]]:
    """The collectives that really run on a rank."""
    model, inputs = made(build, mode), inputs_of(build)
    with fake_mesh(tp) as mesh:
        apply_program(model, read_mesh(mesh), lower(plan), src_data_rank=None)
        with CollectiveCounter() as forward:
            loss = call(model, inputs)["loss"]
        with CollectiveCounter() as backward:
            loss.backward()
    return {"forward": dict(forward.counts), "backward": dict(backward.counts)}


# Reads.


@pytest.mark.parametrize("tp", [2, 4])
def test_two_streams_of_one_module(tp: int) -> None:
    """Joint attention: q, k and v share the one input, the added ones the other. (A pass that keyed them by their module
    lost one stream's reduction.)"""
    plan, report = checked(Joint, JOINT, tp=tp)
    assert report.ok
    assert_equal(rows(Joint, plan, tp=tp))
    found = counted(Joint, plan, tp=tp)
    # Two streams in each of two blocks; nothing in front of the first block's norms lacks a gradient.
    assert found["backward"] == {"all_reduce": 4} and found["forward"] == {"all_reduce": 4}
    assert {when: dict(n) for when, n in expected_collectives(lower(plan).modules).items()} == found


def test_the_proof_of_joint_attention_can_fail() -> None:
    """A stream whose gradient is not reduced is seen."""
    plan, _ = checked(Joint, JOINT)
    wrong = {name: R for name in plan.incoming if "add_" in name}
    assert differing(rows(Joint, replace(plan, incoming={**plan.incoming, **wrong})))


@pytest.mark.parametrize("recorded", ["", "third"])
@pytest.mark.parametrize("mode", ["", "third", "skip first", "skip second"])
def test_a_reader_on_another_branch(recorded: str, mode: str) -> None:
    """Whichever branch the check saw, each is right when it runs."""
    plan, report = checked(Stack, SPLIT, recorded)
    assert report.ok
    assert_equal(rows(Stack, plan, mode))
    assert counted(Stack, plan, mode)["backward"]["all_reduce"] == 2


@pytest.mark.parametrize(
    ("mode", "reductions"),
    [
        ("checkpoint first", 2),
        ("checkpoint second", 2),
        ("checkpoint both", 2 + 2),
        ("checkpoint first reentrant", 6 + 2),
        ("checkpoint second reentrant", 6 + 2),
        ("checkpoint both reentrant", 8 + 4),
    ],
)
def test_readers_inside_and_outside_of_a_checkpoint(mode: str, reductions: int) -> None:
    """The first reader or a later one runs again in backward, where no call of the block runs. Of a re-entrant checkpoint the
    first run records no gradient, so that its readers share nothing with those outside, nor with each other; and its second run reduces
    what the parts make again."""
    plan, _ = checked(Stack, SPLIT)
    assert_equal(rows(Stack, plan, mode))
    assert counted(Stack, plan, mode)["backward"]["all_reduce"] == reductions


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("rules", [SPLIT, SUMMED], ids=["reads", "sums"])
def test_whole_blocks_in_a_checkpoint(rules: Mapping[str, Any], reentrant: bool) -> None:
    """Both runs of a block are calls of it."""

    class Recomputed(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x = self.blocks[0](x)
            return checkpoint(self.blocks[1], x, use_reentrant=reentrant)

    def build(mode: str) -> nn.Module:
        return Recomputed(mode)

    plan, _ = checked(Stack, rules)
    found = rows_in(torch.float32, build, plan, "", 2, lambda model: None)
    assert_equal(found)


def test_a_value_that_is_changed_between_two_readers_is_moved_again() -> None:
    plan, _ = checked(Stack, SPLIT, "in place")
    assert plan.shared_reads.get("blocks.0.second.a") is None
    assert_equal(rows(Stack, plan, "in place"))
    assert counted(Stack, plan, "in place")["backward"]["all_reduce"] == 4


def test_a_reader_without_gradients_leaves_nothing_behind() -> None:
    plan, _ = checked(Stack, SPLIT)
    assert_equal(rows(Stack, plan, "no grad"))
    assert counted(Stack, plan, "no grad")["backward"]["all_reduce"] == 2


def test_readers_outside_of_blocks() -> None:
    plan, report = checked(Flat, FLAT)
    assert report.ok
    assert_equal(rows(Flat, plan))
    model = made(Flat)
    assert {p.reads_in for p in lower(plan).modules.values() if p.reads_in is not None} == {""}
    assert expected_collectives(lower(plan).modules)["backward"]["all_reduce"] == 1
    assert tree_of(model).modules.keys() == plan.tree.modules.keys()


@pytest.mark.parametrize("rules", [SPLIT, SUMMED], ids=["", "summed"])
def test_nothing_is_left_after_an_exception(rules: Mapping[str, Any]) -> None:
    plan, _ = checked(Stack, rules)
    model = made(Stack)
    with fake_mesh(2) as mesh:
        apply_program(model, read_mesh(mesh), lower(plan), src_data_rank=None)
        for mode in ("fail", ""):
            for block in model.blocks:
                block.mode = mode
            if mode:
                with pytest.raises(KeyError, match="in between"):
                    model(**inputs_of(Stack))
            else:
                model(**inputs_of(Stack)).sum().backward()
            found = tables(model)
            assert found and all(table.moved is None for table in found)


def test_nothing_that_was_moved_outlives_the_call_of_its_block() -> None:
    """The table is open while the block runs, and holds what was moved in that call alone."""
    plan, _ = checked(Stack, SPLIT)
    model, seen = made(Stack), []
    with fake_mesh(2) as mesh:
        apply_program(model, read_mesh(mesh), lower(plan), src_data_rank=None)
        for block in model.blocks:
            block.third.register_forward_hook(lambda *_: seen.append([len(t.moved or ()) for t in tables(model)]))
            block.mode = "third"
        model(**inputs_of(Stack))
    assert len(seen) == 2
    first, second = ({i for i, n in enumerate(each) if n} for each in seen)
    assert first and second and not first & second
    assert {n for each in seen for n in each} == {0, 1}


def graphs(model: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[list[int], list[int]]:
    """Each block compiled whole: the reductions in its forward and its backward graph."""
    torch._dynamo.reset()
    recorded = AotEagerAndRecordGraphs()
    for block in model.blocks:
        block.compile(fullgraph=True, backend=recorded)
    call(model, inputs)["loss"].backward()
    torch._dynamo.reset()
    return tuple(
        [sum("all_reduce" in str(node.target) for node in graph.graph.nodes) for graph in found]
        for found in (recorded.fw_graphs, recorded.bw_graphs)
    )


@pytest.mark.parametrize(
    ("rules", "forward"), [pytest.param(SPLIT, 2, marks=pytest.mark.slow), (SUMMED, 1)], ids=["reads", "sums"]
)
def test_blocks_compile_whole_with_one_reduction(rules: Mapping[str, Any], forward: int) -> None:
    plan, _ = checked(Stack, rules)
    model = made(Stack)
    with fake_mesh(2) as mesh:
        apply_program(model, read_mesh(mesh), lower(plan), src_data_rank=None)
        assert graphs(model, inputs_of(Stack)) == ([forward, forward], [1, 1])


def test_a_change_between_two_readers_in_a_graph_is_refused_by_torch() -> None:
    """The version of a tensor is not to be had in a graph; what was moved is then a view of a value that was changed."""
    plan, _ = checked(Stack, SPLIT, "in place")
    model = made(Stack, "in place")
    with fake_mesh(2) as mesh:
        apply_program(model, read_mesh(mesh), lower(plan), src_data_rank=None)
        with pytest.raises(Exception, match="modified inplace|inplace"):
            graphs(model, inputs_of(Stack))
    torch._dynamo.reset()


# Sums.


@pytest.mark.parametrize(
    "mode", ["", "third", "skip first", "checkpoint first", "checkpoint second", "checkpoint both"]
)
def test_what_a_block_adds_up_is_reduced_once(mode: str) -> None:
    """Also where the first part did not run, and where a checkpoint runs a part again."""
    plan, report = checked(Stack, SUMMED)
    assert report.ok, report.diagnostics
    assert_equal(rows(Stack, plan, mode))
    parts = 2 if "third" in mode else 1
    assert counted(Stack, plan, mode)["forward"] == {"all_reduce": 2 * parts}


def test_the_last_part_that_does_not_run() -> None:
    """Its block says so before it returns, and names the line to delete; without the line all is right."""
    plan, _ = checked(Stack, SUMMED)
    with pytest.raises(
        RuntimeError, match=r"second\.o did not run after blocks\.0\.first\.o.*delete `sum_outputs: \[first\.o, "
    ):
        rows(Stack, plan, "skip second")
    assert_equal(rows(Stack, checked(Stack, SPLIT)[0], "skip second"))


def test_parts_in_another_order() -> None:
    plan, _ = checked(Stack, SUMMED)
    with pytest.raises(RuntimeError, match="did not run after"):
        rows(Stack, plan, "swap")


@pytest.mark.parametrize("part", ["first", "second"])
def test_a_part_in_a_reentrant_checkpoint_would_lose_its_gradient(part: str) -> None:
    plan, _ = checked(Stack, SUMMED)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        rows(Stack, plan, f"checkpoint {part} reentrant")


def test_a_checkpoint_that_needs_the_sum_again() -> None:
    plan, _report = checked(Stack, SUMMED)
    with pytest.raises(RuntimeError, match="checkpoint the block"):
        rows(Stack, plan, "checkpoint sum")


@pytest.mark.parametrize("kind", ["checkpoint both reentrant"])
def test_a_block_whose_whole_sum_is_in_a_reentrant_checkpoint(kind: str) -> None:
    plan, _ = checked(Stack, SUMMED)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        rows(Stack, plan, kind)


def test_a_part_that_is_called_alone_is_reduced_by_itself() -> None:
    plan, _ = checked(Stack, SUMMED)

    class Alone(Stack):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.blocks[0].first(x) * self.blocks[1].second(x)

    def build(mode: str) -> nn.Module:
        return Alone(mode)

    found = rows_in(torch.float64, build, plan, "", 2, lambda model: None)
    assert not differing(found)


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("norm of second", "first.o is read by more than"),
        ("skip second", "second.o is listed last, where the sum is reduced, but does not run"),
        ("swap", "second.o is listed last, where the sum is reduced, but runs before others"),
    ],
)
def test_a_sum_that_is_none_is_refused(mode: str, message: str) -> None:
    plan, report = checked(Stack, SUMMED, mode)
    (found,) = report.diagnostics
    assert found.code == "SP412" and message in found.message
    assert found.help == "delete `sum_outputs: [first.o, second.o]`: each output is then reduced by itself"
    optional = {**SUMMED, "blocks.*": {**SUMMED["blocks.*"], "optional": True}}
    plan, report = checked(Stack, optional, mode)
    assert report.ok and plan.sums == ()
    assert_equal(rows(Stack, plan, mode))


def test_an_optional_sum_that_holds_is_done() -> None:
    plan, report = checked(Stack, {**SUMMED, "blocks.*": {**SUMMED["blocks.*"], "optional": True}})
    assert report.ok and len(plan.sums) == 2


def test_a_sum_after_a_dropout() -> None:
    """On the reduced model it drops nothing; in the model itself it is a finding."""
    model, real = made(Stack, "drop"), made(Stack, "drop")
    for block in real.blocks:
        block.drop.p = 0.1
    plan = bound(model, SUMMED)
    report = check_layout(plan, [RecordedModel(model, inputs_of(Stack), plan.tree)])
    assert report.ok and {name for _, name in report.through} == {"blocks.0.drop", "blocks.1.drop"}
    real = tree_of(real)
    assert (
        acting(real, "blocks.0.drop") == ("blocks.0.drop", "blocks.1.drop") and acting(plan.tree, "blocks.0.drop") == ()
    )
    (found,) = dropping(real, report.through)
    assert found.code == "SP412" and "blocks.*.drop drops elements (p=0.1)" in found.message


@pytest.mark.parametrize(
    ("said", "code", "message"),
    [
        (["first.o", "second.out"], "SP208", "`second.out` in `sum_outputs` matches no module of blocks.*"),
        (["first.o"], "SP208", "matches blocks.*.first.o alone"),
        (["first.a", "second.o"], "SP365", "no partial sum is reduced at"),
    ],
)
def test_what_cannot_be_summed(said: list[str], code: str, message: str) -> None:
    model = made(Stack)
    plan = parse_plan(document({**SPLIT, "blocks.*": {"sum_outputs": said}})).plan
    resolved, about = bind(plan, tree_of(model), MeshSizes(tp=2))
    (found,) = [d for d in (*about, *check(resolved, seq_len=None)) if d.is_error]
    assert found.code == code and message in found.message


def test_patterns_name_several() -> None:
    plan, report = checked(Stack, {**SPLIT, "blocks.*": {"sum_outputs": ["{first,second}.o"]}})
    assert report.ok and plan.sums[0].members == ("blocks.0.first.o", "blocks.0.second.o")


def test_a_later_list_replaces_an_earlier_one() -> None:
    """A rule with a style leaves the list as it is; an empty one takes it back."""
    rules = {**SUMMED, "blocks.1": "replicate"}
    parsed = parse_plan({**document(rules), "sequence_parallel": {"blocks.*": {"sum_outputs": []}}})
    tree = tree_of(made(Stack))
    for overlay, count in ((False, 2), (True, 0)):
        resolved, about = bind(parsed.plan, tree, MeshSizes(tp=2), overlays_of(overlay))
        assert not about and len(resolved.sums) == count


def test_a_rule_says_something() -> None:
    for said in ({"optional": True}, {"sum_outputs": ["first.o"], "argument": "x"}):
        (found,) = parse_plan(document({"blocks.*": said})).diagnostics
        assert found.code == "SP105" and found.message == "the rule `blocks.*` has no `style`"


def test_a_sum_is_reduced_in_its_own_forward() -> None:
    waiting, x = Waiting(("a", "b"), "the line"), torch.ones(2, 4)
    around = Collects([waiting])

    def forward(what: str) -> None:
        with simulated_mesh(2) as mesh:
            assert waiting.put(x, V(1), mesh).shape == (2, 2)
            if what == "take":
                assert torch.equal(waiting.take(x), 2 * x)
                assert torch.equal(waiting.put(x, I, mesh), torch.zeros(2, 4))
            if what == "fail":
                raise KeyError("in between")

    for what, error, match in (
        ("fail", KeyError, "in between"),
        ("", RuntimeError, "b did not run after a, .*: delete the line"),
        ("take", RuntimeError, "b did not run after a"),
    ):
        with pytest.raises(error, match=match):
            around(forward, nn.Identity(), (what,), {})
        assert waiting.sums == [] and not waiting.running
    assert waiting.take(x) is x


# Plans of other projects, and ours.


@pytest.mark.parametrize(("name", "before", "after"), [("llama", 11, 5), ("qwen3", 13, 7)])
def test_transformers_own_plans_communicate_at_the_minimum(name: str, before: int, after: int) -> None:
    """Two layers have two boundaries each, and one is at the head: 5; q and k norms add one per layer. Counted as they run."""
    model = subject(name, 2)
    parsed = from_hf_tp_plan(*hf_tp_plan(model.recorded.model))
    plan = bind(parsed.plan, model.tree, MeshSizes(tp=2))[0]
    report = check_layout(plan, [model.recorded])
    assert report.ok
    seen = report.onto(plan)
    expected = expected_collectives(lower(seen).modules)
    assert expected["backward"]["all_reduce"] == after
    assert sum(p.reads_in is not None for p in lower(seen).modules.values()) > 0
    assert expected["backward"]["all_reduce"] + len(seen.shared_reads) == before
    right, _, worst = _numbers(model, seen)
    assert right, worst
    sharded = copy.deepcopy(model.models[torch.float32])
    inputs = cast(model.recorded.inputs, torch.float32)
    with fake_mesh(2) as mesh:
        apply_program(sharded, read_mesh(mesh), lower(seen), src_data_rank=None)
        with CollectiveCounter() as forward:
            loss = sharded(**inputs).loss
        with CollectiveCounter() as backward:
            loss.backward()
    assert backward.counts == expected["backward"] and forward.counts == expected["forward"]


@pytest.mark.parametrize(
    ("name", "sp"),
    [("cpmant", False), ("bitnet", True), ("granitemoehybrid", False), ("granitemoehybrid", True), ("gptj", True)],
)
def test_what_is_stated_is_what_runs(name: str, sp: bool) -> None:
    """The number of collectives is read off the layout check's run; that they are so many is decided when the model runs."""
    model = subject(name, 2)
    plan = bind(parse_plan(name).plan, model.tree, MeshSizes(tp=2), overlays_of(sp))[0]
    seen = check_layout(plan, [model.recorded]).onto(plan)
    sharded = copy.deepcopy(model.models[torch.float32])
    with fake_mesh(2) as mesh:
        apply_program(sharded, read_mesh(mesh), lower(seen), src_data_rank=None)
        with CollectiveCounter() as forward:
            loss = sharded(**cast(model.recorded.inputs, torch.float32)).loss
        with CollectiveCounter() as backward:
            loss.backward()
    assert collectives(seen, model.recorded.reference) == {
        "forward": dict(forward.counts),
        "backward": dict(backward.counts),
    }


@pytest.mark.parametrize("sp", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize("name", ["cohere", "gptj", "phi"])
def test_parallel_residuals_are_reduced_once(name: str, sp: bool) -> None:
    model = subject(name, 2)
    plan = bind(parse_plan(name).plan, model.tree, MeshSizes(tp=2), overlays_of(sp))[0]
    report = check_layout(plan, [model.recorded])
    assert report.ok
    found = expected_collectives(lower(report.onto(plan)).modules)
    operation = "reduce_scatter" if sp else "all_reduce"
    assert found["forward"][operation] == found["backward"][operation] == 3
    right, _, worst = _numbers(model, report.onto(plan))
    assert right, worst


def test_facts_of_the_small_copy_hold_for_all_layers() -> None:
    model = subject("llama", 2)
    parsed = from_hf_tp_plan(*hf_tp_plan(model.recorded.model))
    plan = bind(parsed.plan, model.tree, MeshSizes(tp=2))[0]
    report = check_layout(plan, [model.recorded])
    alike = Alike(find("llama").tree, model.tree)
    reads, incoming = shared_reads_of(alike, report.shared_reads), incoming_of(alike, report.incoming)
    for found, seen in ((reads, report.shared_reads), (incoming, report.incoming)):
        first = {name: one for name, one in seen.items() if ".0." in name}
        assert first and found == found | {name: one for name, one in seen.items() if ".layers." not in name}
        layers = [{n.replace(f".{i}.", ".0."): found[n] for n in found if f".{i}." in n} for i in range(32)]
        assert all(one.keys() == first.keys() for one in layers)


def test_facts_of_one_kind_of_layer_are_not_those_of_another() -> None:
    """Inkling 2's layers of sliding attention hand queries, keys and values on as three tensors, its others as one: only the first kind
    moves each at its own matrix."""
    layers = ["hybrid_sliding", "sliding_attention", *["hybrid_sliding"] * 4]
    config = AutoConfig.for_model("inkling2_text", layer_types=layers, num_hidden_layers=len(layers))
    program = compile_plan(config, {"tp": 2}, "auto")
    moved = {
        index: [bool(program.modules[f"model.layers.{index}.self_attn.{name}_proj"].enter) for name in "qkv"]
        for index in range(len(layers))
    }
    assert moved == {
        index: [False, kind == "sliding_attention", kind == "sliding_attention"] for index, kind in enumerate(layers)
    }


SEPARATED = {
    "version": "1",
    "tensor_parallel": {
        "blocks.*.attn": "input_with_grad_allreduce",
        "blocks.*.attn.{q,k}": "colwise",
        "blocks.*.attn.o": "rowwise",
    },
}


def test_blocks_of_one_class_are_each_moved_as_they_were_proven() -> None:
    """The reduced model of a module of one's own has all of its blocks."""

    def inputs(seed: int) -> dict[str, Tensor]:
        return {"x": torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(seed))}

    def build() -> nn.Module:
        torch.manual_seed(0)
        return Separated(False, True, False)

    def compiled(model: nn.Module, plan: Any, tp: int) -> Program:
        return compile_plan(Model(model, inputs=inputs), {"tp": tp}, plan)

    program = compiled(build(), SEPARATED, 2)
    moved = [[bool(program.modules[f"blocks.{i}.attn.{name}"].enter) for name in "qk"] for i in range(3)]
    assert moved == [[False, False], [False, True], [False, False]]
    assert_equal(Case(build, inputs(1), SEPARATED, 2, call, compiled=compiled).rows())


def test_blocks_of_one_class_that_differ_leave_those_that_are_not_there_undetermined() -> None:
    alike = Alike(tree_of(Separated(False, True, False)), tree_of(Separated(False, True)))
    incoming = {"blocks.0.attn.k": R, "blocks.1.attn.k": I, "blocks.0.attn.q": R, "blocks.1.attn.q": R}
    assert incoming_of(alike, incoming) == {f"blocks.{i}.attn.q": R for i in range(3)}
    assert disagreeing(alike, incoming) == tuple(f"blocks.{i}.attn.k" for i in range(3))
