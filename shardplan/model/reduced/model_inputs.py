"""The inputs of the reduced model."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CTC_MAPPING_NAMES,
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
)

from shardplan.model.config_numbers import text_config

from .fields import SPECIAL, role
from .images import Fitting
from .pictures import BATCH

IGNORED = -100  # the label that the losses of transformers and torch ignore
CHARACTERS = 128  # the ids of a model that hashes them and has no vocabulary
CHOICES = 2  # texts of a row; one is the answer

MASK, IDS = "attention_mask", "input_ids"

Padding = Literal["left", "right"]
Labels = Literal["next", "class", "classes", "choice", "span", "spoken"]
SPAN = ("start_positions", "end_positions")
# The classes of transformers whose labels are not the next tokens.
FORMS: dict[Labels, tuple[Any, ...]] = {
    "class": (
        *MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.values(),
        *MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES.values(),
    ),
    "classes": (*MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES.values(),),
    "choice": (*MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES.values(),),
    "spoken": (*MODEL_FOR_CTC_MAPPING_NAMES.values(),),
}


def sequence_length(tp: int) -> int:
    """A length that tp divides, with several positions per rank."""
    return max(16, 8 * tp)


def labels_of(cls: type[nn.Module]) -> Labels | None:
    """The labels of the class's loss: the next tokens, a class per row, a class per token, the right text of a row, the first and the
    last token of an answer, the spoken tokens; None for a class without a loss."""
    for form, classes in FORMS.items():
        if cls.__name__ in classes:
            return form
    taken = inspect.signature(cls.forward).parameters
    if "labels" in taken:
        return "next"
    return "span" if all(name in taken for name in SPAN) else None


def tables(config: PreTrainedConfig) -> list[int]:
    """The rows of the tables that may read the ids of a text: the vocabulary's first, then those of smaller tables, the largest first."""
    text = text_config(config)
    rows = int(getattr(text, "unpadded_vocab_size", None) or getattr(text, "vocab_size", None) or CHARACTERS)
    sizes = {value for name, value in vars(text).items() if role(name) == "vocabulary" and type(value) is int}
    return [rows, *sorted((size for size in sizes if 0 < size < rows), reverse=True)]


