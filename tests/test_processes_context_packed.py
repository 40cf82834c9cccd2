"""Packed documents over cp, by the rules that are derived: every batch as in the unsharded model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from processes import on_ranks
from sampling import sampled
from test_processes_context_axis import compared

# Lengths of the documents in two rows of 32 tokens. Two ranks cut them at 16, four at 8, 16 and 24; windows have 5 or 8 tokens, chunks of scans 8.
PACKINGS = (
    ((16, 16), (8, 8, 8, 8)),  # at every cut
    ((17, 15), (7, 9, 9, 7)),  # next to them
    ((15, 17), (9, 7, 7, 9)),
    ((32,), (1,) * 32),  # one; as many as tokens
    ((31, 1), (1, 31)),
    ((5, 5, 5, 5, 5, 5, 2), (6, 6, 6, 6, 6, 2)),  # a window, and longer
    ((4,) * 8, (*(3,) * 10, 2)),
    ((24, 8), (8, 24)),
    ((25, 7), (23, 9)),
    ((2, 28, 2), (14, 4, 14)),  # over all cuts
    ((11, 13, 8), (12, 12, 8)),
    ((16, 1, 15), (15, 1, 16)),
)
# In float32 the gradients of a delta net's `dt_bias` are sums that nearly vanish: float64 decides.
# Mamba 2 is called without positions: only labels say where its documents begin. Sinks have no sdpa. flex goes backward on GPUs alone.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "gemma3_text": {},
    "gpt_oss": {"only": "eager"},
    "qwen3_next": {"dtype": torch.float64},
    "mamba2": {"positions": False, "only": None},
    "bamba": {},
}
SIZES = ((1, 2, 1), (1, 4, 1), (1, 2, 2))
CASES = [
    (name, kind, sizes)
    for name, case in MODELS.items()
    for kind in ((case["only"],) if "only" in case else ("eager", "sdpa"))
    for sizes in SIZES
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind", "sizes"), sampled(CASES, 2))
def test_documents_in_every_place(name: str, kind: str | None, sizes: tuple[int, ...]) -> None:
    settings = {} if kind is None else {"attn_implementation": kind}
    case = {"model": name, "plan": "auto", "sizes": sizes, "settings": settings, "packings": PACKINGS, **MODELS[name]}
    if sizes[-1] > 1:
        case["options"] = {"sequence_parallel": True}
    on_ranks(sizes[1] * sizes[2], compared, case, seconds=300)
