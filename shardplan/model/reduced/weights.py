"""Weights that hide no error: no parameter is zero or one, and matrices have about unit gain."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardplan.model.build_tree import kind_of

from .fields import role

NOISE = 0.1  # added to parameters that the model initialises in a structured way: norm weights, biases, decay rates


@torch.no_grad()
def randomise(model: nn.Module, seed: int) -> None:
    """Sets every parameter of a model, in place.

    Matrices of linear layers, embeddings and expert stacks are normal with standard deviation 1/sqrt(features
    in), so that attention and routing are not uniform; they depend only on the seed and the parameters' names. About half of
    the rows of a table with `max_norm` are longer than this norm.
    Everything else keeps its own initial value plus a little noise: a weight of exactly one or a bias of zero
    would mask wrong gradients with symmetric ones.
    """
    done: set[int] = set()
    for owner_name, owner in model.named_modules():
        kind = kind_of(owner)
        for name, parameter in owner.named_parameters(recurse=False):
            if id(parameter) in done or not parameter.is_floating_point():
                continue
            done.add(id(parameter))
            generator = torch.Generator().manual_seed(_seed(seed, f"{owner_name}.{name}"))
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            if parameter.ndim < 2 or not (kind in ("linear", "conv1d", "embedding") or _is_random(parameter)):
                initial = torch.nan_to_num(parameter.float(), nan=0.0, posinf=0.0, neginf=0.0)
                parameter.copy_(initial + NOISE * noise)
            else:
                features_in = parameter.shape[0] if kind == "conv1d" else parameter.shape[-1]
                bound = getattr(owner, "max_norm", None)  # of rows that a look-up shortens: some are longer
                parameter.copy_(noise / math.sqrt(features_in) * (1.0 if bound is None else bound))
    fill_zero_buffers(model, seed)


@torch.no_grad()
def fill_zero_buffers(model: nn.Module, seed: int) -> None:
    """Fill, in place, each all-zero buffer that would mask a wrong value: floating-point buffers (a gate of zero) with small
    positive numbers, tables of experts with different experts in each row. The result depends only on the seed and the
    buffers' names."""
    for owner_name, owner in model.named_modules():
        experts = next((v for n, v in vars(owner).items() if role(n) == "experts" and type(v) is int), 0)
        for leaf, buffer in owner.named_buffers(recurse=False):
            if buffer.is_meta or buffer.any():
                continue
            name = f"{owner_name}.{leaf}" if owner_name else leaf
            generator = torch.Generator().manual_seed(_seed(seed, name))
            if buffer.is_floating_point():
                buffer.copy_(NOISE * (0.5 + torch.rand(buffer.shape, generator=generator, dtype=torch.float32)))
            elif buffer.dtype in (torch.int32, torch.int64) and buffer.ndim == 2 and buffer.shape[1] <= experts:
                order = torch.rand(buffer.shape[0], experts, generator=generator).argsort(1)
                buffer.copy_(order[:, : buffer.shape[1]])


def _is_random(parameter: torch.Tensor) -> bool:
    """Whether a parameter looks like random numbers around zero, not like a chosen value."""
    values = parameter.float()
    if not torch.isfinite(values).all():
        return True  # memory that the model left uninitialised
    if values.numel() < 2:
        return False
    spread = values.std()
    return bool(spread > 0 and values.mean().abs() < spread / 2)


def _seed(seed: int, name: str) -> int:
    return zlib.crc32(name.encode(), seed) % 2**31


class Undropped(float):
    """A probability that drops nothing: zero where it is drawn by, and in comparisons what the model's code calls it (`if self.p > 0.05`).
    What is computed from it is so too (`keep = 1 - self.p`).

    Attributes:
        told: the model's own number.
    """

    told: float

    def __new__(cls, value: float = 0.0, told: float = 0.0) -> Undropped:
        made = super().__new__(cls, value)
        made.told = float(told)  # an int compares itself with no float
        return made

    def __bool__(self) -> bool:
        return bool(self.told)

    def __deepcopy__(self, memo: object) -> Undropped:
        return self

    __hash__ = float.__hash__


def _told(value: object) -> object:
    return value.told if isinstance(value, Undropped) else value


def _compared(name: str) -> Callable[[Undropped, object], object]:
    return lambda one, other: getattr(one.told, name)(_told(other))


def _computed(name: str) -> Callable[[Undropped, object], object]:
    def operation(one: Undropped, other: object) -> object:
        result = getattr(float, name)(one, other)
        return result if result is NotImplemented else Undropped(result, getattr(one.told, name)(_told(other)))

    return operation


for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Undropped, f"__{_name}__", _compared(f"__{_name}__"))
for _name in ("add", "sub", "mul", "truediv"):
    for _side in ("", "r"):
        setattr(Undropped, f"__{_side}{_name}__", _computed(f"__{_side}{_name}__"))


def without_noise(model: nn.Module) -> None:
    """Makes each probability of dropout drop nothing, in modules and in the attributes that their code reads."""
    for module in model.modules():
        drops = kind_of(module) == "dropout"
        for name, value in vars(module).items():
            if (drops and name == "p") or (isinstance(value, float) and role(name) == "dropout"):
                vars(module)[name] = value if isinstance(value, Undropped) else Undropped(0.0, value)


def writes_to(model: nn.Module) -> Callable[[], frozenset[str]]:
    """A function that later returns the full names of parameters whose values have changed since now; for a DTensor it reads
    this rank's part. It compares values, as a write through `.data` does not change the version counter."""
    before = {name: part.detach().clone() for name, part in _local_parameters(model).items()}

    def written() -> frozenset[str]:
        return frozenset(
            name
            for name, part in _local_parameters(model).items()
            if name not in before or not torch.equal(part, before[name])
        )

    return written


@torch.no_grad()  # a DTensor's own part is then no operation
def _local_parameters(model: nn.Module) -> dict[str, Tensor]:
    named = model.named_parameters(remove_duplicate=False)
    return {name: value.to_local() if isinstance(value, DTensor) else value for name, value in named}
