"""A pipeline stage of an unmodified model: stubs replace the modules of other stages, and every stage runs the model's
own forward.

How to make a stage:

    stage = stage_of(model, cut, 1)           # changes the model: other stages' parameters are gone, names stay
    ...                                       # shard, wrap, compile what is left
    stage.watch()                             # after all other hooks, so that it sees what the next block would get
    sent = stage.run(received, stage.model, **inputs)

`received` are the tensors from the previous stage, and `sent` those for the next one: the first result of its last block, then the carried
values; an empty tensor for a carried module that did not run. The last stage returns what the model's forward returns.

- A block before the stage's own returns its first argument; the last such block, the *inlet*, returns the received
  value. So the model's code between two blocks runs in the receiving stage.
- The first block after the stage's own ends the forward: nothing after it runs.
- In later stages, a module of the first stage returns zeros of the right shape that take no memory. The parts of its
  results that matter were received.
- The stub of a carried module returns the received value; the stub of its block calls it, so that its hooks run as in
  the unsharded model.
- A stub has its original's class and plain attributes. It raises where the model's code calls a module inside it, or
  reads a parameter of a block or of the last stage. Parameters of the first stage are zeros too where code reads them
  without calling their module, or where they have no module of their own.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import BackwardHook

from shardplan.core.stages import HandedOn, PipelineCut
from shardplan.core.tree import ancestors, full_name, parent

from .build_tree import kind_of

STUB = "_shardplan_stub"  # an attribute that marks a stub
HOOKS = tuple(name for name, value in vars(nn.Module()).items() if "hook" in name and isinstance(value, dict))
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class _StageDone(BaseException):
    """The forward has reached the first block of a later stage. It is no Exception, so model code that catches every Exception does not catch it."""


@dataclass
class _Flow:
    """The values that flow through a stage while it runs."""

    received: Sequence[Tensor] = ()
    carried: dict[str, tuple[Tensor, ...]] = field(default_factory=dict)
    weights: list[Callable[[], None]] = field(default_factory=list)
    captured: dict[str, Any] = field(default_factory=dict)
    running: bool = False

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of hidden states."""
        return self.received[0].dtype if self.received else None


@dataclass(eq=False)
class Stage:
    """A model that is one stage of a cut."""

    model: nn.Module
    cut: PipelineCut
    index: int
    _flow: _Flow
    _hooks: dict[str, frozenset[int]] = field(
        default_factory=dict
    )  # for modules whose results no code reads: the plan's hooks, by number
    _watched: bool = False

    @property
    def is_last(self) -> bool:
        return self.index == self.cut.stages - 1

    def watch(self) -> None:
        """Record the results of the last block and of carried modules. Call it once, after all other hooks are registered."""
        assert not self._watched, "called twice"
        self._watched = True
        handed = tuple(one.module for one in self.cut.handed)
        names = (self.cut.blocks_of(self.index)[-1], *(n for n in handed if self.cut.stage_of(n) == self.index))
        for name in () if self.is_last else dict.fromkeys(names):
            HandedOut(name, self.model.get_submodule(name), self._capturing(name))
        self._hooks = {
            one.module: frozenset(self.model.get_submodule(one.module)._forward_hooks)
            - self._hooks.get(one.module, frozenset())
            for one in self.cut.handed
            if one.unread
        }

    @property
    def hooked(self) -> bool:
        """Whether a hook reads a result that no code was seen to read."""
        return any(
            not self.model.get_submodule(name)._forward_hooks.keys() <= ours for name, ours in self._hooks.items()
        )

    def _capturing(self, name: str) -> Callable[[Any], None]:
        flow = self._flow

        def capture(output: Any) -> None:
            if flow.running:  # else a checkpoint is recomputing it
                flow.captured[name] = output

        return capture

    def run(self, received: Sequence[Tensor], forward: Callable[..., Any], **inputs: Any) -> Any:
        """Run the stage on one batch.

        Args:
            received: the tensors from the previous stage; empty for the first stage.
            forward: the model, or its own forward where `model.forward` was replaced.
            inputs: the arguments of the model's forward, the same for every stage.

        Returns:
            The tensors for the next stage; for the last stage, the result of the forward.

        Raises:
            RuntimeError: the forward ended before it reached the next stage.
        """
        assert self._watched, "watch() comes first"
        cut, flow = self.cut, self._flow
        before = cut.handed_at(self.index - 1) if self.index else ()
        assert len(received) == sum(len(one.positions) for one in before) + (self.index > 0), len(received)
        flow.received, flow.captured, flow.carried = tuple(received), {}, {}
        rest = iter(received[1:])
        for one in before:
            flow.carried[one.module] = tuple(next(rest) for _ in one.positions)
        for zeros in flow.weights if received else ():
            zeros()
        flow.running = True
        try:
            result = forward(**inputs)
        except _StageDone:
            return self._sent()
        finally:
            flow.running = False
            flow.received, flow.captured, flow.carried = (), {}, {}
        if not self.is_last:
            raise RuntimeError(
                f"the forward did not run {cut.blocks_of(self.index + 1)[0]}, where the next stage begins"
            )
        return result

    def _sent(self) -> tuple[Tensor, ...]:
        flow, last = self._flow, self.cut.blocks_of(self.index)[-1]
        sent = [_position(_captured(flow, last), 0)]
        for one in self.cut.handed_at(self.index):
            if one.module in flow.carried:
                sent += [value.view_as(value) for value in flow.carried[one.module]]
            elif one.module in flow.captured and (not one.unread or self.hooked):
                output = flow.captured[one.module]
                sent += [_position(output, position) for position in one.positions]
            else:  # neither this call nor a later stage needs it
                sent += [sent[0].new_empty(0) for _ in one.positions]
        return tuple(sent)


