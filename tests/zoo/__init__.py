"""Every causal language model type of transformers against the built-in plan for it."""
