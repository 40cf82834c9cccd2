"""The inputs of a reduced transformers model: text, text with images, other features, or the user's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from shardplan.model.config_numbers import config_value, text_config
from shardplan.model.found import Inputs

from .extras import extras_of
from .features import candidates_of
from .forms import Form, called, first_running, runs
from .images import Fitting, fitting
from .model_inputs import Padding, image_inputs, labels_of
from .own_copies import checked
from .pictures import BATCH
from .precision import cast

IDS = ("input_ids", "decoder_input_ids", "labels")
Feed = Callable[[str, int, Padding | None], dict[str, Any]]


@dataclass(frozen=True)
class Feeding:
    """The inputs of a reduced model.

    Args:
        kinds: the kinds of inputs.
        feed: (kind, seed, padding) -> keyword arguments of `forward`.
        unseen: why images that the model accepts are missing.
    """

    kinds: tuple[str, ...]
    feed: Feed
    unseen: str = ""


def feeding(model: nn.Module, config: PreTrainedConfig, seq_len: int, name: str, inputs: Inputs | None) -> Feeding:
    """The inputs of a reduced model: the user's own, or those that its forward accepts.

    Args:
        model: the reduced model; it is called to find which images it accepts.
        config: its configuration.
        seq_len: the length of text.
        inputs: the user's function, called with a seed and, where it accepts two arguments, the reduced configuration.
    """
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    if inputs is not None:
        own = checked(given(inputs, config), name)
        return Feeding(("own",), lambda kind, seed, padding: {n: cast(v, dtype) for n, v in own(seed).items()})
    kind, candidates = candidates_of(model, config, seq_len)
    text = kind == "text"
    make = candidates[0] if text else first_running(model, candidates)

    def with_images(seed: int, padding: Padding | None, images: Fitting) -> dict[str, Any]:
        if text:
            return image_inputs(config, labels_of(type(model)), seq_len, seed, padding, images)
        return make(seed, padding) | image_inputs(config, None, seq_len, seed, padding, images)

    images, unseen = _images(model, config, with_images) if kind in ("text", "seq2seq") else ({}, "")
    extras, needed = dict[str, Form](), False  # whether the model does not run without images or extras
    if text and images:
        needed = not runs(model, make(0, None))
    elif text:
        make = first_running(model, candidates)
    if text and not needed:
        extras, needed = extras_of(model, config, make(0, None))

    def feed(of: str, seed: int, padding: Padding | None) -> dict[str, Any]:
        if of in images:
            return with_images(seed, padding, images[of])
        made = make(seed, padding)
        if of in extras:
            added = extras[of](seed, made["input_ids"][:BATCH].shape)
            made |= {name: cast(value, dtype) for name, value in added.items()}
        return made

    return Feeding((*(() if needed else (kind,)), *images, *extras), feed, "" if needed else unseen)


def given(inputs: Inputs, config: PreTrainedConfig) -> Inputs:
    """The user's function, changed for a reduced configuration: token ids are taken modulo the size of the reduced
    vocabulary; negative ids (labels that do not count) stay."""
    rows = config_value(text_config(config), "vocab_size")
    accepted = [
        p
        for p in inspect.signature(inputs).parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty
    ]
    function: Callable[..., Mapping[str, Any]] = inputs

    def call(seed: int) -> Mapping[str, Any]:
        made = function(seed, config) if len(accepted) > 1 else function(seed)
        if not isinstance(made, Mapping) or not isinstance(rows, int):
            return made
        return {name: _below(value, rows) if name in IDS else value for name, value in made.items()}

    return call


def _below(ids: Any, rows: int) -> Any:
    if not isinstance(ids, Tensor) or ids.is_floating_point():
        return ids
    return torch.where(ids < 0, ids, ids % rows)


WithImages = Callable[[int, Padding | None, Fitting], dict[str, Any]]  # (seed, padding, images) -> keyword arguments


def _images(model: nn.Module, config: PreTrainedConfig, made: WithImages) -> tuple[dict[str, Fitting], str]:
    """The kinds of images that a reduced model accepts, and why other kinds are left out."""
    found: dict[str, Fitting] = {}
    unseen = []

    def tries(images: Fitting) -> None:
        with torch.no_grad():
            called(model, made(0, None, images))

    for kind in ("image", "video", "audio"):
        images = fitting(model, config, kind, tries)
        if isinstance(images, Fitting):
            found[kind] = images
        elif images:
            unseen.append(f"{kind}s: {images}")
    return found, "; ".join(unseen)
