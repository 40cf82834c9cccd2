"""The memory of logits that stay split over the vocabulary and of fused ones: `python -m benchmarks.fused [cuda]`.

`estimate` tells it for a step of a model at tp 8; the allocator for the head and the loss of one of its ranks, forward and backward:
on a CUDA device at the same size, on the CPU at a sixty-fourth of the tokens and of the hidden size, with chunks in proportion, and
fused ones at all tokens with a sixty-fourth of the hidden size, next to the bytes of the logits that are not made.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.profiler import record_function

import shardplan
from shardplan.runtime.parallel.vocabulary_sums import tokens_of_chunk
from shardplan.runtime.training import causal_lm_loss, fused_logits

from .memory import STEP, peaks_of_steps
from .page import table

TOKENS, HIDDEN, VOCABULARY, TP = 131_072, 4096, 152_064, 8
SETTINGS = {
    "hidden_size": HIDDEN,
    "intermediate_size": 12_288,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": TOKENS,
}
TEXT = """## Fused logits

`python -m benchmarks.fused{argument}`: {tokens:,} tokens, a vocabulary of {vocabulary:,} at tp {tp}, hidden size {hidden:,}. The estimate is that of
a step of a Llama with four layers in bfloat16, the most bytes of logits in it. The allocator's is of one rank's head and loss, forward and backward,
with {measured:,} tokens and a hidden size of {features:,} in {dtype}{where}: the peak without the hidden states, the weight and their gradients, which both need.
"""
WHOLE = "The last column is the same for fused ones with all {tokens:,} tokens and a hidden size of {features:,}; for split ones it is the bytes of the logits alone, in float32.\n"
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def estimated(logits: str) -> int:
    """The most bytes of logits in a step."""
    made = shardplan.estimate(
        shardplan.Model("llama", settings=SETTINGS),
        "auto",
        {"tp": TP},
        shardplan.TrainingStep(TOKENS, micro_batch=1, precision="bf16", optimizer="none"),
        sequence_parallel=True,
        logits=logits,
        activation_checkpointing={"mode": "full"},
    )
    return made.memory.most["logits"]


def split_loss(hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int) -> Tensor:
    return causal_lm_loss(nn.functional.linear(hidden, weight), labels, chunk_size=chunk)


def fused_loss(hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int) -> Tensor:
    return causal_lm_loss(fused_logits(hidden, weight), labels, chunk_size=chunk)


class Head(nn.Module):
    def __init__(self, tokens: int, hidden: int, device: str) -> None:
        super().__init__()
        options = {"dtype": torch.bfloat16 if device == "cuda" else torch.float32, "device": device}
        self.hidden = nn.Parameter(torch.randn(1, tokens, hidden, **options))
        self.weight = nn.Parameter(torch.randn(VOCABULARY // TP, hidden, **options) / hidden**0.5)
        self.register_buffer("labels", torch.randint(VOCABULARY // TP, (1, tokens), device=device))

    def step(self, loss: Loss) -> None:
        loss(self.hidden, self.weight, self.labels).backward()
        self.zero_grad()

    @property
    def needed(self) -> int:
        return 2 * (self.hidden.nbytes + self.weight.nbytes) + self.labels.nbytes


def measured(loss: Loss, tokens: int, features: int, device: str) -> tuple[int, float]:
    """Bytes at the peak besides what is needed; seconds of a step."""
    if device == "cpu":
        needed = 0

        def made() -> tuple[list[nn.Module], Callable[[], None]]:
            nonlocal needed
            head = Head(tokens, features, device)
            needed = head.needed

            def step() -> None:
                with record_function(STEP):
                    head.step(loss)

            return [head], step

        return min(peaks_of_steps(made, steps=2)) - needed, 0.0
    head = Head(tokens, features, device)
    for _ in range(2):
        head.step(loss)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    begun = time.monotonic()
    for _ in range(5):
        head.step(loss)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - head.needed, (time.monotonic() - begun) / 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("device", nargs="?", default="cpu", choices=("cpu", "cuda"))
    device = parser.parse_args().device
    tokens, features = (TOKENS, HIDDEN) if device == "cuda" else (TOKENS // 64, HIDDEN // 64)
    chunk = tokens_of_chunk(VOCABULARY // TP) * tokens // TOKENS
    ways: dict[str, Loss] = {"sharded": partial(split_loss, chunk=chunk), "fused": partial(fused_loss, chunk=chunk)}
    guesses = {name: estimated(name) for name in ways}
    found = {name: measured(loss, tokens, features, device) for name, loss in ways.items()}
    argument, where = ("", " on the CPU") if device == "cpu" else (" cuda", f" on an {torch.cuda.get_device_name()}")
    sizes = {
        "tokens": TOKENS,
        "vocabulary": VOCABULARY,
        "tp": TP,
        "hidden": HIDDEN,
        "measured": tokens,
        "features": features,
        "dtype": "bfloat16" if device == "cuda" else "float32",
    }
    print(TEXT.format(argument=argument, where=where, **sizes))
    rows = [(name, f"{guesses[name]:,}", f"{found[name][0]:,}") for name in ways]
    ratios = [of["fused"] / of["sharded"] for of in (guesses, {name: peak for name, (peak, _) in found.items()})]
    rows.append(("fused / sharded", f"{ratios[0]:.3f} (goal: at most 0.05)", f"{ratios[1]:.3f}"))
    header = ("logits", "estimate", "allocator")
    if device == "cpu":
        header = (*header, f"{TOKENS:,} tokens")
        print(WHOLE.format(**sizes))
        logits = 4 * TOKENS * VOCABULARY // TP
        peak, _ = measured(partial(fused_loss, chunk=tokens_of_chunk(VOCABULARY // TP)), TOKENS, features, device)
        whole = f"{logits:,}", f"{peak:,}", f"{peak / logits:.3f} (goal: at most 0.05)"
        rows = [(*row, one) for row, one in zip(rows, whole, strict=True)]
    if device == "cuda":
        header = (*header, "a step of head and loss")
        times = [seconds for _, seconds in found.values()]
        rows = [(*row, f"{t * 1000:.1f} ms") for row, t in zip(rows, times, strict=False)] + [
            (*rows[-1], f"{times[1] / times[0]:.2f}")
        ]
    print(table(header, rows))


if __name__ == "__main__":
    main()
