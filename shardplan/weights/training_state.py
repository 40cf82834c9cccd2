"""Weights, optimizer state and other state to resume training, in torch's distributed checkpoint format."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from shardplan.runtime.apply.applied import applied
from shardplan.runtime.apply.model_parts import parts_of
from shardplan.runtime.pipeline import Pipeline
from shardplan.runtime.pipeline.merged_parts import merged
from shardplan.torchlib.gathering import of_all

from .all_ranks import all_or_none, is_first, of_first
from .checkpoint_names import without_wrapper
from .checksums import CHECKSUMS, SummedFiles, check_checksums, identity, write_checksums
from .folders import begin, commit, repair, saving
from .state_files import METADATA, StatePlanner, StateReader, checked_metadata, foreign, read_file

EXTRA, RANDOM, SCHEDULES = "extra.pt", "random.pt", "schedules.pt"
_seen: dict[Path, str | None] = {}  # on the first rank: what it last saved or loaded at a path


def save_training_state(
    model: nn.Module | Pipeline,
    optimizer: Optimizer | Sequence[Optimizer],
    folder: str | PathLike[str],
    *,
    schedulers: LRScheduler | Sequence[LRScheduler] = (),
    extra: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> None:
    """Write a planned model, its optimizer, its schedules and the positions of its random generators, so that training can resume
    on any mesh. Call it on all ranks.

    Every rank writes its own part, into one folder that all ranks see. The files go to a hidden folder of this save alone, which is
    renamed at the end: until then an old state stays complete. If two jobs save one folder, the one that began last succeeds; the
    other raises.

    Args:
        optimizer: one, or several that together have the model's parameters, in any order.
        schedulers: schedules of these optimizers; the first rank's are saved.
        extra: numbers, texts, tensors, and lists and dicts of them, such as the step; the first rank's are saved.
        overwrite: replace what `save_training_state` wrote there before.

    Raises:
        ValueError: no plan was applied; the optimizer holds tensors that are not the model's parameters; a schedule is of another
            optimizer; or the folder has files, and `overwrite` is not given or it is not a checkpoint.
        TypeError: `optimizer` or `schedulers` is something else.
        RuntimeError: a rank failed, for example on a full disk (the message names it and its error); or another job saves this
            folder, or has saved it since this job last saved or loaded it. Every rank raises.
    """
    folder, first = Path(folder).resolve(), is_first(None)
    new: Path | None = None
    with ExitStack() as stack:
        with all_or_none(None, f"preparing to save {folder}", "save_training_state"):
            optimizers = _several(optimizer)
            schedules = [(type(one).__name__, one.state_dict()) for one in _schedulers(schedulers, optimizers)]
            for one in optimizers:
                applied(model).keep_checkpoints_portable(one)
            if first:
                _refuse_another(folder)
                new = begin(folder, overwrite=overwrite, marks=(METADATA,))
                stack.enter_context(saving(new, folder))
                _refuse_another(folder)  # a job that saves it from here on ends this save
        new = of_first(new)
        weights, moments = get_state_dict(_named(model), optimizers)
        if isinstance(model, Pipeline):
            moments = to_save(model, moments)
        writer, files = FileSystemWriter(new), SummedFiles()
        writer.fs = files
        with _named_rank(f"saving {folder}"):
            dcp.save({"model": weights, "optimizer": moments}, storage_writer=writer)
        with all_or_none(None, f"finishing {folder}"):
            if first:
                _write(files, new / EXTRA, dict(extra or {}))
                if schedules:
                    _write(files, new / SCHEDULES, {"schedules": schedules})
                if (streams := applied(parts_of(model)[0]).streams) is not None:
                    _write(files, new / RANDOM, {"seed": streams.seed, "calls": streams.calls})
        write_checksums(new, files.written)
        with all_or_none(None, f"finishing {folder}"):
            if first:
                saved = identity(new)
                commit(new, folder, lambda name: False)
                _seen[folder] = saved


def _write(files: SummedFiles, path: Path, content: dict[str, Any]) -> None:
    with files.create_stream(path, "wb") as stream:
        torch.save(content, stream)


def _refuse_another(folder: Path) -> None:
    """Refuse to overwrite a newer state with an older one, after this job was stopped and another job took its place."""
    if folder in _seen and (found := identity(folder)) is not None and found != _seen[folder]:
        raise RuntimeError(
            f"{folder} is not what this job last saved or loaded there: another job has saved it since, and its state is kept. End "
            "one of the jobs, or let them save to different folders; load_training_state takes over what is there"
        )


def load_training_state(
    model: nn.Module | Pipeline,
    optimizer: Optimizer | Sequence[Optimizer],
    folder: str | PathLike[str],
    *,
    schedulers: LRScheduler | Sequence[LRScheduler] = (),
) -> dict[str, Any]:
    """Read what `save_training_state` wrote on any mesh into a planned model with memory, its optimizer and its schedules. Call it
    on all ranks.

    Before anything changes, every file is compared with its saved checksum, each by one rank. If reading fails after that, model
    and optimizer are partly loaded and must not be used. The files are read as data: no pickled code runs.

    Args:
        optimizer, schedulers: one or several, as they were saved.

    Returns:
        What was saved as `extra`.

    Raises:
        ValueError: no plan was applied; the optimizer holds tensors that are not the model's parameters; other schedules were
            saved; or a file has changed since it was written, or holds something that `save_training_state` does not write.
        FileNotFoundError: the folder or a file of it is missing.
        TypeError: `optimizer` or `schedulers` is something else.
        RuntimeError: names or shapes do not fit, another rank failed, or another job saved the folder meanwhile. Every rank
            raises.
    """
    folder = Path(folder).resolve()
    found: str | None = None
    files: Collection[str] = ()
    with all_or_none(None, f"looking for {folder}", "load_training_state"):
        if is_first(None):
            repair(folder)
            found = identity(folder)
    with all_or_none(None, f"checking {folder}"):
        optimizers = _several(optimizer)
        schedules = _schedulers(schedulers, optimizers)
        for one in optimizers:
            applied(model).keep_checkpoints_portable(one)
        files = _check_files(folder)
    with all_or_none(None, f"preparing to load {folder}"):
        metadata = checked_metadata(folder, files)
        extra = read_file(folder / EXTRA)
        random = _read_random(folder / RANDOM)
        read_schedules = _read_schedules(folder, schedules)
    named = _named(model)
    weights, moments = get_state_dict(named, optimizers)
    wanted = to_load(model, moments) if isinstance(model, Pipeline) else moments
    with _named_rank(f"loading {folder}"):
        dcp.load(
            {"model": weights, "optimizer": wanted},
            storage_reader=StateReader(folder, metadata),
            planner=StatePlanner(),
        )
    with all_or_none(None, f"reading {folder}"):
        if is_first(None) and identity(folder) != found:
            raise RuntimeError(f"another job saved {folder} while it was being read: load it again")
    with all_or_none(None, f"loading {folder}"):
        read = loaded(model, moments, wanted) if isinstance(model, Pipeline) else wanted
        set_state_dict(named, optimizers, model_state_dict=weights, optim_state_dict=read)
        for schedule, (_, state) in zip(schedules, read_schedules, strict=True):
            schedule.load_state_dict(state)
        for part in parts_of(model):
            if random is not None and (streams := applied(part).streams) is not None:
                streams.seed, streams.calls = random["seed"], random["calls"]
    if is_first(None):
        _seen[folder] = found
    return extra


def _several(optimizer: Any) -> list[Optimizer]:
    optimizers = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
    others = [one for one in optimizers if not isinstance(one, Optimizer)]
    if others or not optimizers:
        given = f"a {type(others[0]).__name__}" if others else "an empty list"
        inner = others and isinstance(getattr(others[0], "optimizer", None), Optimizer)
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer or a list of them, not {given}"
            f"{': pass its .optimizer' if inner else ''}"
        )
    return optimizers


def _schedulers(given: Any, optimizers: Sequence[Optimizer]) -> list[LRScheduler]:
    schedules = list(given) if isinstance(given, Sequence) else [given]
    for one in schedules:
        if not isinstance(one, LRScheduler):
            raise TypeError(f"schedulers must be torch's LRScheduler or a list of them, not a {type(one).__name__}")
        if all(one.optimizer is not optimizer for optimizer in optimizers):
            raise ValueError(
                f"a {type(one).__name__} schedules an optimizer that was not passed: pass that optimizer too"
            )
    return schedules


def _read_random(path: Path) -> dict[str, int] | None:
    """The positions of the random generators, if they were saved."""
    if not path.is_file():
        return None
    found = read_file(path)
    if {"seed", "calls"} - found.keys() or not all(type(found[name]) is int for name in ("seed", "calls")):
        raise foreign(path, "it has no place of random numbers")
    return found


def _read_schedules(folder: Path, schedules: Sequence[LRScheduler]) -> list[tuple[str, dict[str, Any]]]:
    """The states of the schedules in a folder. Raises ValueError where others were saved."""
    path = folder / SCHEDULES
    saved = read_file(path).get("schedules") if path.is_file() else []
    if not isinstance(saved, list) or not all(
        isinstance(one, tuple) and [*map(type, one)] == [str, dict] for one in saved
    ):
        raise foreign(path, "it has no schedules")
    names, wanted = [name for name, _ in saved], [type(one).__name__ for one in schedules]
    if names != wanted:
        raise ValueError(
            f"{folder} has the schedules {', '.join(names) or 'none'}, and schedulers= are {', '.join(wanted) or 'none'}: pass those that "
            "were saved, in their order"
        )
    return saved


def _named(model: nn.Module | Pipeline) -> nn.Module:
    """One module with this rank's parts, under the names of the whole model."""
    return merged([without_wrapper(part) for part in model.parts]) if isinstance(model, Pipeline) else model


