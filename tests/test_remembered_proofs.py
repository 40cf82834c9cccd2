"""A proof is known again for the same model alone: whatever number of it decides what a slice becomes, it is in the digest."""

from __future__ import annotations

import dataclasses
import functools
import math
import threading
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import shardplan
from shardplan.proof.fingerprints import Fingerprint, NotStable
from shardplan.proof.remembered_proofs import _KNOWN
from tests.proofs import fake_mesh

PLAN = {"version": "1", "name": "mlp", "tensor_parallel": {"up": "colwise", "down": "rowwise"}}
RANKS, NONE = 16, 0  # the width of a rank's slice, and no width
CHOSEN = [NONE]


def normalised(h: Tensor, n: int) -> Tensor:
    """The same values; the gradient of one with this width, which no value of the unsharded model has, is normalised."""
    if h.requires_grad and h.shape[-1] == n:
        h.register_hook(lambda gradient: gradient / gradient.norm())
    return h


class Block(nn.Module):
    """What it does with slices, the number says."""

    def __init__(self, number: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(normalised(torch.relu(self.up(x)), self.number(self)))


def features(seed: int) -> dict[str, Tensor]:
    return {"x": torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(seed))}


def attribute(n: int) -> nn.Module:
    model = Block(lambda module: module.width)
    model.width = n
    return model


def deep(n: int) -> nn.Module:
    model = attribute(0)
    model.number, model.table = (lambda module: module.table["a"][1].x), {"a": [0, types.SimpleNamespace(x=n)]}
    return model


def buffer(n: int) -> nn.Module:
    model = Block(lambda module: int(module.width))
    model.register_buffer("width", torch.tensor(n), persistent=False)
    return model


@dataclasses.dataclass
class Sizes:
    width: int


class Slotted:
    __slots__ = ("width",)

    def __init__(self, width: int) -> None:
        self.width = width


def object_of(make: Callable[[int], Any]) -> Callable[[int], nn.Module]:
    def build(n: int) -> nn.Module:
        model = Block(lambda module: module.sizes.width)
        model.sizes = make(n)
        return model

    return build


def subclass(n: int) -> nn.Module:
    class Own(Block):
        width = n

    return Own(lambda module: module.width)


def inside(n: int) -> nn.Module:
    """A default of a function in a module of a module."""
    model = Block(lambda module: module.gate.number())
    model.gate = nn.Identity()
    model.gate.number = lambda width=n: width
    return model


def hook(n: int) -> nn.Module:
    model = Block(lambda module: NONE)
    model.down.register_forward_pre_hook(lambda module, args: (normalised(args[0] * 1, n),))
    return model


def own_hooks(n: int) -> nn.Module:
    """An attribute with the name of torch's, such as transformers' `_require_grads_hooks`: a list, and a dict whose keys are read."""
    model = Block(lambda module: min(module.width_hooks))
    model._require_grads_hooks = []
    model.width_hooks = {n: None}
    return model


def of_a_global(n: int) -> nn.Module:
    CHOSEN[0] = n
    return Block(lambda module: CHOSEN[0])


def of_a_module(n: int) -> nn.Module:
    math.chosen = n
    return Block(lambda module: math.chosen)


def width_of(module: nn.Module, n: int) -> int:
    return n


def instance(n: int) -> nn.Module:
    model = Block(lambda module: NONE)

    def forward(x: Tensor) -> Tensor:
        return x + model.down(normalised(torch.relu(model.up(x)), n))

    model.forward = forward
    return model


FORMS: dict[str, Callable[[int], nn.Module]] = {
    "an attribute": attribute,
    "in dicts and lists": deep,
    "a buffer": buffer,
    "a dataclass": object_of(Sizes),
    "an object with slots": object_of(Slotted),
    "a numpy array": lambda n: Block(functools.partial(lambda module, array: int(array[1]), array=np.array([3, n]))),
    "an attribute of a class": subclass,
    "a default in a module below": inside,
    "a closure": lambda n: Block(lambda module: n),
    "a closure in a closure": lambda n: Block((lambda inner: lambda module: inner())(lambda: n)),
    "a partial": lambda n: Block(functools.partial(width_of, n=n)),
    "a hook": hook,
    "what is called hooks": own_hooks,
    "a global": of_a_global,
    "a name in another module": of_a_module,
    "a forward of an instance": instance,
}


def applied(model: nn.Module) -> str:
    with fake_mesh(2) as mesh:
        shardplan.apply_plan(shardplan.Model(model, inputs=features), mesh, PLAN)
        return shardplan.applied(model).proof


@pytest.mark.parametrize("form", FORMS)
def test_another_number_is_another_proof(form: str) -> None:
    build = FORMS[form]
    _KNOWN.clear()
    assert "before it was applied" in applied(build(NONE))
    assert "earlier proof" in applied(build(NONE))
    with pytest.raises(shardplan.PlanError, match="SP420"):
        applied(build(RANKS))


def test_hooks_of_all_modules_are_another_proof() -> None:
    _KNOWN.clear()
    assert "before it was applied" in applied(attribute(NONE))
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: None)
    try:
        assert "before it was applied" in applied(attribute(NONE))
    finally:
        handle.remove()


def test_what_cannot_be_read_is_not_remembered() -> None:
    """Code that evaluates a text, a lock, the state of a generator."""
    for number in (lambda module: eval("0"), functools.partial(lambda module, lock: NONE, lock=threading.Lock())):
        with pytest.raises(NotStable):
            Fingerprint().add(Block(number))
    _KNOWN.clear()
    for _ in range(2):
        assert "before it was applied" in applied(Block(lambda module: eval("0")))


def test_functions_in_the_place_of_installed_ones_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def mark() -> str:
        digest = Fingerprint()
        digest.add(nn.Linear(2, 2))
        return digest.hexdigest()

    before = mark()
    monkeypatch.setattr(nn.Linear, "extra_repr", lambda self: "")
    assert mark() != before
    monkeypatch.undo()
    monkeypatch.setattr(nn.Linear, "forward", nn.Identity.forward)
    assert mark() != before
