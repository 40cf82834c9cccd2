"""Making a reduced configuration of the same architecture."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from transformers import PreTrainedConfig

from shardplan.core.expressions import evaluate, parse_expression
from shardplan.model.config_numbers import config_value, text_config

from .counts import like
from .fields import TABLE, Role, Roles, role
from .layers import Kept, sections
from .scale import HEAD_DIMS, Scale, hidden_size, is_size, scale_of, tower_scale
from .state_spaces import state_space_widths
from .vision_fields import images, of_stages, read_layers

STATE = 8
EXPERTS = 4
STAGES = ("stage_names", "out_features", "out_indices")  # of backbones, by layer; they follow from the layers


def reduced_config(
    config: PreTrainedConfig,
    *,
    tp: int,
    ep: int = 1,
    seq_len: int,
    kept: Kept,
    tied: bool | None = None,
    heads_times: int = 1,
    head_dim: int = HEAD_DIMS[0],
    cp: int = 1,
    shared: Mapping[int, int] = MappingProxyType({}),
    roles: Roles = role,
) -> PreTrainedConfig:
    """A configuration of the same class with small numbers.

    Args:
        config: the original; it is not changed.
        tp: the number of ranks; every count keeps its relation to it.
        ep: the number of ranks that experts are distributed over.
        seq_len: windows are made smaller than this; position tables are not.
        kept: the layers of the text model to keep.
        tied: whether embedding and head share their weight; None is as in the original.
        heads_times: the factor by which there are more heads than usual.
        head_dim: the lower bound of head dims.
        cp, shared: as for `small_counts`.
        roles: the role of a field, by its name.

    Raises:
        Exception: whatever the configuration's class raises on a combination that it refuses.
    """
    text = text_config(config)
    options: dict[str, Any] = {
        "heads_times": heads_times,
        "head_dim": head_dim,
        "cp": cp,
        "shared": shared,
        "roles": roles,
    }
    scale = replace(scale_of(text, config, tp, seq_len, kept, **options), ep=ep)
    data = _shrunk(config, scale, text)
    if tied is not None:
        data["tie_word_embeddings"] = tied
        for name, value in vars(config).items():
            if value is text and name in data:
                data[name]["tie_word_embeddings"] = tied
    link(config, data, text, roles)
    read_layers(data, config)
    small = type(config)(**data)
    _with_heads(small, data)
    _no_cache(small)
    return small


def _with_heads(small: PreTrainedConfig, data: dict[str, Any]) -> None:
    """Replace, in place, head counts that the class computes from a width (`hidden_size // 64`) and that are zero by the small
    ones."""
    for name, value in vars(small).items():
        if isinstance(value, PreTrainedConfig) and isinstance(data.get(name), dict):
            _with_heads(value, data[name])
        elif role(name) == "heads" and type(value) is int and value == 0 and is_size(data.get(name)):
            setattr(small, name, data[name])


def _shrunk(config: PreTrainedConfig, scale: Scale, text: PreTrainedConfig) -> dict[str, Any]:
    """The fields of a configuration and of those nested in it, made small."""
    skipped = ("transformers_version", "model_type", *(STAGES if "stage_names" in config.to_dict() else ()))
    held = vars(config)  # the stored value may be in other units (Dory counts each layer as a half)
    data = {
        key: held[key]
        if type(held.get(key)) is int or (type(held.get(key)) is list and _is_plain(held[key]))
        else value
        for key, value in config.to_dict().items()
        if key not in skipped
    }
    for name, value in vars(config).items():
        if not isinstance(value, PreTrainedConfig):
            continue
        inner = tower_scale(value, config, scale) if value is not text and _is_model(value, scale) else scale
        data[name] = {**_shrunk(value, inner, text), "model_type": value.model_type}
    nested = {name for name, value in vars(config).items() if isinstance(value, PreTrainedConfig)}
    for name in data.keys() - nested:
        if name == "per_layer_config":
            data[name] = {
                str(scale.kept.layers.index(int(i))): {n: _field(v, scale, n) for n, v in overrides.items()}
                for i, overrides in data[name].items()
                if int(i) in scale.kept.layers
            }
        else:
            data[name] = _field(data[name], scale, name)
    if config is text:
        parts = sections(vars(config), scale.kept.count)
        data |= {name: scale.kept.before(part.stop) - scale.kept.before(part.start) for name, part in parts.items()}
    for name in _computed(config):
        del data[name]
    state_space_widths(data, config, scale.widths, scale.hidden, scale.tp, scale.cp)
    images(data, config, scale.tp, alone=config is text)
    return data


def _computed(config: PreTrainedConfig) -> set[str]:
    """Numbers without a role that the class computes from its fields, as they exist without an argument of their name. It
    computes others from the small fields."""
    arguments = inspect.signature(type(config).__init__).parameters
    found = {n for n, v in vars(config).items() if n not in arguments and type(v) is int and role(n) in (None, "image")}
    try:
        return found & vars(type(config)()).keys() if found else found
    except Exception:  # raised by a class without defaults
        return set()


def _is_model(config: PreTrainedConfig, scale: Scale) -> bool:
    """Whether a nested configuration describes another model than the scale is for."""
    hidden, layers = hidden_size(config), config_value(config, "num_hidden_layers")
    if hidden is None:
        return is_size(layers) and layers != scale.kept.count
    tables = {"heads": scale.heads, "head_dim": scale.head_dims, "width": scale.widths, "vocabulary": scale.vocabulary}
    return hidden != scale.hidden or any(
        table is not None and is_size(value) and value not in table
        for name, value in vars(config).items()
        for table in [tables.get(scale.roles(name) or "")]
    )


def _field(value: Any, scale: Scale, name: str) -> Any:
    """One field made small."""
    what = scale.roles(name)
    if what in SHRINK and value is not None:
        shrink = SHRINK[what]
        if isinstance(value, dict):  # a number for each kind of layer
            return {kind: shrink(item, scale, name) for kind, item in value.items()}
        return shrink(value, scale, name)
    if name.startswith("rope_") or name == "rope":
        return _rope(value, scale)
    if isinstance(value, (list, tuple)) and len(value) == scale.kept.count and _is_plain(value):
        return scale.kept.of_each(value)
    return value


def _rope(value: Any, scale: Scale) -> Any:
    """Shorten the rotary parameters: lists with one factor for each rotary frequency, and sections of the
    frequencies (multimodal rope)."""
    if not isinstance(value, dict):
        return value
    result = {}
    for name, item in value.items():
        if name in ("short_factor", "long_factor") and isinstance(item, list):
            result[name] = item[: max(1, int(len(item) * scale.rotary))]
        elif name == "mrope_section" and isinstance(item, list):
            ends = [int(sum(item[: i + 1]) * scale.rotary) for i in range(len(item))]
            result[name] = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
        else:
            result[name] = _rope(item, scale)
    return result


def _no_cache(config: PreTrainedConfig) -> None:
    for value in (config, *(value for value in vars(config).values() if isinstance(value, PreTrainedConfig))):
        if hasattr(value, "use_cache"):
            value.use_cache = False


def _is_plain(values: Any) -> bool:
    return all(isinstance(value, (str, int, float)) for value in values)


def _mapped(table: str) -> Callable[[Any, Scale, str], Any]:
    """A shrinker that looks values up; a list with one value per layer keeps those of the kept layers."""

    def shrink(value: Any, scale: Scale, name: str) -> Any:
        if isinstance(value, (list, tuple)):
            values = scale.kept.of(value) if len(value) == scale.kept.count else value
            return [shrink(item, scale, name) for item in values]
        mapping = getattr(scale, table)
        return mapping.get(value, value) if isinstance(value, int) and not isinstance(value, bool) else value

    return shrink


def _positions(value: Any, scale: Scale, name: str) -> Any:
    """As many that tp leaves the same rest: Whisper's encoder always reads all of its positions."""
    if not (isinstance(value, int) and scale.positions and value > scale.positions):
        return value
    return scale.positions - (scale.positions - value) % scale.tp


