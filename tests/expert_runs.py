"""Small models with experts that a plan distributes, and their loss, logits and gradients against the unsharded model's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import transformers
from small_models import share_of, whole
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import shardplan
from shardplan.proof.compare import TOLERANCE, relative_error
from shardplan.runtime.training import get_grad_norm

EXPERTS = 8
COMMON = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "mixtral": {"intermediate_size": 24, "num_local_experts": EXPERTS},
    "qwen3_moe": {
        "intermediate_size": 48,
        "moe_intermediate_size": 24,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 3,
        "head_dim": 8,
        "mlp_only_layers": [0],
    },
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "intermediate_size": 48,
        "moe_intermediate_size": 24,
        "n_routed_experts": EXPERTS,
        "num_experts_per_tok": 3,
        "n_group": 2,
        "topk_group": 2,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
    },
    "gpt_oss": {"intermediate_size": 24, "num_local_experts": EXPERTS, "num_experts_per_tok": 3, "head_dim": 8},
}

# Of types that have no causal class: one, and settings. Tests add theirs.
OWN: dict[str, tuple[type[transformers.PreTrainedModel], dict[str, Any]]] = {}


@dataclass(frozen=True)
class Case:
    """A model on a mesh.

    Args:
        mesh: the sizes of its axes.
        implementation: of its experts.
        settings: of its configuration.
        exchange: of its experts, in place of the plan's.
        rules: under `tensor_parallel`, besides the plan's.
        sliced: under `expert_parallel: sequence_parallel:`, besides the plan's.
        over_cp: under `context_parallel`; empty on a mesh with cp: derived.
        tokens: the shape of a batch.
        dtype: of the model.
        options: keyword arguments of `apply_plan`.
        change: done to the model first, in both runs.
        attention: its implementation.
    """

    model: str
    mesh: tuple[tuple[str, int], ...]
    sequence_parallel: bool = False
    implementation: str = "eager"
    settings: tuple[tuple[str, Any], ...] = ()
    exchange: str | None = None
    tokens: tuple[int, int] = (2, 12)
    dtype: torch.dtype = torch.float32
    options: tuple[tuple[str, Any], ...] = ()
    change: Callable[[nn.Module], None] | None = None
    attention: str = "eager"
    rules: tuple[tuple[str, str], ...] = ()
    sliced: tuple[tuple[str, dict[str, Any]], ...] = ()
    over_cp: tuple[tuple[str, str], ...] = ()


def config_of(model: str, **settings: Any) -> transformers.PreTrainedConfig:
    own = OWN[model][1] if model in OWN else SETTINGS[model]
    return transformers.AutoConfig.for_model(model, **{**COMMON, **own, **settings})


def build(case: Case) -> nn.Module:
    config = config_of(case.model, **dict(case.settings))
    torch.manual_seed(0)
    kinds = {"attn_implementation": case.attention, "experts_implementation": case.implementation}
    if case.model in OWN:
        model = OWN[case.model][0]._from_config(config, **kinds)
    else:
        model = transformers.AutoModelForCausalLM.from_config(config, **kinds)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.15 + (parameter.ndim == 1))
        if case.change is not None:
            case.change(model)
    return model.to(case.dtype).train()


def planned(case: Case) -> tuple[nn.Module, DeviceMesh]:
    """The model with its plan, on its mesh."""
    mesh, model = shardplan.build_mesh(**dict(case.mesh)), build(case)
    options = {"sequence_parallel": case.sequence_parallel, **dict(case.options)}
    shardplan.apply_plan(model, mesh, plan_of(case), **options, prove=False)
    return model, mesh


def batch(*seed: int, tokens: tuple[int, int] = (2, 12)) -> torch.Tensor:
    return torch.randint(0, 96, tokens, generator=torch.Generator().manual_seed(hash(seed) % 2**31))


def step(model: nn.Module, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out = model(input_ids=ids, labels=ids, use_cache=False)
    out.loss.backward()
    return out.loss.detach(), whole(out.logits.detach())


def plan_of(case: Case) -> Any:
    if case.rules:
        return {"version": "1", "extends": case.model, "tensor_parallel": dict(case.rules)}
    if case.over_cp:
        return {"version": "1", "extends": case.model, "context_parallel": dict(case.over_cp)}
    if case.sliced:
        return {
            "version": "1",
            "extends": case.model,
            "expert_parallel": {"sequence_parallel": dict(case.sliced)},
        }
    if case.exchange is None:
        return case.model
    rules = {"model.layers.*.mlp.experts": {"style": "ep_dispatch", "exchange": case.exchange}}
    return {"version": "1", "extends": case.model, "expert_parallel": rules}


def equal_to_the_unsharded(cases: list[Case]) -> None:
    for case in cases:
        model, mesh = planned(case)
        own, data_ranks = share_of(mesh)
        loss, logits = step(model, batch(own, tokens=case.tokens))
        gradients = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}

        reference = build(case)
        found = {i: step(reference, batch(i, tokens=case.tokens)) for i in range(data_ranks)}
        limit = TOLERANCE[case.dtype]
        assert relative_error(loss, found[own][0]) <= limit, (case, "loss")
        assert relative_error(logits, found[own][1]) <= limit, (case, "logits")
        expected = {name: p.grad / data_ranks for name, p in reference.named_parameters() if p.grad is not None}
        assert gradients.keys() == expected.keys(), case
        wrong = {name: error for name, x in gradients.items() if (error := relative_error(x, expected[name])) > limit}
        assert not wrong, (case, wrong)
        # The whole parameters are the unsharded model's.
        norm = get_grad_norm(model)
        squares = sum(x.double().square().sum() for x in expected.values())
        assert relative_error(norm.double(), squares.sqrt()) <= limit, (case, "norm")
        for name, parameter in reference.named_parameters():
            assert torch.equal(whole(dict(model.named_parameters())[name].detach()), parameter), (case, name)
    dist.barrier()


def of(
    model: str,
    *,
    sequence_parallel: bool = False,
    implementation: str = "eager",
    exchange: str | None = None,
    **mesh: int,
) -> Case:
    return Case(model, tuple(mesh.items()), sequence_parallel, implementation, exchange=exchange)
