"""Values other than the model that a user's script keeps from step to step: a model's, a rank's own, and those not compared."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from shardplan.runtime.apply.slices import Packing
from shardplan.runtime.pipeline import Pipeline
from shardplan.torchlib.equality import relative_error
from shardplan.torchlib.local_parts import to_local_if_dtensor

from .step_causes import LIMIT, Difference
from .step_watch import Ran, Tensors

DEPTH, MANY = 12, 10_000


class Kept:
    """The tensors and numbers that `make` returned, and their later values.

    Args:
        parameters: the model's parameters on this rank.
        packed: parameter -> how its rows are packed.
    """

    def __init__(
        self, state: Any, model: nn.Module | Pipeline, parameters: Mapping[str, Tensor], packed: Mapping[str, Packing]
    ) -> None:
        self._state, self._model, self._parameters, self.packed = state, model, parameters, dict(packed)
        self._shapes = {p.shape for p in parameters.values() if p.ndim > 1}
        parts = {name: to_local_if_dtensor(p.detach()) for name, p in parameters.items()}
        self._parts = {name: part for name, part in parts.items() if part.shape != parameters[name].shape}
        self._before = self._now()
        self._copies = {
            name: of
            for name, x in self._before.items()
            for of, part in self._parts.items()
            if not isinstance(x, DTensor) and x.ndim > 1 and torch.equal(x, part)
        }

    def note(self, ran: Ran) -> None:
        """Write the kept values into a step's record; a rank's parts are written as parts of the whole tensor."""
        now = self._now()
        for name, of in self._copies.items():
            x, before = now.get(name), self._before[name]
            if x is not None and not torch.equal(x, before) and not torch.equal(x, self._parts[of]):
                ran.averages.add(name)
        self._before = now
        for name, x in now.items():
            if isinstance(x, DTensor):
                of = next((of for of in self._parameters if _belongs(name, of)), "")
            else:
                of = self._part_of(name, x)
                if isinstance(p := self._parameters.get(of), DTensor):
                    ran.parts[name] = list(x.shape)
                    x = DTensor.from_local(
                        x, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
                    )
            if of in self.packed:
                self.packed[name] = self.packed[of]
            ran.state[name] = x
            if name in self._firm or isinstance(x, DTensor) or (x.ndim > 1 and x.shape in self._shapes):
                ran.firm.add(name)
        ran.firm -= ran.parts.keys()

    def _part_of(self, name: str, x: Tensor) -> str:
        """The parameter that a value may be a rank's part of: found by its name, by its position in a list, or else by its shape."""
        alike = [of for of, part in self._parts.items() if part.shape == x.shape and x.ndim > 0]
        place = re.search(r"\[(\d+)\]$", name)
        every = list(self._parameters)
        wanted = [every[int(place[1])]] if place and int(place[1]) < len(every) else []
        named = [of for of in alike if _belongs(name, of) or of in wanted]
        return next(iter([*named, *alike]), "")

    def _now(self) -> Tensors:
        self._firm: set[str] = set()
        found: Tensors = {}
        for name, x, firm in _walk(self._state, self._model, "state", 0, set()):
            found[name] = x.detach().clone()
            if firm:
                self._firm.add(name)
            if len(found) == MANY:
                break
        return found


