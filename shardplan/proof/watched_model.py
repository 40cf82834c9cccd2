"""Recording a run with real moves: the values and the gradients at the boundaries of a model's modules, whatever moves them inside."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

from torch import Tensor, is_grad_enabled, nn
from torch.distributed.tensor import DTensor

from shardplan.model.reduced.nests import named_results, replaced, tensors_in
from shardplan.model.reduced.recorder import Recorder
from shardplan.runtime.parallel.fused_logits import FusedLogits
from shardplan.torchlib.hollow import Hollow
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


class WatchedModel(Recorder):
    """Records the calls of a model's modules, in `watching`: each gets and returns views of its tensors, whose gradients are its own.

    Args:
        model: see Recorder.
        names: module -> the names of its arguments, which the forwards of a planned model do not have.

    Attributes:
        seen: the tensors, in the order of the run. Calls that a backward makes (checkpoints) are left out.
        made: an argument -> the result, or the argument of a module around, that it is.
    """

    def __init__(self, model: nn.Module, names: Mapping[str, Sequence[str]]):
        super().__init__(model)
        self.names = names
        self.seen: dict[Place, Tensor] = {}
        self.made: dict[Place, Place] = {}
        self._places: dict[int, tuple[Place, Tensor]] = {}  # id -> where it is from; the tensor keeps the id in use

    def call(self, module: nn.Module, forward: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """Record a call of a module from outside: its hooks, which move tensors, run inside."""
        args, kwargs = self._enter(module, args, kwargs) or (args, kwargs)
        return self._leave(module, args, kwargs, forward(*args, **kwargs))

    def number(self, tensor: Tensor, reading: str | None = None) -> int:
        return super().number(tensor.kept if isinstance(tensor, Hollow) else tensor, reading)

    def argument_names(self, module: nn.Module) -> Sequence[str]:
        return self.names[self._names[id(module)]]

    def moved_arguments(self, scope: tuple[str, int], module: nn.Module, named: dict[str, Any]) -> dict[str, Any]:
        views = self._views(partial(Place, *scope, "argument"), named_results(named))
        return {
            name: replaced(value, views)
            for name, value in named.items()
            if any(id(tensor) in views for tensor in tensors_in(value))
        }

    def moved_results(
        self, scope: tuple[str, int], module: nn.Module, results: list[tuple[str, Tensor]]
    ) -> dict[int, Tensor]:
        views = self._views(partial(Place, *scope, "result"), results)
        return {i: views[id(tensor)] for i, (_, tensor) in enumerate(results) if id(tensor) in views}

    def _views(self, of: Callable[[str], Place], values: Iterable[tuple[str, Tensor]]) -> dict[int, Tensor]:
        """A view of each tensor, by the tensor's id; not of a result that is there twice: on ranks it may be moved at one of its places."""
        views: dict[int, Tensor] = {}
        values = [*values]
        times = Counter(id(tensor) for _, tensor in values)
        for key, tensor in values:
            if isinstance(tensor, (DTensor, FusedLogits)) or not tensor.is_floating_point():
                continue  # the values of fused logits are made by the loss
            place = of(key)
            self.seen[place] = self.trace.values[self.number(tensor)]
            origin, _ = self._places.get(id(tensor), (place, tensor))
            if place.side == "argument" and origin != place:
                self.made[place] = origin
            once = place.side == "argument" or times[id(tensor)] == 1
            if tensor.requires_grad and is_grad_enabled() and once:
                views[id(tensor)] = view = tensor.view_as(tensor)
                view.register_hook(partial(self._note_gradient, place))
                self._places[id(view)] = (place if place.side == "result" else origin, view)
        return views

    def _note_gradient(self, place: Place, gradient: Tensor) -> None:
        self.seen[place._replace(gradient=True)] = gradient.detach().clone()


Watch = Callable[[nn.Module, Mapping[str, Sequence[str]]], WatchedModel]


@contextmanager
def watching() -> Iterator[Watch]:
    """Within this context, calls of the modules of watched models are recorded. Nothing changes in the modules, which look for changes.

    Returns:
        A function that watches a model.
    """
    plain, watched = nn.Module.__call__, dict[nn.Module, WatchedModel]()

    def watch(model: nn.Module, names: Mapping[str, Sequence[str]]) -> WatchedModel:
        recorder = WatchedModel(model, names)
        watched.update(dict.fromkeys(model.modules(), recorder))
        return recorder

    def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        recorder = watched.get(module)
        if recorder is None or _current_graph_task_id() != -1:
            return plain(module, *args, **kwargs)
        return recorder.call(module, partial(plain, module), args, kwargs)

    with patch.object(nn.Module, "__call__", called):
        yield watch
