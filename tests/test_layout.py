"""The layout check: every right plan passes, every kind of mistake is found where it is."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

from shardplan.compiler.bind import bind
from shardplan.compiler.layout import LayoutReport, RecordedModel, check_layout
from shardplan.compiler.layout.spread import Spread, indices_of, spread_of
from shardplan.compiler.layout.spreads import Spreads
from shardplan.compiler.lower import lower
from shardplan.core.layout import SEQ, I, P, R, V
from shardplan.core.mesh import MeshSizes
from shardplan.core.plan import overlays_of
from shardplan.core.search_bounds import BOUNDS
from shardplan.language import parse_plan
from shardplan.model import find_model
from shardplan.model.build_tree import tree_of
from shardplan.model.reduced.reduced_model import make_reduced_model
from shardplan.model.reduced.trace import Event, Trace
from shardplan.styles import STYLES
from shardplan.styles.sound import missing
from shardplan.styles.style_record import Lookup, ParameterStyle, Style
from tests.proofs import PLANS


@cache
def recorded_of(name: str, tp: int = 2) -> RecordedModel:
    reduced_model = make_reduced_model(find_model(name), tp=tp, experts_implementation="eager")
    model, inputs = reduced_model.build(), reduced_model.inputs()
    if "output_router_logits" in vars(model.config):
        inputs["output_router_logits"] = True
    return RecordedModel(model, inputs, tree_of(model))


def checked(
    recorded: RecordedModel, plan: dict | str, *, tp: int = 2, sequence_parallel: bool = False, help: bool = False
) -> LayoutReport:
    parsed = parse_plan(plan)
    assert not [d for d in parsed.diagnostics if d.is_error], parsed.diagnostics
    resolved, about = bind(parsed.plan, recorded.tree, MeshSizes(tp=tp), overlays_of(sequence_parallel))
    assert not [d for d in about if d.is_error], about
    return check_layout(resolved, [recorded], help=help)


def test_ids_that_a_rule_would_gather_are_found() -> None:
    """They are reshaped before they are looked up: what reads them is not differentiable itself."""
    plan = extended("gpt2", sequence_parallel={"transformer": "gather_seq_input"})
    codes = [d.code for d in checked(recorded_of("gpt2"), plan, sequence_parallel=True).diagnostics]
    assert codes == ["SP402"]


def extended(parent: str, **sections: dict) -> dict:
    return {"version": "1", "name": "mine", "extends": parent, **sections}


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("tp", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", PLANS)
def test_builtin_plans_are_proven(name: str, tp: int, sequence_parallel: bool) -> None:
    report = checked(recorded_of(parse_plan(name).plan.models[0], tp), name, tp=tp, sequence_parallel=sequence_parallel)
    assert report.diagnostics == () and report.secondary == ()


def test_what_arrives_is_reported_for_the_lowering() -> None:
    plain = checked(recorded_of("llama"), "llama")
    assert plain.incoming["lm_head"] == I
    assert plain.incoming["model.layers.0.self_attn.q_proj"] == R
    overlaid = checked(recorded_of("llama"), "llama", sequence_parallel=True)
    assert overlaid.incoming["lm_head"] == R
    assert overlaid.incoming["model.norm"] == R  # what it hands on


MISTAKES = {
    # a name: (architecture, parent, sections, sequence parallel, code, what it is about, a word of the help)
    "q norm without its reduction": (
        "qwen3",
        "qwen3",
        {"tensor_parallel": {"model.layers.*.self_attn.q_norm": "none"}},
        False,
        "SP401",
        "model.layers.0.self_attn.q_norm.weight",
        "replicated_with_grad_allreduce",
    ),
    "a whole q next to split k and v": (
        "llama",
        "llama",
        {"tensor_parallel": {"model.layers.*.self_attn.q_proj": "none"}},
        False,
        "SP401",
        "model.layers.0.self_attn.q_proj.weight",
        "colwise",
    ),
    "column-wise after column-wise": (
        "llama",
        "llama",
        {"tensor_parallel": {"model.layers.*.mlp.down_proj": {"style": "colwise", "override": True}}},
        False,
        "SP402",
        "model.layers.0.mlp.down_proj",
        "rowwise",
    ),
    "a block norm on the whole sequence": (
        "llama",
        "llama",
        {"sequence_parallel": {"model.layers.*.input_layernorm": "none"}},
        True,
        "SP401",
        "model.layers.0.input_layernorm.weight",
        "sequence_parallel",
    ),
    "no block input into the sequence-parallel region": (
        "llama",
        "llama",
        {"sequence_parallel": {"model.layers.0": "none"}},
        True,
        "SP402",
        "model.layers.0.input_layernorm",
        "split_seq_input",
    ),
    "logits that stay split without a word": (
        "llama",
        "llama",
        {"tensor_parallel": {"lm_head": {"style": "colwise", "override": True}}},
        False,
        "SP405",
        "logits",
        "colwise_gather_output",
    ),
    "a complete gradient summed": (
        "llama",
        "llama",
        {"tensor_parallel": {"model.norm": "replicated_with_grad_allreduce"}},
        False,
        "SP406",
        "model.norm.weight",
        "remove",
    ),
    "router logits read by the auxiliary loss": (
        "mixtral",
        "mixtral",
        {"tensor_parallel": {"model.layers.*.mlp.gate": {"style": "replicated_with_grad_allreduce", "override": True}}},
        False,
        "SP409",
        "",
        "read_outside",
    ),
    "packed matrices split as one": (
        "phi3",
        "phi3",
        {"tensor_parallel": {"model.layers.*.mlp.gate_up_proj": {"style": "colwise", "override": True}}},
        False,
        "SP404",
        "model.layers.0.mlp",
        "packed_colwise",
    ),
    "heads that are not divided": (
        "phi3",
        "phi3",
        {"tensor_parallel": {"model.layers.*.self_attn": {"style": "input_with_grad_allreduce", "override": True}}},
        False,
        "SP404",
        "model.layers.0.self_attn",
        None,
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name: str) -> None:
    architecture, parent, sections, sequence_parallel, code, about, help = MISTAKES[name]
    report = checked(
        recorded_of(architecture),
        extended(parent, **sections),
        sequence_parallel=sequence_parallel,
        help=help is not None,
    )
    first = report.diagnostics[0]
    assert (first.code, first.modules[0] if first.modules else "") == (code, about), report.diagnostics
    if help is not None:
        assert len(report.diagnostics) == 1, [d.message for d in report.diagnostics]
        assert help in (first.help or "")


def test_several_mistakes_are_several_findings() -> None:
    sections = {
        "tensor_parallel": {"model.layers.*.self_attn.q_norm": "none", "model.norm": "replicated_with_grad_allreduce"}
    }
    report = checked(recorded_of("qwen3"), extended("qwen3", **sections), help=True)
    assert [d.code for d in report.diagnostics] == ["SP401", "SP406"]


def test_a_mistake_after_a_crash_is_found() -> None:
    sections = {
        "tensor_parallel": {"model.layers.*.mlp.down_proj": "none", "model.norm": "replicated_with_grad_allreduce"}
    }
    report = checked(recorded_of("llama"), extended("llama", **sections), help=True)
    assert [d.code for d in report.diagnostics] == ["SP408", "SP406"], [d.message for d in report.diagnostics]


class Block(nn.Module):
    """A block of an own model, whose forward can be made to do unusual things."""

    def __init__(self, inner):
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        self.gain = nn.Parameter(torch.randn(8))
        self.inner = inner

    def forward(self, x):
        return x + self.down(self.inner(self, self.up(x)))


class Own(nn.Module):
    def __init__(self, inner=lambda block, h: torch.relu(h)):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(32, 8)
        self.blocks = nn.ModuleList([Block(inner)])
        self.head = nn.Linear(8, 32)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return {"logits": self.head(x)}


SPLIT = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


def own(inner, rules=SPLIT, **given) -> LayoutReport:
    model = Own(inner)
    recorded = RecordedModel(model, {"ids": torch.arange(16).view(2, 8)}, tree_of(model))
    return checked(recorded, {"version": "1", "name": "own", "tensor_parallel": rules}, **given)


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * ctx.saved_tensors[0] * gradient


def _in_place(block, h):
    h = h.clone()
    h[..., ::2].mul_(2.0)
    return h


def _copied(block, h):
    buffer = torch.empty_like(h)
    buffer[:, :4].copy_(h[:, :4])
    buffer[:, 4:] = h[:, 4:]
    return buffer


def _empty_leaf(block, h):
    return h + torch.empty((0,), requires_grad=True).sum()  # torch 2.11 makes one in each checkpoint


def _no_grad(block, h):
    with torch.no_grad():
        mask = h > 0
    return h.masked_fill(mask, 0.0)


@pytest.mark.parametrize(
    "inner",
    [
        lambda block, h: Squared.apply(h),
        _in_place,
        _copied,
        _empty_leaf,
        _no_grad,
        lambda block, h: h.view(2, 8, -1, 2).transpose(1, 2).transpose(1, 2).flatten(2),
        lambda block, h: h - h.detach() * 0.5,
        lambda block, h: torch.einsum("bsf,bsf->bsf", h, h.sigmoid()),
    ],
    ids=[
        "autograd.Function",
        "in place through a view",
        "copy_ and setitem",
        "empty leaf",
        "no_grad mask",
        "views",
        "detach",
        "einsum",
    ],
)
def test_right_plans_of_own_modules_pass(inner) -> None:
    report = own(inner)
    assert report.ok, report.diagnostics


@pytest.mark.parametrize(
    ("inner", "code"),
    [
        (lambda block, h: h.softmax(-1), "SP404"),
        (lambda block, h: h - h.mean(-1, keepdim=True), "SP404"),
        (lambda block, h: h.flip(-1), "SP402"),
        (lambda block, h: h * block.gain[0], "SP401"),
        (lambda block, h: h / h.norm(dim=-1, keepdim=True), "SP404"),
        (lambda block, h: Squared.apply(h.cumsum(-1)), "SP404"),
    ],
    ids=["softmax", "mean", "flip", "whole parameter", "norm", "cumsum"],
)
def test_wrong_plans_of_own_modules_are_found(inner, code: str) -> None:
    report = own(inner)
    assert [d.code for d in report.diagnostics][:1] == [code], report.diagnostics


def test_equal_slices_are_told_apart_by_their_number() -> None:
    """Heads that are repeated: each rank has every second of [a, b, a, b]."""
    a, b = torch.arange(3.0), torch.arange(3.0, 6.0)
    whole = torch.stack((a, b, a, b))
    found = spread_of([torch.stack((a, a)), torch.stack((b, b))], whole)
    assert found == Spread("split", 0, ((0, 2), (1, 3)))
    assert spread_of([torch.stack((a, a)), torch.stack((b, a))], whole) is None


@pytest.mark.parametrize("turned", [False, True])
def test_complex_numbers_are_spread_as_real_ones_are(turned: bool) -> None:
    """Partial sums, noise, shards in and out of order; an imaginary part that is wrong is seen."""
    whole = torch.randn(4, 6, dtype=torch.complex64)
    part = torch.randn(4, 6, dtype=torch.complex64)
    if turned:
        whole, part = whole.conj(), part.conj()
    assert spread_of([part, whole - part], whole) == Spread("sum")
    assert spread_of([whole, whole * (1 + 1e-7j)], whole) == Spread("whole")
    assert spread_of([whole[:, :3], whole[:, 3:]], whole) == Spread("split", 1)
    assert spread_of([whole[:, ::2], whole[:, 1::2]], whole) == Spread("split", 1, ((0, 2, 4), (1, 3, 5)))
    assert spread_of([part, whole - part + 0.1j], whole) is None
    assert spread_of([whole[:, :3], whole[:, 3:].conj()], whole) is None
    assert spread_of([whole.real, whole.real], whole) is None


def test_an_order_that_another_value_has_is_taken_where_it_holds() -> None:
    whole = torch.randn(4, 3)
    locals_, order = [whole[[0, 2]], whole[[1, 3]]], ((0, 2), (1, 3))
    other, uneven = ((0, 3), (1, 2)), ((0,), (1, 2, 3))
    for known in ([], [order], [other, uneven], [other, order]):
        assert spread_of(locals_, whole, orders=known) == Spread("split", 0, order)
    assert spread_of([whole[[0, 2]], whole[[1, 1]]], whole, orders=[order]) is None


def test_an_order_in_which_ranks_share_slices_is_not_taken_for_another_value() -> None:
    """Four ranks, two of them with each half of four rows; the same rows are not all of eight."""
    rows = torch.randn(8, 3)
    events = [Event("op", "mul", ("", 0, i), (), (i,)) for i in range(2)]
    at = {event.place: event for event in events}
    halves = [rows[:2], rows[:2], rows[2:4], rows[2:4]]
    reference, *runs = (
        Trace(events, values, [True] * 2, [0.0] * 2, at=at) for values in ([rows[:4], rows], *([x, x] for x in halves))
    )
    spreads = Spreads({}, reference, runs)
    assert spreads.of(events[0], 0) == Spread("split", 0, ((0, 1), (0, 1), (2, 3), (2, 3)))
    assert spreads.of(events[1], 0) is None


def test_a_sum_over_the_split_dim_is_a_partial_sum() -> None:
    report = own(lambda block, h: h + h.sum(-1, keepdim=True))
    assert [d.code for d in report.diagnostics][:1] == ["SP403"], report.diagnostics


def test_frozen_parameters_need_no_reduction() -> None:
    model = Own(lambda block, h: h * block.gain[0])
    model.blocks[0].gain.requires_grad_(False)
    recorded = RecordedModel(model, {"ids": torch.arange(16).view(2, 8)}, tree_of(model))
    assert checked(recorded, {"version": "1", "name": "own", "tensor_parallel": SPLIT}).ok


def test_another_way_on_a_slice_cannot_be_told() -> None:
    def inner(block, h):
        return torch.relu(h) if h.shape[-1] == 16 else 2 * torch.relu(h).clone()

    assert [d.code for d in own(inner).diagnostics] == ["SP407"]


def test_another_way_with_the_same_result_is_compared_at_the_next_boundary() -> None:
    def inner(block, h):
        return torch.relu(h) if h.shape[-1] == 16 else h.clamp(min=0).clone()

    report = own(inner)
    assert report.ok, report.diagnostics


def test_a_choice_that_roundoff_decides_is_the_unsharded_runs() -> None:
    """Among equal values; a rank that sums up in another order may find another one the largest."""
    runs = iter(range(8))

    def inner(block, h):
        scores = torch.ones(8)
        scores[next(runs)] += 1e-6
        return torch.relu(h) * (1 + scores.argmax())

    report = own(inner)
    assert report.ok, report.diagnostics


def test_a_value_that_is_added_to_itself_many_times_is_traced_back_once() -> None:
    """As many ways lead back as there are paths: 2 ** 60."""

    def inner(block, h):
        gain = block.gain[0]
        for _ in range(60):
            gain = gain / 2 + gain / 2
        return h * gain

    report = own(inner)
    assert [d.code for d in report.diagnostics][:1] == ["SP401"], report.diagnostics


def test_a_parameter_read_by_another_module() -> None:
    """Its rows are split like the features, and it is a local tensor in the block's code too."""
    report = own(lambda block, h: h * block.up.weight[:, 0])
    assert report.ok, report.diagnostics
    assert {module for module, names in report.cross_module_reads.items() if names} == {"blocks.0"}
    assert report.cross_module_reads["blocks.0"] == ("blocks.0.up.weight",)


