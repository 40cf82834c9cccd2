"""Steps that an exception left half-way, hooks, and parameters that are switched: what a planned model does then, against the unsharded
model."""

from __future__ import annotations

import copy
from contextlib import nullcontext, suppress
from typing import Any
from unittest.mock import patch

import pytest
import torch
from processes import on_ranks
from small_models import batch, small_model
from test_processes_parts import RESETS, assert_same_gradients, planned
from torch import Tensor, nn

import shardplan
from shardplan.proof.compare import TOLERANCE, relative_error
from shardplan.runtime.parallel import left_steps

MESHES: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "tp": (
        {"sequence_parallel": True, "data_parallel": False, "activation_checkpointing": {"mode": "full"}},
        {"tp": 2},
    ),
    "fsdp2": ({}, {"dp_shard": 2, "tp": 1}),
    "fsdp2, tp": ({"sequence_parallel": True}, {"tp": 2}),
}


def refused() -> Any:
    """What the next step raises where torch cannot reset FSDP2's state."""
    return pytest.raises(RuntimeError, match="half-way, and torch .* cannot put FSDP2's state right")


def loss_of(model: nn.Module, seed: int = 3) -> Tensor:
    return model(input_ids=batch(seed), labels=batch(seed), use_cache=False).loss


def train(model: nn.Module, inner: nn.Module, where: str, *, zero: bool = True) -> None:
    """Steps of plain SGD; the second one ends in an exception, which the loop catches."""
    failing = False

    def fail(*_: Any) -> None:
        if failing:
            raise MemoryError("invented")

    act = inner.model.layers[0].mlp.act_fn
    forward = type(act).forward

    def failing_forward(self: nn.Module, x: Tensor) -> Tensor:
        output = forward(self, x)
        if self is act and where == "forward":
            fail()
        elif self is act and output.requires_grad:
            output.register_hook(fail)
        return output

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with patch.object(type(act), "forward", failing_forward):
        for step in range(4):
            failing = step == 1
            try:
                loss_of(model, step).backward()
            except MemoryError:
                assert failing
                if zero:
                    optimizer.zero_grad()
                continue
            assert not failing
            optimizer.step()
            optimizer.zero_grad()


def skip_a_batch(mesh: str) -> None:
    settings, sizes = MESHES[mesh]
    start = small_model("qwen3", dtype=torch.float64).train()
    for where in ("forward", "backward"):
        reference = copy.deepcopy(start)
        inner = planned(start, settings, **sizes)
        if "fsdp2" in mesh and not RESETS:
            with refused():
                train(inner, inner, where)
            continue
        for one in (reference, inner):
            train(one, one, where)
        after = dict(shardplan.full_parameters(inner))
        for name, parameter in reference.named_parameters():
            assert relative_error(after[name], parameter.detach()) < TOLERANCE[torch.float64], (where, name)
    if "fsdp2" in mesh and RESETS:
        inner = planned(start, settings, **sizes)
        with pytest.raises(RuntimeError, match="ended a backward of this model half-way.*begin it again"):
            train(inner, inner, "backward", zero=False)
        reference = copy.deepcopy(start)
        fresh = dict(shardplan.full_parameters(inner))
        with torch.no_grad():
            for name, parameter in reference.named_parameters():
                parameter.copy_(fresh[name])
        for one in (reference, inner):
            loss_of(one).backward()
        assert_same_gradients(inner, reference, mesh)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_a_batch_that_is_skipped_leaves_nothing_behind(mesh):
    on_ranks(2, skip_a_batch, mesh)


def accumulate(kind: str) -> None:
    """The forward of the third of four micro-batches ends in an exception, which the loop catches: the gradients of the others are kept."""
    start = small_model("qwen3", dtype=torch.float64).train()
    sizes = {"dp_replicate": 2, "dp_shard": 1} if kind == "of a replica" else {"dp_shard": 2}
    inner, reference = planned(start, {}, tp=1, **sizes), copy.deepcopy(start)
    activation = type(start.model.layers[0].mlp.act_fn)
    for one in (reference, inner):
        for step in range(4):
            if one is inner and kind == "not reduced":
                one.set_requires_gradient_sync(step == 3)
            elif one is inner and kind == "of a replica":
                one.set_requires_all_reduce(step == 3)
            failing = patch.object(activation, "forward", side_effect=MemoryError) if step == 2 else nullcontext()
            if one is inner and step == 3 and not RESETS:
                with refused():
                    loss_of(one, step)
                return
            with suppress(MemoryError), failing:
                loss_of(one, step).backward()
    assert_same_gradients(inner, reference, kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["reduced", "not reduced", "of a replica"])
def test_gradients_of_earlier_micro_batches_are_kept(kind):
    on_ranks(2, accumulate, kind)


def fail_with_ddp() -> None:
    inner = small_model("qwen3").train()
    mesh = shardplan.build_mesh(dp_replicate=2, device_type="cpu")
    model = shardplan.apply_plan(inner, mesh, "auto", data_parallel={"backend": "ddp"}, prove=False)
    with pytest.raises(RuntimeError, match="Expected to have finished reduction in the prior iteration"):
        train(model, inner, "backward")


