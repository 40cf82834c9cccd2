"""Converting the plans of other projects: transformers, NeMo Automodel and NeMo-RL, torch, DeepSpeed."""

from .converting import ConvertedPlan, convert_plan

__all__ = ["ConvertedPlan", "convert_plan"]