def test_a_module_that_does_not_run_may_read_what_is_below_it() -> None:
    """Nothing was seen of it, so that all below it are local tensors in its code."""
    model = Own()
    model.idle = nn.MultiheadAttention(8, 2)  # reads the weight of its out_proj
    recorded = RecordedModel(model, {"ids": torch.arange(16).view(2, 8)}, tree_of(model))
    plan = parse_plan({"version": "1", "name": "own", "tensor_parallel": SPLIT}).plan
    resolved, _ = bind(plan, recorded.tree, MeshSizes(tp=2))
    report = check_layout(resolved, [recorded])
    assert "idle" not in report.cross_module_reads
    program = lower(replace(resolved, cross_module_reads=report.cross_module_reads))
    assert {name for name, _ in program.modules["idle"].also_reads} == {"out_proj"}


def test_a_mean_over_a_split_parameter_read_by_another_module() -> None:
    report = own(lambda block, h: h * block.up.weight.mean())
    assert [d.code for d in report.diagnostics][:1] == ["SP404"], report.diagnostics


UNFILLED: list[torch.Tensor] = []  # a function that captured it would have a copy in each run


def test_memory_that_is_filled_later() -> None:
    """What was in it before is not compared: it may differ, or be equal, by chance. The keys of latent attention are made
    so, and their slices are written one by one."""

    def halves(block: nn.Module, h: torch.Tensor) -> torch.Tensor:
        garbage = [torch.full_like(h, float(n)) for n in range(8)]  # for the allocator to hand out again
        del garbage
        result = h.new_empty(h.shape)
        UNFILLED.append(result.clone())
        result[..., ::2] = h[..., ::2]
        result[..., 1::2] = 2 * h[..., 1::2]
        return result

    report = own(halves)
    assert report.ok, report.diagnostics
    assert UNFILLED and not any(value.any() for value in UNFILLED)


