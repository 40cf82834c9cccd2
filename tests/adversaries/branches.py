"""Code that does not run in every batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .adversary import Adversary, document
from .parts import (
    ATTENTION,
    BLOCK_INPUT,
    MLP,
    WIDTH,
    Attention,
    Mlp,
    MlpBlock,
    Stack,
    features,
    linear,
)

RARE = (0, 1, 101)  # the last batch takes the other way


def flagged(seed: int, rare: int = 100) -> dict[str, Any]:
    """With a flag for batches that are rare."""
    return {**features(seed), "flag": seed >= rare}


def lifted(seed: int) -> dict[str, Any]:
    """The values of a rare batch have another mean."""
    made = features(seed)
    return made if seed < 100 else {"x": made["x"] + 3}


def larger(seed: int) -> dict[str, Any]:
    """The values of a rare batch are larger."""
    made = features(seed)
    return made if seed < 100 else {"x": 4 * made["x"]}


def either(seed: int) -> dict[str, Any]:
    """Every other batch takes the other way."""
    return {**features(seed), "flag": seed % 2 == 1}


def seldom(seed: int) -> dict[str, Any]:
    """The first batch takes the way that every other one takes."""
    return {**features(seed), "flag": seed % 2 == 0}


class Side(Stack):
    """Another MLP on the way that a flag, or the data, opens."""

    def __init__(self, by_data: bool = False) -> None:
        super().__init__(MlpBlock())
        self.by_data, self.side = by_data, Mlp()

    def forward(self, x: Tensor, flag: bool = False) -> Tensor:
        x = self.trunk(x) if not self.by_data else x
        if flag or (self.by_data and bool(x.mean() > 1)):
            x = x + self.side(x)
        return self.trunk(x) if self.by_data else x


# Whether hidden values are small, asked of all of them; each is a number of the values on a rank.
SMALL: dict[str, Callable[[Tensor], Tensor | bool]] = {
    "hidden": lambda h: h.sum() < 300,
    "sum": lambda h: h.detach().sum() < 300,
    "norm": lambda h: h.detach().norm() < 35,
    "mean": lambda h: h.detach().mean() < 0.9,
    "largest": lambda h: h.detach().abs().amax() < 7.8,
    "asked": lambda h: h.detach().norm().item() < 35,
    "floats": lambda h: max(1.0, float(h.detach().abs().amax()) / 7.8) == 1.0,
    "any": lambda h: not (h.detach().abs() > 7.8).any(),
    "every": lambda h: bool((h.detach().abs() < 7.8).all()),
    "count": lambda h: (h.detach().abs() > 7.8).sum() < 1,
    "counted": lambda h: int((h.detach().abs() > 7.8).sum()) == 0,
    "rows": lambda h: h[h.detach().abs() > 7.8].shape[0] == 0,
    "nonzero": lambda h: len((h.detach().abs() > 7.8).nonzero()) == 0,
    "selected": lambda h: h.masked_select(h.detach().abs() > 7.8).numel() == 0,
    "bound": lambda h: (h.detach().norm() / 35).clamp(min=1) < 1.001,
}


class Asking(MlpBlock):
    """Halves its MLP's values where the hidden ones, or the sum of the output, are large."""

    def __init__(self, of: str) -> None:
        super().__init__()
        self.of = of

    def forward(self, x: Tensor) -> Tensor:
        if self.of == "output":
            y = self.mlp(x + self.norm(x))
            return x + (y if y.abs().sum() < 300 else y / 2)
        h = self.mlp.hidden(x + self.norm(x))
        return x + self.mlp.down(h if SMALL[self.of](h) else h / 2)


def asking(of: str) -> nn.Module:
    return Stack(Asking(of), Asking(of))