@contextmanager
def _named_rank(doing: str) -> Iterator[None]:
    """Raise a RuntimeError: torch collects the errors of all ranks, and raises a CheckpointException, which is no Exception."""
    try:
        yield
    except CheckpointException as error:
        rank, (failure, _) = next(iter(error.failures.items()))
        raise RuntimeError(f"{doing} failed on rank {rank}: {type(failure).__name__}: {failure}") from error


def _check_files(folder: Path) -> Collection[str]:
    """The names of all files of a state."""
    for name in (METADATA, EXTRA, CHECKSUMS):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder} has no {name}: save_training_state did not write it, or did not finish")
    return check_checksums(folder)


# The optimizer state of pipeline stages in the form of the whole model's checkpoint: a tied parameter once, under its name in
# `named_parameters()` of the whole model, and the parameter groups of all stages together.
State = dict[str, Any]


def aliases(pipeline: Pipeline) -> dict[str, str]:
    """Each further name of a tied parameter -> the name that its state has in a checkpoint."""
    place = {name: i for i, name in enumerate(pipeline.names)}
    found: dict[str, str] = {}
    for tie in pipeline.ties:
        first, *others = sorted(tie, key=lambda name: place.get(name, len(place)))
        found |= dict.fromkeys(others, first)
    return found


