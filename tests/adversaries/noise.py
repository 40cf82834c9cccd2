"""Random numbers in code: each rank draws its own, so a plan that splits what they fall on is refused."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .adversary import Adversary, document
from .context import EXCHANGED
from .context import plan as over_cp
from .meshes import MESHES
from .mixtures import PLAN, Mixture
from .parts import ATTENTION, MLP, MLP_SEQUENCE, Attention, Block, Mlp, MlpBlock, Stack, features
from .stages import ONE_BY_ONE, OWN_PLAN, Own, pairs, squared


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


class Between(Mlp):
    """Twice as much where a number of the batch, or of each row, is between two others."""

    def __init__(self, of: str) -> None:
        super().__init__()
        self.of = of

    def hidden(self, x: Tensor) -> Tensor:
        h = super().hidden(x)
        drawn = torch.rand(()) if self.of == "batch" else torch.randn(len(h), 1, 1)
        return torch.where((drawn > 0.4) & (drawn < 0.6), 2 * h, h)


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


class Dropping(Own):
    """Leaves layers out, seldom."""

    def __init__(self, generator: str, layers: Sequence[nn.Module]) -> None:
        super().__init__(*layers)
        self.generator, self.layer_drop = generator, 0.02

    def drawn(self) -> float:
        return {"torch": lambda: torch.rand(()).item(), "python": random.random, "numpy": np.random.rand}[
            self.generator
        ]()

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            if not self.training or self.drawn() >= self.layer_drop:
                x = layer(x)
        return self.norm(x)


class Path(MlpBlock):
    """Stochastic depth: of a call, whose MLP then does not run; of a row, which is multiplied by 0; or of a feature of all tokens."""

    def __init__(self, of: str, cls: type[nn.Module] = MlpBlock) -> None:
        super().__init__()
        self.of, self.drop_path = of, 0.02
        self.attn = Attention() if cls is Block else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.attn(x)
        if self.of == "call":
            return x if self.training and torch.rand(()) < self.drop_path else super().forward(x)
        if self.of == "feature":
            return x + F.dropout1d(self.mlp(self.norm(x)).mT, self.drop_path, self.training).mT
        keep = torch.rand(x.shape[0], 1, 1) >= self.drop_path
        return x + self.mlp(self.norm(x)) * keep


class Masking(Own):
    """Draws which tokens are masked, and multiplies what the layers return by it, or what each of them does, or by a number; or not."""

    def __init__(self, again: str) -> None:
        super().__init__(*(MlpBlock() for _ in range(4)))
        self.again, self.p, self.drop = again, 1e-4, nn.Dropout(1e-4)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        keep = (torch.rand(x.shape[:2]) >= self.p)[..., None]
        y = self.drop(x * keep)
        for layer in self.layers:
            y = self.drop(layer(y))
            y = y * keep if self.again == "layers" else y
        y = self.norm(y)
        if self.again == "mask":
            return y * keep
        return y * torch.rand(()).item() if self.again == "number" else y


def of(cls: Callable[..., nn.Module], *arguments: object) -> nn.Module:
    return Stack(MlpBlock(cls(*arguments)), MlpBlock(cls(*arguments)))


def attention() -> nn.Module:
    return Stack(Block(AttentionDropout()))


RANDOM = ("SP370", "SP371")
APART = "ranks draw apart"


def dropping(generator: str, experts: bool = False) -> nn.Module:
    return Dropping(generator, [MlpBlock(Mixture("plain")) if experts else MlpBlock() for _ in range(3)])


def paths(of: str, cls: type[nn.Module] = MlpBlock) -> nn.Module:
    return Own(*(Path(of, cls) for _ in range(3)))


def drawn(name: str, mesh: str, build: Any, verdict: Any, why: str = APART, plan: Any = OWN_PLAN) -> Adversary:
    given: dict[str, Any] = {"codes": ("SP371",)} if verdict == "refused" else {}
    if "pp" in mesh:
        given["stage_loss"] = squared
    return Adversary(
        f"drawn_{name}/{mesh}", build, pairs, plan, verdict, why, mesh={**MESHES, "cp": {"cp": 2}}[mesh], **given
    )


KINDS = {
    "dropout": Dropout,
    "noise": Noise,
    "bernoulli": Bernoulli,
    "gumbel": Gumbel,
    "python": Python,
    "seldom": Seldom,
    "between_batch": partial(Between, "batch"),
    "between_row": partial(Between, "row"),
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
    *(
        drawn(f"layers_{generator}", mesh, partial(dropping, generator), "refused")
        for generator in ("torch", "python", "numpy")
        for mesh in ("dp", "pp", "pp_dp")
    ),
    *(
        drawn(f"layers_{generator}", "ep", partial(dropping, generator, True), "refused", plan=PLAN)
        for generator in ("torch", "python", "numpy")
    ),
    *(drawn("path_of_call", mesh, partial(paths, "call"), "refused") for mesh in ("dp", "pp_dp")),
    drawn("path_of_call", "pp", partial(paths, "call"), "right", "a block is on one rank"),
    *(drawn("path_of_row", mesh, partial(paths, "row"), "right", "each row by itself") for mesh in ("dp", "pp")),
    *(
        drawn(f"path_of_{of}", "cp", partial(paths, of, Block), "refused", plan=over_cp(EXCHANGED, {}))
        for of in ("call", "row", "feature")
    ),
    *(drawn(f"masking_{again}", "pp", partial(Masking, again), "refused") for again in ("mask", "number", "layers")),
    drawn("masking_once", "pp", partial(Masking, ""), "right", ONE_BY_ONE),
)