def is_stub(module: nn.Module) -> bool:
    """Whether a module is the stub of another stage's module."""
    return STUB in vars(module)


def stage_of(model: nn.Module, cut: PipelineCut, index: int) -> Stage:
    """Make a model one stage of a cut: stubs without parameters and buffers replace the modules of other stages.

    Args:
        model: on any device; it is changed. A parameter of another stage that a module outside the blocks owns becomes None; if it
            is the first stage's, it is read as zeros.
        cut: the cut of this model.
        index: the number of the stage, from 0.
    """
    flow = _Flow()
    given = {one.module: frozenset(model.get_submodule(one.module)._forward_hooks) for one in cut.handed if one.unread}
    stage = Stage(model, cut, index, flow, given)
    own = cut.blocks_of(index)
    inlet = cut.blocks[cut.blocks.index(own[0]) - 1] if index else None
    carried = {one.module: one for one in (cut.handed_at(index - 1) if index else ())}
    later = set(cut.blocks[cut.blocks.index(own[-1]) + 1 :])
    modules = dict(model.named_modules())
    for name in cut.absent_from(index):
        if name not in modules:
            module, leaf = modules[parent(name)], name.rpartition(".")[2]
            absent = module._parameters[leaf]
            module._parameters[leaf] = None
            if absent is not None and name in cut.first:
                _reads_zeros(module, leaf, absent.shape, flow)
            continue
        stub = _skeleton(modules[name], name, carried, flow)
        if name in later:
            _set_forward(stub, _done)
        elif name in cut.blocks:
            inside = _found(stub, name, [one for one in carried if name in ancestors(one)])
            handed = carried.get(name)
            _set_forward(stub, _block(flow, cut.results, is_inlet=name == inlet, inside=inside, handed=handed))
        elif name in carried:
            pass
        elif name in cut.first:
            _set_forward(stub, _of_first(modules[name], stub, flow, dense=name in cut.written))
        _replace(model, name, stub)
    return stage


def _found(stub: nn.Module, name: str, inside: Sequence[str]) -> list[nn.Module]:
    return [stub.get_submodule(one.removeprefix(f"{name}.")) for one in inside]


def _skeleton(original: nn.Module, name: str, carried: dict[str, HandedOn], flow: _Flow) -> nn.Module:
    """A module of the same class with its plain attributes and stubs of its children, without parameters and buffers."""
    stub = object.__new__(type(original))
    vars(stub).update(vars(original))
    # The hooks of carried modules run; all other hooks were for modules of other stages.
    kept = {hooks: vars(original)[hooks].copy() for hooks in HOOKS if name in carried and "forward" in hooks}
    fresh = {hooks: kept.get(hooks, OrderedDict()) for hooks in HOOKS if hooks in vars(original)}
    state: dict[str, Any] = {"_parameters": {}, "_buffers": {}, "_modules": {}, "_non_persistent_buffers_set": set()}
    vars(stub).update({**fresh, **state, STUB: True})
    for child, module in original.named_children():
        stub._modules[child] = _skeleton(module, full_name(name, child), carried, flow)
    _set_forward(stub, _returning(flow, carried[name]) if name in carried else _absent(name))
    return stub


def _set_forward(stub: nn.Module, forward: Callable[..., Any]) -> None:
    vars(stub)["forward"] = forward


def _absent(name: str) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"the model's code calls {name}, which another pipeline stage has")

    return forward


def _done(*args: Any, **kwargs: Any) -> Any:
    raise _StageDone


def _block(
    flow: _Flow, results: int, *, is_inlet: bool, inside: Sequence[nn.Module], handed: HandedOn | None
) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        for module in inside:
            module()
        value = flow.received[0] if is_inlet else _with_gradient(_first_tensor(args, kwargs), flow)
        further: dict[int, Tensor] = {}
        if handed is not None:
            further = dict(zip(handed.positions, flow.carried[handed.module], strict=True))
        first = further.get(0, value)
        return (first, *(further.get(position) for position in range(1, results))) if results else first

    return forward


