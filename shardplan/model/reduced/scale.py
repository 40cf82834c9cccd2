"""Choosing the small values for a model: the small number for each original number."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import islice
from types import MappingProxyType
from typing import Any

from transformers import PreTrainedConfig

from shardplan.model.config_numbers import config_value

from .counts import WIDTHS_OF_HIDDEN, WIDTHS_OF_TOWER, like, same_relation, small_head_dims, small_widths
from .fields import Role, Roles, role
from .layers import Kept
from .pictures import parts
from .state_spaces import ranks_of_a_group, small_state_heads

# The lower bounds of head dims, in the order in which they are tried: code may divide the hidden size by more than the heads.
HEAD_DIMS = (8, 12, 16)
VOCABULARY = 64  # rows of the small embedding, and at least 16 per rank


@dataclass(frozen=True)
class Scale:
    """The small values for one model within a configuration (its text model, its vision tower).

    Args:
        tp, ep: the numbers of ranks over which layers are split and experts distributed.
        seq_len: the length of the sequences on which the reduced model is run.
        heads, head_dims, widths, vocabulary: original -> small.
        tokens: special token ids, original -> small.
        kept: the layers that are kept.
        hidden: the original hidden size.
        rotary: the factor for rotary dims.
        positions: the largest number of positions, or None to leave it.
        state_heads: heads of state space layers, and their groups: original -> small.
        group_ranks: the number of ranks that share a group of these heads.
        head_dim: the lower bound of head dims.
        cp: the number of ranks that share the heads of a tp rank.
        roles: the role of a field, by its name.
    """

    tp: int
    seq_len: int
    heads: Mapping[int, int] = field(default_factory=dict)
    head_dims: Mapping[int, int] = field(default_factory=dict)
    widths: Mapping[int, int] = field(default_factory=dict)
    vocabulary: Mapping[int, int] = field(default_factory=dict)
    tokens: Mapping[int, int] = field(default_factory=dict)
    kept: Kept = field(default_factory=lambda: Kept(2, (0, 1)))
    hidden: int | None = None
    rotary: Fraction = Fraction(1)
    positions: int | None = None
    ep: int = 1
    state_heads: Mapping[int, int] = field(default_factory=dict)
    group_ranks: int = 1
    head_dim: int = HEAD_DIMS[0]
    cp: int = 1
    roles: Roles = role


def scale_of(
    config: PreTrainedConfig,
    whole: PreTrainedConfig,
    tp: int,
    seq_len: int,
    kept: Kept,
    limits: tuple[float, float] = WIDTHS_OF_HIDDEN,
    heads_times: int = 1,
    head_dim: int = HEAD_DIMS[0],
    cp: int = 1,
    shared: Mapping[int, int] = MappingProxyType({}),
    roles: Roles = role,
) -> Scale:
    """Choose the small values for the model that `config` describes; token ids are those of the `whole`.

    Args:
        heads_times: the factor by which there are more heads than usual.
        head_dim: the lower bound of head dims.
        cp, shared: as for `small_counts`.
        roles: the role of a field, by its name.
    """
    by_role: dict[Role, set[int]] = {}
    for name, value in _numbers(config):
        what = roles(name)
        if what is not None and value > 0:
            by_role.setdefault(what, set()).add(value)
    if whole is not config:  # of the projector between the models
        by_role.setdefault("width", set()).update(
            v for n, v in vars(whole).items() if roles(n) == "width" and is_size(v)
        )
    heads, state_heads = small_state_heads(by_role, tp, heads_times, cp, shared)
    main_heads = config_value(config, "num_attention_heads", config_value(config, "num_heads"))
    hidden = hidden_size(config)
    main_dim = config_value(config, "head_dim")
    if not main_dim and hidden and isinstance(main_heads, int) and main_heads > 0:
        main_dim = hidden // main_heads
    dims = set(by_role.get("head_dim", ()))
    if isinstance(main_dim, int):
        dims.add(main_dim)

    def keeps_product(small: Mapping[int, int]) -> bool:
        few = [ranks // count for count in heads for ranks in (tp,) if count < tp and tp % count == 0]
        if any((small[dim] % copies == 0) != (dim % copies == 0) for dim in small for copies in few):
            return False
        if hidden is None or main_heads not in heads or main_dim not in small:
            return True
        return main_heads * main_dim != hidden or same_relation(heads[main_heads] * small[main_dim], hidden, tp)

    head_dims = small_head_dims(dims, [(main_dim, part) for part in _rotary_parts(config)], keeps_product, head_dim)
    small_hidden = _small_hidden(hidden, main_heads, main_dim, heads, head_dims, tp)
    widths = small_widths(by_role.get("width", ()), (hidden, small_hidden), tp, limits) if hidden else {}
    vocabulary = _small_vocabulary(by_role.get("vocabulary", set()), tp)
    return Scale(
        tp,
        seq_len,
        heads,
        head_dims,
        widths,
        vocabulary,
        _small_tokens(whole, vocabulary.get(config_value(config, "vocab_size"), VOCABULARY)),
        kept,
        hidden,
        next((Fraction(small, large) for large, small in head_dims.items()), Fraction(1)),
        None if _scales_positions(config) else max(128, 2 * seq_len),
        state_heads=state_heads,
        group_ranks=ranks_of_a_group(by_role.get("mamba_groups", ()), tp),
        head_dim=head_dim,
        cp=cp,
        roles=roles,
    )


def _small_hidden(
    hidden: int | None,
    heads: int | None,
    head_dim: int | None,
    small_heads: Mapping[int, int],
    small_dims: Mapping[int, int],
    tp: int,
) -> int:
    """The small hidden size: heads x head dim where the original is this product, else above or below it as the original is."""
    if hidden is None:
        return 64
    if not isinstance(heads, int) or not isinstance(head_dim, int) or heads not in small_heads:
        return like(hidden, tp, at_least=min(hidden, 32 * max(1, tp // 2)), multiple_of=8)
    product = small_heads[heads] * small_dims[head_dim]
    for ratio in (1, 2):  # state-space models need exactly twice
        if hidden * ratio == heads * head_dim and product % ratio == 0:
            return product // ratio
    step = small_heads[heads] if hidden % heads == 0 else 1
    step *= 1 if step % 8 == 0 else 8 if step % 2 else 4
    begin = product + 1 if hidden > heads * head_dim else max(8, product // 2)
    return like(hidden, tp, at_least=begin, multiple_of=step, avoid={product})


def _small_vocabulary(values: set[int], tp: int) -> dict[int, int]:
    small: dict[int, int] = {}
    floor = max(VOCABULARY, 16 * tp)
    for value in sorted(values):
        small[value] = value if value < floor else like(value, tp, at_least=floor)
        floor = max(floor, small[value] + 1)
    return small


def _small_tokens(config: PreTrainedConfig, rows: int) -> dict[int, int]:
    """Move ids beyond the small vocabulary to its end, in order; different ids stay different."""
    ids = {value for name, value in _numbers(config, nested=True) if role(name) == "token" and value >= 0}
    free = iter(i for i in range(rows - 1, -1, -1) if i not in ids)
    return {i: next(free) for i in sorted(ids, reverse=True) if i >= rows}


def _numbers(config: PreTrainedConfig, *, nested: bool = False) -> Iterator[tuple[str, int]]:
    """The integers of a configuration and in its lists, and those of nested configurations that do not describe a model of
    their own."""
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig) and (nested or hidden_size(value) is None):
            yield from _numbers(value, nested=nested)
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, int) and not isinstance(item, bool):
                yield name, item
    for overrides in _per_layer(config).values():
        yield from ((name, item) for name, item in overrides.items() if type(item) is int)


def _per_layer(config: PreTrainedConfig) -> dict[str, dict[str, Any]]:
    """Layer index -> the fields that this layer overrides."""
    return config.to_dict().get("per_layer_config") or {} if getattr(config, "is_heterogeneous", False) else {}


def tower_scale(config: PreTrainedConfig, whole: PreTrainedConfig, outer: Scale) -> Scale:
    """The small values for a model next to the text model, such as a vision tower."""
    kept = tower_layers(config, whole)
    options: dict[str, Any] = {"head_dim": outer.head_dim, "roles": outer.roles}
    scale = scale_of(config, config, outer.tp, outer.seq_len, kept, WIDTHS_OF_TOWER, **options)
    return replace(scale, tokens=outer.tokens)


def layers_read(whole: PreTrainedConfig) -> list[int]:
    """The layers of a vision tower whose results are read, where a configuration names them."""
    found = [value for part in parts(whole) for name, value in vars(part).items() if role(name) == "read_layers"]
    return [i for one in found for i in (one if isinstance(one, (list, tuple)) else [one]) if isinstance(i, int)]


def tower_layers(config: PreTrainedConfig, whole: PreTrainedConfig) -> Kept:
    """The kept layers of a tower: two, its first layers, and the first layer that each list names; enough for indices from the end."""
    count = config_value(config, "num_hidden_layers", config_value(config, "depth"))
    named = [v for n, v in vars(config).items() if role(n) == "layer_indices" and isinstance(v, (list, tuple)) and v]
    read = layers_read(whole)
    from_end = [-i for i in read if i < 0]
    layers = {0, *(min(indices) for indices in named), *(i for i in read if is_size(count) and 0 < i < count)}
    others = (i for i in range(count if is_size(count) else 2) if i not in layers)
    layers |= set(islice(others, max([2, *from_end]) - len(layers))) if len(layers) < max([2, *from_end]) else set()
    return Kept(count if is_size(count) else 2, tuple(sorted(layers)))


def hidden_size(config: PreTrainedConfig) -> int | None:
    """The width of the model's residual stream. A tower with an `embed_dim` has this width; its `hidden_size` is the width of its result."""
    hidden = config_value(config, "hidden_size", config_value(config, "d_model", config_value(config, "hidden_dim")))
    inside = vars(config).get("embed_dim")
    if is_size(hidden) and is_size(inside) and "hidden_size" in vars(config):
        return inside
    return hidden if is_size(hidden) else None


def is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _rotary_parts(config: PreTrainedConfig) -> list[float]:
    found = []
    for node in (vars(config), *_dicts(config_value(config, "rope_parameters"))):
        for name in ("partial_rotary_factor", "rotary_pct", "rope_pct"):
            if isinstance(node.get(name), float):
                found.append(node[name])
    return found


def _dicts(node: Any) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict):
        yield node
        for value in node.values():
            yield from _dicts(value)


def _scales_positions(config: PreTrainedConfig) -> bool:
    """Whether the rotary frequencies depend on the number of positions."""
    return any(
        node.get("rope_type") not in (None, "default", "linear")
        for node in _dicts(config_value(config, "rope_parameters"))
    )
