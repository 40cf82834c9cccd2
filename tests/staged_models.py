"""Models that a cut must not change: they count, read labels in every block, drop tokens, or have hooks and forwards that somebody put there."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY, WIDTH, LENGTH, ROWS = 64, 32, 8, 8
IGNORED = -100


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class ReadsLabels(Block):
    """As a model that masks by what is predicted."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        assert labels is not None, "a stage has no labels"
        return super().forward(x * (1 + 0.5 * (labels != IGNORED).to(x.dtype).unsqueeze(-1)))


class Counts(Block):
    """What it computes follows from how often it ran: by a number, a list and a buffer; and from a running mean."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen = 0, []
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        self.count += 1
        self.mean.lerp_(x.detach().mean((0, 1)).to(self.mean.dtype), 0.5)
        factor = 1 + 0.1 * self.calls + 0.1 * len(self.seen) + 0.1 * self.count
        return super().forward((x - self.mean) * factor)


class Drops(Block):
    """Every other token goes on, in training."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        return super().forward(x[:, ::2] if self.training and x.shape[1] == LENGTH else x)


class Net(nn.Module):
    """Args:
    own: its loss is its own, which counts as transformers' does.
    """

    def __init__(self, block: type[nn.Module] = Block, *, own: bool = False):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList(block() for _ in range(4))
        if own:
            self.loss_function = divided

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any) -> Any:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x, labels)
        logits = self.head(x)
        if hasattr(self, "loss_function"):
            return SimpleNamespace(logits=logits, loss=self.loss_function(logits, labels))
        return logits


def nll(logits: Tensor, labels: Tensor) -> Tensor:
    """The sum over the tokens themselves, not the next ones; of those that are left."""
    step = labels.shape[1] // logits.shape[1]
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, ::step].flatten(), reduction="sum")


def divided(logits: Tensor, labels: Tensor, num_items_in_batch: Any = None, **kwargs: Any) -> Tensor:
    return nll(logits, labels) / ((labels != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch)


# What somebody puts on a model, and reads: `told` has what the last one collects.


def wrapped(model: Net) -> None:
    """Forwards of the model and of its blocks by functions that hold the bound ones, and count."""
    model.forward = _counting(model.forward, calls := [], 1.0)
    for block in model.blocks:
        block.forward = _counting(block.forward, calls, 0.1)
        block.up.forward = functools.partial(_scaled, block.up.forward)
    told[:] = [calls]


told: list[Any] = []


def _counting(own: Callable[..., Any], calls: list[str], by: float) -> Callable[..., Any]:
    count = 0

    @functools.wraps(own)
    def forward(x: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        calls.append(f"{by} {count}")
        return own(**kwargs) if x is None else own(x * (1 + by * count), *args, **kwargs)

    return forward


def _scaled(own: Callable[..., Tensor], x: Tensor) -> Tensor:
    return 0.5 * own(x)


class Recorder:
    """A hook that is an object, which its caller reads."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        self.calls += 1
        return output * (1 + 0.1 * self.calls)


def hooked(model: Net) -> None:
    """Hooks on the model and on blocks: they change arguments and results, and count."""
    recorder, seen = Recorder(), []

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        seen.append("before")
        assert "input_ids" in kwargs, kwargs
        return args, {**kwargs, "input_ids": (kwargs["input_ids"] + len(kwargs["input_ids"])) % VOCABULARY}

    def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        seen.append("after")
        assert "input_ids" in kwargs, kwargs
        return output * 0.5

    model.register_forward_pre_hook(before, with_kwargs=True)
    model.register_forward_hook(after, with_kwargs=True)
    model.register_forward_hook(lambda module, args, output: output * (1 + len(model.blocks)))
    for block in model.blocks:
        block.register_forward_hook(recorder if block is model.blocks[0] else Recorder())
    told[:] = [seen, recorder]