class Scaled(Asking):
    """The same without a branch."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.mlp.hidden(x + self.norm(x))
        return x + self.mlp.down(torch.where((h.detach().abs() > 7.8).any(), h / 2, h))


def scaled() -> nn.Module:
    return Stack(Scaled("any"), Scaled("any"))


class Sparing(Mlp):
    """Takes large values out where there are some; and counts them."""

    def hidden(self, x: Tensor) -> Tensor:
        h = super().hidden(x)
        large = h.detach() > 2
        self.shown = int(large.sum())
        return h.masked_fill(large, 0.0) if large.any() else h


class Guarded(Mlp):
    """Raises where a value is no number."""

    def hidden(self, x: Tensor) -> Tensor:
        h = super().hidden(x)
        if h.isnan().any():
            raise FloatingPointError("not a number")
        return h


def hiding(kind: type[Mlp]) -> nn.Module:
    return Stack(MlpBlock(kind()), MlpBlock(kind()))


class Showing(Mlp):
    """Keeps numbers of its hidden values to show them; it does not compute with them."""

    def hidden(self, x: Tensor) -> Tensor:
        h = super().hidden(x)
        self.shown = {"norm": h.detach().norm().item(), "largest": float(h.detach().amax())}
        return h


def showing() -> nn.Module:
    return Stack(MlpBlock(Showing()), MlpBlock(Showing()))


class Later(Mlp):
    """From its third call in training on it looks at all features."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def hidden(self, x: Tensor) -> Tensor:
        self.calls += self.training
        h = super().hidden(x)
        return h - h.mean(-1, keepdim=True) if self.calls >= 3 else h


def later() -> nn.Module:
    return Stack(MlpBlock(Later()), MlpBlock(Later()))


class SecondReader(nn.Module):
    """Two matrices read one value, the second on a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.down = linear(WIDTH, 32), linear(WIDTH, 32), linear(32, WIDTH)

    def forward(self, x: Tensor, flag: bool) -> Tensor:
        h = torch.relu(self.a(x))
        if flag:
            h = h * self.b(x)
        return self.down(h)


class Readers(nn.Module):
    """A block with two readers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), SecondReader()

    def forward(self, x: Tensor, flag: bool) -> Tensor:
        return x + self.mlp(self.norm(x), flag)


class ReadersStack(Stack):
    def __init__(self) -> None:
        super().__init__(Readers(), Readers())

    def forward(self, x: Tensor, flag: bool) -> Tensor:
        for layer in self.layers:
            x = layer(x, flag)
        return self.norm(x)


class FirstReader(SecondReader):
    """The first of the two readers is on the branch."""

    def forward(self, x: Tensor, flag: bool) -> Tensor:
        gate = self.a(x) if flag else 1.0
        return self.down(torch.relu(self.b(x)) * gate)


class FirstReaders(ReadersStack):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.mlp = FirstReader()


class ThirdReader(SecondReader):
    """Two readers in every batch, and a third on the branch."""

    def __init__(self) -> None:
        super().__init__()
        self.c = linear(WIDTH, 32)

    def forward(self, x: Tensor, flag: bool) -> Tensor:
        h = torch.relu(self.a(x)) * self.b(x)
        return self.down(h * self.c(x) if flag else h)


class ThirdReaders(ReadersStack):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.mlp = ThirdReader()


class TwoWays(nn.Module):
    """One of two MLPs, each after the same norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp, self.other = nn.LayerNorm(WIDTH), Mlp(), Mlp()

    def forward(self, x: Tensor, flag: bool) -> Tensor:
        y = self.norm(x)
        return x + (self.other(y) if flag else self.mlp(y))


class TwoWaysStack(ReadersStack):
    def __init__(self) -> None:
        Stack.__init__(self, TwoWays(), TwoWays())


class Parallel(nn.Module):
    """Attention and an MLP side by side, added up at once; the MLP is skipped where the flag says so."""

    def __init__(self, skipped: str) -> None:
        super().__init__()
        self.skipped, self.norm, self.attn, self.mlp = skipped, nn.LayerNorm(WIDTH), Attention(), Mlp()

    def forward(self, x: Tensor, flag: bool) -> Tensor:
        y = self.norm(x)
        if flag:
            return x + (self.attn(y) if self.skipped == "mlp" else self.mlp(y))
        return x + self.attn(y) + self.mlp(y)


class ParallelStack(ReadersStack):
    def __init__(self, skipped: str) -> None:
        Stack.__init__(self, Parallel(skipped), Parallel(skipped))


class LayerDrop(Stack):
    """Layers are left out at random while training."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.training and torch.rand(()) < 0.3:
                continue
            x = layer(x)
        return self.norm(x)


