"""Inputs that are not text: spectrograms, waveforms and pictures for models that accept these, and the inputs of their
decoders."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from shardplan.model.config_numbers import config_value

from .model_inputs import labels_of, text_inputs
from .pictures import BATCH, flat_patches, pictures_of, squares

GRID, PATCHES = (
    "grid_thw",
    ("pixel_values", "hidden_states"),
)  # arguments of vision towers for pictures of several sizes
SAMPLES = 4  # frames of a waveform's features for each token
DECODER_ONLY = "use_decoder_only_language_model"  # of classes for both: there is no encoder of text
UNKNOWN_STRIDE = 400  # samples for each token where the code alone has the convolutions' strides: 25 ms at 16 kHz


@dataclass(frozen=True)
class Features:
    """Inputs of one kind.

    Args:
        kind: "audio", "picture" or "seq2seq" (of which the text may have images in it).
        make: seed -> keyword arguments of `forward`.
    """

    kind: str
    make: Callable[[int], dict[str, Any]]


def features_of(model: nn.Module, config: PreTrainedConfig, seq_len: int) -> Features | None:
    """The inputs of a model whose forward does not accept text alone; None for other models."""
    accepted = inspect.signature(model.forward).parameters
    if (
        "input_ids" not in accepted
        and GRID in accepted
        and (patches := next((n for n in PATCHES if n in accepted), ""))
    ):
        return Features("picture", lambda seed: dict(zip((patches, GRID), flat_patches(config, seed), strict=True)))
    decodes = "decoder_input_ids" in accepted and not config_value(config, DECODER_ONLY)
    main = next((name for name in MAKERS if name in accepted), None) if "input_ids" not in accepted else None
    named = getattr(type(model), "main_input_name", "input_ids")
    if decodes and named in MAKERS and named in accepted:  # what the encoder reads
        main = named
    if main is None and not ("input_ids" in accepted and decodes):
        return None
    labels = labels_of(type(model))

    def make(seed: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(seed + 1)
        text = (
            text_inputs(config, "next" if labels == "next" and decodes else None, seq_len, seed, None)
            if decodes
            else {}
        )
        ids = text.pop("input_ids", None)
        made: dict[str, Any] = {}
        if main is None:
            made["input_ids"] = ids.flip(1)  # the two sides read other tokens
            made |= {name: make(ids.shape, generator) for name, make in BESIDE.items() if name in accepted}
        else:
            made[main] = MAKERS[main](config, seq_len, generator)
        if decodes:
            made["decoder_input_ids"] = ids
            made |= text
        elif labels is not None and "labels" in accepted and (found := _classes(config, generator)) is not None:
            made["labels"] = found
        return made

    kind = "seq2seq" if main is None else KINDS[main]
    return Features(kind, make)


def _classes(config: PreTrainedConfig, generator: torch.Generator) -> Tensor | None:
    count = getattr(config, "num_labels", None)
    return torch.randint(count, (BATCH,), generator=generator) if isinstance(count, int) and count > 1 else None


def _spectrogram(config: PreTrainedConfig, seq_len: int, generator: torch.Generator) -> Tensor:
    """[BATCH, bins, frames]; as long as the encoder's table of positions after its convolutions, where there is one; else
    [BATCH, frames, bins]."""
    bins = config_value(config, "num_mel_bins")
    if isinstance(bins, int):
        positions = config_value(config, "max_source_positions")
        frames = 2 * positions if isinstance(positions, int) else SAMPLES * seq_len
        return torch.randn(BATCH, bins, frames, generator=generator)
    width = config_value(config, "feature_projection_input_dim", config_value(config, "input_dim", 80))
    return torch.randn(BATCH, seq_len, width, generator=generator)


def _wave(config: PreTrainedConfig, seq_len: int, generator: torch.Generator) -> Tensor:
    """[BATCH, samples], from which the convolutions compute `seq_len` features; a spectrogram [BATCH, frames, bins] where the
    configuration has bins."""
    bins, frames = config_value(config, "num_mel_bins"), config_value(config, "max_length")
    if isinstance(bins, int) and isinstance(frames, int):
        return torch.randn(BATCH, frames, bins, generator=generator)
    if not config_value(config, "conv_kernel"):
        return torch.randn(BATCH, UNKNOWN_STRIDE * seq_len, generator=generator)
    length = seq_len
    strides, kernels = config_value(config, "conv_stride", ()), config_value(config, "conv_kernel", ())
    for stride, kernel in zip(reversed(tuple(strides)), reversed(tuple(kernels)), strict=True):
        length = (length - 1) * stride + kernel
    return torch.randn(BATCH, length, generator=generator)


def _picture(config: PreTrainedConfig, seq_len: int, generator: torch.Generator) -> Tensor:
    """[BATCH, channels, height, width] of the configuration's image."""
    return squares(config, generator.initial_seed())


def _patches(config: PreTrainedConfig, seq_len: int, generator: torch.Generator) -> Tensor:
    """Flat patches behind their places: [BATCH, patches, 2 + channels x patch x patch]."""
    return pictures_of(config, generator.initial_seed()).placed_patches()


def _boxes(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Where on a page each token stands, as shares of its sides: [BATCH, sequence, 4] of left, top, right, bottom."""
    corner = torch.rand(*shape, 2, generator=generator) * 0.8
    return torch.cat([corner, corner + 0.1], -1)


MAKERS: Mapping[str, Callable[[PreTrainedConfig, int, torch.Generator], Tensor]] = {
    "input_features": _spectrogram,
    "input_values": _wave,
    "pixel_values": _picture,
    "flattened_patches": _patches,
}
KINDS = {
    "input_features": "audio",
    "input_values": "audio",
    "pixel_values": "picture",
    "flattened_patches": "picture",
}
# What the encoder of some models reads beside its tokens.
BESIDE: Mapping[str, Callable[[torch.Size, torch.Generator], Tensor]] = {"bbox": _boxes}
