"""The files of a training state, read as data: torch's own reader runs code that is pickled in them."""

from __future__ import annotations

import pickle
from collections.abc import Collection
from io import BytesIO
from pathlib import Path
from types import NoneType
from typing import Any

import torch
from torch.distributed.checkpoint import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    DefaultLoadPlanner,
    FileSystemReader,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta, TensorProperties
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from shardplan.torchlib.private import NAMES, private

from .pickles import Part, check_archive, check_pickle

METADATA = ".metadata"
_PUBLIC = (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
    torch.Size,
)
_PRIVATE = ("stored_place", "stored_form", "layout_of")
_PATHS = {"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"}  # the writer's paths; they are not used


def read_file(path: Path) -> dict[str, Any]:
    """Read what `torch.save` wrote: a dict of numbers, texts, tensors, and lists and dicts of them.

    Raises:
        ValueError: it holds anything else, or is no such file.
    """
    try:
        with path.open("rb") as stream:
            check_archive(stream)
            found = torch.load(stream, map_location="cpu", weights_only=True)
    except Exception as error:  # a pickle can raise any exception
        raise foreign(path, _first_line(error)) from error
    if not isinstance(found, dict):
        raise foreign(path, f"it holds a {type(found).__name__}")
    return found


def foreign(path: Path, why: str) -> ValueError:
    """The error for a file that is not part of a training state."""
    return ValueError(f"{path} is not what save_training_state writes: {why}")


def checked_metadata(folder: Path, files: Collection[str]) -> Metadata:
    """What torch reads first: which file has which tensor.

    Args:
        files: the names that are allowed.

    Raises:
        ValueError: it holds anything but the places of tensors, or names a file that is not allowed.
    """
    metadata = _metadata(folder)
    _check_places(folder, metadata, files)
    return metadata


class StateReader(FileSystemReader):
    """torch's reader of a folder, without its `pickle.load`.

    Args:
        metadata: of the folder.
    """

    def __init__(self, folder: Path, metadata: Metadata):
        super().__init__(folder)
        self.metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        self.metadata.storage_meta = self.metadata.storage_meta or StorageMeta()
        self.metadata.storage_meta.load_id = self.load_id
        return self.metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            place = self.metadata.storage_data[item.storage_index]
            with (Path(self.path) / place.relative_path).open("rb") as stream:
                try:
                    check_archive(Part(stream, place.offset, place.length))
                except Exception as error:  # a pickle can raise any exception
                    raise foreign(
                        Path(self.path) / place.relative_path, f"{item.dest_index.fqn}: {_first_line(error)}"
                    ) from error
        return super().read_data(plan, planner)


class StatePlanner(DefaultLoadPlanner):
    """torch's planner, which loads values other than tensors as `weights_only`."""

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        name = read_item.dest_index.fqn
        try:
            found = torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            raise ValueError(
                f"{name} is no number, text or tensor, and nothing else is read ({_first_line(error)}); "
                "torch.serialization.add_safe_globals allows a class"
            ) from error
        if not self.flatten_state_dict:
            self.state_dict[name] = found
            return
        *above, last = self.mappings[name]  # a place in what is loaded, which has it already
        holder: Any = self.original_state_dict
        for key in above:
            holder = holder[key]
        holder[last] = found


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        allowed = {(one.__module__, one.__name__): one for one in _PUBLIC}
        allowed |= {place: private(key) for key in _PRIVATE for place in NAMES[key].places}
        if (module, name) in allowed:
            return allowed[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module.partition(".")[0] == "pathlib" and name in _PATHS:
            return _as_text
        raise pickle.UnpicklingError(f"it names {module}.{name}, and nothing of it is run")


def _as_text(*parts: object) -> str:
    return "/".join(map(str, parts))


def _metadata(folder: Path) -> Metadata:
    path = folder / METADATA
    try:
        content = path.read_bytes()
        check_pickle(content)
        found = _Unpickler(BytesIO(content)).load()
    except Exception as error:  # a pickle can raise any exception
        raise foreign(path, _first_line(error)) from error
    if not isinstance(found, Metadata):
        raise foreign(path, f"it holds a {type(found).__name__}")
    return found


def _check_places(folder: Path, metadata: Metadata, files: Collection[str]) -> None:
    """Compare all that torch looks at, and may print, with what it writes."""
    path, places, tensors = folder / METADATA, metadata.storage_data, metadata.state_dict_metadata
    planned = {} if metadata.planner_data is None else metadata.planner_data
    if not all(isinstance(one, dict) for one in (places, tensors, planned)) or not all(map(_is_form, tensors.values())):
        raise ValueError(f"{path} is damaged: it has no places of tensors")
    if not all(_has(key, MetadataIndex, fqn=str) for key in places) or {*map(type, (*tensors, *planned))} - {str}:
        raise ValueError(f"{path} is damaged: it has a key that is no name")
    if type(metadata.storage_meta) not in (NoneType, StorageMeta):
        raise ValueError(f"{path} is damaged: it has another storage_meta")
    for place in places.values():
        if not _has(
            place, private("stored_place"), relative_path=str, offset=int, length=int, transform_descriptors=NoneType
        ):
            raise ValueError(f"{path} is damaged: it has a place that is none")
        if place.relative_path not in files:
            raise ValueError(
                f"{path} names {place.relative_path!r}, which was not saved in this folder: nothing is read there"
            )


def _is_form(one: object) -> bool:
    """Whether something is what torch writes of a tensor, or of another value."""
    if isinstance(one, TensorStorageMetadata) and _has(one, TensorStorageMetadata, size=torch.Size, chunks=list):
        return all(_has(chunk, ChunkStorageMetadata, offsets=torch.Size, sizes=torch.Size) for chunk in one.chunks)
    return isinstance(one, BytesStorageMetadata)


def _has(one: object, kind: type, **types: type) -> bool:
    return type(one) is kind and all(type(getattr(one, name, types)) is wanted for name, wanted in types.items())


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
