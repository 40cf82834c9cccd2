"""What hid from the layout check: values below a tolerance or after a gate, results that nobody looked at, bodies of functions."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import shardplan
from shardplan.compiler.bind import bind
from shardplan.compiler.layout import LayoutReport, ModelLayouts, RecordedModel, check_layout, layout_check
from shardplan.compiler.layout.layout_check import Search
from shardplan.compiler.layout.spread import Spread, spread_of
from shardplan.core.mesh import MeshSizes
from shardplan.core.plan import overlays_of
from shardplan.language import parse_plan
from shardplan.model import find_model
from shardplan.model.build_tree import tree_of
from shardplan.model.reduced.nests import tensors_in
from shardplan.model.reduced.recorder import Recorder
from shardplan.runtime.parallel.outputs import on_first
from shardplan.torchlib.modes import CheckedSizes
from tests import own_streams, own_structures
from tests.test_layout import checked, recorded_of


def codes(report: LayoutReport) -> list[str]:
    return [d.code for d in report.diagnostics]


class Block(nn.Module):
    """An MLP whose code is given: (model, what is split) -> what the model returns."""

    def __init__(self, code: Callable[[Block, Tensor, Tensor], Any]):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.head = nn.Linear(8, 16), nn.Linear(16, 8, bias=False), nn.Linear(8, 8)
        self.norm, self.box = nn.LayerNorm(8), nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.randn(8))
        self.register_buffer("gate", torch.zeros(1))
        self.code = code

    def forward(self, x: Tensor) -> Any:
        return self.code(self, x, torch.relu(self.up(x)))


class Model(nn.Module):
    """One block."""

    def __init__(self, code: Callable[[Block, Tensor, Tensor], Any]):
        super().__init__()
        self.block = Block(code)

    def forward(self, x: Tensor) -> Any:
        return self.block(x)


PLAIN = {"up": "colwise", "down": "rowwise"}
PARTIAL = {"up": "colwise", "down.weight": "rowwise"}  # what `down` gives stays a partial sum


def of(code: Callable[[Block, Tensor, Tensor], Any], rules: dict[str, Any] = PLAIN, **given: Any) -> LayoutReport:
    model = Model(code)
    generator = torch.Generator().manual_seed(1)
    recorded = RecordedModel(model, {"x": torch.randn(2, 4, 8, generator=generator)}, tree_of(model))
    rules = {f"block.{name}": style for name, style in rules.items()}
    return checked(recorded, {"version": "1", "name": "own", "tensor_parallel": rules}, **given)


# A partial sum, or a slice, that has a part in a whole result.


@pytest.mark.parametrize(
    ("code", "found"),
    [
        (lambda m, x, h: m.head(x) + 1e-5 * m.down(h), "SP403"),
        (lambda m, x, h: torch.add(m.head(x), m.down(h), alpha=1e-6), "SP403"),
        (lambda m, x, h: m.head(x) + 1e-9 * m.down(h), "SP403"),
        (lambda m, x, h: m.head(x) + m.gate * m.down(h), "SP403"),
        (lambda m, x, h: m.head(x) * (1 + 1e-6 * m.down(h)), "SP403"),
        (lambda m, x, h: m.head(x).add_(m.down(h), alpha=1e-6), "SP403"),
        (lambda m, x, h: m.head(x) + 1e-6 * h.sum(-1, keepdim=True), "SP403"),
        (lambda m, x, h: m.head(x) + 1e-6 * h[..., :8].tanh(), "SP404"),
        (lambda m, x, h: m.head(x) + torch.nn.functional.normalize(m.down(h), dim=-1) * 1e-7, "SP403"),
        (lambda m, x, h: m.head(x) + 1e-6 * m.down(h).detach(), "SP403"),
    ],
    ids=["scaled", "alpha", "invisible", "gate", "product", "in place", "sum of slices", "slices", "norm", "detached"],
)
def test_what_hides_in_a_tolerance_or_behind_a_gate_is_found(code: Callable, found: str) -> None:
    assert codes(of(code, PARTIAL))[:1] == [found]


@pytest.mark.parametrize(
    "code",
    [
        lambda m, x, h: m.head(x) + 0.0 * m.down(h).sum(),
        lambda m, x, h: m.head(x) + 0 * m.up.weight.sum(),
        lambda m, x, h: torch.where(torch.ones(8, dtype=torch.bool), m.head(x), m.down(h)),
        lambda m, x, h: m.down(h).masked_fill(torch.ones(8, dtype=torch.bool), 0.0) + m.head(x),
        lambda m, x, h: m.head(x) + h.new_zeros(8),
        lambda m, x, h: m.head(x) * m.down(h).size(-1),
    ],
    ids=["times zero", "parameters times zero", "where", "masked", "like it", "its size"],
)
def test_what_has_no_part_in_a_result_does_not_matter(code: Callable) -> None:
    report = of(code, PARTIAL)
    assert report.ok, report.diagnostics


def _dropped(m: Block, x: Tensor, h: Tensor) -> Tensor:
    h[..., :8].tanh()
    return m.head(x)


def _kept(m: Block, x: Tensor, h: Tensor) -> Tensor:
    m.loss_of_router = {"later": [h[..., :8].tanh().mean()]}
    return m.head(x)


def _cached_view(m: Block, x: Tensor, h: Tensor) -> Tensor:
    m.cache = h[..., :8].tanh()[0].detach()
    return m.head(x)


def _number(m: Block, x: Tensor, h: Tensor) -> Tensor:
    return m.head(x) if h[..., :8].tanh().max().item() >= 0 else x


def _condition(m: Block, x: Tensor, h: Tensor) -> Tensor:
    return m.head(x) if (h[..., :8].tanh() >= 0).all() else x


@pytest.mark.parametrize("code", [_kept, _cached_view, _number, _condition])
def test_what_code_keeps_or_reads_as_a_number_has_a_part_in_what_comes_later(code: Callable) -> None:
    assert codes(of(code)) == ["SP404"]


def test_a_value_that_nobody_reads_does_not_matter() -> None:
    report = of(_dropped)
    assert report.ok, report.diagnostics


def test_a_scaled_branch_that_is_reduced_passes() -> None:
    report = of(lambda m, x, h: m.head(x) + 1e-5 * m.down(h) + m.gate * m.down(h))
    assert report.ok, report.diagnostics


# Every result of the model.


@dataclass
class Outcome:
    aux: Tensor
    sample: Tensor | None = None


@pytest.mark.parametrize(
    "join",
    [
        lambda a, b: (a, b),
        lambda a, b: [a, b],
        lambda a, b: {"aux": a, "sample": b},
        lambda a, b: Outcome(a, b),
        lambda a, b: {"logits": a, "boxes": {"box": [b]}},
        lambda a, b: Outcome(a, (None, Outcome(b))),
    ],
    ids=["tuple", "list", "dict", "dataclass", "nest", "nested dataclass"],
)
def test_every_result_is_looked_at(join: Callable) -> None:
    right = of(lambda m, x, h: join(m.head(x), m.box(m.down(h))))
    assert right.ok, right.diagnostics
    wrong = of(lambda m, x, h: join(m.head(x), m.down(h)), PARTIAL)
    assert codes(wrong) == ["SP405"] and "a partial sum" in wrong.diagnostics[0].message
    name = wrong.diagnostics[0].modules[0]
    assert name in ("1", "sample", "boxes.0", "sample.0"), name
    split = of(lambda m, x, h: join(m.head(x), m.box(x)), {"box": "colwise"})
    assert codes(split) == ["SP405"]


REDUCED = {"block.up": "colwise", "block.down.weight": "rowwise"}
REDUCED |= {"block": {"style": "input_with_grad_allreduce", "output": "all_reduce"}}


def boxed(join: Callable[[Tensor, Tensor], Any], rules: dict[str, Any], found: list[str]) -> None:
    """A block whose rule reduces its result. `join` makes that of two tensors: the sum and a whole one."""

    class Boxed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block(lambda m, x, h: join(m.down(h), m.head(x)))

        def forward(self, x: Tensor) -> Any:
            return self.block(x)

    model = Boxed()
    recorded = RecordedModel(model, {"x": torch.randn(2, 4, 8)}, tree_of(model))
    assert codes(checked(recorded, {"version": "1", "name": "own", "tensor_parallel": rules})) == found


@pytest.mark.parametrize("kind", [tuple, list, dict, Outcome])
def test_a_rule_moves_the_first_tensor_of_a_result(kind: type) -> None:
    def joined(one: Tensor, other: Tensor) -> Any:
        if kind is dict:
            return {"aux": one, "sample": other}
        return kind(one, other) if kind is Outcome else kind((one, other))

    boxed(joined, REDUCED, [])
    boxed(lambda partial, whole: joined(whole, partial), REDUCED, ["SP402", "SP405"])

    moved = on_first(joined(torch.zeros(2), torch.zeros(2)), lambda x: x + 1)
    assert type(moved) is kind
    assert [bool(x.all()) for x in tensors_in(moved)] == [True, False]
    second = on_first(joined(None, torch.zeros(2)), lambda x: x + 1)
    assert [bool(x.all()) for x in tensors_in(second)] == [True]
    with pytest.raises(ValueError, match="without a tensor"):
        on_first(joined(None, None), lambda x: x + 1)


# Bodies of functions.


class Run(torch.autograd.Function):
    """Runs any code without gradients, as re-entrant checkpointing does, and once more in backward."""

    @staticmethod
    def forward(ctx: Any, code: Callable, x: Tensor) -> Tensor:
        ctx.code = code
        ctx.save_for_backward(x)
        with torch.no_grad():
            return code(x.detach())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(ctx.code(x), gradient)
        return None, x.grad


def _checkpointed(code: Callable, x: Tensor) -> Tensor:
    return torch.utils.checkpoint.checkpoint(code, x, use_reentrant=True)


def _called(code: Callable, x: Tensor) -> Tensor:
    return Run.apply(code, x)


KEPT = pytest.param(
    Run.apply,
    marks=pytest.mark.skipif(
        not isinstance(vars(torch.autograd.Function)["apply"], classmethod),
        reason="a method that was kept cannot be seen since torch 2.14: the proof alone finds what its backward does",
    ),
)


@pytest.mark.parametrize("run", [KEPT, _called, _checkpointed], ids=["function", "called", "checkpoint"])
def test_what_the_body_of_a_function_does_is_looked_at(run: Callable) -> None:
    def mlp(m: Block, x: Tensor) -> Tensor:
        return m.down(torch.relu(m.up(x)))

    right = of(lambda m, x, h: m.head(run(lambda y: mlp(m, y), m.norm(x))))
    assert right.ok, right.diagnostics
    inner = of(lambda m, x, h: m.head(run(lambda y: m.down(torch.relu(m.up(y)) * m.scale[0]), m.norm(x))))
    assert codes(inner)[:1] == ["SP401"] and inner.diagnostics[0].modules == ("block.scale",)
    misfit = of(lambda m, x, h: m.head(run(lambda y: mlp(m, y), m.norm(x))), {"up": "colwise", "down": "colwise"})
    assert codes(misfit)[:1] == ["SP402"]
    hidden = of(
        lambda m, x, h: m.head(run(lambda y: mlp(m, y), m.norm(x))), {"up": "colwise", "down.weight": "rowwise"}
    )
    assert codes(hidden)[:1] == ["SP403"]


class Scaled(torch.autograd.Function):
    """Multiplies by a parameter that it was not given."""

    @staticmethod
    def forward(ctx: Any, model: Block, x: Tensor) -> Tensor:
        ctx.model = model
        return x * model.scale[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, gradient * ctx.model.scale[0]


def test_a_parameter_that_a_function_captures_is_one_of_its_operands() -> None:
    assert codes(of(lambda m, x, h: m.head(x) + m.down(Scaled.apply(m, h))))[:1] == ["SP401"]
    report = of(lambda m, x, h: m.head(Scaled.apply(m, x)) + m.down(h))
    assert report.ok, report.diagnostics


@pytest.mark.parametrize("wrong", [False, True])
def test_a_function_of_what_it_is_given_is_one_operation(wrong: bool) -> None:
    """Whatever it does inside: here its ranks do something else each, and come to the same."""

    class Summed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            parts = [part.clone() for part in (x.split(2, -1) if x.shape[-1] == 8 else x.split(1, -1))]
            return torch.cat(parts, -1) if not wrong else torch.cat(parts, -1).cumsum(-1)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient

    report = of(lambda m, x, h: m.head(x) + m.down(Summed.apply(h)))
    assert codes(report)[:1] == (["SP404"] if wrong else [])


# Calls that torch's function modes do not see.


def _gelu(x: Tensor, slope: float) -> Tensor:
    return x * torch.sigmoid(slope * x)


def _norm(x: Tensor) -> Tensor:
    return x / (1e-3 + x.norm(2.0, dim=-1, keepdim=True))


scripted, scripted_norm = torch.jit.script(_gelu), torch.jit.script(_norm)


def test_scripted_functions() -> None:
    report = of(lambda m, x, h: m.head(x) + m.down(scripted(h, 1.5)))
    assert report.ok, report.diagnostics
    assert codes(of(lambda m, x, h: m.head(x) + m.down(scripted_norm(h))))[:1] == ["SP404"]


def test_mapped_functions() -> None:
    report = of(lambda m, x, h: m.head(x) + m.down(torch.vmap(lambda row: row.sigmoid() * row)(h)))
    assert report.ok, report.diagnostics
    assert codes(of(lambda m, x, h: m.head(x) + m.down(torch.vmap(_norm)(h))))[:1] == ["SP404"]
    captured = of(lambda m, x, h: m.head(x) + m.down(torch.vmap(lambda row: row * m.scale[0])(h)))
    assert codes(captured)[:1] == ["SP401"]


def test_half_precision_in_a_forward() -> None:
    def cast(m: Block, x: Tensor, h: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return m.head(x + m.down(torch.relu(m.up(x)))).float()

    report = of(cast)
    assert report.ok, report.diagnostics
    assert codes(of(cast, PARTIAL))[:1] == ["SP403"]
    assert codes(of(cast, {"up": "colwise", "down": "colwise"}))[:1] == ["SP402"]

    def wrong(m: Block, x: Tensor, h: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return m.down(torch.relu(m.up(x)) * m.scale[0]).float()

    assert codes(of(wrong))[:1] == ["SP401"]


# Ranks that are left without anything.


def test_nothing_is_run_on_a_rank_without_heads() -> None:
    """Torch's attention divides by the number of heads, which ends the process."""

    def attention(m: Block, x: Tensor, h: Tensor) -> Tensor:
        heads = h[..., 8:].unflatten(-1, (-1, 8)).transpose(1, 2)  # one head of 8; on a rank none
        return m.head(x + nn.functional.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2))

    assert of(attention, {}).ok
    report = of(attention, {"up": "colwise"})
    assert any("empty tensor" in d.message for d in (*report.diagnostics, *report.secondary)), report.diagnostics


