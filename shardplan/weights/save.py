"""From a planned model to a checkpoint in the Hugging Face layout; one parameter is gathered at a time."""

from __future__ import annotations

import copy
import json
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from shardplan.runtime.apply.applied import applied
from shardplan.runtime.apply.model_parts import parts_of
from shardplan.runtime.apply.state import packed_parameters
from shardplan.runtime.pipeline import Pipeline

from .all_ranks import all_or_none, is_first
from .checkpoint_names import inner_model, kept_name, original_classes, saved_names, state_entries
from .folders import begin, commit, saving
from .lazy import Box, Lazy, leaf, leaves, read
from .model_tensors import ModelTensor, Stored, tensors_of
from .progress import OnProgress, Progress, reporter
from .safetensors_folder import CONFIG, DTYPES, INDEX, ONE_FILE

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class _Output:
    """A tensor of the checkpoint."""

    name: str
    tensor: Lazy
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return self.tensor.numel() * self.dtype.itemsize


@dataclass(frozen=True)
class _File:
    name: str
    outputs: tuple[_Output, ...]


def save_checkpoint(
    model: nn.Module | Pipeline,
    folder: str | PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
    progress: bool | OnProgress = True,
) -> None:
    """Write a planned model as `save_pretrained` writes the unsharded one. Call it on all ranks of the mesh.

    Parameters are gathered one at a time, and the mesh's first rank writes them: no rank holds the model, and only that
    rank needs the disk. Names and layouts are those of the loaded checkpoint, else those of the model's type (experts
    apart, tied weights once). Files go to a hidden folder next to `folder`, which is renamed at the end: until then an
    old checkpoint is complete, and there must be room for both. If two jobs save one folder, the one that began last
    succeeds; the other raises.

    Args:
        model: what `apply_plan` returned, with memory.
        folder: the checkpoint; its parent folders are made.
        max_shard_size: bytes of one file, or with a unit ("5GB", "500MB"; "GiB" for powers of two); a larger tensor gets a
            file of its own.
        dtype: floating-point tensors are cast to it; None: not cast.
        overwrite: replace an existing checkpoint. Its files that are not written anew, such as a tokenizer's, are
            kept.
        progress: whether the first rank shows a bar on a terminal, or a function that every rank calls.

    Raises:
        ValueError: no plan was applied, the model is on the meta device or has adapters, the size cannot be read, or the
            folder has files, and `overwrite` is not given or it is not a checkpoint.
        OSError: on the first rank: there is no room, or the disk fails.
        RuntimeError: another rank failed, or another job saves the folder. Every rank raises.
    """
    record = applied(model)
    folder = Path(folder).absolute()
    first = is_first(record.mesh.mesh)
    new: Path | None = None
    with ExitStack() as stack:
        with all_or_none(record.mesh.mesh, f"preparing to save {folder}", "save_checkpoint") as agree:
            limit = size_of(max_shard_size)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise TypeError(f"dtype must be a floating-point torch.dtype or None, not {dtype!r}")
            inner = inner_model(parts_of(model)[0])
            source = _Gathered(inner, tensors_of(model, _stored))
            files = _files(_outputs(inner, source, dtype), limit)
            if first:
                folder = folder.resolve()
                new = begin(folder, overwrite=overwrite, marks=(CONFIG, ONE_FILE, INDEX))
                stack.enter_context(saving(new, folder))
                _check_room(new, files)
            agree([(file.name, [(one.name, one.tensor.shape, one.dtype) for one in file.outputs]) for file in files])
        _write_files(files, source, new, record.mesh.mesh, reporter(progress, first))
        with all_or_none(record.mesh.mesh, f"finishing {folder}"):
            if new is not None:
                _write_rest(inner, files, new, dtype)
                commit(new, folder, lambda name: not _replaced(name))


def size_of(text: int | str) -> int:
    """Bytes, from a number or a text with a unit.

    Raises:
        ValueError: it is neither, or not positive.
    """
    if isinstance(text, int) and not isinstance(text, bool) and text > 0:
        return text
    if isinstance(text, str):
        number, unit = text.strip().upper(), "B"
        for name in sorted(_UNITS, key=len, reverse=True):
            if number.endswith(name):
                number, unit = number.removesuffix(name).strip(), name
                break
        if number.replace(".", "", 1).isdigit() and float(number) > 0:
            return max(1, int(float(number) * _UNITS[unit]))
    raise ValueError(f"max_shard_size must be a number of bytes or a text such as '5GB', not {text!r}")


# The tensors to write


class _Gathered:
    """The tensors of a model, gathered on demand."""

    def __init__(self, model: nn.Module, tensors: Sequence[ModelTensor]):
        self.values: dict[str, Tensor] = {}
        self.tensors: dict[str, ModelTensor] = {}
        for one in tensors:
            if not any(ignored in one.names for ignored in getattr(model, "_keys_to_ignore_on_save", None) or ()):
                self.tensors[kept_name(one.names, model)] = one

    def lazies(self) -> dict[str, Lazy]:
        return {name: leaf(name, one.shape, one.dtype, self._reader(name)) for name, one in self.tensors.items()}

    def _reader(self, name: str) -> Callable[[Box], Tensor]:
        return lambda box: self.values[name][tuple(slice(*one) for one in box)]

    def gather(self, name: str, keep: bool) -> None:
        """Gather a tensor (a collective), and keep it on the rank that writes."""
        value = self.tensors[name].whole(everywhere=False)
        if keep:
            assert value is not None, name
            self.values[name] = value


