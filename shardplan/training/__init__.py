"""What a training loop needs besides the model; the losses are usable without a plan."""

from shardplan.torchlib.vocabulary_loss import causal_lm_loss, vocabulary_parallel_nll

from .context import context_parallel

__all__ = ["causal_lm_loss", "context_parallel", "vocabulary_parallel_nll"]
