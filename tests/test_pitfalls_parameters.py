"""How parameters, buffers and attributes are kept: each pitfall shown with its remedy taken away."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module
from torch.nn.utils import prune

import shardplan
from shardplan import Model, validate
from shardplan.core.report import Report
from shardplan.proof.compare import compare
from shardplan.runtime.parallel import reading, style
from shardplan.styles import stored_parameters as stored
from tests.collective_counter import CollectiveCounter
from tests.proofs import (
    Case,
    assert_equal,
    case,
    dtensors,
    fake_mesh,
    on_ranks,
    plan_like,
    planned,
    program_of,
    ranked,
    reduced_model,
)
from tests.simulation import rank_values, simulated_mesh, uneven, whole_values
from tests.small_models import batch, small_model


@pytest.mark.parametrize("sp", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize("tp", [2, 4])
def test_every_rank_has_its_share_of_each_packed_part(tp, sp, monkeypatch):
    """Phi-3's q, k and v have different sizes (grouped heads): plain slices would mix them."""
    assert_equal(case("phi3", tp, sp=sp).rows())
    if tp == 2 and not sp:
        monkeypatch.setattr(stored, "packed_parts", lambda rule, size, plan: ())
        assert case("phi3", tp).wrong()["logits"] > 0.01


@pytest.mark.parametrize("name", ["phi3", "mixtral", "gpt2", "llama", "qwen3_moe"])
def test_a_state_dict_is_the_original_bit_for_bit(name):
    """Rows of packed parameters in the original order, whatever the order inside."""
    small = reduced_model(name, 2)
    original = {key: value.clone() for key, value in small.build().state_dict().items()}
    with on_ranks(model := small.build(), name, 2):
        state = model.state_dict()
        whole = {key: v.full_tensor() if isinstance(v, DTensor) else v for key, v in state.items()}
    assert list(state) == list(original)
    for key, value in whole.items():
        assert all(mine.equal(original[key]) for mine in rank_values(value).values()), key


def test_inside_packed_rows_stand_in_another_order():
    """What the state dict hides: the reason for its hooks."""
    small = reduced_model("phi3", 2)
    with on_ranks(model := small.build(), "phi3", 2):
        stored = model.model.layers[0].self_attn.qkv_proj.weight.detach().full_tensor()
    original = small.build().model.layers[0].self_attn.qkv_proj.weight.detach()
    mine = rank_values(stored)[0].detach()
    assert not mine.equal(original)
    assert mine.sum(0).allclose(original.sum(0), atol=1e-5), "the same rows"


DIVIDED = {
    "phi3": ("model.layers.0.self_attn", {"config.num_attention_heads", "num_key_value_heads"}),
    "gpt2": ("transformer.h.0.attn", {"split_size", "num_heads"}),
}


def read(module: nn.Module, attribute: str) -> int:
    owner, _, leaf = attribute.rpartition(".")
    return getattr(getattr(module, owner) if owner else module, leaf)


@pytest.mark.parametrize("name", DIVIDED)
def test_attributes_are_divided_on_the_instance_and_never_in_the_shared_config(name, monkeypatch):
    owner, attributes = DIVIDED[name]
    original = reduced_model(name, 2).build()
    before, config = {a: read(original.get_submodule(owner), a) for a in attributes}, original.config.to_dict()
    with on_ranks(model := copy.deepcopy(original), name, 2):
        pass
    assert {a: read(model.get_submodule(owner), a) for a in attributes} == {a: n // 2 for a, n in before.items()}
    assert model.config.to_dict() == config
    assert original.config.to_dict() == config
    assert {a: read(original.get_submodule(owner), a) for a in attributes} == before
    # A later change of the shared config is seen by the module that divides another number of it.
    model.config._attn_implementation = "eager"
    assert model.get_submodule(owner).config._attn_implementation == "eager"
    monkeypatch.setattr(style, "divide_attributes", lambda module, names, by: None)
    with pytest.raises((RuntimeError, ValueError)):  # of the shapes, or of a rank that has no heads
        case(name).rows_in(torch.float32)


FREEZE = {
    "all but the last layer": lambda name: ".1." not in name,
    "the embedding": lambda name: "embed_tokens" in name,
    "the norms": lambda name: "norm" in name,
    "all but the norms": lambda name: "norm" not in name,
    "all but one projection": lambda name: "layers.0.self_attn.v_proj" not in name,
}


@pytest.mark.parametrize("sp", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize("what", FREEZE)
def test_frozen_parameters_stay_frozen(what, sp):
    def freeze(model):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not FREEZE[what](name))

    frozen = case("qwen3", sp=sp, tied=False, prepare=freeze)
    assert_equal(frozen.rows())
    with on_ranks(model := frozen.model(torch.float32), "qwen3", 2, sequence_parallel=sp):
        pass
    assert {n: p.requires_grad for n, p in model.named_parameters()} == {
        n: not FREEZE[what](n) for n, _ in model.named_parameters()
    }


def test_torchs_own_style_makes_frozen_parameters_trainable():
    """Why norms do not get torch's SequenceParallel."""
    norm = nn.LayerNorm(4).requires_grad_(False)
    with fake_mesh(2) as mesh:
        parallelize_module(norm, mesh, SequenceParallel())
    assert norm.weight.requires_grad


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "mixtral"])
def test_every_parameter_is_a_dtensor_and_every_buffer_is_plain(name):
    """A mix of plain and DTensor parameters breaks clipping; buffers are read by code that knows no DTensors."""
    with on_ranks(model := reduced_model(name, 2).build(), name, 2, sequence_parallel=True):
        pass
    assert dtensors(model)
    for buffer_name, buffer in model.named_buffers():
        assert not isinstance(buffer, DTensor), buffer_name


