"""The names that scripts of NeMo Automodel and NeMo-RL use, each a few lines over shardplan. docs/converting.md says where
they differ."""

from .imports import import_class_from_path, import_classes_from_paths
from .plans import get_hf_tp_shard_plan, translate_to_torch_parallel_style
from .trainers import adopt

__all__ = [
    "adopt",
    "get_hf_tp_shard_plan",
    "import_class_from_path",
    "import_classes_from_paths",
    "translate_to_torch_parallel_style",
]
