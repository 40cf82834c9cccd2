"""A Llama, and the ways to split it that benchmarks compare."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

warnings.filterwarnings("ignore")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import Replicate, Shard  # noqa: E402
from torch.distributed.tensor.parallel import (  # noqa: E402
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig  # noqa: E402

import shardplan  # noqa: E402
from shardplan.runtime.apply import applied  # noqa: E402
from shardplan.runtime.apply.applied import was_touched  # noqa: E402

Way = Callable[[PretrainedConfig, DeviceMesh], nn.Module]

SHAPES = {
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32},
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64},
    "405B": {"hidden_size": 16384, "intermediate_size": 53248, "num_attention_heads": 128},
}


def llama(layers: int, *, vocab_size: int = 1024, num_key_value_heads: int = 8, **shape: int) -> LlamaConfig:
    return LlamaConfig(
        num_hidden_layers=layers,
        num_key_value_heads=num_key_value_heads,
        vocab_size=vocab_size,
        use_cache=False,
        max_position_embeddings=131072,
        **shape,
    )


@contextmanager
def fake_ranks(tp: int, dp: int = 1, device: str = "cpu") -> Iterator[DeviceMesh]:
    """A mesh with this process as rank 0: collectives are called, and do nothing."""
    dist.init_process_group("fake", rank=0, world_size=dp * tp, store=FakeStore())
    try:
        yield init_device_mesh(device, (dp, tp), mesh_dim_names=("dp_shard", "tp"))
    finally:
        dist.destroy_process_group()


def fresh(config: PretrainedConfig) -> nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


def planned(
    config: LlamaConfig,
    mesh: DeviceMesh,
    *,
    sp: bool,
    compile: bool = False,
    regather: bool | None = None,
    checkpointed: bool = False,
    linear: type[nn.Linear] = nn.Linear,
) -> nn.Module:
    """
    Args:
        linear: the class of the model's Linear layers.
    """
    model = fresh(config)
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = linear
    options = {"data_parallel": False, "compile": {"modules": ["model.layers.*"]} if compile else False}
    options |= {"activation_checkpointing": {"mode": "full"} if checkpointed else False}
    return shardplan.apply_plan(
        model,
        mesh,
        "llama",
        sequence_parallel=sp,
        regather=regather,
        src_data_rank=None,
        prove=False,
        **options,
    )


def trunk(model: nn.Module, **inputs: torch.Tensor) -> torch.Tensor:
    """The last hidden state on the meta device, with the moves that the trunk has in a forward of the model, which refuses to run
    without weights."""
    shared = applied(model).shared if was_touched(model) else None
    if shared is not None:
        shared.regime.inside = "model"
    try:
        return model.model(**inputs).last_hidden_state
    finally:
        if shared is not None:
            shared.regime.inside = ""


def torch_tp_styles() -> dict[str, ParallelStyle]:
    """torch's styles as its tutorial has them, and as transformers' plan for Llama says the same."""
    return {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "model.layers.*.self_attn.[qkv]_proj": ColwiseParallel(),
        "model.layers.*.self_attn.o_proj": RowwiseParallel(),
        "model.layers.*.mlp.gate_proj": ColwiseParallel(),
        "model.layers.*.mlp.up_proj": ColwiseParallel(),
        "model.layers.*.mlp.down_proj": RowwiseParallel(),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }


def stock_tp(config: LlamaConfig, mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(fresh(config), mesh["tp"], torch_tp_styles(), src_data_rank=None)


def stock_sp(config: LlamaConfig, mesh: DeviceMesh) -> nn.Module:
    """The sequence-parallel plan for Llama that NeMo Automodel ships (its `optimized_tp_plans`, September 2025): norms hand
    sequence shards to column-wise matrices, whose input layout is left at its default."""
    model = fresh(config)
    plan = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "model.layers.*.input_layernorm": SequenceParallel(),
        "model.layers.*.self_attn.[qkv]_proj": ColwiseParallel(),
        "model.layers.*.self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
        "model.layers.*.post_attention_layernorm": SequenceParallel(),
        "model.layers.*.mlp.gate_proj": ColwiseParallel(),
        "model.layers.*.mlp.up_proj": ColwiseParallel(),
        "model.layers.*.mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    return parallelize_module(model, mesh["tp"], plan, src_data_rank=None)


def with_fsdp(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["dp_shard"])
    return fully_shard(model, mesh=mesh["dp_shard"])


def compiled(model: nn.Module) -> nn.Module:
    for layer in model.model.layers:
        layer.forward = torch.compile(layer.forward, fullgraph=True)
    return model