def _capped(limit: str) -> Callable[[Any, Scale, str], Any]:
    at_most = parse_expression(limit)

    def shrink(value: Any, scale: Scale, name: str) -> Any:
        most = evaluate(at_most, {"seq_len": scale.seq_len})
        return min(value, most) if isinstance(value, int) and value > 0 else value

    return shrink


def _layers(value: Any, scale: Scale, name: str) -> Any:
    return min(value, len(scale.kept.layers)) if isinstance(value, int) else value


def _layer_indices(value: Any, scale: Scale, name: str) -> Any:
    return scale.kept.indices(value) if isinstance(value, (list, tuple)) else value


def _sparse_layers(value: Any, scale: Scale, name: str) -> Any:
    """The number of sparse layers, at least one; their number among all layers decides which ones they are."""
    return max(1, value * len(scale.kept.layers) // scale.kept.count) if is_size(value) else value


def _share(value: Any, scale: Scale, name: str) -> Any:
    """The widths of parts that are joined to the hidden size keep their shares of it."""
    return value if scale.hidden is None else max(1, value * scale.widths[scale.hidden] // scale.hidden)


def _first_layers(value: Any, scale: Scale, name: str) -> Any:
    return scale.kept.before(value) if isinstance(value, int) else value


def _last_layers(value: Any, scale: Scale, name: str) -> Any:
    return len(scale.kept.layers) - scale.kept.before(scale.kept.count - value)


def _experts(value: Any, scale: Scale, name: str) -> Any:
    if not isinstance(value, int) or value <= EXPERTS:
        return value
    ranks = max(scale.tp, scale.ep)
    at_least = EXPERTS if scale.ep == 1 else max(EXPERTS, 2 * ranks)  # with one on each rank all local ids are 0
    return like(value, ranks, at_least=at_least, multiple_of=2 if value % 2 == 0 else 1)


def _state(value: Any, scale: Scale, name: str) -> Any:
    """A state size that no number of heads equals, even where one does in the original: so the reduced model's shapes tell them apart."""
    if not is_size(value):
        return value
    step, heads = 4 if value % 4 == 0 else 1, set(scale.state_heads.values())
    return like(value, scale.group_ranks, at_least=min(value, STATE), multiple_of=step, avoid=heads)


def _dropout(value: Any, scale: Scale, name: str) -> Any:
    return 0.0 if isinstance(value, float) else 0 if type(value) is int else value


SHRINK: dict[Role, Callable[[Any, Scale, str], Any]] = {
    "dropout": _dropout,
    "token": _mapped("tokens"),
    "layer_indices": _layer_indices,
    "first_layers": _first_layers,
    "last_layers": _last_layers,
    "layers": _layers,
    "sparse_layers": _sparse_layers,
    "heads": _mapped("heads"),
    "head_dim": _mapped("head_dims"),
    "scalar": _mapped("head_dims"),  # scales the scores: usually a head dim, else not a dimension
    "width": _mapped("widths"),
    "share": _share,
    "vocabulary": _mapped("vocabulary"),
    "positions": _positions,
    "experts": _experts,
    "state": _state,
    "mamba_heads": _mapped("state_heads"),
    "mamba_groups": _mapped("state_heads"),
    **{what: _capped(of["at_most"]) for what, of in TABLE.items() if "at_most" in of},
}


# Widths in one part of a configuration that are another part's hidden size: they become the small hidden size.
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
                stages = _stages_of(value, found)
                part.data[name] = stages or _each(value, part.data[name], _following(part, name, models))


def _stages_of(value: Any, found: list[_Part]) -> list[int]:
    """The small widths of a pyramid's stages where a list has these widths in any order; empty for any other."""
    for part in found:
        for name, widths in of_stages(part.config, "widths"):
            same = isinstance(value, (list, tuple)) and len(widths) > 1 and sorted(value) == sorted(widths)
            if same and len(part.data[name]) == len(widths):  # where the stages count as layers, some are left out
                small = dict(zip(widths, part.data[name], strict=True))
                return [small[one] for one in value]
    return []


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
