"""Models that are large, that nothing tells how to call, or whose inputs are not text."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .adversary import Adversary, document
from .live import loss_of
from .parts import MLP, Mlp, MlpBlock, Stack, features, without


def large() -> nn.Module:
    """More than 20 million parameters, in one block."""
    return Stack(MlpBlock(Mlp(hidden=650_000)))


def blocks() -> nn.Module:
    return Stack(MlpBlock(), MlpBlock())


def vit() -> nn.Module:
    """A small image classifier of transformers."""
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    return ViTForImageClassification(ViTConfig(image_size=16, patch_size=8, num_labels=4, **sizes))


def images(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (2,), generator=generator)
    return {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator), "labels": labels}


def t5() -> nn.Module:
    """A small encoder and decoder of transformers."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 32, "d_kv": 8, "num_heads": 4, "d_ff": 64, "num_layers": 2, "vocab_size": 64}
    return T5ForConditionalGeneration(T5Config(dropout_rate=0.0, decoder_start_token_id=0, **sizes))


def translations(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    ids, labels = (torch.randint(4, 64, (2, 8), generator=generator) for _ in range(2))
    return {"input_ids": ids, "labels": labels, "use_cache": False}


VIT = {
    "vit.layers.*.attention.{q,k,v}_proj": "colwise",
    "vit.layers.*.attention.o_proj": "rowwise",
    "vit.layers.*.mlp.fc1": "colwise",
    "vit.layers.*.mlp.fc2": "rowwise",
}
VIT_NO_SUM = {**without(VIT, "vit.layers.*.mlp.fc2"), "vit.layers.*.mlp.fc2.weight": "rowwise"}
T5 = {
    "{encoder,decoder}.block.*.layer.*.DenseReluDense.wi": "colwise",
    "{encoder,decoder}.block.*.layer.*.DenseReluDense.wo": "rowwise",
}
T5_NO_SUM = {
    "{encoder,decoder}.block.*.layer.*.DenseReluDense.wi": "colwise",
    "encoder.block.*.layer.*.DenseReluDense.wo": "rowwise",
    "decoder.block.*.layer.*.DenseReluDense.wo.weight": "rowwise",
}
NO_SUM = {**without(MLP, "layers.*.mlp.down"), "layers.*.mlp.down.weight": "rowwise"}
NO_INPUTS: dict[str, Any] = {"own_inputs": True, "codes": ("SP522",)}
CASES = (
    Adversary("large/right", large, features, document(MLP), "right", "all rules", seeds=(0,)),
    Adversary("large/no_sum", large, features, document(NO_SUM), "wrong", "nobody adds it up", seeds=(0,)),
    Adversary("no_inputs/right", blocks, features, document(MLP), "unproven", "nothing tells its inputs", **NO_INPUTS),
    Adversary("no_inputs/no_sum", blocks, features, document(NO_SUM), "unproven", "nor is it seen", **NO_INPUTS),
    *(
        Adversary(name, build, inputs, document(plan), verdict, why, loss=loss_of, own_inputs=True)
        for name, build, inputs, plan, verdict, why in (
            ("vit/right", vit, images, VIT, "right", "all rules"),
            ("vit/no_sum", vit, images, VIT_NO_SUM, "wrong", "a bias and half of a sum"),
            ("t5/right", t5, translations, T5, "right", "all rules"),
            ("t5/no_sum", t5, translations, T5_NO_SUM, "wrong", "nobody adds the decoder up"),
        )
    ),
)
