"""The inputs of a reduced transformers model: text, text with images, other features, or the user's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from shardplan.model.config_numbers import config_value, text_config
from shardplan.model.found import Inputs

from .extras import extras_of
from .features import Features, features_of
from .forms import boxes, code_books, coded, first_running, runs, shares
from .images import Fitting, fitting
from .model_inputs import Padding, code_inputs, image_inputs, labels_of, text_inputs
from .own_copies import checked
from .pictures import BATCH
from .precision import cast

IDS = ("input_ids", "decoder_input_ids", "labels")
Boxed = Callable[[Tensor, int], Tensor]  # (input_ids, seed) -> the box of each token on its page
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
    labels = labels_of(type(model))
    features = features_of(model, config, seq_len)
    if features is not None:
        return _of_features(model, config, features, seq_len)
    images, unseen = _images(
        model, config, lambda seed, padding, images: image_inputs(config, labels, seq_len, seed, padding, images)
    )
    books = _codebooks(model)

    def tokens_in(codes: int, boxed: Boxed | None) -> Callable[[int, Padding | None], dict[str, Any]]:
        def tokens(seed: int, padding: Padding | None = None) -> dict[str, Any]:
            if books:
                return code_inputs(config, labels, seq_len, seed, padding, books)
            made = text_inputs(config, labels, seq_len, seed, padding)
            if boxed is not None:
                made["bbox"] = boxed(made["input_ids"], seed)
            if codes:
                made["input_ids"] = coded(config, made["input_ids"], codes)
            return made

        return tokens

    placed = (boxes, shares, None) if "bbox" in inspect.signature(model.forward).parameters else (None,)
    candidates = [tokens_in(codes, boxed) for codes in (0, *code_books(config)) for boxed in placed]
    tokens = candidates[0] if images else first_running(model, candidates)

    needed = bool(images) and not runs(model, tokens(0, None))
    extras, needed = ({}, True) if needed else extras_of(model, config, tokens(0, None))

    def feed(kind: str, seed: int, padding: Padding | None) -> dict[str, Any]:
        if kind in images:
            return image_inputs(config, labels, seq_len, seed, padding, images[kind])
        made = tokens(seed, padding)
        if kind in extras:
            made |= {name: _cast(value, dtype) for name, value in extras[kind](made["input_ids"][:BATCH], seed).items()}
        return made

    return Feeding((*(() if needed else ("text",)), *images, *extras), feed, "" if needed else unseen)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return tuple(cast(one, dtype) for one in value) if isinstance(value, tuple) else cast(value, dtype)


def _codebooks(model: nn.Module) -> int:
    """The number of token tables that the model adds up, where it has a list of them; else 0."""
    try:
        tables = model.get_input_embeddings() if isinstance(model, PreTrainedModel) else None
    except NotImplementedError:
        tables = None
    return len(tables) if isinstance(tables, nn.ModuleList) else 0


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


def _of_features(model: nn.Module, config: PreTrainedConfig, features: Features, seq_len: int) -> Feeding:
    """The inputs of a model whose forward does not accept text alone; an encoder's text has images where it accepts them."""

    def with_images(seed: int, padding: Padding | None, images: Fitting) -> dict[str, Any]:
        return features.make(seed) | image_inputs(config, None, seq_len, seed, padding, images)

    images, unseen = _images(model, config, with_images) if features.kind == "seq2seq" else ({}, "")

    def feed(kind: str, seed: int, padding: Padding | None) -> dict[str, Any]:
        return with_images(seed, padding, images[kind]) if kind in images else features.make(seed)

    return Feeding((features.kind, *images), feed, unseen)


def _images(model: nn.Module, config: PreTrainedConfig, made: WithImages) -> tuple[dict[str, Fitting], str]:
    """The kinds of images that a reduced model accepts, and why other kinds are left out."""
    found: dict[str, Fitting] = {}
    unseen = []

    def tries(images: Fitting) -> None:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            inputs = made(0, None, images)
            dtype = next(model.parameters()).dtype
            model(**{name: cast(value, dtype) for name, value in inputs.items()})

    for kind in ("image", "video", "audio"):
        images = fitting(model, config, kind, tries)
        if isinstance(images, Fitting):
            found[kind] = images
        elif images:
            unseen.append(f"{kind}s: {images}")
    return found, "; ".join(unseen)