def _walk(
    value: Any, model: nn.Module | Pipeline, path: str, depth: int, seen: set[int]
) -> Iterator[tuple[str, Tensor, bool]]:
    """The tensors and numbers in what `make` returned, without those of the model and its optimizers; and whether each belongs to a module
    or a schedule, and so must be the same on all ranks."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield path, value, False
        return
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield path, torch.tensor(float(value), dtype=torch.float64), False
        return
    if (
        value is model
        or isinstance(value, str | bytes | type | Optimizer | GradScaler)
        or depth > DEPTH
        or id(value) in seen
    ):
        return
    seen.add(id(value))
    inner: Iterator[tuple[str, Any]]
    if isinstance(value, LRScheduler):
        for key, item in value.state_dict().items():
            if isinstance(item, float):
                yield f"{path}.{key}", torch.tensor(item, dtype=torch.float64), True
        return
    if isinstance(value, nn.Module):
        for name, tensor in value.named_parameters():
            yield f"{path}.{name}", tensor, True
        return
    if isinstance(value, Mapping):
        inner = ((f"{path}[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, Sequence | Set) or type(value).__name__ == "deque":
        inner = ((f"{path}[{number}]", item) for number, item in enumerate(value))
    else:
        own = dict(getattr(value, "__dict__", {}))
        for cls in type(value).__mro__:
            slots = vars(cls).get("__slots__", ())
            for slot in (slots,) if isinstance(slots, str) else slots:
                if hasattr(value, slot):
                    own[slot] = getattr(value, slot)
        inner = ((f"{path}.{key}", item) for key, item in own.items())
    for name, item in inner:
        yield from _walk(item, model, name, depth + 1, seen)


def _belongs(name: str, parameter: str) -> bool:
    """Whether a kept value belongs to a parameter, by the name that the script gives it."""
    return name.endswith((f"[{parameter!r}]", f".{parameter}"))


def of_kept(own: Ran, one: Ran, ranks: Sequence[Ran]) -> Difference | None:
    """The first wrong kept value, among those that must be equal on all ranks and on one process."""
    for name, right in one.state.items():
        mine, part = own.state.get(name), own.parts.get(name)
        if name in own.averages:
            text = f"{name} is {part}, on one process {list(right.shape)}: a rank's part of an average of parameters"
            return Difference(text, "keep DTensors (no `to_local`), and read them with `full_tensor()`")
        if name not in one.firm or part is not None:
            continue
        if mine is None:
            continue
        if mine.shape != right.shape:
            return Difference(f"{name} is {list(mine.shape)}, on one process {list(right.shape)}")
        if (error := relative_error(mine, right)) > LIMIT:
            return Difference(f"{name} is {error:.1e} off{_shown(mine, right)}", _of_all(name, right, ranks))
    return None


def _shown(mine: Tensor, right: Tensor) -> str:
    return "" if right.ndim else f": {float(mine):.6g}, on one process {float(right):.6g}"


def _of_all(name: str, right: Tensor, ranks: Sequence[Ran]) -> str | None:
    """What to write where ranks have different values."""
    every = [run.state[name] for run in ranks if name in run.state and run.state[name].shape == right.shape]
    if len(every) != len(ranks) or all(torch.equal(x, every[0]) for x in every):
        return None
    total = sum(every[1:], every[0])
    if relative_error(total, right) <= LIMIT:
        return "ranks have parts of its sum: all-reduce it"
    if relative_error(total / len(every), right) <= LIMIT:
        return "the mean over ranks is right: all-reduce it, and divide by the ranks"
    return "ranks have different values of it: compute it from values that are reduced over all ranks"


def apart(one: Ran, ranks: Sequence[Ran]) -> dict[str, str]:
    """The kept values that differ from one process without being errors, in words."""
    found: dict[str, str] = {}
    for name, right in one.state.items():
        every = [run.state.get(name) for run in ranks]
        there = [x for x in every if x is not None and x.shape == right.shape]
        if len(there) == len(every) and all(relative_error(x, right) <= LIMIT for x in there):
            continue
        if not all(x is not None for x in every):
            found[name] = "not on all ranks"
        elif any(name in run.parts for run in ranks) or len(there) < len(every):
            found[name] = "a rank's part"
        elif relative_error(sum(there[1:], there[0]), right) <= LIMIT:
            found[name] = "a rank's part of a sum"
        else:
            found[name] = "a rank's own"
    return found


def in_words(found: Mapping[str, str]) -> tuple[str, ...]:
    """One line for each list or object with such values."""
    kinds: dict[str, str] = {}
    for name, why in found.items():
        kinds.setdefault(re.sub(r"(\[\d+\])+$", "", name), why)
    return tuple(f"{name} ({why})" for name, why in kinds.items())
