"""Watching a run: the values and the gradients at the boundaries of a model's modules, whatever moves them inside."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple
from unittest.mock import patch
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardplan.model.reduced.nests import named_results, replaced
from shardplan.torchlib.private import private

_current_graph_task_id = private("current_graph_task_id")


class Place(NamedTuple):
    """A tensor of a run.

    Args:
        module: full name of the module.
        call: how many calls of the module began before, with this one.
        side: an argument or a result of the call, as code outside of the module sees it.
        key: its name or position.
        gradient: whether it is the gradient. That of an argument is what this call adds to it; that of a result is the sum over
            all readers.
    """

    module: str
    call: int
    side: Literal["argument", "result"]
    key: str
    gradient: bool = False


class WatchedModel:
    """What a model's modules were called with and returned, since `watch`.

    Args:
        names: module -> the names of its arguments, which the forwards of a planned model do not have.

    Attributes:
        seen: the tensors, in the order of the run. Calls that a backward makes (checkpoints) are left out.
        made: an argument -> the result, or the argument of a module around, that it is.
    """

    def __init__(self, names: Mapping[str, Sequence[str]]):
        self.names = names
        self.seen: dict[Place, Tensor] = {}
        self.made: dict[Place, Place] = {}
        self._calls: Counter[str] = Counter()
        self._places: dict[int, tuple[Place, Tensor]] = {}  # id -> where it is from; the tensor keeps the id in use

    def watch(self, model: nn.Module) -> None:
        """Watch a model's modules in `watching`."""
        for name, module in model.named_modules():
            _WATCHED[module] = (self, name)

    def call(self, forward: Callable[..., Any], name: str, args: tuple, kwargs: dict) -> Any:
        """A call of a module: its tensors are noted, and it gets and returns views of them, whose gradients are its own."""
        self._calls[name] += 1
        of = partial(Place, name, self._calls[name])
        names = self.names[name]
        named = {names[i] if i < len(names) else f"#{i}": value for i, value in enumerate(args)} | kwargs
        args, kwargs = replaced((args, kwargs), self._views(partial(of, "argument"), named))
        results = forward(*args, **kwargs)
        return replaced(results, self._views(partial(of, "result"), results))

    def _views(self, of: Callable[[str], Place], values: Any) -> dict[int, Tensor]:
        """A view of each tensor, by the tensor's id."""
        views: dict[int, Tensor] = {}
        for key, tensor in named_results(values):
            if isinstance(tensor, DTensor) or not tensor.is_floating_point():
                continue
            place = of(key)
            self.seen[place] = tensor.detach().clone()
            origin, _ = self._places.get(id(tensor), (place, tensor))
            if place.side == "argument" and origin != place:
                self.made[place] = origin
            if tensor.requires_grad and torch.is_grad_enabled():
                views[id(tensor)] = view = tensor.view_as(tensor)
                view.register_hook(partial(self._note_gradient, place))
                self._places[id(view)] = (place if place.side == "result" else origin, view)
        return views

    def _note_gradient(self, place: Place, gradient: Tensor) -> None:
        self.seen[place._replace(gradient=True)] = gradient.detach().clone()


_WATCHED: WeakKeyDictionary[nn.Module, tuple[WatchedModel, str]] = WeakKeyDictionary()


@contextmanager
def watching() -> Iterator[None]:
    """Within this context, calls of the modules of watched models are noted. Nothing changes in the modules, which look for changes."""
    plain = nn.Module.__call__

    def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        found = _WATCHED.get(module)
        if found is None or _current_graph_task_id() != -1:
            return plain(module, *args, **kwargs)
        return found[0].call(partial(plain, module), found[1], args, kwargs)

    with patch.object(nn.Module, "__call__", called):
        yield