CLIPPED = [("llama", True), ("gpt2", False), ("mixtral", True)]  # on every change


@pytest.mark.parametrize(
    ("name", "sp"),
    [
        pytest.param(name, sp, marks=uneven(name) + (() if (name, sp) in CLIPPED else (pytest.mark.slow,)))
        for name in ("llama", "qwen3", "mixtral", "gpt2")
        for sp in (False, True)
    ],
)
def test_clipping_is_right(name, sp):
    """torch's clip_grad_norm_ on the planned model; summing local norms would count whole gradients tp times."""
    small = reduced_model(name, 2)
    inputs = small.inputs()
    reference = small.build()
    reference(**small.inputs()).loss.backward()
    expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
    with on_ranks(model := small.build(), name, 2, sequence_parallel=sp):
        model(**ranked(inputs, 2)).loss.backward()
        parameters = list(model.parameters())
        summed = sum(p.grad.to_local().square().sum() for p in parameters)
        norm = nn.utils.clip_grad_norm_(parameters, 0.1)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        clipped = {n: p.grad.full_tensor() for n, p in model.named_parameters() if n.endswith("norm.weight")}
    for value in rank_values(norm).values():
        assert value.item() == pytest.approx(expected.item(), rel=1e-5)
    for key, value in clipped.items():
        torch.testing.assert_close(rank_values(value)[1], reference.get_parameter(key).grad, rtol=1e-4, atol=1e-7)
    wrong = sum(value.item() for value in rank_values(summed).values()) ** 0.5
    assert wrong > expected.item() * 1.0001


@pytest.mark.parametrize(
    "term", [lambda loss, terms: sum(terms), lambda loss, terms: (loss + terms[0]).backward()], ids=["sum", "loss"]
)
def test_a_term_of_the_parameters_that_ends_a_script_says_what_to_write(term, monkeypatch, compiled_once):
    """torch's words name no cause. They stay, and the help is below them, once."""
    told = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, traceback: told.append(error))
    with fake_mesh(2, 2, names=("dp_shard", "tp")) as mesh:
        for _ in range(2):
            model = shardplan.apply_plan(small_model("llama"), mesh, "auto", src_data_rank=None, prove=False)
        with pytest.raises(RuntimeError, match=r"different mesh|mixed torch\.Tensor and DTensor") as raised:
            term(model(input_ids=(ids := batch(0)), labels=ids).loss, [p.square().sum() for p in model.parameters()])
    for _ in range(2):
        sys.excepthook(raised.type, raised.value, raised.tb)
    sys.excepthook(ValueError, other := ValueError("x"), None)
    assert told == [raised.value, raised.value, other] and not hasattr(other, "__notes__")
    (note,) = raised.value.__notes__
    assert note.startswith("help: parameters are DTensors") and "`p.grad.add_(p, alpha=2 * weight)`" in note


class Failure(Exception):
    pass


def fail(module, args):
    raise Failure


