"""Reduced models of diffusers, of the published classes and with the published options, and what they are called with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

HEADS, HEAD_DIM = 8, 12
WIDTH = HEADS * HEAD_DIM
BATCH, IMAGE, TEXT = 2, 16, 8  # tokens


@dataclass(frozen=True)
class Diffusion:
    """A class of diffusers.

    Args:
        name: the class, followed in parentheses by which of its options.
        sizes: of the reduced model, in place of its configuration's.
        inputs: what the model is called with, from a generator.
        published: of the model whose share of split parameters the table has, where these are not the default configuration's.
    """

    name: str
    sizes: Mapping[str, Any]
    inputs: Callable[[torch.Generator], dict[str, Any]]
    published: Mapping[str, Any] = field(default_factory=dict)

    @property
    def cls(self) -> str:
        """The class's name."""
        return self.name.partition(" ")[0]

    def build(self) -> nn.Module:
        """The reduced model."""
        return self._made(self.sizes)

    def whole(self) -> nn.Module:
        """The published model; on the meta device, as it is large."""
        return self._made(self.published)

    def _made(self, config: Mapping[str, Any]) -> nn.Module:
        import diffusers  # a table can be read without it

        return getattr(diffusers, self.cls)(**config)

    def make(self, seed: int) -> dict[str, Any]:
        """The inputs of a seed."""
        return self.inputs(torch.Generator().manual_seed(seed))


def _floats(random: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=random)


def _times(random: torch.Generator) -> Tensor:
    return torch.randint(1, 1000, (BATCH,), generator=random)


def _dit(random: torch.Generator) -> dict[str, Any]:
    labels = torch.randint(10, (BATCH,), generator=random)
    return {"hidden_states": _floats(random, BATCH, 4, 8, 8), "timestep": _times(random), "class_labels": labels}


def _sd3(random: torch.Generator) -> dict[str, Any]:
    return {
        "hidden_states": _floats(random, BATCH, 4, 8, 8),
        "encoder_hidden_states": _floats(random, BATCH, TEXT - 1, 32),
        "pooled_projections": _floats(random, BATCH, 24),
        "timestep": _times(random),
    }


def _flux(random: torch.Generator) -> dict[str, Any]:
    return {
        "hidden_states": _floats(random, BATCH, IMAGE, 16),
        "encoder_hidden_states": _floats(random, BATCH, TEXT - 1, 32),
        "pooled_projections": _floats(random, BATCH, 24),
        "timestep": torch.rand(BATCH, generator=random),
        "guidance": torch.rand(BATCH, generator=random),
        "img_ids": torch.cartesian_prod(*(torch.arange(n).float() for n in (1, 4, 4))),
        "txt_ids": torch.zeros(TEXT - 1, 3),
    }


def _wan(random: torch.Generator) -> dict[str, Any]:
    return {
        "hidden_states": _floats(random, BATCH, 4, 2, 8, 4),
        "encoder_hidden_states": _floats(random, BATCH, TEXT - 1, 32),
        "timestep": _times(random),
    }


def _qwen(random: torch.Generator) -> dict[str, Any]:
    return {
        "hidden_states": _floats(random, BATCH, IMAGE, 16),
        "encoder_hidden_states": _floats(random, BATCH, TEXT - 1, 32),
        "timestep": torch.rand(BATCH, generator=random),
        "img_shapes": [[(1, 4, 4)]] * BATCH,
    }


def _qwen_edit(random: torch.Generator) -> dict[str, Any]:
    """The image, and one that it is made from."""
    return {
        **_qwen(random),
        "hidden_states": _floats(random, BATCH, 2 * IMAGE, 16),
        "img_shapes": [[(1, 4, 4), (1, 4, 4)]] * BATCH,
    }


