"""Weights, optimizer state and other state to resume training, in torch's distributed checkpoint format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer

from shardplan.runtime.apply.applied import applied
from shardplan.runtime.apply.model_parts import parts_of
from shardplan.runtime.pipeline import Pipeline
from shardplan.runtime.pipeline.merged_parts import merged

from .all_ranks import all_or_none, is_first
from .checkpoint_names import without_wrapper
from .checksums import CHECKSUMS, check_checksums, write_checksums
from .folders import abandon, begin, beside, commit, repair
from .stage_moments import loaded, to_load, to_save

METADATA, EXTRA, RANDOM = ".metadata", "extra.pt", "random.pt"


def save_training_state(
    model: nn.Module | Pipeline,
    optimizer: Optimizer,
    folder: str | PathLike[str],
    *,
    extra: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> None:
    """Write a planned model, its optimizer and the place of its random numbers, so that training can resume on any mesh. Call it
    on all ranks.

    Every rank writes its own part, into one folder that all ranks see. The files go to a temporary folder, which is renamed
    at the end: until then an old one of that name stays complete.

    Args:
        extra: numbers, texts, tensors, and lists and dicts of them, such as the step or a scheduler's `state_dict()`; the
            first rank's are saved.
        overwrite: replace what `save_training_state` wrote there before.

    Raises:
        ValueError: no plan was applied, the optimizer holds tensors that are not the model's parameters, or the folder
            has files and `overwrite` is not given, or is no checkpoint.
        RuntimeError: a rank failed, such as on a full disk; it is named with its error. Every rank raises.
    """
    folder = Path(folder).resolve()
    first, new = is_first(None), beside(folder, "new")
    try:
        with all_or_none(None, f"preparing to save {folder}"):
            applied(model).keep_checkpoints_portable(optimizer)
            if first:
                begin(folder, overwrite=overwrite, marks=(METADATA,))
        weights, moments = get_state_dict(_named(model), optimizer)
        if isinstance(model, Pipeline):
            moments = to_save(model, moments)
        with _named_rank(f"saving {folder}"):
            dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=new)
        with all_or_none(None, f"finishing {folder}"):
            if first:
                torch.save(dict(extra or {}), new / EXTRA)
                if (streams := applied(parts_of(model)[0]).streams) is not None:
                    torch.save({"seed": streams.seed, "calls": streams.calls}, new / RANDOM)
        write_checksums(new)
        with all_or_none(None, f"finishing {folder}"):
            if first:
                commit(new, folder, lambda name: False)
    except BaseException:
        if first:
            abandon(new)
        raise


def load_training_state(
    model: nn.Module | Pipeline, optimizer: Optimizer, folder: str | PathLike[str]
) -> dict[str, Any]:
    """Read what `save_training_state` wrote, on any mesh, into a planned model with memory and its optimizer. To be called
    on all ranks.

    Every file is compared with the checksum that was saved with it, each by one rank, before anything is changed. If reading
    fails after that, model and optimizer hold parts of the checkpoint and are not to be used.

    Returns:
        What was saved as `extra`.

    Raises:
        ValueError: no plan was applied, the optimizer holds tensors that are not the model's parameters, or a file is
            not as it was written.
        FileNotFoundError: the folder or a file of it is missing.
        RuntimeError: names or shapes do not fit, or another rank failed. Every rank raises.
    """
    folder = Path(folder).resolve()
    with all_or_none(None, f"looking for {folder}"):
        if is_first(None):
            repair(folder)
    with all_or_none(None, f"checking {folder}"):
        applied(model).keep_checkpoints_portable(optimizer)
        _check_files(folder)
    with all_or_none(None, f"preparing to load {folder}"):
        extra = torch.load(folder / EXTRA, weights_only=True)
        random = torch.load(folder / RANDOM, weights_only=True) if (folder / RANDOM).is_file() else None
    named = _named(model)
    weights, moments = get_state_dict(named, optimizer)
    wanted = to_load(model, moments) if isinstance(model, Pipeline) else moments
    with _named_rank(f"loading {folder}"):
        dcp.load({"model": weights, "optimizer": wanted}, checkpoint_id=folder)
    with all_or_none(None, f"loading {folder}"):
        read = loaded(model, moments, wanted) if isinstance(model, Pipeline) else wanted
        set_state_dict(named, optimizer, model_state_dict=weights, optim_state_dict=read)
        for part in parts_of(model):
            if random is not None and (streams := applied(part).streams) is not None:
                streams.seed, streams.calls = random["seed"], random["calls"]
    return extra


def _named(model: nn.Module | Pipeline) -> nn.Module:
    """A module with the names of the whole model, as far as this rank has them."""
    return merged([without_wrapper(part) for part in model.parts]) if isinstance(model, Pipeline) else model


@contextmanager
def _named_rank(doing: str) -> Iterator[None]:
    """torch collects the errors of all ranks, and raises them on each as something that `except Exception` misses."""
    try:
        yield
    except CheckpointException as error:
        rank, (failure, _) = next(iter(error.failures.items()))
        raise RuntimeError(f"{doing} failed on rank {rank}: {type(failure).__name__}: {failure}") from error


def _check_files(folder: Path) -> None:
    for name in (METADATA, EXTRA, CHECKSUMS):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder} has no {name}: save_training_state did not write it, or did not finish")
    check_checksums(folder)
