"""Optimizers of torch's form, of any package, as steps of whole matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

State = dict[str, Tensor]
MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]
_NUMBERS: dict[type, torch.dtype] = {bool: torch.bool, int: torch.int64, float: torch.float64}
_GROUP, _STATE = "group", "state"
_PROBED = 3  # steps; the first step of some packages only makes their state
_SAME = 1e-6  # of the largest update, in float64


def stepped_by(make: MakeOptimizer) -> Callable[[Tensor, State], Tensor]:
    """A `whole_matrix` for `Muon(..., stateful=True, momentum=0.0, nesterov=False)`: the step of another optimizer, such as a package's
    Shampoo or SOAP, which gets each matrix whole.

    The optimizer steps a matrix of zeros with the gradient. The negative of the change is the update, which Muon multiplies by `lr`. The
    optimizer's state, and the numbers of its group that a step changes, are kept as tensors in the matrix's dict.

    Args:
        make: makes the optimizer of a list with one matrix, with lr 1 and without weight decay: `lambda matrices: SOAP(matrices, lr=1.0,
            weight_decay=0.0)`.

    Raises:
        ValueError: the update depends on the values of the matrix (weight decay, trust ratios), which here are all 0. Trial steps
            find it.
        TypeError: the optimizer keeps something that is no tensor, number, None, or list or dict of these.
    """
    _try(make)

    def step(gradient: Tensor, state: State) -> Tensor:
        matrix = nn.Parameter(torch.zeros_like(gradient))
        matrix.grad = gradient
        optimizer = make([matrix])
        made = dict(optimizer.param_groups[0])
        if state:
            optimizer.param_groups[0].update(_rebuilt(_GROUP, state))
            optimizer.state[matrix] = _rebuilt(_STATE, state)
        optimizer.step()
        kept = _kept(optimizer, matrix, made)
        state.clear()
        state.update(kept)
        return -matrix.detach()

    return step


def _kept(optimizer: Optimizer, matrix: Tensor, made: Mapping[str, Any]) -> State:
    """What the optimizer needs for its next step: the matrix's state, and the numbers of its group that have changed."""
    (group,) = optimizer.param_groups
    changed = {
        name: value
        for name, value in group.items()
        if type(value) in _NUMBERS and (name not in made or made[name] != value)
    }
    return {**dict(_flat(_GROUP, changed)), **dict(_flat(_STATE, dict(optimizer.state[matrix])))}


def _try(make: MakeOptimizer) -> None:
    """Try some steps of a small matrix from two initial values. All ranks find the same, before any rank waits for another."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(8, 6, generator=generator, dtype=torch.float64) for _ in range(_PROBED)]
    updates = []
    for begin in (torch.zeros_like(gradients[0]), gradients[0]):
        matrix = nn.Parameter(begin.clone().to(device))
        optimizer = make([matrix])
        made = dict(optimizer.param_groups[0])
        with torch.random.fork_rng():
            torch.manual_seed(0)
            for gradient in gradients:
                matrix.grad = gradient.to(device)
                optimizer.step()
        _kept(optimizer, matrix, made)
        updates.append(matrix.detach().cpu() - begin)
    first, second = updates
    if not (first - second).abs().max() <= _SAME * first.abs().max():
        raise ValueError(
            f"the update of {type(optimizer).__name__} depends on the values of the matrix, and not on its gradients alone: write weight_decay=0.0 "
            "there, and weight_decay= of Muon. An optimizer that measures parameters (trust ratios) is none of whole_matrix"
        )


def _flat(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """A value as tensors: `path` has a tensor, `path:int` a number, `path:list` the length of a list whose values are under `path/`."""
    if isinstance(value, Tensor):
        yield name, value
    elif value is None:
        yield f"{name}:none", torch.zeros((), dtype=torch.int64)
    elif type(value) in _NUMBERS:
        yield f"{name}:{type(value).__name__}", torch.tensor(value, dtype=_NUMBERS[type(value)])
    elif isinstance(value, (dict, list, tuple)):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        yield f"{name}:{'dict' if isinstance(value, dict) else 'list'}", torch.tensor(len(value))
        for key, one in pairs:
            if set("/:") & set(str(key)):
                raise TypeError(f"an optimizer of whole_matrix keeps {key!r}, whose name has / or :")
            yield from _flat(f"{name}/{key}", one)
    else:
        raise TypeError(
            f"an optimizer of whole_matrix keeps {name}, a {type(value).__name__}: only tensors, numbers, None, lists and dicts of "
            "these are kept with the training state"
        )


def _rebuilt(name: str, flat: Mapping[str, Tensor]) -> Any:
    """The inverse of `_flat`."""
    if name in flat:
        return flat[name]
    (kind,) = [key.removeprefix(f"{name}:") for key in flat if key.startswith(f"{name}:")]
    value = flat[f"{name}:{kind}"]
    if kind == "none":
        return None
    if kind == "list":
        return [_rebuilt(f"{name}/{i}", flat) for i in range(int(value))]
    if kind == "dict":
        keys = {
            key.removeprefix(f"{name}/").split("/")[0].split(":")[0]: None for key in flat if key.startswith(f"{name}/")
        }
        return {key: _rebuilt(f"{name}/{key}", flat) for key in keys}
    return value.item()
