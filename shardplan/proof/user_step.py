"""A user's own training step, run as often as asked, and everything that it leaves behind on a rank."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.modules.module import register_module_forward_hook
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from shardplan.compiler.layout.randomness import DrawnAlike
from shardplan.compiler.lower.program import Program
from shardplan.core.mesh import APPLIED, MeshSizes
from shardplan.model.reduced.model_inputs import IGNORED
from shardplan.model.reduced.nests import tensors_in
from shardplan.runtime.apply.applied import AppliedParts, applied
from shardplan.runtime.apply.phases import apply_program
from shardplan.runtime.apply.plan_mesh import PlanMesh
from shardplan.runtime.apply.state import packed_parameters
from shardplan.runtime.pipeline import Pipeline
from shardplan.runtime.pipeline.apply_stages import apply_stages
from shardplan.runtime.pipeline.layout_of_stages import layout_on
from shardplan.torchlib.local_parts import to_local_if_dtensor

from .exact import as_written, in_precision_of
from .pipelined import AXES, Scheduled
from .rank import mesh_of, whole
from .steps import Batch

STEPS, MICRO = 3, 2
BACKWARDS = frozenset((Tensor.backward, torch.autograd.backward))
MAKE, STEP = "make", "step"
Tensors = dict[str, Tensor]


@dataclass
class Ran:
    """What one step left behind on a rank.

    Attributes:
        loss: what it returned; None for nothing.
        lines: of the script, by what they called: backward, update (the optimizer's step), reduced (a collective on a gradient).
        forwards, reached: training forwards of the model, and those whose result got a gradient.
        roots: the values that backward began with.
        offsets: how far behind its position the target of a token is, each with how many tokens say so.
        zeroed: whether gradients were lost between two backwards.
        updates: how often optimizers stepped.
        rates: their learning rates then.
        backward: the gradients after the last backward; `update`: in front of the optimizer's step; `after`: the parameters after it.
        state: what else the script keeps of a parameter's shape.
        factor: by how much this rank's parts of the gradients were multiplied between backward and the optimizer's step; None: not by one number.
        square: the square of their norm after backward.
    """

    loss: float | None = None
    lines: dict[str, int] = field(default_factory=dict)
    forwards: int = 0
    reached: int = 0
    roots: list[float] = field(default_factory=list)
    offsets: dict[int, int] = field(default_factory=dict)
    zeroed: bool = False
    updates: int = 0
    rates: list[float] = field(default_factory=list)
    backward: Tensors = field(default_factory=dict)
    update: Tensors = field(default_factory=dict)
    after: Tensors = field(default_factory=dict)
    state: Tensors = field(default_factory=dict)
    factor: float | None = None
    square: float = 0.0


def merged(own: Ran, others: Sequence[Ran]) -> Ran:
    """What a rank left behind, with the tensors of the ranks that have the other stages of its model."""

    def of(name: str) -> Tensors:
        return {key: value for ran in (*others, own) for key, value in getattr(ran, name).items()}

    return replace(own, backward=of("backward"), update=of("update"), after=of("after"), state=of("state"))


class _Watch(TorchFunctionMode):
    """Looks at backwards, optimizers' steps, the model's forwards and the script's collectives while a step runs."""

    def __init__(self, script: str, model: nn.Module | Pipeline):
        super().__init__()
        self.script, self.model, self.ran = script, model, Ran()
        record = applied(model)
        for part in record.parts if isinstance(record, AppliedParts) else (record,):
            part.reshard()  # between forward and backward, FSDP2 has gathered parameters in the places of these
        self.parameters = {_own(name): p for name, p in model.named_parameters()}
        self._inside = False

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func not in BACKWARDS or self._inside:
            return func(*args, **(kwargs or {}))
        before, self._inside = self.ran.backward, True
        now = _gradients(self.parameters)
        if before and not self.ran.updates and any(x.any() and not _any(now.get(n)) for n, x in _local(before).items()):
            self.ran.zeroed = True
        try:
            func(*args, **(kwargs or {}))
        finally:
            self._inside = False
        self._went_back([x for x in args[:1] if isinstance(x, Tensor)])

    def _went_back(self, roots: Sequence[Tensor]) -> None:
        self._note("backward")
        self.ran.roots += [float(x.detach()) for x in roots if not x.ndim]
        self.ran.backward = _gradients(self.parameters)

    @contextmanager
    def watching(self) -> Iterator[None]:
        with ExitStack() as entered:
            entered.callback(register_optimizer_step_pre_hook(self._updated).remove)
            entered.callback(register_module_forward_hook(self._called, with_kwargs=True).remove)
            for name in ("all_reduce", "reduce", "broadcast"):
                entered.enter_context(patch.object(dist, name, self._collective(getattr(dist, name))))
            if isinstance(self.model, Pipeline):
                entered.enter_context(patch.object(self.model, "step", self._stepped(self.model.step)))
            entered.enter_context(self)
            yield

    def _stepped(self, own: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def step(**inputs: Any) -> Tensor:
            self._inside = True
            try:
                loss = own(**inputs)
            finally:
                self._inside = False
            if torch.is_grad_enabled():
                self._went_back([loss])
            return loss

        return step

    def _note(self, what: str) -> None:
        frame: Any = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename != self.script:
            frame = frame.f_back
        if frame is not None:
            self.ran.lines[what] = frame.f_lineno

    def _updated(self, optimizer: Optimizer, args: tuple, kwargs: dict[str, Any]) -> Any:
        """In front of an optimizer's step; where it calls a closure, behind that, which makes the gradients."""
        self._note("update")
        self.ran.updates += 1
        self.ran.rates += [float(group["lr"]) for group in optimizer.param_groups]
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
        if module is not self.model or not torch.is_grad_enabled():
            return
        self.ran.forwards += 1
        ids, seen = kwargs.get("input_ids", args[0] if args else None), [False]

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
                    x.untyped_storage().data_ptr() for x in _local(_gradients(self.parameters, copied=False)).values()
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


def _local(tensors: Mapping[str, Tensor]) -> Tensors:
    return {name: to_local_if_dtensor(tensor) for name, tensor in tensors.items()}


def _any(gradient: Tensor | None) -> bool:
    return gradient is not None and bool(to_local_if_dtensor(gradient).any())


def _count_offsets(gradient: Tensor, ids: Tensor, offsets: dict[int, int]) -> None:
    """Note where the targets of a loss stand. The gradient of a log-probability has one sign at the token that is predicted, and the other at all
    others."""
    positive, negative = (gradient > 0).sum(-1), (gradient < 0).sum(-1)
    for sign, alone in ((1, (positive == 1) & (negative > 1)), (-1, (negative == 1) & (positive > 1))):
        target = (gradient * sign).argmax(-1)
        for offset in range(3):
            length = ids.shape[1] - offset
            hit = (target[:, :length] == ids[:, offset:]) & alone[:, :length]
            offsets[offset] = offsets.get(offset, 0) + int(hit.sum())


def dealt(feed: Callable[[int], Batch], step: int, shares: int, *, alike: bool, masked: bool) -> list[list[Batch]]:
    """The micro-batches of each data-parallel rank: unequal numbers of labels, in the last step a micro-batch without any, padding
    where masks are taken, and a rank on which most tokens are one.

    Args:
        feed: seed -> the model's inputs.
        alike: all micro-batches have the same inputs, and other labels.
    """
    every: list[list[Batch]] = []
    for share in range(shares):
        every.append([])
        for micro in range(MICRO):
            place = (step * shares + share) * MICRO + micro
            batch = dict(feed(step if alike else place))
            labels, ids = batch.get("labels"), batch.get("input_ids")
            if isinstance(labels, Tensor) and isinstance(ids, Tensor) and labels.shape == ids.shape:
                draw = torch.Generator().manual_seed(place)
                if share == shares - 1 and not alike:
                    ids = ids.masked_fill(torch.rand(ids.shape, generator=draw) < 0.5, int(ids[0, -1]))
                labels = ids.masked_fill(
                    torch.rand(ids.shape, generator=draw) < 0.2 + 0.6 * share / shares + 0.1 * micro, IGNORED
                )
                if masked:
                    batch["attention_mask"] = torch.ones_like(ids)
                    batch["attention_mask"][1, -ids.shape[1] // 4 :] = 0
                    labels[1, -ids.shape[1] // 4 :] = IGNORED
                if step == STEPS - 1 and (share, micro) == (shares - 1, 0):
                    labels = torch.full_like(labels, IGNORED)
                batch |= {"input_ids": ids, "labels": labels}
            every[-1].append(batch)
    return every


def joined(batches: Sequence[Batch]) -> Batch:
    """One batch with the rows of several."""
    return {
        name: torch.cat([batch[name] for batch in batches]) if isinstance(value, Tensor) and value.ndim else value
        for name, value in batches[0].items()
    }


@dataclass(frozen=True)
class Trial:
    """A run of the script.

    Args:
        build: the unsharded model, the same in every process.
        program: on `sizes`.
        batches: of each step.
        alike: draws depend on shapes alone (`DrawnAlike`).
        staged: how a pipeline of it runs.
    """

    script: str
    build: Callable[[], nn.Module]
    program: Program
    sizes: MeshSizes
    batches: Sequence[list[Batch]]
    alike: bool = False
    staged: Scheduled | None = None

    def applied(self, mesh: PlanMesh) -> nn.Module | Pipeline:
        """What the script is given."""
        if self.staged is None:
            return apply_program(self.build(), mesh, self.program, src_data_rank=0, seed=0, kind="model")
        layout, count = layout_on(mesh, self.staged.cut, self.staged.schedule), self.staged.micro_batches
        return apply_stages(self.build(), layout, self.program, count, None, compare=True, src_data_rank=0, seed=0)


def run_trial(trial: Trial) -> tuple[list[Ran], bool]:
    """Run a script's steps. All ranks of the mesh call it together.

    Returns:
        What each step left behind, and whether the script or the model drew random numbers.
    """
    torch.manual_seed(dist.get_rank())  # as processes that nobody seeds
    mesh = mesh_of(trial.sizes, APPLIED if trial.staged is None else AXES)
    model = trial.applied(mesh)
    packed = packed_parameters(trial.program)
    autocast = torch.autocast.__init__

    def without(self: Any, *args: Any, **kwargs: Any) -> None:
        autocast(self, *args, **{**kwargs, "enabled": False})

    found, drew = [], False
    with ExitStack() as entered:
        entered.enter_context(patch.dict(os.environ, _as_torchrun()))
        entered.enter_context(patch.object(torch.autocast, "__init__", without))
        for name in ("scale", "unscale_", "step", "update"):
            entered.enter_context(patch.object(GradScaler, name, as_written(getattr(GradScaler, name))))
        entered.enter_context(DrawnAlike() if trial.alike else nullcontext())
        script = runpy.run_path(trial.script, run_name="shardplan_step")
        with in_precision_of(model):
            state = script[MAKE](model)
            for batches in trial.batches:
                watch, before = _Watch(trial.script, model), torch.get_rng_state()
                with watch.watching():
                    loss = script[STEP](model, batches, state)
                drew = drew or not torch.equal(before, torch.get_rng_state())
                ran = watch.ran
                ran.loss = None if loss is None else float(whole(loss) if isinstance(loss, Tensor) else loss)
                ran.after = {name: p.detach().clone() for name, p in watch.parameters.items()}
                shapes = {p.shape for p in model.parameters() if p.ndim > 1}
                ran.state = {name: x.detach().clone() for name, x in _kept(state, model, "state", 0)}
                ran.state = {name: x for name, x in ran.state.items() if dist.get_world_size() > 1 or x.shape in shapes}
                ran.factor, ran.square = _factor(_local(ran.backward), _local(ran.update))
                found.append(ran)
    stage = 0 if mesh.pp is None else mesh.pp.get_local_rank()
    for ran in found:
        kept = {name: one for name in ran.state for parameter, one in packed.items() if _belongs(name, parameter)}
        for name in ("backward", "update", "after", "state"):
            setattr(ran, name, _whole(getattr(ran, name), stage, {**packed, **kept}, mesh.tp_size))
    return found, drew


def _as_torchrun() -> dict[str, str]:
    """What a process of `torchrun` finds in its environment, which accelerate reads."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    return {**own, "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


def _factor(before: Tensors, after: Tensors) -> tuple[float | None, float]:
    both = [(before[name].flatten(), after[name].flatten()) for name in before if name in after]
    if not both:
        return None, 0.0
    x, y = (torch.cat(list(part)).double() for part in zip(*both, strict=True))
    square = float(x @ x)
    if not square:
        return None, 0.0
    factor = float(x @ y) / square
    close = float((y - factor * x).norm()) <= 1e-6 * max(float(y.norm()), 1e-300)
    return factor if close else None, square


def _belongs(name: str, parameter: str) -> bool:
    """Whether what a script keeps is of a parameter, by the name that it gives it."""
    return name.endswith((f"[{parameter!r}]", f".{parameter}"))


def _whole(tensors: Tensors, stage: int, packed: Mapping[str, Any], tp: int) -> Tensors:
    """The whole tensors of those that all ranks with the same stages have, in one order. A collective."""
    boxes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(boxes, (stage, list(tensors)))
    every = [names for other, names in boxes if other == stage]
    common = [name for name in every[0] if all(name in names for names in every)]
    return {name: whole(tensors[name], packed.get(name), tp) for name in common}


def _kept(value: Any, model: nn.Module | Pipeline, path: str, depth: int) -> Iterator[tuple[str, Tensor]]:
    """The tensors in what `make` returned, but those of the model and of what updates it."""
    if value is model or isinstance(value, Optimizer | LRScheduler | GradScaler) or depth > 4:
        return
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.ndim > 1:
            yield path, value
    elif isinstance(value, nn.Module):
        for name, tensor in value.named_parameters():
            yield f"{path}.{name}", tensor
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _kept(item, model, f"{path}[{key!r}]", depth + 1)
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _kept(item, model, f"{path}[{number}]", depth + 1)
    elif hasattr(value, "__dict__") and not callable(value):
        for key, item in vars(value).items():
            yield from _kept(item, model, f"{path}.{key}", depth + 1)
