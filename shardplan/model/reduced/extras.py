"""Arguments in addition to text, for the parts of a model that text alone does not reach: encoder states for
cross-attention, and token types."""

from __future__ import annotations

import inspect
from collections.abc import Container, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from shardplan.model.config_numbers import text_config

from .forms import Form, called, filled, forms_of
from .outcome import loss_of
from .pictures import BATCH, FORMS, arrays


def extras_of(model: nn.Module, config: PreTrainedConfig, inputs: Mapping[str, Any]) -> tuple[dict[str, Form], bool]:
    """The arguments, by name, that give gradients to parameters that text alone does not reach; and whether the model runs only with
    one of them, as when it compares texts with pictures or drops a picture's positions from its logits.

    Args:
        model: the reduced model; it is run.
        config: its configuration.
        inputs: text.
    """
    taken = inspect.signature(type(model).forward).parameters
    candidates = list(_beside(config, taken))
    media = [name for name in FORMS["media"] if name in taken]
    if not candidates and not media:
        return {}, False
    missing = _unreached(model, inputs)
    if missing is None:
        runs = (
            (name, extra)
            for name in media
            for extra in forms_of(model, config, name, inputs["input_ids"].shape[-1])
            if _unreached(model, {**inputs, **extra(0)}) is not None
        )
        found = dict([one]) if (one := next(runs, None)) is not None else {}
        return found, bool(found)
    found = {}
    for name, extra in candidates if missing else ():
        if name in found:
            continue
        left = _unreached(model, {**inputs, **extra(0, inputs["input_ids"][:BATCH].shape)})
        if left is not None and missing and missing - left:
            found[name], missing = extra, missing & left
    return found, False


def _beside(config: PreTrainedConfig, taken: Container[str]) -> Iterator[tuple[str, Form]]:
    """The arguments of plans/inputs.toml that may be given next to text, in each form, as far as a model's forward accepts them."""
    for table in FORMS["beside"]:
        for texts, known in filled(table, text_config(config), {}):
            if (name := next(iter(texts))) in taken:
                yield name, partial(_made, texts, known)


def _made(texts: Mapping[str, str], facts: Mapping[str, int], seed: int, ids: Sequence[int]) -> dict[str, Any]:
    made = arrays(texts, facts, seed, ids)
    return {name: (value,) if name in FORMS["wrapped"] else value for name, value in made.items()}


def _unreached(model: nn.Module, inputs: Mapping[str, Any]) -> set[str] | None:
    """The trained parameters without a gradient; None where the model does not run."""
    try:
        loss_of(called(model, inputs)).backward()
        return {name for name, p in model.named_parameters() if p.requires_grad and p.grad is None}
    except Exception:  # raised by the modelling code: the next run of the model reports it
        return None
    finally:
        model.zero_grad(set_to_none=True)
