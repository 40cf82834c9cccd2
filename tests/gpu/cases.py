"""A model on a mesh of one device, against the unsharded model: loss, logits and every gradient, on every rank."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from shardplan.compiler.lower.program import Program
from shardplan.proof.compare import TOLERANCE, relative_error
from shardplan.runtime.apply.state import packed_parameters
from shardplan.runtime.parallel.fused_logits import FusedLogits
from shardplan.torchlib.packing import unpack

VOCABULARY, TOKENS = 512, (2, 64)
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 128,
    "use_cache": False,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 8, "moe_intermediate_size": 128, "norm_topk_prob": True}
SETTINGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "phi3": {"head_dim": 32},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16},
    "qwen3_moe": {**EXPERTS, "num_experts_per_tok": 2},
    # Whether an expert is chosen is no matter of rounding.
    "qwen3_moe, all experts": {**EXPERTS, "num_experts_per_tok": 8},
}
# Whole sequences are the unsharded model's own call.
OVER_CP = {
    "version": "1",
    "name": "long",
    "extends": "llama",
    "context_parallel": {
        "model.layers.0": "split_seq_input",
        "model.layers.*.self_attn": "exchange_heads",
        "model.norm": "gather_seq_output",
    },
}
MIXED = {"mixed_precision": {"param": "bfloat16", "reduce": "float32"}}


@dataclass(frozen=True)
class Case:
    """A model, how it is split, and the dtype of its parameters.

    Args:
        padded: the second sequence of the batch is shorter.
        compiled: each layer.
    """

    model: str
    tp: int = 2
    ep: int = 1
    dp_shard: int = 1
    cp: int = 1
    sequence_parallel: bool = False
    checkpointing: bool = False
    padded: bool = False
    compiled: bool = False
    logits: str = "replicated"
    dtype: torch.dtype = torch.float32

    @property
    def ranks(self) -> int:
        return self.tp * self.dp_shard * self.cp

    @property
    def data_ranks(self) -> int:
        """Over which FSDP2 shards."""
        return self.dp_shard * self.cp

    @property
    def plan(self) -> Any:
        return OVER_CP if self.cp > 1 else "auto"

    @property
    def words(self) -> str:
        sizes = [f"{axis} {getattr(self, axis)}" for axis in ("dp_shard", "cp", "tp", "ep") if getattr(self, axis) > 1]
        said = (
            ("sequence_parallel", "sequence"),
            ("checkpointing", "checkpointing"),
            ("padded", "padded"),
            ("compiled", "compiled"),
        )
        more = [word for name, word in said if getattr(self, name)]
        more += [f"{self.logits} logits"] if self.logits != "replicated" else []
        return ", ".join([self.model, " x ".join(sizes), *more, str(self.dtype).removeprefix("torch.")])


def all_cases() -> list[Case]:
    """Fewer ranks first, for each: what most plans do first."""
    low = torch.bfloat16
    return [
        Case("llama"),
        Case("llama", sequence_parallel=True),
        Case("llama", sequence_parallel=True, checkpointing=True),
        Case("llama", sequence_parallel=True, padded=True),
        Case("llama", dtype=low),
        Case("llama", sequence_parallel=True, checkpointing=True, dtype=low),
        Case("llama", sequence_parallel=True, padded=True, dtype=low),
        Case("qwen3_moe", ep=2),
        Case("qwen3_moe", ep=2, sequence_parallel=True),
        Case("qwen3_moe, all experts", ep=2, sequence_parallel=True, dtype=low),
        Case("qwen3_moe", sequence_parallel=True, checkpointing=True),
        Case("gemma3_text", sequence_parallel=True, dtype=low),
        Case("phi3", sequence_parallel=True),
        Case("llama", tp=4),
        Case("llama", tp=4, sequence_parallel=True, checkpointing=True),
        Case("llama", tp=4, sequence_parallel=True, dtype=low),
        Case("qwen3_moe", tp=4, ep=4, sequence_parallel=True),
        Case("llama", dp_shard=2, sequence_parallel=True),
        Case("llama", dp_shard=2, sequence_parallel=True, checkpointing=True, dtype=low),
        Case("qwen3_moe", dp_shard=2, ep=4, sequence_parallel=True),
        Case("llama", logits="sharded"),
        Case("llama", logits="fused", padded=True),
        Case("llama", logits="fused", dtype=low),
        Case("llama", tp=1, cp=2),
        Case("llama", cp=2, sequence_parallel=True, padded=True),
        Case("llama", cp=2, dtype=low),
        Case("llama", sequence_parallel=True, compiled=True),
        Case("llama", compiled=True, dtype=low),
    ]


@dataclass(frozen=True)
class Run:
    """What a step leaves: whole, and detached."""

    loss: Tensor
    logits: Tensor
    gradients: Mapping[str, Tensor]


def exactly() -> None:
    """Products in float32 are computed in float32."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False


@cache
def built(name: str) -> nn.Module:
    """The unsharded model, on the CPU, the same in every process."""
    config = AutoConfig.for_model(name.split(",")[0], **{**COMMON, **SETTINGS[name]})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.train()


