"""timm's real ViT and Swin, in small sizes, and what they are called with.

timm imports torchvision, whose wheels are compiled for the CUDA builds of torch. Their Python part imports with the CPU build
if the two operators that it describes when it is imported are declared first. Both packages lie in build/timm, not in the environment:
transformers would find torchvision there and import it without that.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.library import Library

FOLDER = Path(__file__).parent.parent / "build" / "timm"
CLASSES, IMAGE = 10, 32


def timm() -> Any:
    """The package."""
    assert FOLDER.is_dir(), "`make build/timm` installs it"
    if "timm" not in sys.modules:
        operators = Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            operators.define(f"{name}(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor")
        _OPERATORS.append(operators)
        sys.path.append(str(FOLDER))
        try:
            import timm  # noqa: F401
        finally:
            sys.path.remove(str(FOLDER))  # a process that is spawned gets this path, and not the operators
    return sys.modules["timm"]


_OPERATORS: list[Library] = []  # what a Library declares is gone with it


def vit(**options: Any) -> nn.Module:
    """`vit_base_patch16_224`: 12 layers, narrower."""
    sizes = {"img_size": IMAGE, "patch_size": 8, "embed_dim": 64, "num_heads": 4, "depth": 3}
    return timm().create_model("vit_base_patch16_224", num_classes=CLASSES, **{**sizes, **options})


def pooled_vit() -> nn.Module:
    """By the mean of its tokens in place of a class token: 16 tokens, which tp divides."""
    return vit(class_token=False, global_pool="avg")


def swin(**options: Any) -> nn.Module:
    """`swin_tiny_patch4_window7_224`: stages of 2, 2, 6 and 2 blocks with 3, 6, 12 and 24 heads in the original."""
    sizes = {"img_size": 64, "window_size": 4, "embed_dim": 32, "num_heads": (2, 4, 8), "depths": (2, 2, 2)}
    return timm().create_model("swin_tiny_patch4_window7_224", num_classes=CLASSES, **{**sizes, **options})


def pictures(seed: int, size: int) -> dict[str, Tensor]:
    """[2, 3, size, size]."""
    return {"x": torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(seed))}


vit_pictures = partial(pictures, size=IMAGE)
swin_pictures = partial(pictures, size=64)