def layer_drop() -> nn.Module:
    return LayerDrop(*(MlpBlock() for _ in range(4)))


class Idle(Stack):
    """A parameter and a module that nobody reads."""

    def __init__(self) -> None:
        super().__init__(MlpBlock())
        self.mask_token, self.unused = nn.Parameter(torch.zeros(WIDTH)), linear(WIDTH, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.trunk(x)


class InTraining(MlpBlock):
    """Another branch while training."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return x + self.mlp(self.norm(x)) / (1 + self.mlp.hidden(self.norm(x)).square().mean(-1, keepdim=True))
        return super().forward(x)


def in_training() -> nn.Module:
    return Stack(InTraining())


class Many(Mlp):
    """Takes off the mean of its features where there are many numbers."""

    def hidden(self, x: Tensor) -> Tensor:
        h = super().hidden(x)
        return h - h.mean(-1, keepdim=True) if x.numel() > 4000 else h


class Product(Mlp):
    """The same by the product of the shape."""

    def hidden(self, x: Tensor) -> Tensor:
        h = super().hidden(x)
        return h - h.mean(-1, keepdim=True) if math.prod(x.shape) > 4000 else h


class Quotient(Mlp):
    """By whole parts of the length."""

    def hidden(self, x: Tensor) -> Tensor:
        h, length = super().hidden(x), x.shape[1]
        return h - h.mean(-1, keepdim=True) if length // 150 else h


class Fraction(Mlp):
    """By a fraction of it."""

    def hidden(self, x: Tensor) -> Tensor:
        h = super().hidden(x)
        return h - h.mean(-1, keepdim=True) if x.shape[1] / 150 > 1 else h


class Inside(Mlp):
    """In a function that is inside of the forward."""

    def hidden(self, x: Tensor) -> Tensor:
        h, is_long = super().hidden(x), lambda length: length > 150
        return h - h.mean(-1, keepdim=True) if is_long(x.shape[1]) else h


def many(mlp: type[Mlp]) -> nn.Module:
    return Stack(MlpBlock(mlp()))


def longer(seed: int) -> dict[str, Any]:
    """A rare batch is long."""
    return {"x": torch.randn(2, 8 if seed < 100 else 200, WIDTH, generator=torch.Generator().manual_seed(seed))}


SIDE = {**MLP, "side.up": "colwise", "side.down": "rowwise"}
WRONG_SIDE = {**MLP, "side.up": "colwise", "side.down.weight": "rowwise"}
READERS = {"layers.*.mlp.{a,b}": "colwise", "layers.*.mlp.down": "rowwise"}
WAYS = {**MLP, "layers.*.other.up": "colwise", "layers.*.other.down": "rowwise"}
UNTAKEN = "the way is taken in no run of the proof"
CASES = (
    *(
        Adversary(
            f"asks_for_a_number/{of}",
            partial(asking, of),
            larger,
            document(MLP),
            verdict,
            why,
            seeds=RARE,
        )
        for of, verdict, why in (
            ("hidden", "wrong", "in a rare batch ranks take other branches: each has a summand"),
            *(
                (how, "wrong", "in a rare batch ranks take other branches: each asks its own values")
                for how in SMALL
                if how != "hidden"
            ),
            ("output", "right", "the sum of what is whole"),
        )
    ),
    Adversary("scales/wrong", scaled, larger, document(MLP), "wrong", "each by its own", seeds=RARE),
    Adversary("spares/right", partial(hiding, Sparing), features, document(MLP), "right", "a branch that saves time"),
    Adversary("guarded/right", partial(hiding, Guarded), features, document(MLP), "right", "no rank raises alone"),
    Adversary("shows_numbers/right", showing, features, document(MLP), "right", "nothing depends on them"),
    Adversary("flag/right", Side, flagged, document(SIDE), "unproven", UNTAKEN, seeds=RARE),
    Adversary("flag/wrong", Side, flagged, document(WRONG_SIDE), "unproven", UNTAKEN, seeds=RARE),
    Adversary(
        "flag/whole", Side, flagged, document(MLP), "right", "the way that is not taken is not split", seeds=RARE
    ),
    Adversary("flag/taken", Side, partial(flagged, rare=0), document(SIDE), "right", "the way is taken always"),
    Adversary("flag/taken_wrong", Side, partial(flagged, rare=0), document(WRONG_SIDE), "wrong", "nobody adds it up"),
    Adversary(
        "flag/taken_at_times", Side, either, document(SIDE), "right", "taken in every other batch", codes=("SP421",)
    ),
    Adversary("flag/taken_at_times_wrong", Side, either, document(WRONG_SIDE), "wrong", "nobody adds it up"),
    Adversary("data/right", partial(Side, True), lifted, document(SIDE), "right", "both ways are proven", seeds=RARE),
    Adversary(
        "data/wrong", partial(Side, True), lifted, document(WRONG_SIDE), "wrong", "both ways are proven", seeds=RARE
    ),
    Adversary("later/wrong", later, features, document(MLP), "wrong", "from the third step on", seeds=(0, 1, 2, 3)),
    Adversary("later/whole", later, features, document({}), "right", "nothing is split", seeds=(0, 1, 2, 3)),
    Adversary("second_reader/right", ReadersStack, either, document(READERS), "right", "each reader moves by itself"),
    Adversary(
        "second_reader/rare",
        ReadersStack,
        flagged,
        document(READERS),
        "unproven",
        "the second reader is not reached",
        seeds=RARE,
    ),
    Adversary(
        "second_reader/block input",
        ReadersStack,
        either,
        document({"layers.*.mlp": BLOCK_INPUT, **READERS}),
        "right",
        "one move for both",
    ),
    Adversary("second_reader/seldom", ReadersStack, seldom, document(READERS), "right", "each reader moves by itself"),
    Adversary(
        "third_reader/right",
        ThirdReaders,
        either,
        document({**READERS, "layers.*.mlp.c": "colwise"}),
        "right",
        "each reader moves by itself",
        codes=("SP421",),
    ),
    Adversary(
        "third_reader/rare",
        ThirdReaders,
        flagged,
        document({**READERS, "layers.*.mlp.c": "colwise"}),
        "unproven",
        "the third reader is not reached",
        seeds=RARE,
    ),
    Adversary("first_reader/right", FirstReaders, either, document(READERS), "right", "each reader moves by itself"),
    Adversary(
        "two_ways/right", TwoWaysStack, either, document(WAYS), "right", "each way moves by itself", codes=("SP421",)
    ),
    Adversary(
        "two_ways/wrong",
        TwoWaysStack,
        either,
        document({**MLP, "layers.*.other.up": "colwise", "layers.*.other.down.weight": "rowwise"}),
        "wrong",
        "nobody adds the other way up",
    ),
    *(
        Adversary(
            f"skipped/{skipped}",
            partial(ParallelStack, skipped),
            either,
            document({**ATTENTION, **MLP}),
            "right",
            "what runs is added up",
            codes=("SP421",),
        )
        for skipped in ("mlp", "attn")
    ),
    Adversary(
        "layer_drop/right",
        layer_drop,
        features,
        document(MLP),
        "refused",
        "the ranks' generators need not agree",
        codes=("SP370", "SP371", "SP421"),
    ),
    Adversary("idle/whole", Idle, features, document(MLP), "right", "what nobody reads is not split"),
    Adversary("idle/split", Idle, features, document({**MLP, "unused": "colwise"}), "unproven", "nobody reads it"),
    Adversary("in_training/wrong", in_training, features, document(MLP), "wrong", "the mean of a rank's own features"),
    *(
        Adversary(
            f"many/{mlp.__name__.lower()}",
            partial(many, mlp),
            longer,
            document(MLP),
            "wrong",
            "the mean of a rank's own features",
            seeds=RARE,
        )
        for mlp in (Many, Product, Quotient, Fraction, Inside)
    ),
)
