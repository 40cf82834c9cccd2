"""From a checkpoint of the Hugging Face libraries into a planned model; each rank reads its own slices."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from shardplan.core.user_files import shown_name
from shardplan.runtime.apply.applied import Applied, AppliedParts, applied
from shardplan.runtime.apply.model_parts import parts_of
from shardplan.runtime.pipeline import Pipeline

from .all_ranks import all_or_none, is_first
from .checkpoint_names import Resolved, StateEntry, resolve, state_entries
from .folders import repair
from .lazy import Lazy, leaf, leaves, read
from .materialize import initialize, refuse_blank
from .progress import OnProgress, Progress, reporter
from .ranges import Ranges, boxes_of
from .safetensors_folder import Reader, stored_tensors
from .stored_parts import StoredPart, part_of, ranges_of

SHOWN = 30  # at most so many names get suggestions of similar ones, as finding them takes time


@dataclass(frozen=True)
class Loaded:
    """What `load_checkpoint` did on this rank.

    Args:
        missing: names of the model that the checkpoint does not have; with `strict`, only those that the model's class allows.
        unexpected: names of the checkpoint that the model does not have; empty with `strict`.
        read: bytes that were read into parameters and buffers.
        stored: bytes of all tensors of the checkpoint.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    read: int
    stored: int


@dataclass(frozen=True)
class _Task:
    """A tensor of the model and its source."""

    entry: StateEntry
    source: Lazy
    ranges: tuple[Ranges, ...]

    @property
    def elements(self) -> int:
        count = 1
        for one in self.ranges:
            count *= sum(stop - start for start, stop in one)
        return count


@dataclass(frozen=True)
class _Work:
    tasks: tuple[_Task, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    conversions: tuple[Any, ...]
    stored: int


def load_checkpoint(
    model: nn.Module | Pipeline,
    folder: str | PathLike[str],
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    strict: bool = True,
    progress: bool | OnProgress = True,
) -> Loaded:
    """Read a checkpoint in the Hugging Face layout (safetensors, in one file or several with an index) into a model that
    a plan was applied to. Call it on all ranks of the mesh.

    Each rank reads the slices that it keeps, through transformers' renamings and conversions for the model's type. A
    model on the meta device first gets memory and buffers. Nothing of the model changes before all ranks know that every
    file is complete and every name and shape fits.

    Args:
        model: what `apply_plan` returned, on the meta device or with memory.
        folder: a folder that `save_pretrained` or `save_checkpoint` wrote, or one that was downloaded.
        device: where a meta-device model's memory is; the mesh's device type, or "cpu" where FSDP2 offloads to the CPU.
        dtype: the dtype for floating-point parameters and persistent buffers (those that a transformers model keeps in
            float32 stay so); values are cast to it. None leaves the model's dtypes.
        strict: names only in the model or only in the checkpoint are errors. Otherwise missing parameters keep their
            values, or, on the meta device, are drawn by the model's own initialisation (all ranks then need the same
            random state); unexpected names are left out.
        progress: whether the first rank shows a bar on a terminal, or a function that every rank calls.

    Returns:
        What was missing and unexpected, and how much was read.

    Raises:
        ValueError: no plan was applied; the model has adapters, or is partly on the meta device; a file is damaged; the index
            names a file outside the folder; names, shapes or dtypes do not fit (integers for floating-point numbers, or the
            reverse; all are listed); tied parameters have different values; the checkpoint is quantized; on the meta device, neither
            the checkpoint nor an initialisation has a value of something.
        FileNotFoundError: the folder or a file of it is missing.
        RuntimeError: another rank failed, or sees other files. Every rank raises.
    """
    record = applied(model)
    reader = Reader()
    with all_or_none(record.mesh.mesh, f"looking for {folder}", "load_checkpoint"):
        if is_first(record.mesh.mesh):
            repair(Path(folder).resolve())
    try:
        with all_or_none(record.mesh.mesh, f"preparing to load {folder}") as agree:
            _check_call(dtype, device, progress)
            parts = [part_of(part, model) for part in parts_of(model)]
            on_meta = _on_meta([part.inner for part in parts])
            work = [_prepare(part, Path(folder), reader, strict) for part in parts]
            alike = (
                []
                if isinstance(model, Pipeline)
                else [(t.entry.name, t.source.shape) for one in work for t in one.tasks]
            )
            missing = tuple(name for one in work for name in one.missing)
            agree((str(dtype), strict, work[0].stored, missing if alike else (), alike))
            place = torch.device(device or _place(record))
            if on_meta and missing and alike:
                agree(_random_state(place))
        with all_or_none(record.mesh.mesh, f"loading {folder}"), torch.no_grad():
            report, done = reporter(progress, is_first(record.mesh.mesh)), 0
            for part, own in zip(parts, work, strict=True):
                if dtype is not None:
                    _cast(part.inner, dtype)
                if on_meta:
                    part.outer.to_empty(device=place)
                    left = initialize(part.inner, part.packed, place, drawn=frozenset(own.missing))
                    refuse_blank(part.inner, left, {t.entry.name for t in own.tasks})
                done += _fill(own, part.inner, report)
        for part in parts:
            if isinstance(part.inner, PreTrainedModel):
                # save_pretrained and save_checkpoint revert them
                part.inner.__dict__["_weight_conversions"] = list(work[0].conversions)
    finally:
        reader.close()
    return Loaded(missing, work[0].unexpected, done, work[0].stored)


def _check_call(dtype: Any, device: Any, progress: Any) -> None:
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"dtype must be a floating-point torch.dtype or None, not {dtype!r}")
    if device is not None and torch.device(device).type == "meta":
        raise ValueError("device='meta' has no memory to load into: name the device that will run the model")
    if not callable(progress) and not isinstance(progress, bool):
        raise TypeError(f"progress must be True, False or a function, not {progress!r}")


