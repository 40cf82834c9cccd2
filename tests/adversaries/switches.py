"""Parts that a flag of the constructor switches off, and that run in a rare batch all the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from .adversary import Adversary, document
from .branches import RARE, flagged, lifted
from .parts import MLP_DOOR, PARTIAL, WIDTH, Mlp, MlpBlock, Stack, linear


class Off(Mlp):
    """A gate, whose gradient is a sum over a rank's own features, is switched off."""

    def __init__(self) -> None:
        super().__init__()
        self.closed, self.with_closed = linear(WIDTH, 1), False

    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(x)
        return self.down(h * self.closed(x).sigmoid() if self.with_closed else h)


def apply(mlp: nn.Module, x: Tensor) -> Tensor:
    return mlp.by_function(x).sigmoid()


class ByFunction(Mlp):
    """A function of the file reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.by_function, self.with_function = linear(WIDTH, 1), False

    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(x)
        if x.mean() > 1:
            h = h * apply(self, x)
        return self.down(h * self.by_function(x) if self.with_function else h)


class ByWalk(Mlp):
    """It is one of the children."""

    def __init__(self) -> None:
        super().__init__()
        self.walked, self.with_walked = linear(WIDTH, 1), False

    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(x)
        if x.mean() > 1:
            h = h * list(self.children())[-1](x).sigmoid()
        return self.down(h * self.walked(x) if self.with_walked else h)


class Opened(Mlp):
    """The model changes the flag."""

    def __init__(self) -> None:
        super().__init__()
        self.opened, self.with_opened = linear(WIDTH, 1), False

    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(x)
        return self.down(h * self.opened(x).sigmoid() if self.with_opened else h)


class Opening(Stack):
    def forward(self, x: Tensor, flag: bool = False) -> Tensor:
        for layer in self.layers:
            layer.mlp.with_opened = flag
        return self.trunk(x)


class Bare(MlpBlock):
    """Without a norm, so that the mean of its input arrives."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__(mlp)
        self.norm = nn.Identity()


def of(mlp: Callable[[], nn.Module], stack: type[Stack] = Stack) -> nn.Module:
    return stack(Bare(mlp()), Bare(mlp()))


BARE = document(MLP_DOOR)
CASES = (
    Adversary("switched_off/right", partial(of, Off), lifted, BARE, "right", "it never runs", seeds=RARE),
    *(
        Adversary(f"switched_on/{name}", partial(of, *parts), given, BARE, "unproven", "it runs later", seeds=RARE)
        for name, parts, given in (
            ("function", (ByFunction,), lifted),
            ("walk", (ByWalk,), lifted),
            ("model", (Opened, Opening), flagged),
        )
    ),
    Adversary(
        "switched_on/whole",
        partial(of, Opened, Opening),
        partial(flagged, rare=0),
        document({**MLP_DOOR, "layers.*.mlp.opened": PARTIAL}),
        "right",
        "it runs in the proof",
        seeds=RARE,
    ),
)
