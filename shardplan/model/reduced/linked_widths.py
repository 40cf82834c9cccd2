"""Widths in one part of a configuration that are another part's hidden size: they become the small hidden size."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from .fields import Roles, role
from .scale import hidden_size, is_size

OWN = ("hidden_size", "d_model", "embed_dim")
HALF = "num_pos_feats"  # the number of sines, and of cosines
SMALLEST = 64  # smaller numbers are equal by chance


@dataclass(frozen=True)
class _Part:
    """A nested configuration, and its fields made small."""

    path: str
    config: PreTrainedConfig
    data: dict[str, Any]


def link(config: PreTrainedConfig, data: dict[str, Any], text: PreTrainedConfig, roles: Roles) -> None:
    """Change the small fields of a configuration, in place. A width follows another part's hidden size where it equals this
    size, or this size times the number of joined patches or layers.

    Args:
        config: the original.
        data: its fields made small.
        text: the part that describes the text model.
        roles: the role of a field, by its name.
    """
    found = list(_parts("", config, data))
    models = [p for p in found if hidden_size(p.config) is not None]
    models.sort(key=lambda p: p.config is not text)  # where several are equal, it follows the text model's
    for part in found:
        for name, value in vars(part.config).items():
            if name in part.data and (name in OWN or role(name) is None) and roles(name) == "width":
                follows = _following(part, name, models)
                part.data[name] = _each(value, part.data[name], follows)


def _following(part: _Part, name: str, models: list[_Part]) -> Callable[[Any, Any], Any]:
    """(value, small value) -> the small value that follows another model's."""
    own = hidden_size(part.config)
    words = set(name.split("_"))
    # Where two parts have the same width, it follows the other part.
    order = sorted(models, key=lambda p: (p.config is part.config, not words & set(re.split(r"[._]", p.path))))

    def follows(value: Any, small: Any) -> Any:
        if not is_size(value) or value < SMALLEST or (value == own and name in OWN):
            return small
        for model in order:
            if value == hidden_size(model.config) and (new := _small_hidden(model)) is not None:
                return new
        for model in order:
            hidden, new = hidden_size(model.config), _small_hidden(model)
            if name == HALF and new is not None and hidden == 2 * value:
                return new // 2
            for many, few in _joined(model):
                if new is not None and hidden is not None and many > 1 and value == many * hidden:
                    return few * new
        return small

    return follows


def _joined(part: _Part) -> Iterator[tuple[int, int]]:
    """The number of a tower's values that are joined to one, before and after: patches to a token, results of layers."""
    for name in ("merge_size", "spatial_merge_size"):
        merge = getattr(part.config, name, None)
        if isinstance(merge, int):
            yield merge**2, merge**2
    for name, value in vars(part.config).items():
        if role(name) == "layer_indices" and isinstance(value, (list, tuple)):
            yield 1 + len(value), 1 + len(part.data[name])


def _small_hidden(part: _Part) -> int | None:
    names = ("embed_dim", "hidden_size", "d_model") if is_size(vars(part.config).get("embed_dim")) else OWN[:2]
    stored = (part.config.attribute_map.get(name, name) for name in names)
    return next((value for name in stored if is_size(value := part.data.get(name))), None)


def _each(value: Any, small: Any, follows: Callable[[Any, Any], Any]) -> Any:
    if isinstance(value, (list, tuple)) and isinstance(small, (list, tuple)) and len(value) == len(small):
        return [follows(*pair) for pair in zip(value, small, strict=True)]
    return follows(value, small)


def _parts(path: str, config: PreTrainedConfig, data: dict[str, Any]) -> Iterator[_Part]:
    yield _Part(path, config, data)
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            yield from _parts(f"{path}.{name}", value, data[name])
