"""Plans of other projects as ours: transformers, NeMo Automodel and NeMo-RL, torch, DeepSpeed. Imports nothing heavy."""
