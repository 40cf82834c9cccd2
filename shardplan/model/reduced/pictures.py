"""Arrays of pictures, films, sound and series in the forms that models read: plans/inputs.toml has the forms, and the facts about a
configuration on which they depend."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from math import prod
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from shardplan.core.data_files import data_folder
from shardplan.core.expressions import evaluate, names, parse_expression

from .fields import role

BATCH = 2
FORMS: Mapping[str, Any] = tomllib.loads((data_folder("plans") / "inputs.toml").read_text("utf-8"))
CALL = re.compile(r"(\w+)\((.*)\)")
WHOLE = ("vision", "whole")  # the parts of a configuration where a number is looked up


def _grid(rows: int, columns: int) -> Tensor:
    return torch.cartesian_prod(torch.arange(rows), torch.arange(columns))


def _boxes(rows: int, columns: int) -> Tensor:
    """The box of each patch of a picture, as shares of its sides: [BATCH, patches, 4] of left, top, right, bottom."""
    corners = (_grid(rows, columns) / torch.tensor([rows, columns])).flip(1)
    return torch.cat([corners, corners + torch.tensor([1 / columns, 1 / rows])], -1).expand(BATCH, -1, -1)


def _pooled(rows: int, columns: int) -> Tensor:
    """The patches of all pictures that are pooled to each token: [tokens, 4]."""
    number = torch.arange(BATCH * rows * columns).view(BATCH, rows // 2, 2, columns // 2, 2)
    return number.transpose(2, 3).reshape(-1, 4)


def _placed(generator: torch.Generator, rows: int, columns: int, width: int) -> Tensor:
    """Flat patches of each picture, each preceded by its row and column, which count from one: [BATCH, patches, 2 + width]."""
    patches = torch.randn(BATCH, rows * columns, width, generator=generator)
    return torch.cat([(_grid(rows, columns) + 1.0).expand(BATCH, -1, -1), patches], -1)


# The functions of plans/inputs.toml: from a generator and whole numbers to an array.
MAKERS: Mapping[str, Callable[..., Tensor]] = {
    "random": lambda g, *shape: torch.randn(*shape, generator=g),
    "below": lambda g, limit, *shape: torch.randint(limit, shape, generator=g),
    "ones": lambda g, *shape: torch.ones(*shape, dtype=torch.long),
    "reals": lambda g, *shape: torch.ones(*shape),
    "true": lambda g, *shape: torch.ones(*shape, dtype=torch.bool),
    "first": lambda g, count, *shape: (torch.arange(shape[-1]) < count).long().repeat(*shape[:-1], 1),
    "each": lambda g, *row: torch.tensor([row] * BATCH),  # the same row for each picture: [BATCH, row]
    "every": lambda g, number: torch.tensor([number] * BATCH),
    "places": lambda g, rows, columns: _grid(rows, columns).flip(1).repeat(BATCH, 1, 1),  # column and row of each patch
    "boxes": lambda g, rows, columns: _boxes(rows, columns),
    "pooled": lambda g, rows, columns: _pooled(rows, columns),
    "placed": _placed,
    # Zeros, and ones after a third of each row.
    "halves": lambda g, *shape: (torch.arange(shape[-1]) >= shape[-1] // 3).long().expand(shape).contiguous(),
}


def _overhang(strides: Sequence[int], kernels: Sequence[int]) -> int:
    """The samples that convolutions read in addition to the product of their strides for each of their results."""
    length = 0
    for stride, kernel in zip(reversed(strides), reversed(kernels), strict=True):
        length = (length - 1) * stride + kernel
    return length


# From lists of a configuration to a number.
FOLDS: Mapping[str, Callable[..., int]] = {
    "product": lambda numbers, *others: prod(numbers),
    "largest": lambda numbers: max(numbers),
    "overhang": _overhang,
}


def arrays(texts: Mapping[str, str], facts: Mapping[str, int], seed: int, ids: Sequence[int] = ()) -> dict[str, Tensor]:
    """An array for each argument.

    Args:
        texts: the arguments -> a function of MAKERS, with expressions over the facts.
        facts: those about the reduced model's configuration, and further ones.
        seed: each seed gives other random values.
        ids: the shape for which an expression writes `ids`.

    Raises:
        EvaluationError: an expression needs a fact that is not there.
    """
    generator, made = torch.Generator().manual_seed(seed + 1), {}
    for name, text in texts.items():
        call = CALL.fullmatch(text)
        assert call is not None, text
        sizes = (one.strip() for one in call[2].split(","))
        numbers = (ids if one == "ids" else (evaluate(parse_expression(one), facts),) for one in sizes)
        made[name] = MAKERS[call[1]](generator, *chain.from_iterable(numbers))
    return made


def facts_of(config: PreTrainedConfig, **given: int) -> dict[str, int]:
    """The facts about a configuration: those of plans/inputs.toml that it has, the number of rows, and `tile_rows` and `tile_columns`
    where the configuration lists how large pictures are cut.

    Args:
        given: further facts, for the expressions.
    """
    facts = {"batch": BATCH, **given}
    named = {"vision": [vision_of(config)], "whole": [config], "every": [*parts(config)]}
    for name, fact in FORMS["numbers"].items():
        of = [one for part in fact.get("of", WHOLE) for one in named.get(part, [getattr(config, part, None)])]
        found = [getattr(part, n, None) for part in of for n in fact.get("names", ())]
        if "folded" in fact:
            lists = [one for one in found if isinstance(one, (list, tuple)) and one and all(map(_plain, one))]
            value = FOLDS[fact["folded"]](*lists) if lists else None
        else:
            value = next(filter(None, (_plain(one, fact.get("item")) for one in found)), None)
        if value is None and "else" in fact:
            expression = parse_expression(fact["else"])
            value = evaluate(expression, facts) if facts.keys() >= {*names(expression)} else None
        if value is not None:
            facts[name] = value
    points = next((value for name, value in vars(config).items() if role(name) == "cut"), None) or ()
    tiles = [(h // facts["height"], w // facts["width"]) for h, w in points]
    cut = min((t for t in tiles if t != (1, 1)), key=prod, default=())
    return facts | dict(zip(("tile_rows", "tile_columns"), cut, strict=False))


def vision_of(config: PreTrainedConfig) -> PreTrainedConfig:
    """The vision part of a configuration; the configuration itself where there is none."""
    named = (part for whole in parts(config) if (part := getattr(whole, "vision_config", None)) is not None)
    sized = (part for part in parts(config) if getattr(part, "image_size", None))
    return next(named, next(sized, config))


def parts(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """A configuration and those nested in it."""
    yield config
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            yield from parts(value)


def _plain(value: Any, item: int | None = None) -> int | None:
    """A number, or an item of a list, or the number that all items are."""
    if isinstance(value, (list, tuple)) and value and (item is not None or all(one == value[0] for one in value)):
        value = value[item or 0]
    return value if isinstance(value, int) and value > 0 else None
