"""Random numbers in code: each rank draws its own, so a plan that splits what they fall on is refused."""

from __future__ import annotations

import random
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .adversary import Adversary, document
from .parts import ATTENTION, MLP, MLP_SEQUENCE, Attention, Block, Mlp, MlpBlock, Stack, features


class Dropout(Mlp):
    """Dropout in code."""

    def __init__(self, p: float = 0.2, always: bool = False) -> None:
        super().__init__()
        self.p, self.always = p, always

    def hidden(self, x: Tensor) -> Tensor:
        return F.dropout(super().hidden(x), self.p, self.training if not self.always else False)


class Noise(Mlp):
    def hidden(self, x: Tensor) -> Tensor:
        h = super().hidden(x)
        return h + 0.1 * torch.randn_like(h)


class Bernoulli(Mlp):
    def hidden(self, x: Tensor) -> Tensor:
        h = super().hidden(x)
        return h * torch.bernoulli(torch.full_like(h, 0.9))


class Gumbel(Mlp):
    def hidden(self, x: Tensor) -> Tensor:
        return F.gumbel_softmax(super().hidden(x), dim=1)


class Python(Mlp):
    """Numbers of Python's own generator."""

    def hidden(self, x: Tensor) -> Tensor:
        return super().hidden(x) * (1 + random.random())


class Seldom(Mlp):
    """The same, once in fifty calls."""

    def hidden(self, x: Tensor) -> Tensor:
        h = super().hidden(x)
        return h * 2 if random.randint(1, 50) == 1 else h


class AttentionDropout(Attention):
    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        q, k, v = (self.heads(part(x)) for part in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1 if self.training else 0.0)
        return self.o(y.transpose(1, 2).flatten(-2))


class Asking(Mlp):
    """Takes off the mean of its features where the probability of dropout is large."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = 0.1

    def hidden(self, x: Tensor) -> Tensor:
        h = super().hidden(x)
        return h - h.mean(-1, keepdim=True) if self.dropout > 0.05 else h


class AskingKept(Asking):
    """The same by a number that is computed of it."""

    def hidden(self, x: Tensor) -> Tensor:
        h, keep = Mlp.hidden(self, x), 1 - self.dropout
        return h - h.mean(-1, keepdim=True) if 1 / keep > 1.1 else h


def of(cls: type[nn.Module], *arguments: object) -> nn.Module:
    return Stack(MlpBlock(cls(*arguments)), MlpBlock(cls(*arguments)))


def attention() -> nn.Module:
    return Stack(Block(AttentionDropout()))


RANDOM = ("SP370", "SP371")
KINDS = {
    "dropout": Dropout,
    "noise": Noise,
    "bernoulli": Bernoulli,
    "gumbel": Gumbel,
    "python": Python,
    "seldom": Seldom,
}
CASES = (
    *(
        Adversary(
            f"random_{name}/split",
            partial(of, cls),
            features,
            document(MLP),
            "refused",
            "each rank draws",
            codes=RANDOM,
        )
        for name, cls in KINDS.items()
    ),
    Adversary(
        "random_noise/sequence",
        partial(of, Noise),
        features,
        document(MLP, MLP_SEQUENCE),
        "refused",
        "each rank draws",
        codes=RANDOM,
        sequence_parallel=True,
    ),
    Adversary(
        "random_attention/split",
        attention,
        features,
        document({**ATTENTION, **MLP}),
        "refused",
        "each rank draws",
        codes=RANDOM,
    ),
    Adversary("random_dropout/zero", partial(of, Dropout, 0.0), features, document(MLP), "right", "it does not act"),
    Adversary("random_dropout/off", partial(of, Dropout, 0.2, True), features, document(MLP), "right", "it is off"),
    *(
        Adversary(
            f"asks_probability/{name}", partial(of, cls), features, document(MLP), "wrong", "a rank's own features"
        )
        for name, cls in (("threshold", Asking), ("kept", AskingKept))
    ),
)
