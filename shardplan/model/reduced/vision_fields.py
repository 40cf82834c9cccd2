"""Making numbers of vision parts small, by role: patches, tables of patches, stages of a pyramid, the layers that are read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import accumulate, count, pairwise
from math import gcd, isqrt
from typing import Any

from transformers import PreTrainedConfig

from .fields import TABLE, Role, role
from .pictures import vision_of
from .scale import is_size, tower_layers

PATCH = 4  # pixels
SIDE, ODD_SIDE = 4, 3  # patches
WINDOW = 2  # the side of an attention window, in patches
BLOCKS = 2  # of each stage: one with shifted windows, one without
HEAD_DIM = 8


def images(data: dict[str, Any], config: PreTrainedConfig, tp: int, *, alone: bool) -> None:
    """Make an image 4 x 4 patches (or fewer, if it had fewer), pooled to 2 x 2 tokens where tokens were pooled.

    Args:
        data: the fields made small; they are changed.
        config: the original.
        alone: the model is not part of another. Then a side is odd where it was, and as long as the rest is that tp leaves of all patches, so
            the number of all positions, with those that are not patches, keeps its relation to tp.
    """
    parts = (part for part in (config, *vars(config).values()) if isinstance(part, PreTrainedConfig))
    sizes = {id(part): (_named(part, "image")[1], _named(part, "patch")[1]) for part in parts}
    sides = {part: pixels // of_patch for part, (pixels, of_patch) in sizes.items() if pixels and of_patch}
    image, (patch, pixels) = _named(config, "image")[0], _named(config, "patch")
    if id(config) in sides:
        large = sides[id(config)]
        alike = (s for s in count(ODD_SIDE if large % 2 else SIDE, 2) if (s * s - large * large) % tp == 0)
        for name, side in ((patch, PATCH), (image, PATCH * min(next(alike) if alone else SIDE, large))):
            data[name] = _with_side(data[name], side)
    elif pixels and isinstance(data[patch], int) and not _named(config, "bins")[1]:
        data[patch] = PATCH
    name, window = _named(config, "window")
    if pixels and window > pixels and window % pixels == 0:  # in pixels
        data[name] = PATCH * min(SIDE, window // pixels)
    name, table = _named(config, "square")
    if pixels and table and isqrt(table) ** 2 == table:
        data[name] = min(SIDE, isqrt(table)) ** 2
    largest = max(sides.values(), default=0)
    name, tokens = _named(config, "image_tokens")
    if largest and tokens:
        data[name] = (min(SIDE, largest) // min(2, max(1, largest // isqrt(tokens)))) ** 2
    name, whole = _named(config, "cut")[0], _named(vision_of(config), "image")[1]
    if largest and whole and data.get(name):
        data[name] = [[side * PATCH * min(SIDE, largest) // whole for side in one] for one in data[name]]
    _by_patches(data, {side**2: min(SIDE, side) ** 2 for side in sides.values()})
    _stages(data, config)
    _convolved(data, config)


def read_layers(data: dict[str, Any], config: PreTrainedConfig) -> None:
    """Replace, in place, the numbers of the tower layers that are read by their numbers in the reduced model."""
    _renumbered(data, config, tower_layers(vision_of(config), config).layers)


def _renumbered(data: dict[str, Any], config: PreTrainedConfig, layers: tuple[int, ...]) -> None:
    def small(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [small(item) for item in value]
        return layers.index(value) if isinstance(value, int) and value in layers else value

    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            _renumbered(data[name], value, layers)
        elif role(name) == "read_layers":
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
    stages = _named(config, "stages")[0]
    depths = vars(config).get(stages)
    if not (isinstance(depths, (list, tuple)) and all(map(is_size, depths)) and len(data[stages]) == len(depths)):
        return  # where the stages count as layers, some are left out
    data[stages] = [min(depth, BLOCKS) for depth in depths]
    numbered = [range(*ends) for ends in pairwise(accumulate(depths, initial=0))]  # the blocks, over all stages
    for name, listed in of_stages(config, "blocks"):
        kept = [block for stage in numbered for block in _both_kinds(stage, listed)]
        data[name] = [kept.index(block) for block in listed if block in kept]
    lists = {n: v for n, v in vars(config).items() if isinstance(v, (list, tuple)) and len(v) == len(depths)}
    of_heads = [n for n, v in lists.items() if role(n) == "heads" and all(is_size(one) for one in v)]
    heads = lists[of_heads[0]] if of_heads else None
    data.update({name: list(lists[name]) for name in of_heads})
    (image, side), (_, patch), (name, window) = (_named(config, what) for what in ("image", "patch", "window"))
    stride = next((strides[0] for _, strides in of_stages(config, "strides")), 0)
    halvings = 2 ** (len(depths) - 1)
    across = patch or stride
    if side and across and window and side // across % (window * halvings) == 0:  # windows in each stage
        data[name] = [WINDOW] * len(depths) if name in lists else WINDOW
        data[image] = _with_side(data[image], WINDOW * halvings * (PATCH if patch else stride))
    for name, widths in of_stages(config, "widths"):
        if name not in lists and not is_size(vars(config)[name]):
            continue
        head_dim = widths[0] // heads[0] if heads else gcd(*widths)
        if head_dim > HEAD_DIM and head_dim % HEAD_DIM == 0:
            small = [one * HEAD_DIM // head_dim for one in widths]
            data[name] = small if name in lists else small[0]


def of_stages(config: PreTrainedConfig, what: str) -> Iterator[tuple[str, Sequence[int]]]:
    """The fields that have a meaning next to the stages of a pyramid, and their numbers.

    Args:
        what: "widths", "strides" or "blocks", as in [stages] of plans/numbers.toml.
    """
    for name, value in vars(config).items():
        numbers = value if isinstance(value, (list, tuple)) else [value]
        if any(re.fullmatch(one, name) for one in TABLE["stages"][what]) and numbers and all(map(is_size, numbers)):
            yield name, numbers


def _both_kinds(stage: range, listed: Sequence[int]) -> list[int]:
    """The kept blocks of a stage: the first and, where one of the others is listed and it is not, or the reverse, this one."""
    return [stage[0], *sorted(stage[1:], key=lambda block: (block in listed) == (stage[0] in listed))[: BLOCKS - 1]]


def _convolved(data: dict[str, Any], config: PreTrainedConfig) -> None:
    """Set the width after the last convolutions of a pyramid, their channels times the last of a list of factors, to their width."""
    name, width = _named(config, "width")
    factors = [value[-1] for value in vars(config).values() if isinstance(value, (list, tuple)) and value]
    for of, channels in vars(config).items():
        if role(of) == "convolutions" and any(is_size(factor) and width == channels * factor for factor in factors):
            data[name] = data[of] * width // channels


def _named(config: PreTrainedConfig, what: Role) -> tuple[str, int]:
    """The first field with a role, "" where there is none; and the number that it is, or, of a list, the first after frames."""
    name, value = next(((name, value) for name, value in vars(config).items() if role(name) == what), ("", 0))
    size = value[len(value) == 3] if isinstance(value, (list, tuple)) and value else value
    return name, size if type(size) is int and size > 0 else 0


def _with_side(value: Any, side: int) -> Any:
    """A size of an image with another side: a number, or a list with rows and columns, which may follow a number of frames."""
    return [*value[: len(value) == 3], side, side] if isinstance(value, (list, tuple)) else side
