"""The inputs that models read: text, spectrograms, waveforms, pictures, series, and the inputs of their decoders."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from shardplan.model.config_numbers import config_value

from .forms import GRIDS, KINDS, SPOKEN, Form, Make, boxes, code_books, coded, forms_of, shares
from .model_inputs import Labels, Padding, code_inputs, labels_of, text_inputs
from .pictures import BATCH

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
    """The forms of text: ids, or codes of several books, each with boxes where the model reads them."""
    labels, books = labels_of(type(model)), _codebooks(model)
    if books:
        return [lambda seed, padding: code_inputs(config, labels, seq_len, seed, padding, books)]

    def made_in(codes: int, boxed: Callable[[Tensor, int], Tensor] | None) -> Make:
        def make(seed: int, padding: Padding | None) -> dict[str, Any]:
            made = text_inputs(config, labels, seq_len, seed, padding)
            if boxed is not None:
                made["bbox"] = boxed(made["input_ids"], seed)
            if codes:
                made["input_ids"] = coded(config, made["input_ids"], codes)
            return made

        return make

    placed = (boxes, shares, None) if "bbox" in inspect.signature(model.forward).parameters else (None,)
    return [made_in(codes, boxed) for codes in (0, *code_books(config)) for boxed in placed]


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