@pytest.mark.parametrize(
    "where",
    [
        "model.layers.1.self_attn.q_proj",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("model.layers.0.mlp.act_fn", "model.norm")),
        "lm_head",
    ],
)
def test_exceptions_leave_the_parameters_in_place(where):
    """The early stop of activation checkpointing passes through forward as an exception too."""
    small = reduced_model("qwen3", 2)
    inputs = small.inputs()
    with on_ranks(model := small.build(), "qwen3", 2, sequence_parallel=True):
        before = dtensors(model)
        handle = model.get_submodule(where).register_forward_pre_hook(fail)
        with pytest.raises(Failure):
            model(**ranked(inputs, 2))
        handle.remove()
        assert {n: id(p) for n, p in dtensors(model).items()} == {n: id(p) for n, p in before.items()}
        model(**ranked(inputs, 2)).loss.backward()


def test_without_the_remedy_an_exception_leaves_local_tensors_behind(monkeypatch):
    def without_finally(self, forward, module, args, kwargs):
        members = self.members[self.regime.variant]
        stored = [(owner._parameters, name, owner._parameters[name]) for owner, name, _ in members]
        for (held, name, parameter), (_, _, gradient) in zip(stored, members, strict=True):
            held[name] = reading.read(parameter, gradient, self.regime)
        result = forward(*args, **kwargs)
        for held, name, parameter in stored:
            held[name] = parameter
        return result

    monkeypatch.setattr(reading.Reads, "__call__", without_finally)

    def failing(self, x):
        raise Failure

    small = reduced_model("llama", 2)

    inputs = small.inputs()
    with on_ranks(model := small.build(), "llama", 2):
        monkeypatch.setattr(nn.Linear, "forward", failing)
        with pytest.raises(Failure):
            model(**ranked(inputs, 2))
        assert not isinstance(model.model.layers[0].self_attn.q_proj.weight, DTensor)


@pytest.mark.parametrize("sp", [pytest.param(False, marks=pytest.mark.slow), True], ids=["tp", "sp"])
def test_getattr_finds_the_parameter_during_and_after_forward(sp):
    """FSDP2 and tie_weights read and replace parameters by attribute; nothing may stand in front of them."""
    small, seen = reduced_model("llama", 2), []
    inputs = small.inputs()
    with on_ranks(model := small.build(), "llama", 2, sequence_parallel=sp):

        def look(module, args):
            seen.append(type(model.lm_head.weight) is nn.Parameter or isinstance(model.lm_head.weight, DTensor))

        model.model.layers[1].self_attn.v_proj.register_forward_pre_hook(look)
        first = model(**ranked(inputs, 2)).logits
        assert seen == [True]
        head = model.lm_head
        assert "weight" not in head.__dict__ and head.weight is head._parameters["weight"]
        # Whoever replaces the parameter is heard in the next forward.
        replaced = nn.Parameter(head.weight.detach() * 2)
        head.weight = replaced
        assert head.weight is replaced
        second = model(**ranked(inputs, 2)).logits
        torch.testing.assert_close(rank_values(second.detach())[1], rank_values(first.detach())[1] * 2)


class InPlace(nn.Module):
    """A model whose own code changes what modules return in place (Llama 4's `out.add_`)."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        self.embed = nn.Embedding(16, 8)
        self.up, self.down, self.head = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 16, bias=False)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)

    def forward(self, ids):
        x = self.embed(ids)
        x.mul_(2.0)
        inner = self.up(x)
        inner.tanh_()
        out = self.down(inner)
        out.add_(x)
        logits = self.head(out)
        logits.div_(3.0)
        return logits


def in_place_step(model, inputs):
    logits = model(**inputs)
    return {"logits": logits, "loss": logits.logsumexp(-1).mean()}


IN_PLACE = {
    "version": "1",
    "name": "in-place",
    "tensor_parallel": {
        "embed": "embedding_rowwise",
        "up": "colwise",
        "down": "rowwise",
        "head": "colwise_gather_output",
    },
}


@pytest.mark.parametrize("embedding", ["embedding_rowwise", "embedding_colwise"])
def test_outputs_may_be_changed_in_place(embedding):
    plan = {**IN_PLACE, "tensor_parallel": {**IN_PLACE["tensor_parallel"], "embed": embedding}}
    ids = {"ids": torch.arange(16).reshape(2, 8)}
    assert_equal(Case(InPlace, ids, plan, 2, in_place_step).rows())


def test_sending_no_weights_sends_nothing():
    """src_data_rank=None, parameters of the root included: torch's own entry "" would scatter those."""

    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))
            self.up = nn.Linear(3, 4)

        def forward(self, x):
            return self.up(x * self.scale)

    plan = {"version": "1", "name": "root", "tensor_parallel": {"up": "colwise_gather_output"}}
    with fake_mesh(2) as mesh:
        with CollectiveCounter() as counter:
            model = planned(Root(), mesh, plan, src_data_rank=None)
        assert not counter.counts.keys() & {"broadcast", "scatter", "all_gather"}
        assert isinstance(model.scale, DTensor)
        with CollectiveCounter() as counter:
            planned(Root(), mesh, plan, src_data_rank=0)
        assert counter.counts.keys() & {"broadcast", "scatter"}


