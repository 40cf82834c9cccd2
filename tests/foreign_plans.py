"""Plans as NeMo Automodel, NeMo-RL and torchtitan have them, and a DeepSpeed config: written anew, in their form."""

from __future__ import annotations

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

QKV = [f"model.layers.*.self_attn.{name}_proj" for name in "qkv"]
UP = ["model.layers.*.mlp.gate_proj", "model.layers.*.mlp.up_proj"]
O_PROJ, DOWN = "model.layers.*.self_attn.o_proj", "model.layers.*.mlp.down_proj"
STYLES = {name: ColwiseParallel() for name in (*QKV, *UP)} | {name: RowwiseParallel() for name in (O_PROJ, DOWN)}
NORMS = ["model.layers.*.input_layernorm", "model.layers.*.post_attention_layernorm"]


class SequenceParallelAllGatherActivation(SequenceParallel):
    """NeMo Automodel's: the norm gathers what it hands on."""


class VocabParallelEmbedding(RowwiseParallel):
    """NeMo Automodel's."""


class RotaryEmbedParallel(SequenceParallel):
    """NeMo Automodel's and NeMo-RL's."""


class Qwen3QKNorm(SequenceParallel):
    """NeMo Automodel's and NeMo-RL's."""


class ReplicatedWithGradAllReduce(ParallelStyle):
    """NeMo Automodel's since 0.7: marks the module, whose gradients its training step adds up."""

    def _apply(self, module: object, device_mesh: object) -> object:
        raise NotImplementedError


class MyOwn(ColwiseParallel):
    """Nobody knows what it does."""


def automodel_llama(model: object = None, sequence_parallel: bool = False) -> dict[str, ParallelStyle]:
    """The form of NeMo Automodel's function for Llama: fused names are there for models that have them."""
    plan: dict[str, ParallelStyle] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        **{name: ColwiseParallel() for name in (*QKV, "model.layers.*.self_attn.qkv_proj", *UP)},
        "model.layers.*.mlp.gate_up_proj": ColwiseParallel(),
        O_PROJ: RowwiseParallel(),
        DOWN: RowwiseParallel(),
        "lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    if sequence_parallel:
        plan |= {
            "model.embed_tokens": VocabParallelEmbedding(
                input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False
            ),
            "model.norm": SequenceParallel(),
            **{name: SequenceParallelAllGatherActivation(use_local_output=False) for name in NORMS},
            **{name: RowwiseParallel(output_layouts=Shard(1), use_local_output=False) for name in (O_PROJ, DOWN)},
            "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
        }
    return plan


def nemo_rl_qwen3() -> dict[str, ParallelStyle]:
    """The older sequence-parallel form: norms hand on DTensors, and the matrices after them say nothing."""
    return {
        **automodel_llama(sequence_parallel=True),
        **{name: SequenceParallel() for name in NORMS},
        "model.rotary_emb": RotaryEmbedParallel(),
        **{f"model.layers.*.self_attn.{name}_norm": Qwen3QKNorm() for name in "qk"},
        **{name: ColwiseParallel(use_local_output=False) for name in QKV},
    }


def torchtitan_llama() -> dict[str, ParallelStyle]:
    """torchtitan's form: each block says where its input is gathered."""
    plan = automodel_llama()
    hidden = {"input_kwarg_layouts": {"hidden_states": Shard(1)}}
    plan |= {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        **{name: SequenceParallel() for name in (*NORMS, "model.norm")},
        "model.layers.*.self_attn": PrepareModuleInput(
            **hidden, desired_input_kwarg_layouts={"hidden_states": Replicate()}
        ),
        "model.layers.*.mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        **{name: RowwiseParallel(output_layouts=Shard(1)) for name in (O_PROJ, DOWN)},
        "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    return {name: style for name, style in plan.items() if "qkv_proj" not in name and "gate_up_proj" not in name}


def takes_more(model: object, tp_size: int) -> dict[str, ParallelStyle]:
    return {}


def raises() -> dict[str, ParallelStyle]:
    raise RuntimeError("no plan today")


AUTOMODEL_SP = automodel_llama(sequence_parallel=True)
NAMES = dict.fromkeys((*QKV, *UP), "colwise") | {
    "model.embed_tokens": "rowwise_rep",
    O_PROJ: "rowwise",
    DOWN: "rowwise",
    "lm_head": "colwise_rep",
}
EMPTY: dict[str, ParallelStyle] = {}

DEEPSPEED = {
    "zero_optimization": {"stage": 1},
    "tensor_parallel": {
        "autotp_size": 4,
        "partition_config": {
            "use_default_specs": False,
            "layer_specs": [
                {"patterns": [r".*\.o_proj\.weight$", r".*\.down_proj\.weight$"], "partition_type": "row"},
                {"patterns": [r".*\.self_attn\.[qkv]_proj\.weight$"], "partition_type": "column"},
                {"patterns": [r".*\.mlp\.(up|gate)_proj\.weight$"]},
            ],
        },
    },
}


def automodel_phi3(model: object = None, sequence_parallel: bool = False) -> dict[str, ParallelStyle]:
    """As NeMo Automodel's for Phi-3: attention is computed whole, and DTensor gathers gate and up where they are cut."""
    whole = {"input_layouts": Replicate(), "output_layouts": Replicate()}
    return {
        "model.embed_tokens": VocabParallelEmbedding(**whole),
        "model.layers.*.self_attn.qkv_proj": RowwiseParallel(**whole),
        "model.layers.*.self_attn.o_proj": ColwiseParallel(**whole),
        "model.layers.*.mlp.gate_up_proj": ColwiseParallel(
            input_layouts=Replicate(), output_layouts=Shard(-1), use_local_output=False
        ),
        DOWN: RowwiseParallel(input_layouts=Shard(-1), output_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
