"""The parts of a training loop other than the model. The losses work without a plan too."""

from shardplan.runtime.parallel.fused_logits import fused_logits
from shardplan.runtime.parallel.vocabulary_loss import causal_lm_loss, cross_entropy, vocabulary_parallel_nll
from shardplan.runtime.parallel.vocabulary_probabilities import entropy, log_probabilities, top_k
from shardplan.torchlib.local_parts import to_local_if_dtensor

from .context_parallel import context_parallel
from .expert_bias import count_expert_tokens, update_expert_bias
from .gradients import clip_grad_by_total_norm_, clip_grad_norm_, get_grad_norm
from .inference import unshard
from .micro_batches import micro_batches
from .padding import pad_to_multiple
from .watch_ranks import watch_ranks

__all__ = [
    "causal_lm_loss",
    "clip_grad_by_total_norm_",
    "clip_grad_norm_",
    "context_parallel",
    "count_expert_tokens",
    "cross_entropy",
    "entropy",
    "fused_logits",
    "get_grad_norm",
    "log_probabilities",
    "micro_batches",
    "pad_to_multiple",
    "to_local_if_dtensor",
    "top_k",
    "unshard",
    "update_expert_bias",
    "vocabulary_parallel_nll",
    "watch_ranks",
]