def test_every_application_has_its_own_styles():
    """torch's parallelize_module writes into the style objects that it is given."""
    program = program_of(reduced_model("llama", 2).build(), "llama", 2)
    with simulated_mesh(2):
        first, second = program.parallelize_plan, program.parallelize_plan
        assert first.keys() == second.keys() and not {map(id, first.values())} & {map(id, second.values())}
        assert len({id(s) for s in first.values()}) == len(first)


def test_the_styles_work_with_torchs_own_loop():
    """`program.parallelize_plan` and torch's parallelize_module, without apply_plan."""
    small = reduced_model("qwen3", 2)

    inputs = small.inputs()
    expected = small.build()(**small.inputs()).logits.detach()
    program = program_of(small.build(), "qwen3", 2, sequence_parallel=True)
    model = small.build()
    with simulated_mesh(2) as mesh:
        parallelize_module(model, mesh, program.parallelize_plan)
        logits = model(**ranked(inputs, 2)).logits
    assert compare("logits", "logits", whole_values(logits), expected).verdict == "equal"


def test_a_plan_that_leaves_a_module_out_replicates_it():
    """Modules that no rule names are whole, run on what arrives, and are right where the plan is."""
    plan = plan_like("llama", {"model.layers.*.mlp": "none", "model.layers.*.mlp.*": "none"})
    assert_equal(case("llama", plan=plan).rows())


class ByItsOtherName(nn.Module):
    """Its own code reads a parameter by the second of its names, as heads read a table that is tied."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(16, 8, bias=False), nn.Linear(16, 8, bias=False)
        self.last.weight = self.first.weight
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(self.first(x)).relu()) @ self.last.weight


def test_a_tied_parameter_is_read_by_any_of_its_names() -> None:
    rules = {"up": "colwise", "down": "rowwise"}

    def rows(seed: int) -> dict[str, torch.Tensor]:
        return {"x": torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(seed))}

    report = validate(Model(ByItsOtherName(), inputs=rows), {"version": "1", "tensor_parallel": rules}, {"tp": 2})
    assert report.ok and report.proven, report


class Normed(nn.Module):
    """An MLP whose second matrix is computed from other parameters."""

    def __init__(self, norm: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), norm(nn.Linear(32, 16))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


@pytest.mark.parametrize(
    ("norm", "call"),
    [
        (nn.utils.parametrizations.weight_norm, "parametrize.remove_parametrizations(module, 'weight')"),
        (nn.utils.parametrizations.spectral_norm, "parametrize.remove_parametrizations(module, 'weight')"),
        (nn.utils.weight_norm, "remove_weight_norm(module)"),
        (nn.utils.spectral_norm, "remove_spectral_norm(module)"),
        (partial(prune.l1_unstructured, name="weight", amount=0.5), "prune.remove(module, 'weight')"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_a_weight_that_is_computed_is_kept_whole_or_made_a_parameter(
    norm: Callable[[nn.Module], nn.Module], call: str
) -> None:
    """Both ways that the finding names end in a plan that is proven."""
    model = nn.Sequential(nn.Linear(16, 16), Normed(norm), Normed(norm))

    def validated(style: str) -> Report:
        rules = {"*.up": "colwise" if style == "rowwise" else "colwise_gather_output", "*.down": style}
        plan = {"version": "1", "name": "mine", "tensor_parallel": rules}
        return validate(Model(model, inputs=lambda seed: {"input": torch.randn(2, 4, 16)}), plan, {"tp": 2})

    (finding,) = validated("rowwise").diagnostics
    assert finding.code == "SP310" and f"`torch.nn.utils.{call}`" in finding.help
    assert "`*.down: replicate`" in finding.help
    assert validated("replicate").ok
    for block in list(model)[1:]:
        if "parametrize" in call:
            nn.utils.parametrize.remove_parametrizations(block.down, "weight")
        elif "prune" in call:
            prune.remove(block.down, "weight")
        else:
            getattr(nn.utils, call.removesuffix("(module)"))(block.down)
    assert validated("rowwise").ok
