"""What a training loop needs besides the model; usable without a plan."""

from shardplan.torchlib.vocabulary_loss import causal_lm_loss, vocabulary_parallel_nll

__all__ = ["causal_lm_loss", "vocabulary_parallel_nll"]
