"""Inputs of models that do not accept text alone: spectrograms, waveforms, pictures, series, and the inputs of their decoders."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from shardplan.model.config_numbers import config_value

from .forms import GRIDS, KINDS, SPOKEN, Form, code_books, coded, first_running, forms_of, shares
from .model_inputs import Labels, labels_of, text_inputs
from .pictures import BATCH

DECODER_ONLY = "use_decoder_only_language_model"  # in classes that can have a text encoder: they have none


@dataclass(frozen=True)
class Features:
    """Inputs of one kind.

    Args:
        kind: "audio", "picture", "series" or "seq2seq" (its text may contain images).
        make: seed -> keyword arguments of `forward`.
    """

    kind: str
    make: Callable[[int], dict[str, Any]]


def features_of(model: nn.Module, config: PreTrainedConfig, seq_len: int) -> Features | None:
    """The inputs of a model whose forward does not accept text alone; None for other models. Of several possible
    forms, the first one with which the model runs."""
    accepted = inspect.signature(model.forward).parameters
    decodes = "decoder_input_ids" in accepted and not config_value(config, DECODER_ONLY)
    gridded = any(name in accepted for name in GRIDS)  # a tower for pictures of several sizes
    mains = [name for name in KINDS if name in accepted and (gridded or name != "hidden_states")]
    main = next(iter(mains), None) if "input_ids" not in accepted else None
    named = getattr(type(model), "main_input_name", "input_ids")
    if decodes and named in KINDS and named in accepted:  # what the encoder reads
        main = named
    if main is None and not ("input_ids" in accepted and decodes):
        return None
    labels = labels_of(type(model))
    read = [main, *mains] if named not in mains else [main]  # any of them, where the class does not name one
    arrays: list[Form] = [lambda seed: {}]
    if main is not None:
        arrays = [form for one in dict.fromkeys(filter(None, read)) for form in forms_of(model, config, one, seq_len)]

    def made_in(form: Form, codes: int) -> Callable[[int], dict[str, Any]]:
        def make(seed: int) -> dict[str, Any]:
            generator = torch.Generator().manual_seed(seed + 1)
            text = (
                text_inputs(config, labels if labels in ("next", "class") else None, seq_len, seed, None)
                if decodes
                else {}
            )
            ids = text.pop("input_ids", None)
            made: dict[str, Any] = {}
            if main is None:
                made["input_ids"] = ids.flip(1)  # the two sides read different tokens
                if "bbox" in accepted:
                    made["bbox"] = shares(ids, seed)
            else:
                made |= form(seed)
            if decodes:
                made["decoder_input_ids"] = coded(config, ids, codes) if codes else ids
                made |= text
            elif (
                labels is not None
                and "labels" in accepted
                and (found := _labels(labels, config, generator)) is not None
            ):
                made["labels"] = found
            return made

        return make

    books = (0, *code_books(config)) if decodes else (0,)
    candidates = [made_in(form, codes) for codes in books for form in arrays]
    return Features("seq2seq" if main is None else KINDS[main], first_running(model, candidates))


def _labels(form: Labels, config: PreTrainedConfig, generator: torch.Generator) -> Tensor | None:
    if form == "spoken":  # the first token is the id for none
        return torch.randint(1, int(config.vocab_size), (BATCH, SPOKEN), generator=generator)
    count = getattr(config, "num_labels", None)
    return torch.randint(count, (BATCH,), generator=generator) if isinstance(count, int) and count > 1 else None
