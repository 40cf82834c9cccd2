"""Training loops of one's own: other optimizers, clipping over ranks, gradient accumulation, frozen parts."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .adversary import Adversary, document
from .parts import ATTENTION, ATTENTION_NORMS, BLOCK_SEQUENCE, MLP, Attention, Block, Stack, features


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """With an `eps` like the gradients, a step depends on their size."""
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-2, weight_decay=0.1)


def momentum(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True)


class Sign(torch.optim.Optimizer):
    """Steps by the sign of a mean of gradients (Lion)."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                mean = state.setdefault("mean", torch.zeros_like(parameter.grad))
                # A smooth sign: a rounding of a gradient that is almost zero must not turn a step around.
                parameter.sub_(torch.tanh(100 * (0.9 * mean + 0.1 * parameter.grad)), alpha=group["lr"])
                mean.lerp_(parameter.grad, 0.01)


def attention() -> nn.Module:
    return Stack(*(Block(Attention(norm=True)) for _ in range(2)))


def frozen() -> nn.Module:
    """The first layer and the last norm are frozen."""
    model = attention()
    model.layers[0].requires_grad_(False)
    model.norm.requires_grad_(False)
    return model


def frozen_norms() -> nn.Module:
    """The norms of queries and keys are frozen, so that they have no gradient to get wrong."""
    model = attention()
    for layer in model.layers:
        layer.attn.q_norm.requires_grad_(False)
        layer.attn.k_norm.requires_grad_(False)
    return model


class Detached(Stack):
    """The gradient of the first layer is cut off."""

    def trunk(self, x: Tensor) -> Tensor:
        first, second = self.layers
        return self.norm(second(first(x).detach()))


def detached() -> nn.Module:
    return Detached(*(Block(Attention(norm=True)) for _ in range(2)))


NORMS, BARE = {**ATTENTION_NORMS, **MLP}, {**ATTENTION, **MLP}
LOOPS = {
    "adamw": {"optimizer": adamw},
    "momentum": {"optimizer": momentum},
    "lion": {"optimizer": Sign},
    "clipped": {"max_norm": 0.05},
    "accumulated": {"micro_batches": 2},
    "all": {"optimizer": adamw, "max_norm": 0.05, "micro_batches": 2},
}
CASES = (
    *(
        Adversary(f"training_{name}/right", attention, features, document(NORMS), "right", "all rules", **options)
        for name, options in LOOPS.items()
    ),
    *(
        Adversary(
            f"training_{name}/sequence",
            attention,
            features,
            document(NORMS, BLOCK_SEQUENCE),
            "right",
            "all rules",
            sequence_parallel=True,
            **LOOPS[name],
        )
        for name in ("clipped", "all")
    ),
    Adversary(
        "training_all/bare_norm",
        attention,
        features,
        document(BARE),
        "wrong",
        "the norms see a rank's heads",
        **LOOPS["all"],
    ),
    Adversary("frozen/right", frozen, features, document(NORMS), "right", "all rules"),
    Adversary("frozen/bare_norm", frozen, features, document(BARE), "wrong", "the second layer's norms are trained"),
    Adversary("frozen_norms/bare", frozen_norms, features, document(BARE), "right", "what is frozen has no gradient"),
    Adversary("detached/right", detached, features, document(NORMS), "right", "all rules"),
    Adversary("detached/bare_norm", detached, features, document(BARE), "wrong", "the norms see a rank's heads"),
)
