"""Watching a user's training step on a rank: backwards, optimizers' steps, forwards of the model, collectives of the script."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from shardplan.model.reduced.nests import tensors_in
from shardplan.runtime.apply.applied import AppliedParts, applied
from shardplan.runtime.pipeline import Pipeline
from shardplan.runtime.pipeline.step_loss import StepLoss
from shardplan.torchlib.local_parts import to_local_if_dtensor

BACKWARDS = frozenset((Tensor.backward, torch.autograd.backward))
Tensors = dict[str, Tensor]
WHOLE = ("backward", "update", "begun", "stepped", "after", "state")  # of Ran: made whole from the ranks' parts


@dataclass
class Ran:
    """The results of one step on a rank.

    Attributes:
        loss: the step's result; None if there is none.
        lines: the script's lines, by what they called: backward, update (the optimizer's step), reduced (a collective on a gradient).
        forwards, reached: the training forwards of the model, and those whose result got a gradient.
        roots: the values from which backward started.
        offsets: the distance from a token to its target -> the number of tokens that show this distance.
        zeroed: whether gradients were lost between two backwards.
        updates: the number of optimizers' steps.
        backs: the number of the script's calls of backward.
        options: (number of the optimizer's step, parameter, or group if the parameter is not the model's) -> the numbers of its group.
        scheduled: the number of schedules' steps.
        backward: the gradients after the last backward; `update`: before the optimizer's step; `after`: the parameters at the end.
        begun, stepped: the parameters before an optimizer's first step, and after its last one.
        state: the other values that the script keeps.
        firm: the names of values in it that must be equal on all ranks and on one process.
        parts: names of values in it that are a rank's part -> the part's shape.
        averages: the names of values that began as a copy of parameters, and follow them.
        buffers: the model's buffers that changed after its last forward and backward.
        factor, factors: the factor by which this rank's parts of the gradients changed between backward and the optimizer's step, for all
            and for each; None where it is not a single number.
        square: the squared norm of this rank's parts of the gradients after backward.
    """

    loss: float | None = None
    lines: dict[str, int] = field(default_factory=dict)
    forwards: int = 0
    reached: int = 0
    roots: list[float] = field(default_factory=list)
    offsets: dict[int, int] = field(default_factory=dict)
    zeroed: bool = False
    updates: int = 0
    backs: int = 0
    options: dict[tuple[int, str], dict[str, float]] = field(default_factory=dict)
    scheduled: int = 0
    backward: Tensors = field(default_factory=dict)
    update: Tensors = field(default_factory=dict)
    begun: Tensors = field(default_factory=dict)
    stepped: Tensors = field(default_factory=dict)
    after: Tensors = field(default_factory=dict)
    state: Tensors = field(default_factory=dict)
    firm: set[str] = field(default_factory=set)
    parts: dict[str, list[int]] = field(default_factory=dict)
    averages: set[str] = field(default_factory=set)
    buffers: Tensors = field(default_factory=dict)
    factor: float | None = None
    factors: dict[str, float | None] = field(default_factory=dict)
    square: float = 0.0


def merged(own: Ran, others: Sequence[Ran]) -> Ran:
    """A rank's results, with the tensors of the ranks that have the other stages of its model."""

    def of(name: str) -> Tensors:
        return {key: value for ran in (*others, own) for key, value in getattr(ran, name).items()}

    found = replace(own, state=_of_stages([*others, own]))
    for name in (*WHOLE, "buffers"):
        if name != "state":
            setattr(found, name, of(name))
    return found


def _of_stages(runs: Sequence[Ran]) -> Tensors:
    """The values that the stages' scripts keep, except those that differ between stages: a list of a stage's own parameters."""
    found: Tensors = {}
    unlike = set[str]()
    for name, x in (item for run in runs for item in run.state.items()):
        if name in found and not (found[name].shape == x.shape and torch.equal(found[name], x)):
            unlike.add(name)
        found[name] = x
    return {name: x for name, x in found.items() if name not in unlike}