def test_attention_without_heads_raises_in_a_mode() -> None:
    heads = torch.zeros(2, 0, 4, 8)
    with CheckedSizes(), pytest.raises(ValueError, match="empty"):
        nn.functional.scaled_dot_product_attention(heads, heads, heads)
    with CheckedSizes():
        nn.functional.scaled_dot_product_attention(*(torch.zeros(2, 1, 4, 8) for _ in range(3)))


def test_code_that_meets_empty_tensors_unsharded_too_may_do_so_on_a_rank() -> None:
    """A loop over experts; some get no tokens."""

    def experts(m: Block, x: Tensor, h: Tensor) -> Tensor:
        result = m.head(x)
        for chosen in (h.new_zeros(2, 4) > 0, h.new_zeros(2, 4) == 0):
            result = result.clone()
            result[chosen] += m.down(h[chosen])
        return result

    report = of(experts)
    assert report.ok, report.diagnostics


class Raising(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.made: list[weakref.ref] = []

    def forward(self, x: Tensor) -> None:
        local = nn.Identity()
        self.made.append(weakref.ref(local))
        raise RuntimeError("the model's own")


def test_nothing_of_a_run_that_raised_is_kept() -> None:
    """Until the exception is gone, a checkpoint of torch 2.11 that it left keeps what autograd saves, also for the next model."""
    recorder = Recorder(model := Raising())
    recorder.run({"x": torch.ones(1)})
    assert recorder.trace.crash is not None and "the model's own" in recorder.trace.crash.message
    (made,) = model.made
    assert made() is None


def test_slices_of_nothing() -> None:
    empty = torch.zeros(4, 0)
    assert spread_of([torch.zeros(2, 0), torch.zeros(2, 0)], empty) == Spread("split", 0)
    assert spread_of([torch.zeros(0, 2), torch.zeros(4, 2)], torch.zeros(4, 2)) is not None
    assert spread_of([torch.zeros(0, 2), torch.ones(4, 2)], torch.zeros(4, 2)) is None


# The search for changes is bounded.

WRONG_NORM = {"self_attn.q_norm": "none"}


def mistaken(search: Search, rules: Mapping[str, str]) -> LayoutReport:
    """Of rules that mistake modules of a layer."""
    edited = {f"model.layers.*.{name}": style for name, style in rules.items()}
    plan = parse_plan({"version": "1", "name": "own", "extends": "qwen3", "tensor_parallel": edited})
    recorded = recorded_of("qwen3")
    resolved, _ = bind(plan.plan, recorded.tree, MeshSizes(tp=2))
    return check_layout(resolved, [recorded], search=search)


@pytest.mark.parametrize("left", [Search(tries=0), Search(seconds=0.0)], ids=["tries", "seconds"])
def test_a_finding_is_reported_without_a_change_once_the_search_is_over(left: Search) -> None:
    report = mistaken(left, WRONG_NORM)
    assert codes(report) == ["SP401"] and report.diagnostics[0].help is None
    assert left.over


def test_the_search_counts_what_it_tries() -> None:
    search = Search(seconds=10.0)
    before = search.tries
    report = mistaken(search, WRONG_NORM)
    assert report.diagnostics[0].help and 0 < before - search.tries < 10
    assert 0 < search.seconds < 10


def test_a_change_that_gives_a_split_up_comes_last() -> None:
    """Of two mistakes in one MLP, each is mended at its own line, though the whole MLP left unsplit would mend both at once."""
    report = mistaken(Search(), {"mlp.down_proj": "colwise", "mlp.up_proj": "rowwise"})
    assert codes(report) == ["SP402", "SP402"]
    assert [change.pattern.rpartition(".")[2] for change in report.repairs] == ["up_proj", "down_proj"]
    assert not any(change.given_up for change in report.repairs)


def test_a_search_for_a_draft_ends_where_no_change_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout_check, "repairs", lambda plan, finding: iter(()))
    for search in (Search(), Search(of_draft=True)):
        repairs = mistaken(search, WRONG_NORM | {"mlp.gate_proj": "none"}).repairs
        assert len(repairs) > 1 and set(repairs) == {None}
        assert search.over == search.of_draft and search.tries > 0