def _on_meta(models: Sequence[nn.Module]) -> bool:
    places = {parameter.is_meta: name for model in models for name, parameter in model.named_parameters()}
    if len(places) == 2:
        raise ValueError(f"{places[True]} is on the meta device and {places[False]} is not: materialize all or none")
    return True in places


def _place(record: Applied | AppliedParts) -> str:
    section = record.program.resolved.data_parallel
    return "cpu" if section is not None and getattr(section, "cpu_offload", None) else record.mesh.mesh.device_type


def _random_state(place: torch.device) -> list[int]:
    """The state that random numbers on a device depend on."""
    source = torch if place.type == "cpu" else torch.get_device_module(place)
    return source.get_rng_state().tolist()


# Before the model is touched


def _prepare(part: StoredPart, folder: Path, reader: Reader, strict: bool) -> _Work:
    model = part.inner
    stored = stored_tensors(folder)
    lazies = {name: leaf(name, one.shape, one.dtype, partial(reader.read, one)) for name, one in stored.items()}
    tensors = part.entries
    own = {name: entry.tensor for entry in tensors for name in entry.names}
    found = resolve(model, lazies, {**part.elsewhere, **own})
    missing = [entry for entry in tensors if not any(name in found.tensors for name in entry.names)]
    missing = _not_ignored(missing, lambda entry: entry.name, getattr(model, "_keys_to_ignore_on_load_missing", None))
    unexpected = _unexpected(model, found)
    sources = {entry.name: _source(entry, found) for entry in tensors}
    wrong = [
        f"{entry.name} is {tuple(source.shape)} in the checkpoint and {tuple(entry.tensor.shape)} in the model"
        for entry in tensors
        if (source := sources[entry.name]) is not None and source.shape != entry.tensor.shape
    ]
    wrong += [
        f"{entry.name} is {_short(source.dtype)} in the checkpoint and {_short(entry.tensor.dtype)} in the model"
        for entry in tensors
        if (source := sources[entry.name]) is not None and _is_inexact(source.dtype) != _is_inexact(entry.tensor.dtype)
    ]
    if wrong or (strict and (missing or unexpected)):
        known = [name for entry in tensors for name in entry.names]
        raise ValueError(_misfit(folder, [entry.name for entry in missing], unexpected, wrong, known))
    tasks = [
        _Task(entry, source, ranges_of(entry, part.packed))
        for entry in tensors
        if (source := sources[entry.name]) is not None
    ]
    for task in tasks:
        _check_ties(task, found)
    tasks.sort(key=lambda task: min(str(stored[key].file) for key in leaves(task.source)))  # file by file
    return _Work(
        tuple(tasks),
        tuple(name for entry in tensors if sources[entry.name] is None for name in entry.names),
        tuple(unexpected),
        found.conversions,
        sum(one.dtype.itemsize * torch.Size(one.shape).numel() for one in stored.values()),
    )


def _is_inexact(dtype: torch.dtype) -> bool:
    """Whether a dtype is floating-point or complex: a cast between these and other dtypes changes the meaning."""
    return dtype.is_floating_point or dtype.is_complex


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _source(entry: StateEntry, found: Resolved) -> Lazy | None:
    return next((found.tensors[name] for name in entry.names if name in found.tensors), None)


