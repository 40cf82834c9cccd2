"""Hooks on parameters, modules and tensors, and forwards that are set on instances."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
    register_module_full_backward_hook,
    register_module_full_backward_pre_hook,
)

from .adversary import Adversary, document, squares
from .parts import MLP, MLP_DOOR, MLP_SEQUENCE, Mlp, MlpBlock, Stack, features


def blocks() -> Stack:
    return Stack(MlpBlock(), MlpBlock())


def halved_gradient() -> nn.Module:
    """A hook on a parameter that is split."""
    model = blocks()
    model.layers[0].mlp.up.weight.register_hook(lambda grad: grad * 0.5)
    return model


def halved_norm_gradient() -> nn.Module:
    """A hook on a parameter that stays whole."""
    model = blocks()
    model.norm.weight.register_hook(lambda grad: grad * 0.5)
    return model


def _halve(parameter: Tensor) -> None:
    parameter.grad.mul_(0.5)


def accumulated() -> nn.Module:
    """A hook after the accumulation of a gradient."""
    model = blocks()
    model.layers[1].mlp.down.weight.register_post_accumulate_grad_hook(_halve)
    return model


def _doubled(module: nn.Module, args: tuple, output: Tensor) -> Tensor:
    return 2 * output


def _shifted(module: nn.Module, args: tuple) -> tuple:
    return (args[0] + 1,)


def _normalised(module: nn.Module, args: tuple, output: Tensor) -> Tensor:
    return output / output.norm(dim=-1, keepdim=True)


def _scaled_gradient(module: nn.Module, grads: tuple, outer: tuple) -> tuple:
    return tuple(grad if grad is None else grad * 0.5 for grad in grads)


def _unit_gradient(module: nn.Module, grads: tuple, outer: tuple) -> tuple:
    return tuple(grad if grad is None else grad / grad.norm() for grad in grads)


def doubled_output() -> nn.Module:
    model = blocks()
    model.layers[0].mlp.register_forward_hook(_doubled)
    model.layers[1].mlp.up.register_forward_hook(_doubled)
    return model


def shifted_input() -> nn.Module:
    model = blocks()
    model.layers[0].mlp.register_forward_pre_hook(_shifted)
    model.layers[1].mlp.down.register_forward_pre_hook(_shifted)
    return model


def normalised_hidden() -> nn.Module:
    """A hook that normalises what is split."""
    model = blocks()
    model.layers[0].mlp.up.register_forward_hook(_normalised)
    return model


def backward_hooks() -> nn.Module:
    model = blocks()
    model.layers[0].mlp.register_full_backward_hook(_scaled_gradient)
    return model


def unit_backward_hooks() -> nn.Module:
    """The gradient of what is split is normalised by its own length."""
    model = blocks()
    model.layers[0].mlp.down.register_full_backward_hook(_unit_gradient)
    return model


class Hooked(Mlp):
    """Changes the gradient of the hidden values, or of its input, in a tensor hook."""

    def __init__(self, change: str, at_input: bool) -> None:
        super().__init__()
        self.change, self.at_input = change, at_input

    def changed(self, grad: Tensor) -> Tensor:
        if self.change == "clip":
            return grad.clamp(-1e-3, 1e-3)
        if self.change == "unit":
            return grad / grad.norm()
        if self.change == "centre":
            return grad - grad.mean(-1, keepdim=True)
        if self.change == "limit":
            return grad * (10 / grad.norm()).clamp(max=1)
        return grad * 0.5

    def forward(self, x: Tensor) -> Tensor:
        if self.at_input:
            x = x * 1
            x.register_hook(self.changed)
        h = self.hidden(x)
        if not self.at_input:
            h.register_hook(self.changed)
        return self.down(h)


def hooked(change: str, at_input: bool = False) -> nn.Module:
    return Stack(MlpBlock(Hooked(change, at_input)), MlpBlock(Hooked(change, at_input)))


def _squared(self: Mlp, x: Tensor) -> Tensor:
    return self.down(torch.relu(self.up(x)).square())


def _own_norm(self: Mlp, x: Tensor) -> Tensor:
    h = torch.relu(self.up(x))
    return self.down(h / (1 + h.square().sum(-1, keepdim=True)))


def patched(function: types.FunctionType) -> nn.Module:
    """A `forward` that is set on an instance."""
    model = blocks()
    for layer in model.layers:
        layer.mlp.forward = types.MethodType(function, layer.mlp)
    return model


def captured() -> nn.Module:
    """A `forward` set on an instance that calls the module's own, which it has captured."""
    model = blocks()
    for layer in model.layers:
        before = layer.mlp.forward
        layer.mlp.forward = lambda x, before=before: 2 * before(x)
    return model


def closed_over() -> nn.Module:
    """The same with a closure."""
    model = blocks()

    def patch(module: nn.Module) -> None:
        before = module.forward

        def forward(x: Tensor) -> Tensor:
            return before(x) + module.up.weight.sum() * x

        module.forward = forward

    for layer in model.layers:
        patch(layer.mlp)
    return model


@contextmanager
def of_all_modules(register: Callable[[Any], Any], hook: Callable[..., Any], kinds: tuple[type, ...]) -> Iterator[None]:
    """A hook of every module that there is, which acts on some kinds."""
    handle = register(lambda module, *values: hook(module, *values) if isinstance(module, kinds) else None)
    try:
        yield
    finally:
        handle.remove()