def _stored(part: nn.Module) -> list[Stored]:
    record, inner = applied(part), inner_model(part)
    on_meta = next((name for name, parameter in inner.named_parameters() if parameter.is_meta), None)
    if on_meta is not None:
        raise ValueError(f"{on_meta} is on the meta device: there is nothing to save")
    packed = packed_parameters(record.program) if record.tp > 1 else {}
    return [
        Stored(entry.names, entry.tensor, next((packed[n] for n in entry.names if n in packed), None), record.tp)
        for entry in state_entries(inner)
    ]


def _outputs(model: nn.Module, source: _Gathered, dtype: torch.dtype | None) -> list[_Output]:
    outputs = []
    for name, tensor in saved_names(model, source.lazies()).items():
        cast = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        outputs.append(_Output(name, tensor, cast))
    unknown = [one for one in outputs if one.dtype not in _NAMES]
    if unknown:
        raise ValueError(f"safetensors has no {unknown[0].dtype}, the dtype of {unknown[0].name}")
    return outputs


def _files(outputs: Sequence[_Output], limit: int) -> list[_File]:
    """The outputs in files, in their order. Within a file the largest dtypes come first, so that all are aligned."""
    groups: list[list[_Output]] = [[]]
    filled = 0
    for one in outputs:
        if groups[-1] and filled + one.bytes > limit:
            groups.append([])
            filled = 0
        groups[-1].append(one)
        filled += one.bytes
    count = len(groups)
    names = [ONE_FILE] if count == 1 else [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    return [
        _File(name, tuple(sorted(group, key=lambda one: -one.dtype.itemsize)))
        for name, group in zip(names, groups, strict=True)
    ]


def _check_room(folder: Path, files: Sequence[_File]) -> None:
    needed = sum(one.bytes for file in files for one in file.outputs)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise OSError(
            f"{folder.parent.parent} has {free:,} bytes free, but the checkpoint needs {needed:,}: nothing was written"
        )


# Writing


def _write_files(
    files: Sequence[_File],
    source: _Gathered,
    folder: Path | None,
    mesh: Any,
    report: Callable[[Progress], None],
) -> None:
    """Gather and write, file by file.

    Args:
        folder: on the rank that writes.
    """
    uses = Counter(key for file in files for one in file.outputs for key in leaves(one.tensor))
    done, total = 0, sum(one.bytes for file in files for one in file.outputs)
    gathered: set[str] = set()
    for file in files:
        with all_or_none(mesh, f"writing {file.name}"), torch.no_grad():
            writer = _Writer(folder / file.name, file.outputs) if folder is not None else None
            for one in file.outputs:
                for key in leaves(one.tensor):
                    if key not in gathered:
                        source.gather(key, keep=writer is not None)
                        gathered.add(key)
                if writer is not None:
                    writer.write(one)
                for key in leaves(one.tensor):
                    uses[key] -= 1
                    if not uses[key]:
                        source.values.pop(key, None)
                done += one.bytes
                report(Progress(one.name, done, total))
            if writer is not None:
                writer.close()


class _Writer:
    """A safetensors file, written tensor by tensor. After a disk error it accepts tensors and writes
    nothing, because the other ranks continue to gather; `close` raises the error."""

    def __init__(self, path: Path, outputs: Sequence[_Output]):
        self.failure: OSError | None = None
        self.file: BinaryIO | None = None
        offset = 0
        header: dict[str, dict[str, Any]] = {"__metadata__": {"format": "pt"}}
        for one in outputs:
            place = [offset, offset + one.bytes]
            header[one.name] = {"dtype": _NAMES[one.dtype], "shape": list(one.tensor.shape), "data_offsets": place}
            offset += one.bytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._try(lambda: self._open(path, len(text).to_bytes(8, "little") + text))

    def _open(self, path: Path, header: bytes) -> None:
        self.file = path.open("wb")
        self.file.write(header)

    def write(self, one: _Output) -> None:
        values = torch.empty(one.tensor.shape, dtype=one.dtype)
        read(one.tensor, values)
        self._try(lambda: self._write(values.reshape(-1).view(torch.uint8).numpy().data))

    def _write(self, data: memoryview) -> None:
        assert self.file is not None  # nothing is tried after a file that could not be opened
        self.file.write(data)

    def close(self) -> None:
        if self.file is not None:
            self._try(self.file.close)
        if self.failure is not None:
            raise self.failure

    def _try(self, act: Callable[[], object]) -> None:
        try:
            if self.failure is None:
                act()
        except OSError as error:
            self.failure = error


def _write_rest(model: nn.Module, files: Sequence[_File], folder: Path, dtype: torch.dtype | None) -> None:
    """Write the index, where there are several files, and a transformers model's configuration."""
    if len(files) > 1:
        index = {
            "metadata": {"total_size": sum(one.bytes for file in files for one in file.outputs)},
            "weight_map": {one.name: file.name for file in files for one in file.outputs},
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    if isinstance(model, PreTrainedModel):
        config = copy.deepcopy(model.config)
        config.dtype = str(dtype or model.dtype).removeprefix("torch.")
        with original_classes(model):
            config.architectures = [type(model).__name__]
        config.save_pretrained(folder)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)


def _replaced(name: str) -> bool:
    """Whether a file of an old checkpoint holds weights, and so is not kept."""
    return name.endswith((".safetensors", INDEX)) or (name.startswith("pytorch_model") and ".bin" in name)
