"""Whether a model is still the one that was proven: its modules, their classes, forwards, hooks and flags, its parameters, and which ones are
frozen."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from operator import is_
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from shardplan.core.plan import variant_name, without_sequence
from shardplan.core.tree import ancestors, full_name, parent
from shardplan.model.code_conditions import flags
from shardplan.runtime.parallel.fsdp_units import groups_in, replaced
from shardplan.runtime.parallel.whole_values import whole_values
from shardplan.torchlib.private import private

from .refusals import adapters_of
from .watched import Looks, Watched

HOOKS = {
    "_forward_pre_hooks": "forward pre-hook",
    "_forward_hooks": "forward hook",
    "_backward_pre_hooks": "backward pre-hook",
    "_backward_hooks": "backward hook",
}
# Their hooks are known to be right: they gather, measure, record what a model returns, or change the whole output of an
# embedding table.
KNOWN = ("shardplan", "transformers", "accelerate", "peft", "torch.distributed", "torch.utils")


def unchanged(watched: Watched) -> Looks:
    """Check every forward, and parts that are called directly, for changes that would be silently wrong. RuntimeError gives the line to
    write. Every model is checked for parameters that were frozen when the plan was applied and are trained now; a model with split values
    or experts also for new hooks where values are split, forwards set on modules, replaced modules and parameters, and other classes.

    These changes are right, and pass: freezing; switching between peft's adapters; hooks of the model itself, where values are whole, and
    of parameters; FSDP2, checkpoints and torch.compile around modules.
    """
    checks: list[Callable[[], None]] = []
    split = watched.mesh.tp_size > 1 or bool(watched.program.experts)  # cp splits only values
    if split or watched.program.resolved.context_parallel:
        checks = [_Modules(watched).check, _Parameters(watched).check, _Frozen(watched, split=split).check]
    elif watched.split:
        checks = [_Frozen(watched, split=False).check]
    if watched.split and isinstance(watched.outer, FSDPModule):
        checks.append(partial(_refuse_replaced, groups_in(watched.outer.modules())))

    def look(*_: Any) -> None:
        for check in checks:
            check()

    if watched.regime is not None:
        watched.regime.look = look
    return dict.fromkeys((watched.outer, watched.inner), look) if checks else {}


def same_flags(watched: Watched) -> Looks:
    """Check the flags that the user's own code reads (`code_conditions.flags`): what another value switches on is not proven. RuntimeError names
    the flag."""
    known = [(name, module, found) for name, module in watched.inner.named_modules() if (found := flags(module))]

    def look(*_: Any) -> None:
        for name, module, before in known:
            for flag, value in before.items():
                now = vars(module).get(flag)
                if type(now) is not type(value) or now != value:
                    raise RuntimeError(
                        f"{full_name(name, flag)} is {now!r} now, and was {value!r} when the plan was applied: what it switches in the model's code "
                        "is not proven. Set it before apply_plan, which then proves the plan with it"
                    )

    return {watched.outer: look} if known and watched.split else {}


def _refuse_replaced(groups: list[Any]) -> None:
    if names := replaced(groups):
        raise RuntimeError(
            f"another tensor is in the place of the parameter {names[0]} ({len(names)} in all), by torch.func.functional_call or an assignment: "
            "FSDP2 would compute with its own ones. Copy the values into those, `with torch.no_grad(): parameter.copy_(values)`"
        )


class _Modules:
    """The modules of the inner model. Lists are compared as a whole; differences are searched only where they differ."""

    def __init__(self, watched: Watched):
        self.names = {module: name for name, module in watched.inner.named_modules()}
        self.modules = list(self.names)
        self.classes = list(map(type, self.modules))
        self.slots = [
            (m._modules, leaf) for m in self.modules for leaf, child in m._modules.items() if child is not None
        ]
        self.owners = [m for m in self.modules for child in m._modules.values() if child is not None]
        self.children: list[nn.Module | None] = [items[leaf] for items, leaf in self.slots]
        inside = self.modules[1:]  # many tools wrap the model's own forward, also after apply_plan
        self.attributes = [vars(module) for module in inside]
        self.forwards = ["forward" in one for one in self.attributes]
        whole = _whole(watched, self.names.values())
        split = [module for module in inside if self.names[module] not in whole]
        self.hooked = [(self.names[module], kind, vars(module)[kind]) for module in split for kind in HOOKS]
        if split:
            self.hooked += [("", kind, private(f"global{kind}")) for kind in HOOKS]
        self.hooks = [hooks for *_, hooks in self.hooked]
        self.known = list(map(tuple, self.hooks))
        self.registered = RemovableHandle.next_id

    def check(self) -> None:
        if (classes := list(map(type, self.modules))) != self.classes:
            self._other_classes(classes)
        if (children := [items.get(leaf) for items, leaf in self.slots]) != self.children:
            self._other_children(children)
        if (forwards := ["forward" in one for one in self.attributes]) != self.forwards:
            self._other_forwards(forwards)
        if RemovableHandle.next_id != self.registered:  # a count of all hooks registered anywhere, on tensors too
            if (hooks := list(map(tuple, self.hooks))) != self.known:
                self._other_hooks(hooks)
            self.registered = RemovableHandle.next_id

    def _other_classes(self, classes: list[type]) -> None:
        for module, before, now in zip(self.modules, self.classes, classes, strict=True):
            if now is not before and not (issubclass(now, FSDPModule) and issubclass(now, before)):
                raise RuntimeError(
                    f"{self.names[module] or 'the model'} is a {now.__name__} now, but the plan was proven with {before.__name__}, "
                    "its class when the plan was applied: set its class before apply_plan"
                )
        self.classes = classes

    def _other_children(self, children: list[nn.Module | None]) -> None:
        slots = zip(self.owners, self.slots, self.children, children, strict=True)
        for owner, (_, leaf), before, now in slots:
            if now is not before and not _is_around(now, before):
                what = "was removed" if now is None else f"was replaced by a {type(now).__name__}"
                raise RuntimeError(
                    f"{full_name(self.names[owner], leaf)} {what} after apply_plan, which split and proved the earlier one: replace "
                    "it before apply_plan"
                )
        self.children = children

    def _other_forwards(self, forwards: list[bool]) -> None:
        for module, before, now in zip(self.modules[1:], self.forwards, forwards, strict=True):
            if now and not before:
                raise RuntimeError(
                    f"{self.names[module]} got a forward of its own after apply_plan: the plan's moves do not run around it, and what it "
                    "computes is not proven. Set it before apply_plan, which then proves and runs it"
                )
        self.forwards = forwards

    def _other_hooks(self, hooks: list[tuple[int, ...]]) -> None:
        for (name, kind, there), before, now in zip(self.hooked, self.known, hooks, strict=True):
            for number in now:
                if number not in before and not _is_known(hook := there[number]):
                    raise RuntimeError(
                        f"{name or 'every module'} got a {HOOKS[kind]} ({_shown(hook)}) after apply_plan: it would see this rank's "
                        "share of the values, and it is not proven. Register it before apply_plan, which then proves the plan with "
                        "it; or on a module whose values are whole, such as the model"
                    )
        self.known = hooks


class _Parameters:
    """The parameters that the program stores over tp or ep: a replacement must be stored the same way."""

    def __init__(self, watched: Watched):
        names = [full_name(m.name, p.name) for m in watched.program.modules.values() for p in m.parameters]
        slots = (_slot(watched.inner, name) for name in names)
        self.slots = [slot for slot in slots if isinstance(slot.now, DTensor)]
        self.places = [(slot.items, slot.leaf) for slot in self.slots]
        self.known = [slot.now for slot in self.slots]
        self.stored = list(map(_stored, self.known))

    def check(self) -> None:
        now = [items.get(leaf) for items, leaf in self.places]
        if all(map(is_, now, self.known)):
            return
        for slot, stored, parameter in zip(self.slots, self.stored, now, strict=True):
            if _stored(parameter) != stored:
                raise RuntimeError(
                    f"the parameter {slot.name} was replaced after apply_plan, and the new one is not stored as the plan stores it: replace it "
                    "before apply_plan, or copy the values into the one that is there"
                )
        self.known = now


class _Frozen:
    """The frozen parameters, which must not be trained later: no rank would reduce their gradients, or not in a proven way. Exempt are
    parameters that only FSDP2 shards, as it reduces all that is trained, and adapters, which have their styles' layouts and take turns.

    Args:
        split: whether parameters or experts are split.
    """

    def __init__(self, watched: Watched, *, split: bool):
        adapters = set(adapters_of(watched.inner))
        sharded = not split and isinstance(watched.outer, FSDPModule)
        self.slots = [
            slot
            for name, parameter in watched.inner.named_parameters(remove_duplicate=False)
            if not parameter.requires_grad
            and not (sharded and isinstance(parameter, DTensor))
            and not adapters.intersection(name.split("."))
            for slot in (_slot(watched.inner, name),)
        ]
        self.places = [(slot.items, slot.leaf) for slot in self.slots]

    def check(self) -> None:
        for items, leaf in self.places:
            if (parameter := items.get(leaf)) is not None and parameter.requires_grad:
                trained = [slot.name for slot in self.slots if slot.now is not None and slot.now.requires_grad]
                raise RuntimeError(
                    f"{trained[0]} is trained now ({len(trained)} in all), and was frozen when the plan was applied: its gradient is "
                    "not proven, and perhaps not reduced. Call requires_grad_(True) before apply_plan for every parameter that is "
                    "trained at any time, and requires_grad_(False) afterwards for those that are not trained yet"
                )


@dataclass(frozen=True, slots=True)
class _Slot:
    """The place where a module keeps a parameter."""

    items: dict[str, Any]
    leaf: str
    name: str

    @property
    def now(self) -> Any:
        return self.items.get(self.leaf)


def _slot(model: nn.Module, name: str) -> _Slot:
    return _Slot(model.get_submodule(parent(name))._parameters, name.rpartition(".")[2], name)


def _stored(parameter: object) -> object:
    """How a parameter is stored over the last axis of its mesh, which is the plan's; FSDP2's axes come before it."""
    return (parameter.shape, parameter.placements[-1]) if isinstance(parameter, DTensor) else type(parameter)


def _whole(watched: Watched, names: Iterable[str]) -> frozenset[str]:
    program = watched.program
    if watched.mesh.tp_size == 1 and not program.resolved.context_parallel:  # tokens are exchanged inside of experts
        return frozenset(name for name in names if not set(program.experts).intersection(ancestors(name)))
    overlays = program.resolved.overlays
    return whole_values(names, program.by_name, variant_name(overlays), variant_name(without_sequence(overlays)))


def _is_around(module: nn.Module | None, inner: nn.Module | None) -> bool:
    """Whether a module of torch wraps exactly another one: a checkpoint's wrapper, or one made by torch.compile."""
    return module is not None and type(module).__module__.startswith("torch.") and list(module.children()) == [inner]


def _is_known(hook: Any) -> bool:
    while isinstance(hook, partial):
        hook = hook.func
    return f"{hook.__module__}.".startswith(tuple(f"{one}." for one in KNOWN))


def _shown(hook: Any) -> str:
    return getattr(hook, "__qualname__", type(hook).__qualname__)
