"""Gradients that come out wrong while the loss is right, each shown with its remedy taken away."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.distributed.tensor import DTensor

from shardplan.core.layout import I
from shardplan.runtime.apply import phases
from shardplan.runtime.parallel import reading
from shardplan.runtime.parallel.collectives import all_reduce
from tests.proofs import (
    assert_equal,
    case,
    collect,
    compare_results,
    differing,
    dtensors,
    on_ranks,
    plan_like,
    ranked,
    reduced_model,
    unsharded,
)

QK_NORMS = "model.layers.*.self_attn.{q,k}_norm"


def gradients_alone_differ(wrong: dict[str, float], *, about: str, least: float = 1e-3) -> None:
    """The loss and the logits are equal; what differs is the gradients of the parameters named, by much."""
    assert wrong and all(about in name for name in wrong), wrong
    assert max(wrong.values()) > least


@pytest.mark.parametrize("sp", [False, True], ids=["tp", "sp"])
def test_norms_over_a_ranks_own_heads_have_partial_gradients(sp):
    assert_equal(case("qwen3", sp=sp).rows())
    broken = plan_like("qwen3", {QK_NORMS: "replicate"})
    gradients_alone_differ(case("qwen3", sp=sp, plan=broken).wrong(), about="_norm.weight", least=0.1)


def test_norms_of_blocks_have_partial_gradients_under_sequence_parallelism():
    broken = plan_like("llama", {}, {"model.layers.*.{input,post_attention}_layernorm": "replicate"})
    gradients_alone_differ(case("llama", sp=True, plan=broken).wrong(), about="layernorm.weight", least=0.1)
    assert_equal(case("llama", sp=False, plan=broken).rows())


def test_a_bias_added_after_the_reduction_has_a_partial_gradient_under_sequence_parallelism(monkeypatch):
    assert_equal(case("gpt2", sp=True).rows())
    real = reading.read

    def whole(parameter, program, regime):
        return real(parameter, replace(program, computed=I) if parameter.ndim == 1 else program, regime)

    # The biases added after the reduction are read in the boundary, all others in the module's own forward.
    monkeypatch.setattr("shardplan.runtime.parallel.boundaries.read", whole)
    monkeypatch.setattr(reading.Reads, "__call__", lambda self, forward, module, args, kwargs: forward(*args, **kwargs))
    gradients_alone_differ(case("gpt2", sp=True).wrong(), about="c_proj.bias", least=0.1)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_a_router_in_front_of_split_experts_has_a_partial_gradient(name):
    broken = plan_like(name, {"model.layers.*.mlp.gate": {"style": "replicate", "read_outside": [0]}})
    gradients_alone_differ(case(name, plan=broken).wrong(), about="mlp.gate.weight", least=0.1)


@pytest.mark.parametrize("sp", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize("name", ["mixtral", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
def test_the_auxiliary_loss_reads_the_router_outside_the_split_region(name, sp):
    """Every rank computes it in full; without `read_outside` its part of the gradient is counted tp times."""
    assert_equal(case(name, sp=sp).rows())
    broken = plan_like(name, {"model.layers.*.mlp.gate": "replicated_with_grad_allreduce"})
    wrong = case(name, sp=sp, plan=broken).wrong()
    assert "loss" not in wrong and "logits" not in wrong
    assert any(name.endswith("mlp.gate.weight") for name in wrong)


def test_the_auxiliary_loss_alone_would_be_off_by_the_size_of_the_axis():
    """With nothing but the auxiliary loss, the router's gradient is tp times too large."""

    def auxiliary(model, inputs):
        return {"loss": model(**inputs).aux_loss}

    assert_equal(case("mixtral", call=auxiliary).rows())
    broken = plan_like("mixtral", {"model.layers.*.mlp.gate": "replicated_with_grad_allreduce"})
    wrong = case("mixtral", plan=broken, call=auxiliary).wrong()
    last = max(name for name in wrong if name.endswith("gate.weight"))
    assert wrong[last] == pytest.approx(1.0, rel=1e-3)


