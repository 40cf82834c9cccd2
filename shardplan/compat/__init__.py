"""The names that scripts of NeMo Automodel (0.7.0, and the forms of older releases) and NeMo-RL use, each a few lines over shardplan.
docs/compat.md says where their behaviour differs."""

from importlib.util import find_spec as _find_spec

from shardplan.model.packed import patch_is_packed_sequence as _patch_is_packed_sequence_for_training
from shardplan.runtime.training import to_local_if_dtensor

from .configs import DDPConfig, DistributedConfig, FSDP2Config, MegatronFSDPConfig, to_dict
from .gradient_norms import clip_grad_by_total_norm_, get_grad_norm
from .imports import import_class_from_path, import_classes_from_paths
from .logprobs import TrainingSamplingParams, apply_temperature_scaling, get_logprobs_from_vocab_parallel_logits
from .managers import DDPManager, FSDP2Manager, MegatronFSDPManager, _destroy_dist_connection
from .mesh_context import (
    MeshContext,
    ModelParallelizer,
    MoEParallelizerConfig,
    ParallelismSizes,
    compile_parallelized_model,
    get_model_parallelizer,
)
from .multimodal import CpVisionFrameShardingConfig, MultimodalDistributedConfig, MultimodalVisionConfig
from .strategies import (
    _parallelize_model,
    apply_fsdp2_sharding_recursively,
    apply_fsdp_sharding_recursively,
    fsdp2_strategy_parallelize,
    megatron_fsdp_strategy_parallelize,
    nvfsdp_strategy_parallelize,
    parallelize_model,
    unshard_fsdp2_model,
)
from .torch_plans import get_hf_tp_shard_plan, translate_to_torch_parallel_style
from .trainers import adopt

# nvFSDP became the package megatron-fsdp, so its backend is this package.
HAVE_NVFSDP = HAVE_MEGATRON_FSDP = bool(_find_spec("megatron_fsdp"))

__all__ = [
    "HAVE_MEGATRON_FSDP",
    "HAVE_NVFSDP",
    "CpVisionFrameShardingConfig",
    "DDPConfig",
    "DDPManager",
    "DistributedConfig",
    "FSDP2Config",
    "FSDP2Manager",
    "MegatronFSDPConfig",
    "MegatronFSDPManager",
    "MeshContext",
    "MoEParallelizerConfig",
    "ModelParallelizer",
    "MultimodalDistributedConfig",
    "MultimodalVisionConfig",
    "ParallelismSizes",
    "TrainingSamplingParams",
    "_destroy_dist_connection",
    "_parallelize_model",
    "_patch_is_packed_sequence_for_training",
    "adopt",
    "apply_fsdp2_sharding_recursively",
    "apply_fsdp_sharding_recursively",
    "apply_temperature_scaling",
    "clip_grad_by_total_norm_",
    "compile_parallelized_model",
    "fsdp2_strategy_parallelize",
    "get_grad_norm",
    "get_hf_tp_shard_plan",
    "get_logprobs_from_vocab_parallel_logits",
    "get_model_parallelizer",
    "import_class_from_path",
    "import_classes_from_paths",
    "megatron_fsdp_strategy_parallelize",
    "nvfsdp_strategy_parallelize",
    "parallelize_model",
    "to_dict",
    "to_local_if_dtensor",
    "translate_to_torch_parallel_style",
    "unshard_fsdp2_model",
]