@pytest.mark.slow
def test_with_ddp_the_next_forward_raises():
    on_ranks(2, fail_with_ddp)


def hook_parameters() -> None:
    start = small_model("qwen3", dtype=torch.float64).train()
    for settings, sizes in (({}, {"dp_shard": 2, "tp": 1}), ({"sequence_parallel": True}, {"tp": 2})):
        reference, model = copy.deepcopy(start), planned(start, settings, **sizes)
        for _ in range(2):  # after a forward, gathered parameters are in the places of some
            for parameter in model.parameters():
                with pytest.raises(RuntimeError, match="register_post_accumulate_grad_hook"):
                    parameter.register_hook(lambda gradient: 0.5 * gradient)
            loss_of(model)
        model.zero_grad()
        model = planned(start, settings, **sizes)
        for one in (reference, model):
            for parameter in one.parameters():
                parameter.register_post_accumulate_grad_hook(lambda p: (p.grad.mul_(0.5), None)[1])
            loss_of(one).backward()
        assert_same_gradients(model, reference, str(sizes))
    reference, model = copy.deepcopy(start), planned(start, {"data_parallel": False})
    for one in (reference, model):  # without FSDP2 they run
        for parameter in one.parameters():
            parameter.register_hook(lambda gradient: 0.5 * gradient)
        loss_of(one).backward()
    assert_same_gradients(model, reference, "tp")
    with torch.device("meta"):
        model = small_model("qwen3")
    mesh = shardplan.build_mesh(dp_shard=2, device_type="cpu")
    model = shardplan.materialize(shardplan.apply_plan(model, mesh, "auto", prove=False), "cpu").to(torch.float64)
    for parameter in model.parameters():
        with pytest.raises(RuntimeError, match="would never run"):
            parameter.register_hook(lambda gradient: gradient)


@pytest.mark.slow
def test_hooks_on_parameters_run_or_are_refused():
    on_ranks(2, hook_parameters)


def noisy(kind: str, source: str) -> None:
    """NEFTune adds noise to what the embedding returns."""
    reference = small_model(kind, dtype=torch.float64).train()
    for settings in ({"sequence_parallel": True, "data_parallel": False}, {"sequence_parallel": True}):
        noise = 0.05 * torch.randn(1, 1, 64, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        model = planned(reference, settings)
        before = copy.deepcopy(reference)
        loss_of(model)  # the plan's own moves, before
        handles = [
            one.get_submodule(source).register_forward_hook(lambda m, a, out: out + noise) for one in (before, model)
        ]
        losses = [loss_of(one) for one in (before, model)]
        for loss in losses:
            loss.backward()
        assert relative_error(losses[1].detach(), losses[0].detach()) < TOLERANCE[torch.float64]
        assert_same_gradients(model, before, f"{kind}: {source}")
        for handle in handles:
            handle.remove()
        before.zero_grad()
        model.zero_grad()
        for one in (before, model):
            loss_of(one).backward()
        assert_same_gradients(model, before, f"{kind}: {source}, without the hook")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "source"),
    [("qwen3", "model.embed_tokens"), ("gpt2", "transformer.wpe")],
)
def test_a_hook_on_an_embedding_sees_the_whole_value(kind, source):
    on_ranks(2, noisy, kind, source)


def adapted() -> nn.Module:
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"])
    model = peft.get_peft_model(small_model("qwen3", dtype=torch.float64), settings)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, dtype=torch.float64))
    return model.train()


def preference(model: nn.Module, *, gradients: bool) -> Tensor:
    """As DPO: policy and reference in turns, the reference being the model without its adapters."""

    def reference() -> Tensor:
        with torch.set_grad_enabled(gradients), model.disable_adapter():
            return loss_of(model).detach()

    first, chosen = reference(), loss_of(model)
    second, rejected = reference(), loss_of(model, 4)
    return ((chosen - first) - 0.5 * (rejected - second)).exp()


def switch_adapters() -> None:
    for settings in ({}, {"activation_checkpointing": {"mode": "full"}}):
        for gradients in (False, True) if settings == {} else (False,):
            reference = adapted()
            mesh = shardplan.build_mesh(tp=2, device_type="cpu")
            model = shardplan.apply_plan(adapted(), mesh, "auto", sequence_parallel=True, prove=False, **settings)
            for _ in range(2):
                reference.zero_grad()
                model.zero_grad()
                for one in (reference, model):
                    preference(one, gradients=gradients).backward()
                own = {n: p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None}
                for name, parameter in reference.named_parameters():
                    if parameter.grad is not None:
                        assert relative_error(own[name], parameter.grad) < 1e-6, (settings, gradients, name)


@pytest.mark.slow
def test_adapters_that_are_switched_off_for_a_reference_are_trained():
    on_ranks(2, switch_adapters)


def test_a_torch_that_cannot_reset_fsdp2_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(left_steps, "left_half_way", lambda root: "backward")
    with pytest.raises(RuntimeError, match="cannot put FSDP2's state right"):
        left_steps.put_right(object())  # type: ignore[arg-type]  # as before torch 2.13, without `reset_iter_state`
