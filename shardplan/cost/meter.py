"""Measuring a step: every storage, every collective and every floating-point operation."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from shardplan.core.estimates import Category, Phase
from shardplan.core.mesh import Axis
from shardplan.torchlib.local_parts import to_local_if_dtensor
from shardplan.torchlib.operators import DEVICE, collective_of
from shardplan.torchlib.private import private

from .flops import GROUPED, counted, flops_of
from .overlap import ALONE, Overlap
from .running_module import Place, Places
from .traced_parts import Parts

_DispatchMode: Any = private("TorchDispatchMode")
_leaves = private("tree_leaves")
_Fake: Any = private("FakeTensor")
_Propagator: Any = private("sharding_propagator")
_without_modes: Any = private("disable_modes")
FUNCTIONAL = "_c10d_functional"
WAITS = ("_c10d_functional::wait_tensor", "_c10d_functional_autograd::wait_tensor")


@dataclass(eq=False, slots=True)
class StorageRecord:
    """One storage.

    Args:
        size: its present bytes.
        made_in: the phase in which it was made.
        over_vocabulary: whether a tensor over tokens and vocabulary was made in it.
        over_pairs: whether a tensor over pairs of tokens was made in it.
        gathered: whether it holds parameters that data-parallel ranks gathered.
        kept: whether it was alive at the end of the forward that made it.
        purpose: its purpose, where it is known later ("gradients").
        part: the part of the model that made it, where parts are followed.
    """

    size: int
    made_in: Phase
    over_vocabulary: bool = False
    over_pairs: bool = False
    gathered: bool = False
    kept: bool = False
    purpose: Category | None = None
    part: str = ""


def category_of(record: StorageRecord) -> Category:
    if record.purpose is not None:
        return record.purpose
    if record.over_vocabulary:
        return "logits"
    if record.over_pairs:
        return "masks and scores"
    if record.gathered:
        return "gathered parameters"
    return "activations" if record.kept and record.made_in == "forward" else "temporaries"


@dataclass(frozen=True, slots=True)
class Change:
    """Bytes that are allocated or freed, and the place that runs."""

    record: StorageRecord
    bytes: int
    place: Place


@dataclass
class Log:
    """What happened while a step ran.

    Args:
        before: the storages that exist before the step, with their bytes.
        changes: the changes in order.
        calls: (axis, collective) -> number of calls; bytes: the same -> ring bytes.
        flops: (place, dtype) -> floating-point operations.
        operands: (storage, bytes, part) for each read of an operand by a product.
        kept: the storages that the forward made and that are alive at its end, with their bytes.
        part_flops: (part, phase, dtype) -> operations.
        part_calls, part_bytes: (part, axis, collective) -> as `calls` and `bytes`.
        overlaps: part -> the products that ran while its collectives were under way.
    """

    before: dict[StorageRecord, int] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)
    calls: Counter[tuple[Axis, str]] = field(default_factory=Counter)
    bytes: Counter[tuple[Axis, str]] = field(default_factory=Counter)
    flops: Counter[tuple[Place, str]] = field(default_factory=Counter)
    operands: list[tuple[StorageRecord, int, str]] = field(default_factory=list)
    kept: dict[StorageRecord, int] = field(default_factory=dict)
    part_flops: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    part_calls: Counter[tuple[str, Axis, str]] = field(default_factory=Counter)
    part_bytes: Counter[tuple[str, Axis, str]] = field(default_factory=Counter)
    overlaps: dict[str, Overlap] = field(default_factory=dict)


class Meter(_DispatchMode):
    """A context that follows every storage that an operator makes.

    Args:
        places: tells which module runs.
        groups: the name of a process group -> (its mesh axis, its number of ranks).
        over_cp: the name of the cp axis's group. FSDP2 may use the same group: it sends with torch's plain collectives, and the
            moves of a plan's section `context_parallel` are functional collectives.
        logits: (elements, last dim) of tensors over tokens and vocabulary.
        pairs: the last two dims of tensors over pairs of tokens, whose other dims are sequences and heads; 0 looks for none.
        parts: follows which part of the model runs; None where this is not wanted.
    """

    def __init__(
        self,
        places: Places,
        groups: Mapping[str, tuple[Axis, int]],
        logits: Iterable[tuple[int, int]],
        pairs: int,
        parts: Parts | None = None,
        over_cp: str | None = None,
    ) -> None:
        super().__init__()
        self.parts, self.over_cp = parts, over_cp
        self.places, self.groups, self.logits = places, groups, frozenset(logits)
        self.pairs = pairs
        self.log = Log()
        self._alive: dict[int, tuple[StorageRecord, Any]] = {}
        # The result of a collective that is under way -> its part and bytes, and the products until it began.
        self._under_way: dict[StorageRecord, tuple[str, tuple[Axis, str], int, Counter[str]]] = {}
        self._products: Counter[str] = Counter()
        self._overlapped: Counter[str] = Counter()  # the products until the last one that ran during a collective

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch's hook: True, as nothing is compiled here, and keeping the compiler away takes time at each operator."""
        return False

    def start(self) -> None:
        """Begin a new log with the storages that are alive now."""
        self.log = Log({record: record.size for record, _ in self._alive.values()})

    @contextmanager
    def before(self) -> Iterator[None]:
        """Within this context nothing is logged; storages that remain count as existing when the log began."""
        log, there = self.log, {record for record, _ in self._alive.values()}
        self.log = Log()
        try:
            yield
        finally:
            log.changes += [change for change in self.log.changes if change.record in there]
            log.before |= {record: record.size for record, _ in self._alive.values() if record not in there}
            self.log = log

    def mark(self, tensors: Iterable[Tensor], purpose: Category) -> None:
        """Record the purpose of the tensors' storages; unknown storages are followed from now on."""
        for tensor in tensors:
            self._see(to_local_if_dtensor(tensor).untyped_storage()).purpose = purpose

    def end_forward(self) -> None:
        """Record the storages that are alive, which the forward keeps for the backward."""
        for record, _ in self._alive.values():
            record.kept = True
            if record not in self.log.before:
                self.log.kept[record] = record.size

    @contextmanager
    def running(self) -> Iterator[None]:
        """A context that measures. Storages that are resized in place, as FSDP does to free gathered parameters, are followed too. Whole tensors
        with which DTensor finds how an operator splits, when it first runs in a process, are not followed."""
        resize, learns = torch.UntypedStorage.resize_, _Propagator._propagate_tensor_meta_non_cached
        meter = self

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            meter._resized(storage)
            return result

        def learned(*args: Any) -> Any:
            with _without_modes():
                return learns(*args)

        with (
            patch.object(torch.UntypedStorage, "resize_", resized),
            patch.object(_Propagator, "_propagate_tensor_meta_non_cached", learned),
            self,
        ):
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is DEVICE and type(args[0]) is _Fake:  # more than half of all calls are this one
            return args[0].device
        if any(hasattr(cls, "__tensor_flatten__") for cls in types):
            return NotImplemented  # its operations on its parts are dispatched here again
        kind = _kind_of(func)
        if kind.waits:  # it returns its argument; without memory, torch copies it
            self._waited(args[0])
            return args[0]
        kwargs = kwargs or {}
        out = _run(func, args, kwargs) if kind.grouped else func(*args, **kwargs)
        made = [out] if isinstance(out, Tensor) else [x for x in _leaves(out) if isinstance(x, Tensor)]
        if any(x.device.type == "meta" for x in made):
            return out  # DTensor finds how an operator splits: no rank has this tensor
        for x in made:
            record = self._see(x.untyped_storage())
            record.over_vocabulary |= x.ndim > 0 and (x.numel(), x.shape[-1]) in self.logits
            record.over_pairs |= (
                x.ndim > 3 and x.shape[-2] == self.pairs and x.shape[-1] - self.pairs in (0, 1)
            )  # sinks
        if kind.counted and (product := flops_of(func, args, kwargs, out)) is not None:
            self._computed(*product, [x for x in args if isinstance(x, Tensor)])
        if kind.collective is not None:
            self._communicated(kind, [*args, *kwargs.values()], made)
        return out

    def _computed(self, dtype: str, operations: int, read: list[Tensor]) -> None:
        place, part = self.places.now, self._part
        self.log.flops[place, dtype] += operations
        self._products[dtype] += operations
        operands = [self._see(x.untyped_storage()) for x in read]
        self.log.operands += [(record, x.nbytes, part) for record, x in zip(operands, read, strict=True)]
        if self.parts is not None:
            self.log.part_flops[part, place[0], dtype] += operations

    @property
    def _part(self) -> str:
        return self.parts.at(self.places.now) if self.parts is not None else ""

    def _communicated(self, kind: _Kind, arguments: list[Any], made: list[Tensor]) -> None:
        name = kind.collective
        assert name is not None, "a collective"
        whole = max((x for x in [*_leaves(arguments), *made] if isinstance(x, Tensor)), key=lambda x: x.nbytes)
        group = _group_name(arguments)
        axis, ranks = self.groups[group]
        if kind.functional and group == self.over_cp:
            axis = Axis.CP
        if axis not in (Axis.TP, Axis.CP) and name == "all_gather":
            self._see(whole.untyped_storage()).gathered = True
        if ranks > 1:
            sent = (2 if name == "all_reduce" else 1) * (ranks - 1) * whole.nbytes // ranks
            self.log.calls[axis, name] += 1
            self.log.bytes[axis, name] += sent
            if self.parts is not None:
                self.log.part_calls[self._part, axis, name] += 1
                self.log.part_bytes[self._part, axis, name] += sent
            if kind.functional:
                result = self._see(made[0].untyped_storage())
                self._under_way[result] = self._part, (axis, name), sent, Counter(self._products)

    def _waited(self, result: Tensor) -> None:
        part, key, sent, before = self._under_way.pop(
            self._see(result.untyped_storage()), ("", None, 0, self._products)
        )
        during = self._products - (before | self._overlapped)  # each product is counted once
        if key is not None and during:
            self.log.overlaps[part] = self.log.overlaps.get(part, ALONE) + Overlap({key: sent}, during)
            self._overlapped = Counter(self._products)

    def _see(self, storage: torch.UntypedStorage) -> StorageRecord:
        key = id(storage)
        if key in self._alive:
            return self._alive[key][0]
        record = StorageRecord(0, self.places.now[0], part=self._part)
        self._alive[key] = record, weakref.ref(storage, lambda _: self._freed(key))
        self._change(record, storage.nbytes())
        return record

    def _resized(self, storage: torch.UntypedStorage) -> None:
        if id(storage) in self._alive:
            record, _ = self._alive[id(storage)]
            record.gathered = True
            self._change(record, storage.nbytes())

    def _freed(self, key: int) -> None:
        record, _ = self._alive.pop(key)
        self._change(record, 0)

    def _change(self, record: StorageRecord, size: int) -> None:
        if size != record.size:
            self.log.changes.append(Change(record, size - record.size, self.places.now))
            record.size = size


@dataclass(frozen=True, slots=True)
class _Kind:
    """Facts about an operator from its name."""

    waits: bool
    grouped: bool
    counted: bool
    collective: str | None
    functional: bool


@cache
def _kind_of(func: Any) -> _Kind:
    name = func.name()
    functional = name.startswith(FUNCTIONAL)
    return _Kind(name.partition(".")[0] in WAITS, name == GROUPED, counted(func), collective_of(name), functional)


def _run(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Call a grouped product. torch knows its result shapes only for bfloat16."""
    if args[0].dtype == torch.bfloat16:
        return func(*args, **kwargs)
    lowered = (x.bfloat16() if isinstance(x, Tensor) and x.is_floating_point() else x for x in args)
    return func(*lowered, **kwargs).to(args[0].dtype)


def _group_name(arguments: list[Any]) -> str:
    """The process group among a collective's arguments; functional collectives have its name as their last text."""
    names = [x for x in arguments if isinstance(x, str)]
    if names:
        return names[-1]
    group = next(x for x in arguments if isinstance(x, torch.ScriptObject))
    return dist.ProcessGroup.unbox(group).group_name
