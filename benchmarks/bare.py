"""Host time of one sharded layer over that of bare collectives: `python -m benchmarks.bare`.

Bare collectives: a Llama whose layers have the collectives of tensor parallelism and nothing else, written by hand, for one rank. Its
parameters are plain tensors with the dimensions that a rank has. It says how much of a layer's host time nobody can save.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardplan.torchlib.operators import FUNCTIONAL

from .host import SIZE, TP, alone, layer_times, ratio
from .page import table
from .ways import Way, compiled, fake_ranks, llama, planned, with_fsdp

TEXT = """## Host time over bare collectives

`python -m benchmarks.bare`: as above, against the same layer with plain parameters, its collectives written by hand into its code, and
nothing else (`benchmarks/bare.py`); under FSDP2 both have it, and compiled both are compiled the same way. That layer's own time is against the
layer alone: of the table above, it is the part that the collectives take. **Not left**: layers of a subclass of `nn.Linear`, which
compute their weights' gradients with their inputs', as the bare layer does, so that no product hides a reduction
([0008](decisions/0008-communication-is-merged-at-run-time.md)). Median of {repeats} pairs, and the middle half of them.
"""
GOAL = "<= 1.15"


def with_collectives(model: nn.Module, mesh: DeviceMesh, *, sp: bool) -> nn.Module:
    """Give the layers of a Llama with a rank's dimensions their collectives: Megatron-LM's f and g, or with `sp` their forms along the
    sequence, dim 1 of a batch of 1 (arXiv 1909.08053, 2205.05198)."""
    group, ranks = mesh["tp"].get_group().group_name, mesh["tp"].size()
    waited, reduce = FUNCTIONAL.wait_tensor.default, FUNCTIONAL.all_reduce.default
    gather, scatter = FUNCTIONAL.all_gather_into_tensor.default, FUNCTIONAL.reduce_scatter_tensor.default

    def summed(x: Tensor) -> Tensor:
        return waited(reduce(x, "sum", group))

    def gathered(x: Tensor) -> Tensor:
        return waited(gather(x[0], ranks, group)).unsqueeze(0)

    def scattered(x: Tensor) -> Tensor:
        return waited(scatter(x[0], "sum", ranks, group)).unsqueeze(0)

    def same(x: Tensor) -> Tensor:
        return x.view_as(x)

    enter, leave = (
        (_both(gathered, scattered), _both(scattered, gathered)) if sp else (_both(same, summed), _both(summed, same))
    )

    class SummedGradients(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *weights: Tensor) -> tuple[Tensor, ...]:
            return tuple(weight.view_as(weight) for weight in weights)

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
            return summed(torch.cat(gradients)).split([one.shape[0] for one in gradients])

    def forward_of(layer: nn.Module) -> Callable[..., Tensor]:
        first, second = layer.input_layernorm, layer.post_attention_layernorm

        def forward(hidden_states: Tensor, **kwargs: Any) -> Tensor:
            weights = first.weight, second.weight
            of_first, of_second = SummedGradients.apply(*weights) if sp else weights
            x = enter(_norm(hidden_states, of_first, first.variance_epsilon))
            hidden_states = hidden_states + leave(layer.self_attn(hidden_states=x, **kwargs)[0])
            x = enter(_norm(hidden_states, of_second, second.variance_epsilon))
            return hidden_states + leave(layer.mlp(x))

        return forward

    for layer in model.model.layers:
        layer.forward = forward_of(layer)
    if sp:  # of all layers together, so not part of a layer's time
        model.model.layers[0].register_forward_pre_hook(lambda _, args: (args[0].chunk(ranks, 1)[0].contiguous(),))
        model.model.norm.register_forward_pre_hook(lambda _, args: (enter(args[0]),))
    return model


def _norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """As transformers computes it."""
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return weight * wide.to(x.dtype)


def _both(run: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    class Move(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return run(x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return back(gradient)

    return Move.apply


def bare(config: Any, mesh: DeviceMesh, *, sp: bool) -> nn.Module:
    return with_collectives(alone(config, mesh), mesh, sp=sp)


def after(change: Callable[[nn.Module, DeviceMesh], nn.Module]) -> Callable[[Way], Way]:
    return lambda way: lambda config, mesh: change(way(config, mesh), mesh)


class OwnClass(nn.Linear):
    """A layer that is no plain `nn.Linear`: it leaves no gradient of its weight to the move of its input."""


# Group -> its goal, what is done to a planned model, and to the others.
GROUPS: dict[str, tuple[str, Callable[[Way], Way], Callable[[Way], Way]]] = {
    "eager": (GOAL, lambda way: way, lambda way: way),
    "eager, not left": ("", lambda way: partial(way, linear=OwnClass), lambda way: way),
    "under FSDP2": (GOAL, after(with_fsdp), after(with_fsdp)),
    "compiled per layer": ("", lambda way: partial(way, compile=True), after(lambda model, _: compiled(model))),
}


def rows(repeats: int) -> Iterator[tuple[str, str, str, str]]:
    for group, (goal, of_planned, of_other) in GROUPS.items():
        ways: dict[str, Way] = {"alone": of_other(alone)}
        for plan, sp in (("TP", False), ("SP", True)):
            ways |= {plan: of_planned(partial(planned, sp=sp)), f"bare {plan}": of_other(partial(bare, sp=sp))}
        with fake_ranks(TP) as mesh:
            times = layer_times(ways, mesh, repeats, partial(llama, **SIZE))
        for plan in ("TP", "SP"):
            floor = times[f"bare {plan}"]
            yield f"{group}, {plan}", goal, ratio(times[plan], floor), ratio(floor, times["alone"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(TEXT.format(repeats=args.repeats))
    print(
        table(
            ("layer", "goal", "times bare collectives", "bare collectives, times the layer alone"), rows(args.repeats)
        )
    )


if __name__ == "__main__":
    main()
