"""Which kernels torch's attention takes with grouped heads, without and with a mask: `python -m tests.gpu.attention cuda`. First the
function itself, each of its backends alone and free to choose; then planned models."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile

from .cases import Case, batch, of_dtype
from .rows import attempt
from .timing import Times, times_of

BACKENDS = ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "MATH")
OPERATOR = "aten::_scaled_dot_product"


def call_of(grouped: bool, mask: str, dtype: torch.dtype, device: str) -> Callable[[], None]:
    """Forward and backward of heads as a rank of Llama-3.1-8B at tp 2 has them.

    Args:
        grouped: 4 heads for each key-value head are said by `enable_gqa`; else the key-value heads are repeated before.
        mask: "causal" (no tensor), "full" or "boolean".
    """
    heads, groups, tokens, features = (16, 4, 2048, 128) if device == "cuda" else (4, 2, 32, 16)

    def made(heads: int) -> torch.Tensor:
        return torch.randn(1, heads, tokens, features, dtype=dtype, device=device, requires_grad=True)

    query, key, value = made(heads), made(groups), made(groups)
    given = (
        torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril()[None, None] if mask == "boolean" else None
    )

    def call() -> None:
        k, v = key, value
        if not grouped:
            k, v = (x.repeat_interleave(heads // groups, 1) for x in (key, value))
        result = scaled_dot_product_attention(
            query, k, v, attn_mask=given, is_causal=mask == "causal", enable_gqa=grouped
        )
        result.sum().backward()

    return call


def kernels_of(call: Callable[[], Any], device: str) -> dict[str, Any]:
    """torch's operators for attention, and the three kernels with the most time."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with profile(activities=activities) as profiled:
        call()
        if device == "cuda":
            torch.cuda.synchronize()
    events = profiled.key_averages()
    row: dict[str, Any] = {
        "operators": sorted({e.key.removeprefix("aten::") for e in events if e.key.startswith(OPERATOR)})
    }
    if device == "cuda":
        kernels = [e for e in events if e.device_type.name == "CUDA"]
        kernels.sort(key=lambda e: -e.self_device_time_total)
        row["kernels"] = [e.key[:60] for e in kernels[:3]]
    return row


def chosen(call: Callable[[], None], device: str) -> dict[str, Any]:
    call()
    times: Times = times_of(call, device, 5)
    return {**kernels_of(call, device), "ms": times.step}


def accepted(call: Callable[[], None], backend: str) -> dict[str, Any]:
    """Whether a backend takes a call; a refusal is a figure, and not wrong."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")  # torch warns why
        try:
            with sdpa_kernel([getattr(SDPBackend, backend)]):
                call()
        except RuntimeError as error:
            said = [str(one.message).split("(Triggered")[0].strip() for one in caught]
            return {"accepted": False, "why": (" / ".join(said) or str(error).splitlines()[0])[:300]}
    return {"accepted": True}


def of_model(case: Case, device: str) -> dict[str, Any]:
    """The unsharded model's: a planned one calls the same function, with a rank's heads."""
    model = of_dtype(case.model, case.dtype, device)
    given = batch(case, 0, device)
    return kernels_of(lambda: model(**given, use_cache=False).loss.backward(), device)


def main() -> None:
    device = sys.argv[1]
    for dtype in (torch.bfloat16, torch.float32):
        for grouped in (True, False):
            for mask in ("causal", "full", "boolean"):
                words = f"{'grouped' if grouped else 'repeated'}, {mask}, {str(dtype).removeprefix('torch.')}"
                call = call_of(grouped, mask, dtype, device)
                attempt(words, partial(chosen, call, device))
                for backend in BACKENDS if dtype == torch.bfloat16 else ():
                    attempt(f"{words}, {backend}", partial(accepted, call, backend))
    for padded in (False, True):
        case = Case("llama", padded=padded, dtype=torch.bfloat16)
        attempt(f"llama{', padded' if padded else ''}, bfloat16", partial(of_model, case, device))


if __name__ == "__main__":
    main()
