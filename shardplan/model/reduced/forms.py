"""The forms of arrays of sounds, pictures and series, in the order in which they are tried, and the choice of one with which a model runs."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from shardplan.model.config_numbers import config_value

from .images import RECIPES
from .model_inputs import Padding
from .outcome import results_of
from .pictures import FORMS, arrays, facts_of, parts
from .precision import cast
from .scale import hidden_size, is_size

Make = Callable[[int, Padding | None], dict[str, Any]]  # (seed, padding) -> arguments of forward
Form = Callable[..., dict[str, Any]]  # (seed, shape of the token ids) -> arguments of forward
KINDS: Mapping[str, str] = FORMS[
    "kinds"
]  # arguments of forward that a model may read instead of token ids -> the kind of input
TOWER: Mapping[str, Sequence[str]] = FORMS["tower"]  # the arguments' names in towers, where whole models use others
GRIDS = TOWER["image_grid_thw"]
SPOKEN = 3  # tokens of a transcript
NAMES = re.compile(r"[a-z_]+")


def first_running(model: nn.Module, candidates: Sequence[Make]) -> Make:
    """The first of several inputs with which a model runs and gives finite results. Where there is none, the very first, so
    that its error is reported."""
    if len(candidates) == 1:
        return candidates[0]
    return next((one for one in candidates if runs(model, one(0, None))), candidates[0])


def called(model: nn.Module, inputs: Mapping[str, Any]) -> Any:
    """What a model returns for inputs, which are cast to its dtype. The global generator stays as it is."""
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    with torch.random.fork_rng(devices=[]):
        return model(**{name: cast(value, dtype) for name, value in inputs.items()})


def runs(model: nn.Module, inputs: Mapping[str, Any]) -> bool:
    """Whether a model runs with these inputs and gives finite results."""
    try:
        with torch.no_grad():
            return all(bool(result.isfinite().all()) for result in results_of(called(model, inputs)).values())
    except Exception:  # raised by the modelling code for inputs of another form
        return False


def forms_of(model: nn.Module, config: PreTrainedConfig, main: str, seq_len: int) -> list[Form]:
    """The forms in which a model may accept an argument, with the arguments that belong to it, of plans/inputs.toml.

    Args:
        main: one of KINDS.
        seq_len: the number of positions that the model makes of it, where the configuration leaves this open.
    """
    accepted = inspect.signature(model.forward).parameters
    facts = facts_of(config, seq=seq_len, hidden=hidden_size(config) or 1)
    mask = next((name for name in accepted if re.fullmatch(FORMS["mask"], name)), "")
    first = next((m.in_features for m in model.modules() if isinstance(m, nn.Linear)), None)
    plain, masked = list[Form](), list[Form]()
    for table in FORMS["alone"]:
        if not {main, KINDS[main]} & {*table["of"]}:
            continue
        for form, known in filled(table, config, facts, first):
            texts = {_accepted(name, main, mask, accepted): text for name, text in form.items() if name != "lacks"}
            marks = texts.pop(mask, "") if "mask" in form else ""
            if next(iter(texts)) != main or "" in texts or any(name in known for name in form.get("lacks", ())):
                continue
            if not all(known.keys() >= {*NAMES.findall(text.partition("(")[2])} for text in texts.values()):
                continue
            plain.append(partial(arrays, texts, known))
            if marks and mask:
                masked.append(partial(arrays, {**texts, mask: marks}, known))
    return [*plain, *masked]


def filled(
    form: Mapping[str, Any], config: PreTrainedConfig, facts: dict[str, int], first: int | None = None
) -> Iterator[tuple[Mapping[str, Any], dict[str, int]]]:
    """The arrays of a table of plans/inputs.toml, with the facts for each.

    Args:
        first: the features that the model's first matrix reads.
    """
    if form.get("image"):
        yield from ((r.arrays, facts) for r in RECIPES if r.kind == "image" and not r.reads and r.suits(config))
    for number in _candidates(form["each"], config, first) if "each" in form else (None,):
        known = facts if number is None else facts | {form["each"]: number}
        for one in form.get("forms", ()):
            yield from filled(one, config, known, first)
        if "forms" not in form and not form.get("image"):
            yield {name: text for name, text in form.items() if name != "each"}, known


def _candidates(name: str, config: PreTrainedConfig, first: int | None = None) -> list[int]:
    """Numbers to try, without repetition.

    Args:
        first: the features that the model's first matrix reads.
    """
    of = FORMS["candidates"][name]
    found = (config_value(part, n) for part in parts(config) for n in of.get("names", ()))
    more = (*of.get("also", ()), first if of.get("first_matrix") else None)
    return list(dict.fromkeys(n for n in (*found, *more) if is_size(n)))


def _accepted(name: str, main: str, mask: str, accepted: Mapping[str, Any]) -> str:
    """A model's name of an argument; "" where it has none."""
    if name in ("main", "mask"):
        return main if name == "main" else mask
    return next((one for one in TOWER.get(name, (name,)) if one in accepted), "")


def code_books(config: PreTrainedConfig) -> Iterator[int]:
    """The possible numbers of codes at each position: the number of books or channels, and one more with a text token."""
    yield from dict.fromkeys(n + more for n in _candidates("books", config) for more in (0, 1))


def coded(config: PreTrainedConfig, ids: Tensor, books: int) -> Tensor:
    """Codes of several books at each position, [batch, sequence, books], made from token ids."""
    rows = min(_candidates("code", config), default=1)
    return torch.stack([ids.roll(i, -1) % rows for i in range(books)], -1)


def boxes(ids: Tensor, seed: int) -> Tensor:
    """Each token's box on a page of 1000 steps a side: [*ids, 4] of left, top, right, bottom."""
    generator = torch.Generator().manual_seed(seed + 2)
    corner = torch.randint(800, (*ids.shape, 2), generator=generator)
    return torch.cat([corner, corner + torch.randint(1, 200, (*ids.shape, 2), generator=generator)], -1)


def shares(ids: Tensor, seed: int) -> Tensor:
    """As `boxes`, as shares of the page's sides."""
    return boxes(ids, seed) / 1000
