"""The inputs of a reduced transformers model: text, text with images, other features, or the user's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from shardplan.model.config_numbers import config_value, text_config
from shardplan.model.found import Inputs

from .forms import (
    GRIDS,
    KINDS,
    SPOKEN,
    Form,
    Make,
    boxes,
    called,
    code_books,
    coded,
    filled,
    first_running,
    forms_of,
    runs,
    shares,
)
from .images import Fitting, fitting
from .model_inputs import Labels, Padding, code_inputs, image_inputs, labels_of, tables, text_inputs
from .outcome import loss_of
from .own_copies import checked
from .pictures import BATCH, FORMS, arrays
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


# Arguments in addition to text, for the parts of a model that text alone does not reach: encoder states for cross-attention, and token
# types.
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


# The inputs that models read: text, spectrograms, waveforms, pictures, series, and the inputs of their decoders.
DECODER_ONLY = "use_decoder_only_language_model"  # in classes that can have a text encoder: they have none


def candidates_of(model: nn.Module, config: PreTrainedConfig, seq_len: int) -> tuple[str, list[Make]]:
    """The kind of a model's inputs, and all forms in which it may read them, in the order in which they are tried.

    The kind is "text", one of plans/inputs.toml where forward does not accept text alone, or "seq2seq" for an encoder and a decoder
    of text. The text of "text" and "seq2seq" may contain images.
    """
    accepted = inspect.signature(model.forward).parameters
    decodes = "decoder_input_ids" in accepted and not config_value(config, DECODER_ONLY)
    gridded = any(name in accepted for name in GRIDS)  # a tower for pictures of several sizes
    mains = [name for name in KINDS if name in accepted and (gridded or name != "hidden_states")]
    main = next(iter(mains), None) if "input_ids" not in accepted else None
    named = getattr(type(model), "main_input_name", "input_ids")
    if decodes and named in KINDS and named in accepted:  # what the encoder reads
        main = named
    if main is None and not ("input_ids" in accepted and decodes):
        return "text", _texts(model, config, seq_len)
    labels = labels_of(type(model))
    read = [main, *mains] if named not in mains else [main]  # any of them, where the class does not name one
    arrays: list[Form] = [lambda seed: {}]
    if main is not None:
        arrays = [form for one in dict.fromkeys(filter(None, read)) for form in forms_of(model, config, one, seq_len)]

    def made_in(form: Form, codes: int) -> Make:
        def make(seed: int, padding: Padding | None) -> dict[str, Any]:
            if not decodes:
                found = _labels(labels, config, seed) if "labels" in accepted else None
                return form(seed) if found is None else {**form(seed), "labels": found}
            text = text_inputs(config, labels if labels in ("next", "class") else None, seq_len, seed, None)
            ids = text.pop("input_ids")
            made = form(seed)
            if main is None:
                made["input_ids"] = ids.flip(1)  # the two sides read different tokens
                made |= {"bbox": shares(ids, seed)} if "bbox" in accepted else {}
            return {**made, "decoder_input_ids": coded(config, ids, codes) if codes else ids, **text}

        return make

    books = (0, *code_books(config)) if decodes else (0,)
    return "seq2seq" if main is None else KINDS[main], [made_in(form, codes) for codes in books for form in arrays]


def _texts(model: nn.Module, config: PreTrainedConfig, seq_len: int) -> list[Make]:
    """The forms of text: ids, or codes of several books, each with boxes where the model reads them. Ids are of the whole vocabulary, or
    fewer where another table reads them, too, and the model's code does not keep from it those that it lacks."""
    labels, books = labels_of(type(model)), _codebooks(model)
    if books:
        return [lambda seed, padding: code_inputs(config, labels, seq_len, seed, padding, books)]

    def made_in(rows: int, codes: int, boxed: Callable[[Tensor, int], Tensor] | None) -> Make:
        def make(seed: int, padding: Padding | None) -> dict[str, Any]:
            made = text_inputs(config, labels, seq_len, seed, padding, rows)
            if boxed is not None:
                made["bbox"] = boxed(made["input_ids"], seed)
            if codes:
                made["input_ids"] = coded(config, made["input_ids"], codes)
            return made

        return make

    placed = (boxes, shares, None) if "bbox" in inspect.signature(model.forward).parameters else (None,)
    forms = product(tables(config), (0, *code_books(config)), placed)
    return [made_in(rows, codes, boxed) for rows, codes, boxed in forms]


def _codebooks(model: nn.Module) -> int:
    """The number of token tables that the model adds up, where it has a list of them; else 0."""
    try:
        tables = model.get_input_embeddings() if isinstance(model, PreTrainedModel) else None
    except NotImplementedError:
        tables = None
    return len(tables) if isinstance(tables, nn.ModuleList) else 0


def _labels(form: Labels | None, config: PreTrainedConfig, seed: int) -> Tensor | None:
    generator = torch.Generator().manual_seed(seed + 1)
    if form == "spoken":  # the first token is the id for none
        return torch.randint(1, int(config.vocab_size), (BATCH, SPOKEN), generator=generator)
    count = getattr(config, "num_labels", None) if form is not None else None
    return torch.randint(count, (BATCH,), generator=generator) if isinstance(count, int) and count > 1 else None
