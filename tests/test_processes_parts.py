"""Calls of a planned model's parts by themselves, outside of its own forward: each has the gradients of the unsharded model, or raises."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from processes import on_ranks
from small_models import batch, small_model, whole
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

import shardplan
from shardplan.proof.compare import relative_error

SETTINGS: dict[str, dict[str, Any]] = {
    "sp": {"sequence_parallel": True, "data_parallel": False},
    "sp, checkpoints": {
        "sequence_parallel": True,
        "data_parallel": False,
        "activation_checkpointing": {"mode": "full"},
    },
    "sp, fsdp2": {"sequence_parallel": True},
}
RESETS = hasattr(FSDPModule, "reset_iter_state")  # from torch 2.13 on


def planned(reference: nn.Module, settings: dict[str, Any], **sizes: int) -> nn.Module:
    mesh = shardplan.build_mesh(**(sizes or {"tp": 2}), device_type="cpu")
    return shardplan.apply_plan(copy.deepcopy(reference), mesh, "auto", prove=False, **settings).train()


def assert_same_gradients(model: nn.Module, reference: nn.Module, at: str) -> None:
    own = {name: gradient for name, _, gradient in shardplan.full_parameters(model, gradients=True)}
    for name, parameter in reference.named_parameters():
        if parameter.grad is None:
            assert own[name] is None or not own[name].any(), (at, name)
        else:
            assert own[name] is not None, (at, name)
            # Norms and scores are float32 in the models' own code.
            assert relative_error(own[name], parameter.grad) < 1e-6, (at, name)


def hidden(model: nn.Module) -> tuple[Tensor, ...]:
    return model(input_ids=batch(3), use_cache=False, output_hidden_states=True).hidden_states


def chunked(model: nn.Module, *, reentrant: bool) -> Tensor:
    """What chunked and fused cross entropy do: the head on a part of the sequence, in a checkpoint."""
    last = hidden(model)[-1]
    losses = [
        checkpoint(lambda h, i=i: model.lm_head(h[:, i : i + 4]).logsumexp(-1).sum(), last, use_reentrant=reentrant)
        for i in range(0, last.shape[1], 4)
    ]
    return torch.stack(losses).sum()


def with_its_own_loss(model: nn.Module) -> Tensor:
    output = model(input_ids=batch(3), labels=batch(3), use_cache=False, output_hidden_states=True)
    return output.loss + model.lm_head(output.hidden_states[-1]).logsumexp(-1).sum()


def after_an_error(model: nn.Module) -> Tensor:
    with pytest.raises(RuntimeError):
        model.model.norm(torch.ones(2, 3, 7))
    return model(input_ids=batch(3), labels=batch(3), use_cache=False).loss


def probed(model: nn.Module) -> Tensor:
    """Nothing but the head is trained."""
    with torch.no_grad():
        last = hidden(model)[-1]
    return model.lm_head(last).logsumexp(-1).sum()


LOSSES: dict[str, Callable[[nn.Module], Tensor]] = {
    "the trunk": lambda m: m.model(input_ids=batch(3), use_cache=False).last_hidden_state.mean(1).norm(dim=-1).sum(),
    "the trunk, a length that tp does not divide": lambda m: (
        m.model(input_ids=batch(3)[:, :5]).last_hidden_state[0].pow(3).sum()
    ),
    "the head": lambda m: m.lm_head(hidden(m)[-1]).logsumexp(-1).sum(),
    "the head in chunks": lambda m: chunked(m, reentrant=False),
    "the head in chunks, reentrant": lambda m: chunked(m, reentrant=True),
    "the head and its own loss": with_its_own_loss,
    "the head alone": probed,
    "the last norm": lambda m: m.model.norm(hidden(m)[1]).pow(3).sum(),
    "a block's part": lambda m: m.model.layers[1].mlp(hidden(m)[1]).pow(3).sum(),
    "the embedding": lambda m: m(inputs_embeds=1.5 * m.model.embed_tokens(batch(3)), labels=batch(3)).loss,
    "a checkpoint around the model": lambda m: checkpoint(
        lambda: m(input_ids=batch(3), labels=batch(3)).loss, use_reentrant=False
    ),
    "a step after an error": after_an_error,
}


def call(setting: str) -> None:
    reference = small_model("qwen3", dtype=torch.float64).train()
    model = planned(reference, SETTINGS[setting])
    for name, loss in LOSSES.items():
        losses = []
        for one in (reference, model):
            one.zero_grad()
            losses.append(loss(one))
            losses[-1].backward()
        assert relative_error(whole(losses[1].detach()), losses[0].detach()) < 1e-6, name
        assert_same_gradients(model, reference, f"{setting}: {name}")


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
def test_parts_that_take_and_return_whole_values_are_right(setting):
    on_ranks(2, call, setting)


@pytest.mark.slow
def test_parts_are_right_where_their_parameters_are_sharded():
    on_ranks(4, call_sharded)


def call_sharded() -> None:
    """The root's parameters are gathered for a part, and their gradients reduced, also where no unit runs next to it."""
    reference = small_model("qwen3", dtype=torch.float64).train()
    for name in ("the trunk", "the head alone"):
        model = planned(reference, {"sequence_parallel": True}, dp_shard=2, tp=2)
        for one in (reference, model):
            one.zero_grad()
            LOSSES[name](one).backward()
        assert_same_gradients(model, reference, name)
    with pytest.raises(RuntimeError, match="FSDP2 has not gathered"):
        model.model.layers[0].mlp(hidden(model)[1])


