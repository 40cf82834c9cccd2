"""What a training loop needs besides the model; usable without a plan."""

from shardplan.torchlib.vocabulary_loss import causal_lm_loss, vocabulary_parallel_nll

from .padding import pad_to_multiple

__all__ = ["causal_lm_loss", "pad_to_multiple", "vocabulary_parallel_nll"]
