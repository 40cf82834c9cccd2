"""More than one output, in every form: each of them is compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from .adversary import Adversary, document
from .parts import BLOCK_INPUT, MLP, MLP_SEQUENCE, WIDTH, Mlp, MlpBlock, Stack, features, linear


class Pair(Stack):
    """Two heads."""

    def __init__(self) -> None:
        super().__init__(MlpBlock(), MlpBlock())
        self.head, self.box = linear(WIDTH, 8), linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Any:
        x = self.trunk(x)
        return self.head(x), self.box(x)


class Named(Pair):
    """The main output stands second."""

    def forward(self, x: Tensor) -> Any:
        x = self.trunk(x)
        return {"aux": self.box(x), "sample": self.head(x)}


@dataclass
class Sample:
    sample: Tensor
    extra: list[Any]
    note: str = "a text"


class Dataclass(Pair):
    def forward(self, x: Tensor) -> Any:
        x = self.trunk(x)
        return Sample(self.head(x), [None, {"box": self.box(x)}, 3])


@dataclass
class Output(ModelOutput):
    aux: Tensor | None = None
    sample: Tensor | None = None


class Transformers(Pair):
    def forward(self, x: Tensor) -> Any:
        x = self.trunk(x)
        return Output(aux=self.box(x), sample=self.head(x))


class Both(NamedTuple):
    box: Tensor
    head: Tensor


class Tuple(Pair):
    def forward(self, x: Tensor) -> Any:
        x = self.trunk(x)
        return Both(self.box(x), self.head(x))


class Hidden(Stack):
    """What is inside of an MLP is an output too."""

    def __init__(self) -> None:
        super().__init__(MlpBlock())
        self.mlp, self.side = Mlp(), linear(32, 4)

    def forward(self, x: Tensor) -> Any:
        h = self.mlp.hidden(self.trunk(x))
        return self.mlp.down(h), self.side(h)


class Statistic(Stack):
    """A number about what is inside of an MLP, which nobody trains."""

    def __init__(self) -> None:
        super().__init__(MlpBlock())
        self.mlp = Mlp()

    def forward(self, x: Tensor) -> Any:
        h = self.mlp.hidden(self.trunk(x))
        return {"sample": self.mlp.down(h), "largest": h.detach().abs().max()}


class AuxiliaryFirst(nn.Module):
    """A block that returns a number first and what the next one reads second."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.square().mean(), self.mlp(x)


class BlockOutputs(Stack):
    def __init__(self) -> None:
        super().__init__(AuxiliaryFirst(), AuxiliaryFirst())

    def forward(self, x: Tensor) -> Any:
        total = torch.zeros((), dtype=x.dtype)
        for layer in self.layers:
            aux, y = layer(x)
            total, x = total + aux, x + y
        return self.norm(x), total


HEAD = {**MLP, "head": "colwise_gather_output"}
MODELS = {"tuple": Pair, "dict": Named, "dataclass": Dataclass, "model_output": Transformers, "namedtuple": Tuple}
CASES = (
    *(
        Adversary(f"{name}/right", build, features, document(HEAD), "right", "both heads are whole")
        for name, build in MODELS.items()
    ),
    *(
        Adversary(
            f"{name}/second_split", build, features, document({**HEAD, "box": "colwise"}), "wrong", "the box is a slice"
        )
        for name, build in MODELS.items()
    ),
    *(
        Adversary(
            f"{name}/main_split", build, features, document({**MLP, "head": "colwise"}), "wrong", "the head is a slice"
        )
        for name, build in MODELS.items()
    ),
    Adversary(
        "dataclass/sequence",
        Dataclass,
        features,
        document(HEAD, MLP_SEQUENCE),
        "right",
        "the norm hands on the whole sequence",
        sequence_parallel=True,
    ),
    Adversary(
        "tuple/sequence_split",
        Pair,
        features,
        document(MLP, {**MLP_SEQUENCE, "norm": "sequence_parallel"}),
        "wrong",
        "both outputs are slices of the sequence",
        sequence_parallel=True,
    ),
    Adversary(
        "hidden/right",
        Hidden,
        features,
        document({**MLP, "mlp.up": "colwise", "mlp.down": "rowwise", "side": "rowwise"}),
        "right",
        "both readers of the split value sum",
    ),
    Adversary(
        "hidden/second_partial",
        Hidden,
        features,
        document({**MLP, "mlp.up": "colwise", "mlp.down": "rowwise", "side.weight": "rowwise"}),
        "wrong",
        "the second output is a partial sum",
    ),
    Adversary(
        "statistic/right",
        Statistic,
        features,
        document({**MLP, "mlp.up": "colwise_gather_output", "mlp.down": "rowwise_rep"}),
        "right",
        "the hidden values are whole where the number is taken",
    ),
    Adversary(
        "statistic/split",
        Statistic,
        features,
        document({**MLP, "mlp.up": "colwise", "mlp.down": "rowwise"}),
        "wrong",
        "each rank reports the largest of its own features",
    ),
    Adversary("auxiliary_first/right", BlockOutputs, features, document(MLP), "right", "each matrix sums by itself"),
    Adversary(
        "auxiliary_first/moved_first",
        BlockOutputs,
        features,
        document(
            {
                "layers.*": "all_reduce",
                "layers.*.mlp": BLOCK_INPUT,
                "layers.*.mlp.up": "colwise",
                "layers.*.mlp.down.weight": "rowwise",
            }
        ),
        "wrong",
        "the rule at the block sums its first output, the number",
    ),
)