def test_uneven_vocabulary() -> None:
    class Uneven(Own):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(33, 8), nn.Linear(8, 33)

    model = Uneven()
    recorded = RecordedModel(model, {"ids": torch.arange(32).view(2, 16)}, tree_of(model))
    rules = {"embed": "embedding_rowwise", "head": "colwise_gather_output", **SPLIT}
    assert checked(recorded, {"version": "1", "name": "own", "tensor_parallel": rules}).ok


def test_the_model_is_not_changed() -> None:
    recorded = recorded_of("gpt2")
    before = {name: value.clone() for name, value in recorded.model.state_dict().items()}
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in recorded.model.modules()]
    checked(recorded, "gpt2", sequence_parallel=True)
    assert all(torch.equal(value, before[name]) for name, value in recorded.model.state_dict().items())
    assert hooks == [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in recorded.model.modules()]


def test_a_tp_size_is_needed() -> None:
    recorded = recorded_of("llama")
    resolved, _ = bind(parse_plan("llama").plan, recorded.tree, MeshSizes())
    with pytest.raises(ValueError, match="tp size"):
        check_layout(resolved, [recorded])


@pytest.mark.parametrize("style", STYLES.values(), ids=lambda style: style.name)
def test_records_say_enough(style: Style) -> None:
    assert missing(style) is None


SHARDED = ParameterStyle("out", "V")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"input_sources": (R,)}, "no input destination"),
        ({"input_sources": (V(-1),), "input_destination": P}, "no move"),
        ({"output_destination": I}, "no output source"),
        ({"weight": SHARDED}, "no output source"),
        ({"output_source": V(SEQ), "output_destination": P}, "no move"),
        (
            {"lookup": Lookup(), "weight": ParameterStyle("in", "V"), "output_source": I},
            "does not compute a partial sum",
        ),
    ],
)
def test_records_that_lack_something_are_refused(fields: dict, reason: str) -> None:
    assert reason in missing(replace(Style(name="new", summary=""), **fields))


def test_slices_are_found_in_parts_as_at_once(monkeypatch):
    """What all pairs of slices take does not fit where a table has many."""
    table = torch.arange(60.0).view(12, 5)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    assert indices_of(table[order], table, 0, 1e-6) == tuple(order.tolist())
    monkeypatch.setattr("shardplan.compiler.layout.spread.BOUNDS", replace(BOUNDS, compared=30))
    assert indices_of(table[order], table, 0, 1e-6) == tuple(order.tolist())