def _with_gradient(value: Tensor, flow: _Flow) -> Tensor:
    """The same values; they require a gradient where a block's do, as later code puts hooks on them."""
    if value.requires_grad or not flow.received or not flow.received[0].requires_grad or not torch.is_grad_enabled():
        return value
    return value + torch.zeros((), dtype=value.dtype, device=value.device, requires_grad=True)


def _returning(flow: _Flow, handed: HandedOn) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        values = flow.carried[handed.module]
        if not handed.length:
            return values[0]
        found = dict(zip(handed.positions, values, strict=True))
        return tuple(found.get(position) for position in range(handed.length))

    return forward


def _of_first(original: nn.Module, stub: nn.Module, flow: _Flow, *, dense: bool) -> Callable[..., Any]:
    """Return zeros of the shape that a module returns, without memory unless they are `dense`. Its parameters are zeros too,
    for code that looks up a row to fill padding or asks for their dtype."""
    kind = kind_of(original)
    width, dtype = None, None
    if kind in ("embedding", "linear", "conv1d"):
        weight = original.weight
        assert isinstance(weight, Tensor)
        shape, dtype = weight.shape, weight.dtype
        width = shape[0 if kind == "linear" else 1]
    convolution = _without_memory(original) if isinstance(original, CONVOLUTIONS) else None
    run: Any = type(original).forward  # `forward` must not hold the original, whose parameters must be freed
    for leaf, parameter in original._parameters.items():
        if parameter is not None:
            _reads_zeros(stub, leaf, parameter.shape, flow)

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        given = _first_tensor(args, kwargs)
        if convolution is not None:
            shape = run(convolution, given.to("meta")).shape
        elif width is not None:
            shape = torch.Size((*(given.shape if kind == "embedding" else given.shape[:-1]), width))
        else:
            return given
        zeros = torch.zeros((), dtype=flow.dtype or dtype, device=given.device).expand(shape)
        return zeros.contiguous() if dense else zeros

    return forward


def _without_memory(module: nn.Module) -> nn.Module:
    """A copy on the meta device, for finding the shape of a result."""
    memo = {id(p): nn.Parameter(p.detach().to("meta"), requires_grad=False) for p in module.parameters()}
    return copy.deepcopy(module, memo)


def _reads_zeros(module: nn.Module, leaf: str, shape: torch.Size, flow: _Flow) -> None:
    """While a stage runs, let a parameter of the first stage be zeros without memory, which are not a Parameter of the module."""

    def zeros() -> None:
        value = flow.received[0]
        vars(module)[leaf] = torch.zeros((), dtype=value.dtype, device=value.device).expand(shape)

    flow.weights.append(zeros)


def _first_tensor(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            return value
    raise RuntimeError("a module of another pipeline stage is called without a tensor")


def _captured(flow: _Flow, name: str) -> Any:
    if name not in flow.captured:
        raise RuntimeError(f"{name} did not run before the next pipeline stage begins")
    return flow.captured[name]


def _position(output: Any, position: int) -> Tensor:
    """A tensor of a module's output."""
    return output if isinstance(output, Tensor) else output[position]


def _replace(model: nn.Module, name: str, new: nn.Module) -> None:
    """Put a module in another's place, in lists and dicts of modules too."""
    model.get_submodule(parent(name))._modules[name.rpartition(".")[2]] = new


BACKWARD = ("_backward_pre_hooks", "_backward_hooks")


class HandedOut:
    """Hooks of a module that run last. torch wraps a module's output for its full backward hooks after the forward hooks, so no hook sees
    the wrapped output. Here, these hooks run the full backward hooks, which stay in the dicts of the handles that remove them.

    The rest of the forward gets a view. The later stage runs this code too, so a hook that the code puts on a tensor acts only once.

    Args:
        seen: called with each output.
    """

    def __init__(self, name: str, module: nn.Module, seen: Callable[[Any], None]):
        self.name, self.seen = name, seen
        self.first, self.then = (vars(module)[kind] for kind in BACKWARD)
        self.legacy = bool(self.then) and not module._is_full_backward_hook  # on the forward's own result
        self.made: BackwardHook | None = None
        if not self.legacy:
            for kind in BACKWARD:
                vars(module)[kind] = OrderedDict()
        module.register_forward_pre_hook(self.before)
        module.register_forward_hook(self.after)

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if not self.legacy and any(vars(module)[kind] for kind in BACKWARD):
            raise RuntimeError(
                f"{self.name} got a backward hook after apply_plan, and hands its output to another pipeline stage: register it before "
                "apply_plan, which then runs it there"
            )
        self.made = None
        if not self.legacy and (self.first or self.then):
            self.made = BackwardHook(module, list(self.then.values()), list(self.first.values()))
            args = self.made.setup_input_hook(args)
        return args

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if self.made is not None:
            output = self.made.setup_output_hook(output)
        self.made = None
        self.seen(output)
        return output if self.legacy else _views(output)


def _views(output: Any) -> Any:
    if isinstance(output, Tensor):
        return output.view_as(output)
    return type(output)(map(_views, output)) if type(output) in (tuple, list) else output