def call_gathered(kind: str, sizes: dict[str, int]) -> None:
    """Data parallelism alone, and with experts: values are whole everywhere."""
    reference = small_model(kind, dtype=torch.float64).train()
    model = planned(reference, {}, **sizes)
    for name in (
        "the trunk",
        "the head",
        "the head in chunks",
        "the head alone",
        "the last norm",
        "the embedding",
        *(["a step after an error"] if RESETS else []),  # refused before torch 2.13, where FSDP2 is left half-way
    ):
        for one in (reference, model):
            one.zero_grad()
            LOSSES[name](one).backward()
        assert_same_gradients(model, reference, f"{kind}: {name}")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "sizes"), [("qwen3", {"dp_shard": 2}), ("mixtral", {"dp_shard": 2, "ep": 2})])
def test_parts_are_right_where_values_are_whole_everywhere(kind: str, sizes: dict[str, int]) -> None:
    on_ranks(2, call_gathered, kind, sizes)


def refuse() -> None:
    model = planned(small_model("qwen3"), SETTINGS["sp"])
    states = [state.detach() for state in hidden(model)]
    layer = model.model.layers[1]
    for inner in (layer.self_attn.q_proj, layer.mlp.down_proj, layer.self_attn.q_norm):
        with pytest.raises(RuntimeError, match=r"layers\.1\.\S+ was called by itself, .* Call model\.layers\.1"):
            inner(states[1])
    with pytest.raises(RuntimeError, match="a checkpoint .* without a checkpoint around it"):
        checkpoint(layer.mlp, states[1].requires_grad_(), use_reentrant=False)
    loss = checkpoint(layer.mlp, states[1].requires_grad_(), use_reentrant=True).sum()
    with pytest.raises(RuntimeError, match="use checkpoints with use_reentrant=False"):
        loss.backward()
    model.gradient_checkpointing_enable()
    with pytest.raises(RuntimeError, match="activation_checkpointing of apply_plan"):
        model.model(input_ids=batch(3), use_cache=False)
    model(input_ids=batch(3), labels=batch(3), use_cache=False).loss.backward()


@pytest.mark.slow
def test_what_has_a_ranks_share_or_would_run_again_otherwise_is_refused():
    on_ranks(2, refuse)


def tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield from [value] if value.is_floating_point() else []
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from tensors(one)
    elif hasattr(value, "values"):
        for one in value.values():
            yield from tensors(one)


def fresh(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if isinstance(value, (tuple, list)):
        return type(value)(fresh(one) for one in value)
    return {name: fresh(one) for name, one in value.items()} if isinstance(value, dict) else value


def call_each(kind: str, setting: str) -> tuple[int, int]:
    """Every module, with what the unsharded model gives it. How many were right, and how many were refused."""
    reference = small_model(kind, dtype=torch.float64).train()
    given: dict[str, tuple[tuple, dict]] = {}
    hooks = [
        module.register_forward_pre_hook(
            lambda _, args, kwargs, name=name: given.setdefault(name, (args, kwargs)) and None, with_kwargs=True
        )
        for name, module in reference.named_modules()
        if name
    ]
    reference(input_ids=batch(3), use_cache=False)
    for hook in hooks:
        hook.remove()
    model = planned(reference, SETTINGS.get(setting, {"data_parallel": False}))
    right = refused = 0
    for name, (args, kwargs) in given.items():
        found = []
        try:
            for one in (reference, model):
                one.zero_grad()
                inputs = fresh(args), fresh({k: v for k, v in kwargs.items() if k != "past_key_values"})
                outputs = [x for x in tensors(one.get_submodule(name)(*inputs[0], **inputs[1])) if x.requires_grad]
                draws = torch.Generator().manual_seed(3)
                if outputs:
                    sum((x * torch.randn(x.shape, generator=draws, dtype=x.dtype)).sum() for x in outputs).backward()
                found.append(([x.detach() for x in outputs], [x.grad for x in tensors(inputs) if x.grad is not None]))
        except RuntimeError as error:
            assert "called by itself" in str(error), name
            refused += 1
            continue
        for own, theirs in zip(found[1], found[0], strict=True):
            assert len(own) == len(theirs), name
            assert all(relative_error(a, b) < 1e-6 for a, b in zip(own, theirs, strict=True)), name
        assert_same_gradients(model, reference, f"{kind}, {setting}: {name}")
        right += 1
    return right, refused


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "setting"), [("gpt2", "sp"), ("mixtral", "tp")])
def test_each_module_is_right_or_refused(kind, setting):
    for right, refused in on_ranks(2, call_each, kind, setting):
        assert right > 8 and refused > 7