def test_both_variants_of_a_plan_share_one_search() -> None:
    layouts = ModelLayouts(find_model("qwen3"), 2)
    rules = {"model.layers.*.self_attn.q_norm": "none"}
    plan = parse_plan({"version": "1", "name": "own", "extends": "qwen3", "tensor_parallel": rules}).plan
    left = []
    for sequence_parallel in (False, True):
        layouts.check(plan, overlays_of(sequence_parallel))
        left.append(layouts._plans[id(plan)].search.tries)
    assert left[1] < left[0]
    right = parse_plan("qwen3").plan
    layouts.check(right)
    assert layouts._plans[id(right)].search == Search()


@pytest.mark.parametrize("shape", [(4, 8), (2, 4, 8)])
def test_a_bias_after_a_reduction_is_added_to_all_features(shape: tuple[int, ...]) -> None:
    """Positions are dim 1: of values [positions, features] a reduce-scatter would split the features, which a whole bias does not fit."""
    model = nn.Module()
    model.block = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    model.forward = lambda x: model.block(x)
    recorded = RecordedModel(
        model, {"x": torch.randn(*shape, generator=torch.Generator().manual_seed(1))}, tree_of(model)
    )
    rules = {"block": "gather_seq_output", "block.0": "colwise", "block.2": "rowwise_seq"}
    found = checked(recorded, {"version": "1", "name": "own", "tensor_parallel": rules}).diagnostics
    said = [text for d in found for text in (d.message, *d.notes) if "has 8 features" in text]
    assert bool(said) == bool(found) == (len(shape) == 2), found