def _pixart(random: torch.Generator) -> dict[str, Any]:
    mask = torch.ones(BATCH, TEXT - 1)
    mask[1, TEXT // 2 :] = 0
    return {
        "hidden_states": _floats(random, BATCH, 4, 8, 8),
        "encoder_hidden_states": _floats(random, BATCH, TEXT - 1, 32),
        "timestep": _times(random),
        "encoder_attention_mask": mask,
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }


def _auraflow(random: torch.Generator) -> dict[str, Any]:
    return {
        "hidden_states": _floats(random, BATCH, 4, 8, 8),
        "encoder_hidden_states": _floats(random, BATCH, TEXT - 1, 32),
        "timestep": torch.rand(BATCH, generator=random),
    }


def _cogvideox(random: torch.Generator) -> dict[str, Any]:
    return {
        "hidden_states": _floats(random, BATCH, 2, 4, 8, 8),
        "encoder_hidden_states": _floats(random, BATCH, TEXT, 32),
        "timestep": _times(random),
    }


def _hunyuan_video(random: torch.Generator) -> dict[str, Any]:
    mask = torch.ones(BATCH, TEXT - 1, dtype=torch.long)
    mask[1, TEXT // 2 :] = 0
    return {
        "hidden_states": _floats(random, BATCH, 4, 2, 8, 4),
        "encoder_hidden_states": _floats(random, BATCH, TEXT - 1, 32),
        "encoder_attention_mask": mask,
        "pooled_projections": _floats(random, BATCH, 24),
        "timestep": _times(random),
        "guidance": 1000 * torch.rand(BATCH, generator=random),
    }


HEADED = {"num_attention_heads": HEADS, "attention_head_dim": HEAD_DIM}

DIFFUSION = {
    one.name: one
    for one in (
        Diffusion(
            "DiTTransformer2DModel",
            {
                **HEADED,
                "in_channels": 4,
                "out_channels": 8,
                "num_layers": 2,
                "sample_size": 8,
                "num_embeds_ada_norm": 10,
            },
            _dit,
        ),
        Diffusion(
            "SD3Transformer2DModel",
            {
                **HEADED,
                "sample_size": 8,
                "in_channels": 4,
                "out_channels": 4,
                "num_layers": 3,
                "joint_attention_dim": 32,
                "caption_projection_dim": WIDTH,
                "pooled_projection_dim": 24,
                "pos_embed_max_size": 8,
                "dual_attention_layers": (0,),
                "qk_norm": "rms_norm",
            },
            _sd3,
        ),
        Diffusion(
            "FluxTransformer2DModel",
            {
                **HEADED,
                "in_channels": 16,
                "num_layers": 2,
                "num_single_layers": 2,
                "joint_attention_dim": 32,
                "pooled_projection_dim": 24,
                "guidance_embeds": True,
                "axes_dims_rope": (4, 4, 4),
            },
            _flux,
        ),
        Diffusion(
            "WanTransformer3DModel",
            {
                **HEADED,
                "in_channels": 4,
                "out_channels": 4,
                "text_dim": 32,
                "freq_dim": 16,
                "ffn_dim": 64,
                "num_layers": 2,
                "rope_max_seq_len": 32,
            },
            _wan,
        ),
        Diffusion(
            "QwenImageTransformer2DModel",
            {
                **HEADED,
                "in_channels": 16,
                "out_channels": 4,
                "num_layers": 2,
                "joint_attention_dim": 32,
                "axes_dims_rope": (4, 4, 4),
            },
            _qwen,
        ),
        Diffusion(
            "QwenImageTransformer2DModel (edit)",
            {
                **HEADED,
                "in_channels": 16,
                "out_channels": 4,
                "num_layers": 2,
                "joint_attention_dim": 32,
                "axes_dims_rope": (4, 4, 4),
                "zero_cond_t": True,
            },
            _qwen_edit,
            {"zero_cond_t": True},
        ),
        Diffusion(
            "PixArtTransformer2DModel",
            {
                **HEADED,
                "in_channels": 4,
                "out_channels": 8,
                "num_layers": 2,
                "cross_attention_dim": WIDTH,
                "sample_size": 8,
                "caption_channels": 32,
                "use_additional_conditions": False,
            },
            _pixart,
            {"caption_channels": 4096},
        ),
        Diffusion(
            "AuraFlowTransformer2DModel",
            {
                **HEADED,
                "sample_size": 8,
                "num_mmdit_layers": 2,
                "num_single_dit_layers": 2,
                "joint_attention_dim": 32,
                "caption_projection_dim": WIDTH,
                "pos_embed_max_size": 16,
            },
            _auraflow,
        ),
        Diffusion(
            "CogVideoXTransformer3DModel",
            {
                **HEADED,
                "in_channels": 4,
                "out_channels": 4,
                "time_embed_dim": 16,
                "text_embed_dim": 32,
                "num_layers": 2,
                "sample_width": 8,
                "sample_height": 8,
                "sample_frames": 5,
                "max_text_seq_length": TEXT,
            },
            _cogvideox,
        ),
        Diffusion(
            "HunyuanVideoTransformer3DModel",
            {
                **HEADED,
                "in_channels": 4,
                "out_channels": 4,
                "num_layers": 2,
                "num_single_layers": 2,
                "num_refiner_layers": 2,
                "text_embed_dim": 32,
                "pooled_projection_dim": 24,
                "rope_axes_dim": (4, 4, 4),
            },
            _hunyuan_video,
        ),
    )
}

# The same as `tests.diffusion_models:NAMED.<class>.build`, as other processes and the command line name it.
NAMED = SimpleNamespace(**{name: one for name, one in DIFFUSION.items() if name == one.cls})