def of_dtype(name: str, dtype: torch.dtype, device: str) -> nn.Module:
    """A copy on a device, its parameters, and in float64 all else, in a dtype."""
    model = copy.deepcopy(built(name)).to(device)
    if dtype == torch.float64:
        return model.double()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def batch(case: Case, data_rank: int, device: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(data_rank)
    ids = torch.randint(1, VOCABULARY, TOKENS, generator=generator)
    given = {"input_ids": ids, "labels": ids}
    if case.padded:
        mask = torch.ones_like(ids)
        mask[1, 40:] = 0
        given = {"input_ids": ids * mask, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask}
    return {name: value.to(device) for name, value in given.items()}


def step(model: nn.Module, given: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    out = model(**given, use_cache=False)
    out.loss.backward()
    return out.loss.detach(), whole(out.logits.detach())


def whole(value: Tensor) -> Tensor:
    if isinstance(value, FusedLogits):
        value = value.make()
    return value.full_tensor() if isinstance(value, DTensor) else value


def unsharded(case: Case, dtype: torch.dtype, device: str, data_rank: int = 0) -> Run:
    """Its loss and logits for a rank's batch, and the mean gradients of all."""
    model, found = of_dtype(case.model, dtype, device), []
    for i in range(case.dp_shard):
        found.append(step(model, batch(case, i, device)))
    gradients = {name: p.grad / case.dp_shard for name, p in model.named_parameters() if p.grad is not None}
    return Run(*found[data_rank], gradients)


def options_of(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    data_parallel: Any = False
    if case.data_ranks > 1:
        data_parallel = MIXED if dtype == torch.bfloat16 else {}
    checkpointing = {"mode": "full"} if case.checkpointing else False
    options = {"sequence_parallel": case.sequence_parallel, "activation_checkpointing": checkpointing}
    return {**options, "data_parallel": data_parallel, "logits": case.logits, "compile": {} if case.compiled else False}


def planned_step(case: Case, model: nn.Module, program: Program, mesh: DeviceMesh, device: str) -> Run:
    """The same of a planned model. All ranks of the mesh call it.

    Args:
        program: that was applied to it.
    """
    loss, logits = step(model, batch(case, mesh.get_local_rank("dp_shard"), device))
    packed, gradients = packed_parameters(program), {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            full, pack = whole(parameter.grad), packed.get(name)
            gradients[name] = full if pack is None else unpack(full, pack.dim, pack.parts, case.tp)
    return Run(loss, logits, gradients)


def errors(run: Run, reference: Run) -> dict[str, float]:
    """Of the loss, the logits and each gradient; infinite for one that only one of both has."""
    found = {"loss": relative_error(run.loss.float(), reference.loss.float())}
    if run.loss.dtype == torch.float64:
        found["loss"] = relative_error(run.loss, reference.loss)
    found["logits"] = relative_error(run.logits, reference.logits)
    for name in sorted(run.gradients.keys() ^ reference.gradients.keys()):
        found[name] = float("inf")
    for name in run.gradients.keys() & reference.gradients.keys():
        found[name] = relative_error(run.gradients[name], reference.gradients[name])
    return found


def judged(case: Case, run: Run, exact: Run, plain: Run | None) -> dict[str, Any]:
    """A row: whether one rank's step is right. In bfloat16 each error may be twice that of the unsharded model in bfloat16, and
    the loss is as exact as its dtype, whatever the luck of that model.

    Args:
        exact: unsharded, in the dtype of the comparison.
        plain: unsharded in bfloat16, where that is the case's dtype.
    """
    found = errors(run, exact)
    if plain is None:
        limits = dict.fromkeys(found, TOLERANCE[exact.loss.dtype])
    else:
        limits = {name: 2 * error for name, error in errors(plain, exact).items()}
        limits["loss"] = max(limits["loss"], 2**-9)
    shares = {
        name: error / limit if (limit := limits.get(name, 0.0)) else float(error > 0) * 1e9
        for name, error in found.items()
    }
    worst = max(shares, key=lambda name: shares[name])
    return {
        "ok": shares[worst] <= 1.0,
        "loss": found["loss"],
        "logits": found["logits"],
        "gradients": max(error for name, error in found.items() if name not in ("loss", "logits")),
        "tensors": len(found),
        "of the limit": shares[worst],
        "worst": worst,
    }


def worst_of(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    rank = max(range(len(rows)), key=lambda i: rows[i]["of the limit"])
    return {**rows[rank], "rank": rank, "ranks": len(rows)}


def precisions(case: Case) -> tuple[torch.dtype, ...]:
    """In which a case is run, until one is right: what is above the tolerance in float32 is decided in float64."""
    return (case.dtype,) if case.dtype == torch.bfloat16 else (torch.float32, torch.float64)


def references(case: Case, dtype: torch.dtype, device: str, data_rank: int = 0) -> tuple[Run, Run | None]:
    """What a run is held against: exact, and in bfloat16 plain."""
    if dtype != torch.bfloat16:
        return unsharded(case, dtype, device, data_rank), None
    return unsharded(case, torch.float32, device, data_rank), unsharded(case, dtype, device, data_rank)


def stored(case: Case, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a planned model's parameters before applying: FSDP2 casts them itself."""
    return torch.float32 if dtype == torch.bfloat16 and case.data_ranks > 1 else dtype
