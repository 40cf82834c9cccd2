"""Modules and parameters that are there once and used more than once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .adversary import Adversary, document
from .parts import MLP, MLP_SEQUENCE, WIDTH, Mlp, MlpBlock, Stack, features, linear


def same_layer() -> nn.Module:
    """One layer object that stands in the list twice."""
    layer = MlpBlock()
    return Stack(layer, MlpBlock(), layer)


def same_mlp() -> nn.Module:
    """Two blocks with one MLP."""
    mlp = Mlp()
    return Stack(MlpBlock(mlp), MlpBlock(mlp))


class Common(Stack):
    """Two blocks with one MLP, which are FSDP2 units; the model has a name for it too (feedback-transformer-pytorch)."""

    def __init__(self) -> None:
        mlp = Mlp()
        super().__init__(MlpBlock(mlp), MlpBlock(mlp))
        self.common = mlp


class Empty(Mlp):
    """It has a parameter without elements: no tokens of memory (rela-transformer)."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.Parameter(torch.zeros(0, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        memory = self.memory[None].expand(len(x), -1, -1)
        return super().forward(torch.cat((memory, x), 1))


def empty() -> nn.Module:
    return Stack(MlpBlock(Empty()), MlpBlock(Empty()))


def in_units(*units: str) -> dict[str, Any]:
    return {**document(MLP), "data_parallel": {"backend": "fsdp2", "units": list(units)}}


def same_matrix() -> nn.Module:
    """Two MLPs with one first matrix, as a parameter."""
    first, second = MlpBlock(), MlpBlock()
    second.mlp.up.weight = first.mlp.up.weight
    return Stack(first, second)


class Repeated(Stack):
    """One layer, run four times (ALBERT)."""

    def __init__(self) -> None:
        super().__init__(MlpBlock())

    def trunk(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = self.layers[0](x)
        return self.norm(x)


class Transposed(Mlp):
    """The second matrix is the first one, transposed."""

    def __init__(self) -> None:
        super().__init__()
        del self.down

    def forward(self, x: Tensor) -> Tensor:
        return self.hidden(x) @ self.up.weight


def transposed() -> nn.Module:
    return Stack(MlpBlock(Transposed()))


class Language(nn.Module):
    """Token ids in, logits out; the head is the embedding."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embedding, self.layers = nn.Embedding(32, WIDTH), nn.ModuleList([MlpBlock(), MlpBlock()])
        self.norm, self.head = nn.LayerNorm(WIDTH), linear(WIDTH, 32)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def ids(seed: int) -> dict[str, Tensor]:
    return {"ids": torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(seed))}


class Functional(Language):
    """The head is no module: the embedding's matrix is read."""

    def __init__(self) -> None:
        super().__init__()
        del self.head

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x) @ self.embedding.weight.T


TIED = {**MLP, "embedding": "embedding_rowwise", "head": "colwise_gather_output"}
SHARED = ("SP524",)
CASES = (
    *(
        Adversary(f"common/{name}", Common, features, in_units("layers.*"), "right", "it is the root's", mesh=mesh)
        for name, mesh in (("tp", {"tp": 2}), ("dp", {"dp_shard": 2}), ("both", {"dp_shard": 2, "tp": 2}))
    ),
    Adversary(
        "common/nameless",
        same_mlp,
        features,
        in_units("layers.*"),
        "refused",
        "the root's unit does not find it",
        codes=("SP341",),
        mesh={"dp_shard": 2, "tp": 2},
    ),
    *(
        Adversary(f"empty/{name}", empty, features, in_units("layers.*"), "right", "nothing to reduce", mesh=mesh)
        for name, mesh in (("tp", {"tp": 2}), ("both", {"dp_shard": 2, "tp": 2}))
    ),
    Adversary("same_layer/right", same_layer, features, document(MLP), "right", "it is split once", codes=SHARED),
    Adversary(
        "same_layer/sequence",
        same_layer,
        features,
        document(MLP, MLP_SEQUENCE),
        "wrong",
        "its first call would split what is split already",
        sequence_parallel=True,
    ),
    Adversary("same_mlp/right", same_mlp, features, document(MLP), "right", "it is split once", codes=SHARED),
    Adversary(
        "same_mlp/sequence",
        same_mlp,
        features,
        document(MLP, MLP_SEQUENCE),
        "right",
        "it is gathered at each call",
        sequence_parallel=True,
        codes=SHARED,
    ),
    Adversary("same_matrix/right", same_matrix, features, document(MLP), "right", "both names are split alike"),
    Adversary(
        "same_matrix/one",
        same_matrix,
        features,
        document({"layers.0.mlp.up": "colwise", "layers.0.mlp.down": "rowwise"}),
        "wrong",
        "one name is split, the other not",
    ),
    Adversary("repeated/right", Repeated, features, document(MLP), "right", "split once, run four times"),
    Adversary(
        "repeated/sequence",
        Repeated,
        features,
        document(MLP, MLP_SEQUENCE),
        "wrong",
        "its second call would split what is split already",
        sequence_parallel=True,
    ),
    Adversary(
        "transposed/colwise",
        transposed,
        features,
        document({"layers.*.mlp.up": "colwise"}),
        "wrong",
        "the matrix is split, and read whole outside its module",
    ),
    Adversary("tied/right", Language, ids, document(TIED), "right", "both are split by rows"),
    Adversary(
        "tied/head_alone",
        Language,
        ids,
        document({**MLP, "head": "colwise_gather_output"}),
        "wrong",
        "the embedding stays whole",
    ),
    Adversary(
        "tied/columns",
        Language,
        ids,
        document({**TIED, "embedding": "embedding_colwise"}),
        "wrong",
        "one is split by rows, the other by columns",
    ),
    Adversary("tied/whole", Language, ids, document(MLP), "right", "both stay whole"),
    Adversary(
        "functional_head/split",
        Functional,
        ids,
        document({**MLP, "embedding": "embedding_rowwise"}),
        "wrong",
        "a rank has logits of its own rows",
    ),
    Adversary("functional_head/whole", Functional, ids, document(MLP), "right", "the embedding stays whole"),
)