def to_save(pipeline: Pipeline, moments: State) -> State:
    """This rank's optimizer state for the checkpoint. A collective over pp."""
    other = aliases(pipeline)
    state = {name: value for name, value in moments["state"].items() if name not in other}
    return {**moments, "state": state, "param_groups": _all_groups(pipeline, moments["param_groups"], other)}


def _all_groups(pipeline: Pipeline, groups: list[State], other: dict[str, str]) -> list[State]:
    gathered = of_all(groups, pipeline.group)
    count = max(map(len, gathered))
    made = []
    for i in range(count):
        same = [part[i] for part in gathered if i < len(part)]
        names = dict.fromkeys(name for part in same for name in part["params"] if name not in other)
        made.append({**same[0], "params": list(names)})
    return made


def to_load(pipeline: Pipeline, moments: State) -> State:
    """The state to read for this rank, with the state of a tied copy under the name that the checkpoint has."""
    other = aliases(pipeline)
    state = {name: value for name, value in moments["state"].items() if name not in other}
    for name, value in moments["state"].items():
        if name in other:
            state.setdefault(other[name], value)
    return {**moments, "state": state}


def loaded(pipeline: Pipeline, moments: State, read: State) -> State:
    """The state that was read, under this rank's names.

    Args:
        moments: this rank's, before `to_load`.
        read: what `to_load` returned, filled.
    """
    other = aliases(pipeline)
    state = {
        name: _copied(value, read["state"][other[name]]) if name in other else read["state"][name]
        for name, value in moments["state"].items()
    }
    mine = {name for group in moments["param_groups"] for name in group["params"]}
    groups = [
        {**group, "params": [*group["params"], *(n for n in other if n in mine and other[n] in group["params"])]}
        for group in read["param_groups"]
    ]
    return {**read, "state": state, "param_groups": groups}


def _copied(own: State, read: State) -> State:
    """The values that were read, in this copy's own tensors."""
    for name, value in own.items():
        if isinstance(value, Tensor) and value is not read[name]:
            value.copy_(read[name])
    return {name: value if isinstance(value, Tensor) else read[name] for name, value in own.items()}