def test_one_block_input_takes_the_sums_of_all_tables() -> None:
    """A table that another value is multiplied by later cannot stay a partial sum too: the first block's input takes what waits."""
    model = own_streams.Sides()
    # What `init` writes (tests/test_init_streams.py), but for vectors under sequence_parallel.
    column, row, norm = "colwise", "rowwise", {"style": "sequence_parallel", "output": "gather"}
    plan = {
        "version": "1",
        "name": "Sides",
        "tensor_parallel": {
            "{embed,vectors}": "embedding_rowwise",
            "blocks.*.attn.{q,k,v}": column,
            "blocks.*.attn.o": row,
            "blocks.*.attn": {"style": "input_with_grad_allreduce", "shares": ["num_heads"]},
            "blocks.*.mlp": "input_with_grad_allreduce",
            "blocks.*.mlp.up": column,
            "blocks.*.mlp.down": row,
            "head": {"style": "colwise_gather_output", "optional": True},
        },
        "sequence_parallel": {
            "{embed,vectors}": "embedding_rowwise_seq",
            "blocks.0": "split_seq_input",
            "blocks.*.norm{1,2}": "sequence_parallel",
            "blocks.*.attn": {"style": "gather_seq_input", "shares": ["num_heads"]},
            "blocks.*.attn.o": "rowwise_seq",
            "blocks.*.mlp": "gather_seq_input",
            "blocks.*.mlp.down": "rowwise_seq",
            "blocks.*.gate": norm,
            "blocks.*.back": "split_seq_input",
            "blocks.*.back.weight": "replicated_with_grad_allreduce",
            "norm": norm,
        },
    }
    report = shardplan.validate(
        shardplan.Model(model, inputs=own_structures.ids), plan, {"tp": 2}, sequence_parallel=True
    )
    assert [error.code for error in report.errors] == ["SP402"]
    assert "blocks.*.back is a partial sum" in report.errors[0].message
    assert report.errors[0].help == (
        "write `vectors: embedding_rowwise` under sequence_parallel instead of `embedding_rowwise_seq`"
    )