class Watch(TorchFunctionMode):
    """Watches backwards, optimizers' steps, the model's forwards and the script's collectives while a step runs."""

    def __init__(self, script: str, model: nn.Module | Pipeline):
        super().__init__()
        self.script, self.model, self.ran = script, model, Ran()
        record = applied(model)
        for part in record.parts if isinstance(record, AppliedParts) else (record,):
            part.reshard()  # between forward and backward, gathered parameters replace them in FSDP2
        self.parameters = {_own(name): p for name, p in model.named_parameters()}
        self._inside, self._versions, self._buffers = False, list[int](), self._buffers_now()

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func not in BACKWARDS or self._inside:
            return func(*args, **(kwargs or {}))
        before, self._inside = self.ran.backward, True
        now = _gradients(self.parameters)
        again = not self.ran.updates and self._versions == self._versions_now()  # not a pass with other parameters
        if again and any(x.any() and not _any(now.get(name)) for name, x in local_of(before).items()):
            self.ran.zeroed = True
        try:
            func(*args, **(kwargs or {}))
        finally:
            self._inside = False
        self._went_back([x for x in args[:1] if isinstance(x, Tensor)])

    def _went_back(self, roots: Sequence[Tensor]) -> None:
        self._note("backward")
        self.ran.backs += 1
        self.ran.roots += [float(x.detach()) for x in roots if not x.ndim]
        self.ran.backward = _gradients(self.parameters)
        self._versions, self._buffers = self._versions_now(), self._buffers_now()

    def _versions_now(self) -> list[int]:
        return [to_local_if_dtensor(parameter)._version for parameter in self.parameters.values()]

    def _buffers_now(self) -> Tensors:
        parts = self.model.parts if isinstance(self.model, Pipeline) else [self.model]
        return {_own(name): x.detach().clone() for part in parts for name, x in part.named_buffers()}

    def written_buffers(self) -> Tensors:
        """The buffers that the script wrote. Changes by forwards (checkpoints recompute them in backward) depend on each rank's own batches."""
        own = self._buffers
        return {name: x for name, x in self._buffers_now().items() if name not in own or not torch.equal(x, own[name])}

    @contextmanager
    def watching(self) -> Iterator[None]:
        with ExitStack() as entered:
            entered.callback(register_optimizer_step_pre_hook(self._updated).remove)
            entered.callback(register_optimizer_step_post_hook(self._after_update).remove)
            entered.enter_context(patch.object(LRScheduler, "step", self._scheduled(LRScheduler.step)))
            entered.callback(register_module_forward_hook(self._called, with_kwargs=True).remove)
            for name in ("all_reduce", "reduce", "broadcast"):
                entered.enter_context(patch.object(dist, name, self._collective(getattr(dist, name))))
            if isinstance(self.model, Pipeline):
                entered.enter_context(patch.object(self.model, "step", self._stepped(self.model.step)))
                entered.enter_context(patch.object(StepLoss, "of", self._lost(StepLoss.of)))
            entered.enter_context(self)
            yield

    def _scheduled(self, own: Callable[..., None]) -> Callable[..., None]:
        def step(*args: Any, **kwargs: Any) -> None:
            self.ran.scheduled += 1
            own(*args, **kwargs)

        return step

    def _after_update(self, *_: Any) -> None:
        self.ran.stepped = self.copied()

    def copied(self) -> Tensors:
        """The current parameters."""
        return {name: p.detach().clone() for name, p in self.parameters.items()}

    def _stepped(self, own: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def step(**inputs: Any) -> Tensor:
            self._inside = True
            try:
                loss = own(**inputs)
            finally:
                self._inside = False
            self._buffers = self._buffers_now()
            if torch.is_grad_enabled():
                self._went_back([loss])
            return loss

        return step

    def _lost(self, own: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Record the loss of a micro-batch in the last stage; its logits are those of a forward of the model."""

        def of(loss: StepLoss, run: Callable[[dict[str, Any]], Any], inputs: dict[str, Any]) -> Tensor:
            def watched(given: dict[str, Any]) -> Any:
                output = run(given)
                self._went_forward(given.get("input_ids"), output)
                return output

            return own(loss, watched, inputs)

        return of

    def _note(self, what: str) -> None:
        frame: Any = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename != self.script:
            frame = frame.f_back
        if frame is not None:
            self.ran.lines[what] = frame.f_lineno

    def _updated(self, optimizer: Optimizer, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Called before an optimizer's step or, if the step calls a closure, after the closure, which makes the gradients."""
        self._note("update")
        self.ran.updates += 1
        if self.ran.updates == 1:
            self.ran.begun = self.copied()
        names = {id(p): name for name, p in self.parameters.items()}
        for i, group in enumerate(optimizer.param_groups):
            of = {names.get(id(p), f"group {i}") for p in group["params"]}
            numbers = {
                key: float(x) for key, x in group.items() if isinstance(x, int | float | Tensor) and key != "params"
            }
            self.ran.options |= dict.fromkeys(((self.ran.updates, name) for name in of), numbers)
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self.ran.update |= _gradients(self.parameters, held)
            return None

        def called() -> Any:
            result = closure()
            self.ran.update |= _gradients(self.parameters, held)
            return result

        return args[:1], {**kwargs, "closure": called}

    def _called(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
        if module is self.model:
            self._buffers = self._buffers_now()
            self._went_forward(kwargs.get("input_ids", args[0] if args else None), output)

    def _went_forward(self, ids: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        self.ran.forwards += 1
        seen = [False]

        def reached(gradient: Tensor) -> None:
            if not seen[0]:
                seen[0], self.ran.reached = True, self.ran.reached + 1
            parts = to_local_if_dtensor(gradient)
            if isinstance(ids, Tensor) and parts.ndim == 3 and parts.shape[:2] == ids.shape:
                _count_offsets(parts, ids, self.ran.offsets)

        for result in tensors_in(output):
            if result.requires_grad:
                result.register_hook(reached)

    def _collective(self, own: Callable[..., Any]) -> Callable[..., Any]:
        def run(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if sys._getframe(1).f_code.co_filename == self.script:
                memory = to_local_if_dtensor(tensor).untyped_storage().data_ptr()
                own_memory = {
                    x.untyped_storage().data_ptr() for x in local_of(_gradients(self.parameters, copied=False)).values()
                }
                if memory in own_memory:
                    self._note("reduced")
            return own(tensor, *args, **kwargs)

        return run


def _gradients(parameters: Mapping[str, Tensor], held: set[int] | None = None, *, copied: bool = True) -> Tensors:
    found: Tensors = {}
    for name, parameter in parameters.items():
        if parameter.grad is not None and (held is None or id(parameter) in held):
            found[name] = parameter.grad.detach().clone() if copied else parameter.grad
    return found


def _own(name: str) -> str:
    return name.removeprefix("module.")  # of DistributedDataParallel


def local_of(tensors: Mapping[str, Tensor]) -> Tensors:
    return {name: to_local_if_dtensor(tensor) for name, tensor in tensors.items()}


def _any(gradient: Tensor | None) -> bool:
    return gradient is not None and bool(to_local_if_dtensor(gradient).any())


def _count_offsets(gradient: Tensor, ids: Tensor, offsets: dict[int, int]) -> None:
    """Record where a loss has its targets. The gradient of a log-probability has one sign at the predicted token, and the opposite sign at
    all others."""
    positive, negative = (gradient > 0).sum(-1), (gradient < 0).sum(-1)
    for sign, alone in ((1, (positive == 1) & (negative > 1)), (-1, (negative == 1) & (positive > 1))):
        target = (gradient * sign).argmax(-1)
        for offset in range(3):
            length = ids.shape[1] - offset
            hit = (target[:, :length] == ids[:, offset:]) & alone[:, :length]
            offsets[offset] = offsets.get(offset, 0) + int(hit.sum())
