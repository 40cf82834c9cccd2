"""Making the fields of vision parts small: patches, tables by the number of patches, stages of a pyramid, the layers that are read."""

from __future__ import annotations

from math import gcd, isqrt
from typing import Any

from transformers import PreTrainedConfig

from .fields import role
from .pictures import parts
from .scale import READ, is_size, tower_layers

PATCH = 4  # pixels
SIDE, ODD_SIDE = 4, 3  # patches
WINDOW = 2  # the side of an attention window, in patches
BLOCKS = 2  # of each stage: one with shifted windows, one without
HEAD_DIM = 8


def images(data: dict[str, Any], config: PreTrainedConfig, alone: bool) -> None:
    """Make an image 4 x 4 patches (or fewer, if it had fewer), pooled to 2 x 2 tokens where tokens were
    pooled.

    Args:
        data: the fields made small; they are changed.
        config: the original.
        alone: the model is not part of another. Then an odd side becomes 3 patches: every odd square is one more than a multiple
            of eight, so the number of all positions, with those that are not patches, keeps its relation to tp.
    """
    sides: dict[int, int] = {}
    for part in (config, *(value for value in vars(config).values() if isinstance(value, PreTrainedConfig))):
        image, patch = _side(getattr(part, "image_size", None)), _side(getattr(part, "patch_size", None))
        if image and patch:
            sides[id(part)] = image // patch
    patch = _side(data.get("patch_size"))
    if id(config) in sides:
        most = ODD_SIDE if alone and sides[id(config)] % 2 else SIDE
        for name, side in (("patch_size", PATCH), ("image_size", PATCH * min(most, sides[id(config)]))):
            data[name] = [side, side] if isinstance(data[name], (list, tuple)) else side
    elif patch and isinstance(data["patch_size"], int) and not any(name.endswith("_stride") for name in data):
        data["patch_size"] = PATCH
    window = getattr(config, "window_size", None)
    if patch and isinstance(window, int) and window > patch and window % patch == 0:  # in pixels
        data["window_size"] = PATCH * min(SIDE, window // patch)
    table = data.get("num_position_embeddings")
    if patch and isinstance(table, int) and isqrt(table) ** 2 == table:
        data["num_position_embeddings"] = min(SIDE, isqrt(table)) ** 2
    tokens = getattr(config, "mm_tokens_per_image", None)
    if isinstance(tokens, int) and sides:
        side = max(sides.values())
        kernel = min(2, max(1, side // isqrt(tokens)))
        data["mm_tokens_per_image"] = (min(SIDE, side) // kernel) ** 2
    points = data.get("image_grid_pinpoints")
    whole = _side(getattr(getattr(config, "vision_config", None), "image_size", None))
    if points and whole and sides:
        small = PATCH * min(SIDE, max(sides.values()))
        data["image_grid_pinpoints"] = [[side * small // whole for side in point] for point in points]
    _by_patches(data, {side**2: min(SIDE, side) ** 2 for side in sides.values()})
    _stages(data, config)
    _convolved(data, config)


def read_layers(data: dict[str, Any], config: PreTrainedConfig) -> None:
    """Replace, in place, the numbers of the tower layers that are read by their numbers in the reduced model."""
    vision = next((v for part in parts(config) if (v := getattr(part, "vision_config", None)) is not None), None)
    if vision is not None:
        _renumbered(data, config, tower_layers(vision, config).layers)


def _renumbered(data: dict[str, Any], config: PreTrainedConfig, layers: tuple[int, ...]) -> None:
    def small(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [small(item) for item in value]
        return layers.index(value) if isinstance(value, int) and value in layers else value

    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            _renumbered(data[name], value, layers)
        elif name == READ:
            data[name] = small(value)


def _by_patches(data: dict[str, Any], patches: dict[int, int]) -> None:
    """Reduce a table by the number of patches (for example, of the tokens that they become): it keeps its entry for a picture."""
    for name, value in data.items():
        if isinstance(value, dict) and value and all(str(key).isdecimal() for key in value):
            rows = {patches[int(key)]: item for key, item in value.items() if int(key) in patches}
            if rows and all(is_size(item) for item in rows.values()):
                data[name] = {key: max(1, key // 2) for key in rows}


def _stages(data: dict[str, Any], config: PreTrainedConfig) -> None:
    """Reduce a pyramid of stages: all stages stay, with fewer blocks and narrower heads, and in the same relation to each other."""
    depths = getattr(config, "depths", None)
    if not isinstance(depths, (list, tuple)) or not all(is_size(depth) for depth in depths):
        return
    if len(data["depths"]) != len(depths):  # the stages count as layers, and some are left out
        return
    data["depths"] = [min(depth, BLOCKS) for depth in depths]
    lists = {n: v for n, v in vars(config).items() if isinstance(v, (list, tuple)) and len(v) == len(depths)}
    of_heads = [n for n, v in lists.items() if role(n) == "heads" and all(is_size(one) for one in v)]
    heads = lists[of_heads[0]] if of_heads else None
    data.update({name: list(lists[name]) for name in of_heads})
    side, window = _side(getattr(config, "image_size", None)), getattr(config, "window_size", None)
    patch, halvings = _side(getattr(config, "patch_size", None)), 2 ** (len(depths) - 1)
    if side and patch and is_size(window) and side // patch % (window * halvings) == 0:  # windows in each stage
        small = WINDOW * halvings * PATCH
        data["window_size"] = WINDOW
        data["image_size"] = [small, small] if isinstance(config.image_size, (list, tuple)) else small
    for name, value in vars(config).items():
        widths = value if name in lists else [value]
        if name not in ("embed_dim", "hidden_sizes", "hidden_size") or not all(is_size(one) for one in widths):
            continue
        head_dim = widths[0] // heads[0] if heads else gcd(*widths)
        if head_dim > HEAD_DIM and head_dim % HEAD_DIM == 0:
            small = [one * HEAD_DIM // head_dim for one in widths]
            data[name] = small if name in lists else small[0]


def _convolved(data: dict[str, Any], config: PreTrainedConfig) -> None:
    """Set the width after the last convolutions of a pyramid to their width."""
    channels, factors = getattr(config, "base_channels", None), getattr(config, "channel_multiplier", None)
    if is_size(channels) and factors and getattr(config, "hidden_size", None) == channels * factors[-1]:
        data["hidden_size"] = data["base_channels"] * factors[-1]


def _side(value: Any) -> int | None:
    """The side in pixels; the first one of a list."""
    value = value[0] if isinstance(value, (list, tuple)) and value else value
    return value if is_size(value) else None
