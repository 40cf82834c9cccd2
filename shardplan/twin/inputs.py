"""What the small model is called with."""

from __future__ import annotations

import inspect
from typing import Any, Literal

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
)

from shardplan.models.numbers import text_config

from .fields import SPECIAL

BATCH = 2
IGNORED = -100  # the label that the losses of transformers and torch leave out

Padding = Literal["left", "right"]
Labels = Literal["next", "class", "classes"]


def sequence_length(tp: int) -> int:
    """A length that tp divides, with several positions per rank."""
    return max(16, 8 * tp)


def labels_of(cls: type[PreTrainedModel]) -> Labels | None:
    """What the class's loss compares with: the next tokens, a class per row, a class per token; None: it has
    no loss."""
    if cls.__name__ in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.values():
        return "class"
    if cls.__name__ in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES.values():
        return "classes"
    return "next" if "labels" in inspect.signature(cls.forward).parameters else None


def text_inputs(
    config: PreTrainedConfig, labels: Labels | None, seq_len: int, seed: int, padding: Padding | None
) -> dict[str, Any]:
    """Token ids [batch, sequence] that between them use as much of the vocabulary as fits, and labels.

    Args:
        config: the small model's.
        labels: see `labels_of`.
        seq_len: the sequence's length.
        seed: other ids for each.
        padding: pad the second row by a quarter on that side, and give an `attention_mask`.
    """
    text = text_config(config)
    generator = torch.Generator().manual_seed(seed)
    special = set(special_tokens(config))
    rows = int(getattr(text, "unpadded_vocab_size", None) or text.vocab_size)
    allowed = torch.tensor([i for i in range(rows) if i not in special])
    wanted = BATCH * seq_len
    draws = [allowed[torch.randperm(len(allowed), generator=generator)] for _ in range(-(-wanted // len(allowed)))]
    ids = torch.cat(draws)[:wanted].reshape(BATCH, seq_len)
    pad = getattr(text, "pad_token_id", None)
    if isinstance(pad, int) and 0 <= pad < rows:
        ids[0, 1] = pad  # the row that `padding_idx` keeps from learning is looked up too
    result: dict[str, Any] = {"input_ids": ids}
    if labels == "class":
        result["labels"] = torch.randint(config.num_labels, (BATCH,), generator=generator)
    elif labels == "classes":
        result["labels"] = torch.randint(config.num_labels, ids.shape, generator=generator)
    elif labels == "next":
        result["labels"] = ids.clone()
        result["labels"][0, : seq_len // 4] = IGNORED
    if padding is not None:
        quarter = seq_len // 4
        padded = slice(0, quarter) if padding == "left" else slice(seq_len - quarter, seq_len)
        result["attention_mask"] = torch.ones_like(ids)
        result["attention_mask"][1, padded] = 0
        if labels in ("next", "classes"):
            result["labels"][1, padded] = IGNORED
        if labels == "next" and padding == "left":
            result["labels"][1, quarter] = IGNORED  # predicted from a position that sees nothing
    return result


def image_inputs(
    config: PreTrainedConfig, labels: Labels | None, seq_len: int, seed: int, padding: Padding | None
) -> dict[str, Any]:
    """As text_inputs, with one image per row: its tokens after the first quarter of `seq_len`, and pixels
    [batch, channels, side, side]. The sequence is a multiple of `seq_len`, long enough for the image and a token."""
    count, vision = int(config.mm_tokens_per_image), config.vision_config
    begin = seq_len // 4 + 1
    result = text_inputs(config, labels, seq_len * -(-(begin + count + 1) // seq_len), seed, padding)
    generator = torch.Generator().manual_seed(seed + 1)
    image = torch.zeros_like(result["input_ids"], dtype=torch.bool)
    image[:, begin : begin + count] = True
    result["input_ids"][image] = int(config.image_token_id)
    if labels == "next":
        result["labels"][image] = IGNORED
    result["token_type_ids"] = image.long()
    shape = (BATCH, int(vision.num_channels), int(vision.image_size), int(vision.image_size))
    result["pixel_values"] = torch.randn(shape, generator=generator)
    return result


def takes_images(config: PreTrainedConfig) -> bool:
    """Whether images can be given: a vision tower of which each image gives a fixed number of tokens."""
    needed = ("mm_tokens_per_image", "image_token_id", "vision_config")
    return all(getattr(config, name, None) is not None for name in needed)


def special_tokens(config: PreTrainedConfig) -> list[int]:
    """Ids that stand for images, sounds and their borders."""
    return [
        value
        for part in {id(c): c for c in (config, text_config(config))}.values()
        for name, value in vars(part).items()
        if SPECIAL.fullmatch(name) and isinstance(value, int) and name.endswith(("_id", "_index"))
    ]