def _unit_before(module: nn.Module, grads: tuple) -> tuple:
    return _unit_gradient(module, grads, ())


def kept(by: str) -> nn.Module:
    """One hook keeps what the first block returns, another adds it to what the last returns."""
    model, held = blocks(), [None] if by == "list" else {}
    place: Any = 0 if by == "list" else "x"

    def keep(module: nn.Module, args: tuple, output: Tensor) -> None:
        held[place] = output

    model.layers[0].register_forward_hook(keep)
    model.norm.register_forward_hook(lambda module, args, output: output + held[place])
    return model


def _adversary(name: str, build, verdict: str, why: str, rules=MLP, **options) -> Adversary:
    overlay = MLP_SEQUENCE if options.get("sequence_parallel") else None
    return Adversary(name, build, features, document(rules, overlay), verdict, why, **options)


def large(output: Any) -> Tensor:
    """A loss whose gradients are longer than the hooks' limit, which those of a proof are not."""
    return 3e3 * squares(output)


def small_steps(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-5)


LARGE = {"loss": large, "optimizer": small_steps}
HOOK, LIVE = ("SP525",), ("SP524",)
CASES = (
    _adversary("parameter_hook/split", halved_gradient, "refused", "it is lost with the parameter", codes=HOOK),
    _adversary("parameter_hook/whole", halved_norm_gradient, "refused", "this one is replaced too", codes=HOOK),
    _adversary("accumulate_hook/split", accumulated, "refused", "it is lost with the parameter", codes=HOOK),
    _adversary("forward_hook/linear", doubled_output, "right", "it acts on each element by itself", codes=LIVE),
    _adversary("forward_hook/before", shifted_input, "right", "it acts on each element by itself", codes=LIVE),
    _adversary("forward_hook/normalised", normalised_hidden, "wrong", "the length of a slice is not the length"),
    _adversary("backward_hook/linear", backward_hooks, "right", "half of each gradient", codes=LIVE),
    _adversary("backward_hook/unit", unit_backward_hooks, "wrong", "each rank divides by the length of its own slice"),
    *(
        _adversary(f"tensor_hook/{change}_split", partial(hooked, change), verdict, why)
        for change, verdict, why in (
            ("half", "right", "half of each slice"),
            ("clip", "right", "each element of a slice is clipped by itself"),
            ("unit", "wrong", "each rank divides by the length of its own slice"),
            ("centre", "wrong", "each rank takes off the mean of its own features"),
        )
    ),
    *(
        _adversary(
            f"tensor_hook/{change}_whole", partial(hooked, change, True), "right", "the gradient there is complete"
        )
        for change in ("clip", "unit", "centre")
    ),
    *(
        _adversary(f"tensor_hook/{change}_partial", partial(hooked, change, True), verdict, why, rules=MLP_DOOR)
        for change, verdict, why in (
            ("half", "right", "half of a sum is the sum of halves"),
            ("clip", "wrong", "each rank clips its own summand"),
            ("unit", "wrong", "each rank divides by the length of its own summand"),
            ("centre", "right", "centring is linear, and over a dim that is whole"),
        )
    ),
    *(
        _adversary(
            f"tensor_hook/limit_{where}", partial(hooked, "limit", where != "split"), verdict, why, **more, **LARGE
        )
        for where, verdict, why, more in (
            ("split", "wrong", "each rank limits the length of its own slice", {}),
            ("partial", "wrong", "each rank limits the length of its own summand", {"rules": MLP_DOOR}),
            ("whole", "right", "the gradient there is complete", {}),
        )
    ),
    _adversary("patched_forward/right", partial(patched, _squared), "right", "split as the class's own", codes=LIVE),
    _adversary("patched_forward/normalised", partial(patched, _own_norm), "wrong", "it sums over what is split"),
    _adversary("patched_forward/captured", captured, "right", "twice the class's own", codes=LIVE),
    _adversary(
        "patched_forward/closure",
        closed_over,
        "wrong",
        "it reads a parameter of a module below, which is split",
    ),
    _adversary(
        "patched_forward/sequence",
        partial(patched, _squared),
        "right",
        "split as the class's own",
        sequence_parallel=True,
        codes=LIVE,
    ),
    *(
        _adversary(
            f"of_all_modules/{name}", blocks, verdict, why, around=partial(of_all_modules, register, hook, kinds)
        )
        for name, register, hook, kinds, verdict, why in (
            ("doubled", register_module_forward_hook, _doubled, (nn.Linear,), "right", "twice each slice or summand"),
            ("shifted", register_module_forward_pre_hook, _shifted, (nn.LayerNorm,), "right", "norms are whole"),
            (
                "normalised",
                register_module_forward_hook,
                _normalised,
                (nn.Linear,),
                "wrong",
                "a slice has another length",
            ),
            ("half", register_module_full_backward_hook, _scaled_gradient, (nn.Linear,), "right", "half of each"),
            (
                "unit",
                register_module_full_backward_pre_hook,
                _unit_before,
                (nn.Linear,),
                "wrong",
                "of a slice or a whole",
            ),
        )
    ),
    *(_adversary(f"kept/{by}", partial(kept, by), "right", "both are whole") for by in ("list", "dict")),
    _adversary(
        "kept/sequence",
        partial(kept, "list"),
        "wrong",
        "a slice is added to the whole sequence",
        sequence_parallel=True,
    ),
)
