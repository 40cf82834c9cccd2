"""The names of dtypes, as users write them."""

from __future__ import annotations

NAMES = {
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "fp16": "float16",
    "half": "float16",
    "float32": "float32",
    "fp32": "float32",
    "float": "float32",
}

DTYPES = tuple(dict.fromkeys(NAMES.values()))


def dtype_name(dtype: object, what: str, allowed: tuple[str, ...] = DTYPES) -> str:
    """torch's name of a dtype: `bfloat16` for "bf16", "bfloat16", "torch.bfloat16" and torch.bfloat16.

    Args:
        what: the argument, for the message.

    Raises:
        ValueError: the dtype is not one of the allowed ones.
    """
    name = NAMES.get(str(dtype).removeprefix("torch."))
    if name not in allowed:
        raise ValueError(f"{what} must be {', '.join(allowed[:-1])} or {allowed[-1]}, not {dtype!r}")
    return name
