"""The roles of numbers that names do not tell: the model is built on the meta device with one number doubled, and what changes is read."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from shardplan.model.config_numbers import config_value, text_config

from .fields import Role, role
from .pictures import parts
from .scale import hidden_size

Build = Callable[[PreTrainedConfig], Any]  # gives a model on the meta device
SMALLEST = 96  # smaller numbers are kernels, channels and bins, and stay


def measured_widths(config: PreTrainedConfig, build: Build, dims: Collection[int]) -> dict[str, Role]:
    """The names of numbers that are widths, or factors of them: where one is twice as large, so is a dim.

    Args:
        config: numbers whose names have roles may be small in it, others are the original's.
        build: raises whatever the configuration's class and the modelling code raise.
        dims: those of the original's parameters.
    """
    found: dict[str, Role] = {}
    base = None
    for index, part in enumerate(parts(config)):
        for name, value in vars(part).items():
            sizes = value if isinstance(value, (list, tuple)) else [value]
            sized = bool(sizes) and all(type(one) is int and one >= SMALLEST for one in sizes)
            if not sized or role(name) is not None or all(dim % one for dim in dims for one in sizes):
                continue
            base = base or _shapes(build(config))
            doubled = [2 * one for one in sizes]
            models = [*_built(config, index, name, doubled if sizes is value else doubled[0], build)]
            twice = {dim for one in models for dim in _doubled(base, _shapes(one))}
            tied = not models and value == hidden_size(part)  # as the groups of a convolution are to its channels
            if tied or any(dim % one == 0 for dim in twice for one in sizes):
                found[name] = "width"
    return found


def with_usual_names(config: PreTrainedConfig, build: Build) -> PreTrainedConfig:
    """A configuration whose numbers have names of their own, with the usual names mapped to them; any other as it is."""
    text = text_config(config)
    if hidden_size(text) is not None or config_value(text, "vocab_size") is not None:
        return config
    base, names = build(config), dict(text.attribute_map)
    if not any(module is _table(base) for module in base.modules()):
        return config
    at = next(i for i, part in enumerate(parts(config)) if part is text)
    for name, value in vars(text).items():
        if type(value) is int and value > 1 and role(name) is None:
            for larger in _built(config, at, name, 2 * value, build):
                usual = _usual_name(value, base, larger)
                names |= {usual if usual not in names else f"{name}_{usual}": name} if usual else {}
    config = copy.deepcopy(config)
    text_config(config).attribute_map = names
    return config


def _usual_name(number: int, base: Any, larger: Any) -> str:
    """The usual name of a number, from the model and the one that was built with twice the number."""
    (rows, hidden), now = (_table(one).weight.shape for one in (base, larger))
    if tuple(now) != (rows, hidden):
        return "vocab_size" if now[1] == hidden else "hidden_size"
    before, after = _shapes(base), _shapes(larger)
    if before.keys() < after.keys():
        return "num_hidden_layers"
    doubled = _doubled(before, after)
    if any(2 * dim == number for dim in doubled):  # the frequencies of a rotary embedding
        return "head_dim"
    if number in doubled:
        stacked = any(len(s) == 3 and s[0] != after[n][0] for n, s in before.items())
        return "num_experts" if stacked else "intermediate_size"
    if doubled:
        return "num_key_value_heads"
    # Heads that share the hidden size shape nothing, but each becomes narrower.
    narrower = any(n == 2 * m for n, m in zip(_numbers(base), _numbers(larger), strict=False))
    return "num_attention_heads" if narrower else ""


def _built(config: PreTrainedConfig, index: int, name: str, value: Any, build: Build) -> Iterator[Any]:
    """A model with another number in one part of its configuration; none where its code refuses the number, which is tied to others."""
    larger = copy.deepcopy(config)
    setattr([*parts(larger)][index], name, value)
    try:
        yield build(larger)
    except Exception:  # raised by the modelling code
        return


def _table(model: Any) -> Any:
    """The embedding of tokens; None for a model that has none."""
    try:
        return model.get_input_embeddings()
    except NotImplementedError:
        return None


def _numbers(model: nn.Module) -> list[int]:
    """The numbers that its modules keep."""
    return [n for module in model.modules() for n in vars(module).values() if type(n) is int]


def _doubled(before: dict[str, tuple[int, ...]], after: dict[str, tuple[int, ...]]) -> set[int]:
    """The dims that are twice as large in the other model."""
    both = before.keys() & after.keys()
    return {dim for name in both for dim, new in zip(before[name], after[name], strict=False) if new == 2 * dim}


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The dims of parameters and buffers without the rows of tables and the kernels of convolutions."""
    return {
        f"{name}.{own}": tuple(tensor.shape)[
            isinstance(module, nn.Embedding) : 2 if hasattr(module, "stride") else None
        ]
        for name, module in model.named_modules(remove_duplicate=False)
        for own, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None
    }