def test_tied_parameters_are_one_parameter_again(monkeypatch):
    tied = case("llama", tied=True)
    with on_ranks(model := tied.model(torch.float32), "llama", 2):
        pass
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert len(list(model.parameters())) == len(list(tied.model(torch.float32).parameters()))
    assert_equal(tied.rows())
    monkeypatch.setattr(phases, "restore_ties", lambda model, groups: None)
    wrong = tied.wrong()
    assert set(wrong) == {"model.embed_tokens.weight", "lm_head.weight"}, "the loss is right all the same"
    assert max(wrong.values()) > 0.05


def test_gradients_are_finished_once_and_none_is_left_partial():
    """What is left as a partial sum would be reduced again by each use: clipping, the optimizer, logging."""
    small = reduced_model("qwen3", 2)
    inputs = small.inputs()
    with on_ranks(model := small.build(), "qwen3", 2, sequence_parallel=True):
        model(**ranked(inputs, 2)).loss.backward()
    for name, parameter in dtensors(model).items():
        assert isinstance(parameter.grad, DTensor), name
        assert parameter.grad.placements == parameter.placements, name


def accumulate(model, inputs):
    """Two micro-batches, the second one other tokens; the loss of the first is run backward here."""
    model(**inputs).loss.backward()
    second = {**inputs, "input_ids": inputs["input_ids"].flip(0), "labels": inputs["labels"].flip(0).roll(1, 1)}
    output = model(**second)
    return {"loss": output.loss, "logits": output.logits}


@pytest.mark.parametrize("sp", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize("name", ["qwen3", "mixtral", "phi3", "gpt2"])
def test_gradient_accumulation(name, sp):
    assert_equal(case(name, sp=sp, call=accumulate).rows())


def test_reducing_accumulated_gradients_in_a_hook_would_reduce_the_first_ones_twice():
    """Why partial gradients are summed in the graph: the recipe with hooks is right for one backward pass only."""
    small = reduced_model("qwen3", 2)
    inputs = small.inputs()
    plan = plan_like("qwen3", {QK_NORMS: "replicate"})

    def reduce(parameter):
        with torch.no_grad():
            local = parameter.grad.to_local()
            local.copy_(all_reduce(local, parameter.device_mesh))

    def rows(passes):
        reference = unsharded(small.build(), small.inputs(), accumulate if passes == 2 else one_pass)
        with on_ranks(model := small.build(), plan, 2):
            for name, parameter in model.named_parameters():
                if "q_norm" in name or "k_norm" in name:
                    parameter.register_post_accumulate_grad_hook(reduce)
            values = (accumulate if passes == 2 else one_pass)(model, ranked(inputs, 2))
            values["loss"].backward()
        return compare_results(reference, collect(model, values))

    def one_pass(model, inputs):
        output = model(**inputs)
        return {"loss": output.loss, "logits": output.logits}

    assert differing(rows(1)) == {}
    gradients_alone_differ(differing(rows(2)), about="_norm.weight", least=0.1)


def test_grouping_changes_no_gradient(monkeypatch):
    """The same gradients with one reduction for each parameter, which is what the group saves."""
    small = reduced_model("gemma3_text", 2)
    monkeypatch.setattr(reading.Reads, "__call__", lambda self, forward, module, args, kwargs: forward(*args, **kwargs))
    assert_equal(case("gemma3_text", sp=True).rows())
    assert small.seq_len % 2 == 0


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_partial_gradients_are_summed_in_the_reduce_dtype(dtype):
    """Sums of bfloat16 gradients over ranks lose what float32 keeps: 256 + 1 is 256 in bfloat16."""
    from shardplan.runtime.parallel.tensor_moves import sum_gradients
    from tests.simulation import LocalTensor, rank_values, simulated_mesh

    with simulated_mesh(4) as mesh:
        weight = torch.ones(1, dtype=torch.bfloat16, requires_grad=True)
        (read,) = sum_gradients(mesh, [weight], dtype)
        parts = {0: 256.0, 1: 1.0, 2: 1.0, 3: 0.0}
        gradient = LocalTensor({r: torch.tensor([v], dtype=torch.bfloat16) for r, v in parts.items()})
        read.backward(gradient)
    exact = dtype is not None
    assert {value.item() for value in rank_values(weight.grad).values()} == {258.0 if exact else 256.0}