@pytest.mark.usefixtures("no_repairs")
def test_a_whole_value_is_not_split_as_a_sum_that_waits() -> None:
    """A block input that gathers its output takes one look-up of the table; the other one still waits at the next block input."""
    model = own_streams.TwoLists()
    blocks = "{first,second}.*"
    rules = {
        "embed": "embedding_rowwise",
        f"{blocks}.attn": {"style": "input_with_grad_allreduce", "shares": "num_heads"},
        f"{blocks}.attn.{{q,k,v}}": "colwise",
        f"{blocks}.attn.o": "rowwise",
        f"{blocks}.mlp": "input_with_grad_allreduce",
        f"{blocks}.mlp.up": "colwise",
        f"{blocks}.mlp.down": "rowwise",
        "head": "colwise_gather_output",
    }
    sliced = {
        "embed": "embedding_rowwise_seq",
        "first.0": {"style": "split_seq_input", "output": "gather"},
        "second.0": "split_seq_input",
        f"{blocks}.norm{{1,2}}": "sequence_parallel",
        f"{blocks}.attn": {"style": "gather_seq_input", "shares": "num_heads"},
        f"{blocks}.mlp": "gather_seq_input",
        f"{blocks}.{{attn.o,mlp.down}}": "rowwise_seq",
        "norm": {"style": "sequence_parallel", "output": "gather"},
    }
    plan = {"version": "1", "name": "own", "tensor_parallel": rules, "sequence_parallel": sliced}
    report = shardplan.validate(
        shardplan.Model(model, inputs=own_structures.ids), plan, {"tp": 2}, sequence_parallel=True
    )
    assert [error.code for error in report.errors] == ["SP402"]
    assert "the input of second.* is whole" in report.errors[0].message