def _not_ignored(items: Sequence[Any], name: Callable[[Any], str], patterns: Collection[str] | None) -> list[Any]:
    return [item for item in items if not any(re.search(pattern, name(item)) for pattern in patterns or ())]


def _unexpected(model: nn.Module, found: Resolved) -> list[str]:
    """The checkpoint's tensors that the model does not use. Excepted are tensors that the model's class ignores, and buffers of
    older checkpoints that the model now computes itself (inv_freq, position_ids)."""
    persistent = {name for entry in state_entries(model) for name in entry.names}
    computed = {name.rpartition(".")[2] for name, _ in model.named_buffers() if name not in persistent}
    names = _not_ignored(
        found.unexpected, lambda name: name, getattr(model, "_keys_to_ignore_on_load_unexpected", None)
    )
    return [name for name in names if name.rpartition(".")[2] not in computed]


def _check_ties(task: _Task, found: Resolved) -> None:
    """Check that a tied tensor that is stored several times has the same values each time."""
    present = [name for name in task.entry.names if name in found.tensors]
    for name in present[1:]:
        one, other = (_slices(found.tensors[key], task) for key in (present[0], name))
        if any(not torch.equal(left, right) for left, right in zip(one, other, strict=True)):
            raise ValueError(
                f"the model ties {present[0]} and {name}, but the checkpoint has different values for them: build the "
                "model with tie_word_embeddings=False"
            )


def _slices(source: Lazy, task: _Task) -> Iterator[Tensor]:
    for _, box in boxes_of(task.ranges):
        values = torch.empty([stop - start for start, stop in box], dtype=source.dtype)
        read(source, values, box)
        yield values


def _misfit(folder: Path, missing: list[str], unexpected: list[str], wrong: list[str], known: Sequence[str]) -> str:
    lines = [f"the checkpoint in {folder} does not fit the model:"]
    for title, names, others in (
        ("the checkpoint lacks", missing, unexpected),
        ("the model lacks", unexpected, missing or known),
    ):
        for i, name in enumerate(names):
            near = _nearest(name, others) if i < SHOWN else None
            lines.append(f"  {title} {shown_name(name)}" + (f" (is it {near}?)" if near else ""))
    lines += [f"  {one}" for one in wrong]
    if (missing or unexpected) and not wrong:
        lines.append("strict=False ignores unexpected names, and initialises missing ones")
    return "\n".join(lines)


def _nearest(name: str, others: Sequence[str]) -> str | None:
    alike = [other for other in others if other.rpartition(".")[2] == name.rpartition(".")[2]] or others[:500]
    return next(iter(get_close_matches(name, alike[:500], n=1)), None)


# Touching the model


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Give floating-point parameters and persistent buffers a dtype, as `from_pretrained(dtype=...)` does."""
    plan = model._get_dtype_plan(dtype) if isinstance(model, PreTrainedModel) else {}
    wanted = {}
    for entry in state_entries(model):
        if entry.tensor.is_floating_point():
            kept = [other for pattern, other in plan.items() if any(_names(pattern, name) for name in entry.names)]
            wanted[id(entry.tensor)] = kept[0] if kept else dtype
    model._apply(lambda tensor: tensor.to(wanted.get(id(tensor), tensor.dtype)))


def _names(pattern: str, name: str) -> bool:
    return re.search(pattern.replace("*", ".*"), name) is not None


def _fill(work: _Work, model: nn.Module, report: Callable[[Progress], None]) -> int:
    """Read everything. Returns the bytes that were written into the model."""
    now = {name: entry.tensor for entry in state_entries(model) for name in entry.names}  # to_empty made new tensors
    sizes = [task.elements * now[task.entry.name].dtype.itemsize for task in work.tasks]
    done, total = 0, sum(sizes)
    for task, size in zip(work.tasks, sizes, strict=True):
        target = now[task.entry.name]
        local = target.to_local() if isinstance(target, DTensor) else target
        fill(local.detach(), task.source, task.ranges)
        done += size
        report(Progress(task.entry.name, done, total))
    return done


def fill(local: Tensor, source: Lazy, ranges: tuple[Ranges, ...]) -> None:
    """Read the given ranges of a tensor into a rank's part of it."""
    assert tuple(local.shape) == tuple(sum(b - a for a, b in one) for one in ranges), (local.shape, ranges)
    for place, box in boxes_of(ranges):
        read(source, local[tuple(slice(*one) for one in place)], box)