def text_inputs(
    config: PreTrainedConfig,
    labels: Labels | None,
    seq_len: int,
    seed: int,
    padding: Padding | None,
    rows: int | None = None,
) -> dict[str, Any]:
    """Labels, and token ids [batch, sequence] or [batch, choices, sequence] that use as much of the vocabulary as fits.

    Args:
        config: the reduced model's.
        labels: see `labels_of`.
        seq_len: the sequence's length.
        seed: each seed gives other ids.
        padding: pad the second row by a quarter on this side, and give an `attention_mask`.
        rows: ids are below it; None: the vocabulary's.
    """
    text = text_config(config)
    generator = torch.Generator().manual_seed(seed)
    special = set(special_tokens(config))
    rows = tables(config)[0] if rows is None else rows
    allowed = torch.tensor([i for i in range(rows) if i not in special])
    shape = (BATCH, CHOICES, seq_len) if labels == "choice" else (BATCH, seq_len)
    wanted = prod(shape)
    draws = [allowed[torch.randperm(len(allowed), generator=generator)] for _ in range(-(-wanted // len(allowed)))]
    ids = torch.cat(draws)[:wanted].reshape(shape)
    pad = getattr(text, "pad_token_id", None)
    if isinstance(pad, int) and 0 <= pad < rows:
        ids[0, ..., 1] = pad  # also look up the row that `padding_idx` keeps from learning
    if labels == "class":
        _end_once(ids, getattr(text, "eos_token_id", None), pad, allowed)
    result: dict[str, Any] = {"input_ids": ids}
    of_classes = {
        "class": (config.num_labels, (BATCH,)),
        "classes": (config.num_labels, ids.shape),
        "choice": (CHOICES, (BATCH,)),
    }
    if labels in of_classes:
        count, of = of_classes[labels]
        assert count is not None
        result["labels"] = torch.randint(count, of, generator=generator)
    elif labels == "span":
        result |= {name: torch.randint(seq_len // 2, (BATCH,), generator=generator) for name in SPAN}
    elif labels == "next":
        result["labels"] = ids.clone()
        result["labels"][0, : seq_len // 4] = IGNORED
    return result if padding is None else padded(result, 1, padding)


def can_be_padded(model: nn.Module, inputs: Mapping[str, Any]) -> bool:
    """Whether a call has ids of two rows or more that `padded` can change, and the model takes the mask."""
    ids = inputs.get(IDS)
    if MASK in inputs or not isinstance(ids, Tensor) or ids.ndim < 2 or ids.shape[0] < 2 or ids.shape[-1] < 8:
        return False
    return MASK in inspect.signature(model.forward).parameters


def padded(inputs: Mapping[str, Any], row: int, side: Padding) -> dict[str, Any]:
    """Inputs with ids, where one row is padded by a quarter: `attention_mask` marks the padding, and labels of tokens leave it out."""
    ids, labels = inputs[IDS], inputs.get("labels")
    length, quarter = ids.shape[-1], ids.shape[-1] // 4
    where = slice(0, quarter) if side == "left" else slice(length - quarter, length)
    mask = inputs[MASK].clone() if MASK in inputs else torch.ones_like(ids)
    mask[row, ..., where] = 0
    result = {**inputs, MASK: mask}
    if isinstance(labels, Tensor) and labels.shape == ids.shape:
        result["labels"] = labels = labels.clone()
        labels[row, where] = IGNORED
        if side == "left":
            labels[row, quarter] = IGNORED  # predicted from a position without unmasked tokens
    return result


def _end_once(ids: Tensor, end: Any, pad: Any, allowed: Tensor) -> None:
    """Give each row the end token once, in the middle, where nothing is padded. BART's and T5's heads read the state there, and raise
    where rows have different numbers of end tokens, or none. A model that pads with the end token has no such position."""
    if type(end) is int and end != pad and (allowed == end).any():
        ids[ids == end] = next(token for token in allowed.tolist() if token not in (end, pad))
        ids[..., ids.shape[-1] // 2] = end


def code_inputs(
    config: PreTrainedConfig, labels: Labels | None, seq_len: int, seed: int, padding: Padding | None, books: int
) -> dict[str, Any]:
    """As text_inputs, for a model that reads several codebooks of an audio codec at once: ids [batch x codebooks, sequence],
    labels [batch, sequence, codebooks]."""
    drawn = [text_inputs(config, labels, seq_len, seed * books + i, padding) for i in range(books)]
    result = drawn[0] | {"input_ids": torch.stack([one["input_ids"] for one in drawn], 1).flatten(0, 1)}
    if labels == "next":
        result["labels"] = torch.stack([one["labels"] for one in drawn], -1)
    return result


def image_inputs(
    config: PreTrainedConfig,
    labels: Labels | None,
    seq_len: int,
    seed: int,
    padding: Padding | None,
    images: Fitting,
) -> dict[str, Any]:
    """As text_inputs, with one image (or video) per row: its tokens after the first quarter, and its arrays. The sequence is
    a multiple of `seq_len`, long enough for the image and one more token between the quarters that may be padded."""
    length = seq_len * max(1, -(-2 * (images.count + 2) // seq_len)) if images.count else seq_len
    begin = length // 4 + 1
    result = text_inputs(config, labels, length, seed, padding)
    image = torch.zeros_like(result["input_ids"], dtype=torch.bool)
    image[:, begin : begin + images.count] = True
    if images.token is not None:
        result["input_ids"][image] = images.token
        if labels == "next":
            result["labels"][image] = IGNORED
    result |= {name: image.long() * number for name, number in images.types.items()}
    result |= {name: torch.ones_like(image, dtype=torch.long)[..., None] for name in images.recipe.reads}
    return result | images.arrays(config, seed)


def special_tokens(config: PreTrainedConfig) -> list[int]:
    """Ids of images, sounds and their borders."""
    return [
        value
        for part in {id(c): c for c in (config, text_config(config))}.values()
        for name, value in vars(part).items()
        if SPECIAL.fullmatch(name) and isinstance(value, int) and name.endswith(("_id", "_index"))
    ]
