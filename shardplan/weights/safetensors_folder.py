"""A folder of safetensors files as the Hugging Face libraries write it: its content, checked before anything is read,
and slices of its tensors."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shardplan.core.first_few import in_a_row
from shardplan.core.user_files import LONGEST_NAME, CannotRead, decode, read_bytes, shown_name
from shardplan.model.stored_tensors import MAX_DIGITS, MAX_FILES, MAX_HEADER

from .lazy import Box

ONE_FILE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
OPEN_FILES = 4  # the experts of one layer may be spread over several files


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint, not read yet.

    Args:
        written: distinguishes its file from one that replaces it.
    """

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    written: tuple[int, ...]


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint by name. Reads the header of every file, and compares its length with the file's.

    Raises:
        RuntimeError: a save replaced it meanwhile.
        FileNotFoundError: there is no such folder, no safetensors in it, or a file that its index names is missing.
        ValueError: a file is damaged, a name has an absurd index, or the index names a file outside the folder or a missing
            tensor.
    """
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{folder} is not a folder: download the model first (`hf download`), and name its folder"
        )
    inode = folder.stat().st_ino
    _refuse_quantized(folder)
    placed = _index(folder)
    files = sorted(set(placed.values())) if placed is not None else [ONE_FILE]
    missing = [name for name in files if not (folder / name).is_file()]
    if missing:
        other = next((name for name in missing if (folder / name).exists()), None)
        if other is not None:
            raise ValueError(f"{folder / shown_name(other)}, which {INDEX} names, is not a regular file")
        raise FileNotFoundError(
            f"{in_a_row(map(shown_name, missing), 5)} of {folder} is missing, but {INDEX} names it: download it again"
        )
    found: dict[str, StoredTensor] = {}
    for name in files:
        for tensor in _header(folder / name):
            if placed is None or placed.get(tensor.name, name) == name:
                found[tensor.name] = tensor
    if folder.stat().st_ino != inode:
        raise RuntimeError(_replaced(folder))
    lost = [name for name in placed or {} if name not in found]
    if lost:
        raise ValueError(
            f"{in_a_row(map(shown_name, lost), 5)} is not in the file that {folder / INDEX} names: the index belongs to another checkpoint"
        )
    return found


def _refuse_quantized(folder: Path) -> None:
    config = folder / CONFIG
    if config.is_file() and _json(config).get("quantization_config"):
        raise ValueError(f"{folder} contains quantized weights (see {CONFIG}): dequantize them first")


def _index(folder: Path) -> dict[str, str] | None:
    """The file of each tensor; None for a checkpoint in one file, which has priority over an index, as in transformers."""
    if (folder / ONE_FILE).is_file():
        return None
    if not (folder / INDEX).is_file():
        others = sorted(path.name for path in folder.glob("*.bin"))
        if (folder / INDEX).exists():
            raise ValueError(f"{folder / INDEX} is not a regular file")
        hint = (
            f"; {in_a_row(map(shown_name, others), 5)} is in an older format: save it as safetensors first"
            if others
            else ""
        )
        raise FileNotFoundError(f"{folder} has neither {ONE_FILE} nor {INDEX}{hint}")
    placed = _json(folder / INDEX).get("weight_map")
    if not isinstance(placed, dict) or not all(isinstance(name, str) for name in placed.values()):
        raise ValueError(f"{folder / INDEX} has no weight_map from names of tensors to names of files")
    if len(files := {*placed.values()}) > MAX_FILES:
        raise ValueError(f"{folder / INDEX} names {len(files):,} files, and at most {MAX_FILES:,} are read")
    for tensor, name in placed.items():
        if not name.strip("./") or not name.isprintable() or len(name) > LONGEST_NAME:
            raise ValueError(
                f"{folder / INDEX} places {shown_name(tensor)} in {shown_name(name)}, which is no name of a file"
            )
        if ".." in PurePosixPath(name).parts or PurePosixPath(name).is_absolute() or PureWindowsPath(name).anchor:
            raise ValueError(
                f"{folder / INDEX} places {shown_name(tensor)} in {name!r}, outside the folder: nothing is read there"
            )
    return placed


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(decode(read_bytes(path, MAX_HEADER)))
    except CannotRead as error:
        raise ValueError(f"{path} {error.reason}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}): it is damaged") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must contain a JSON object")
    return content


def _header(path: Path) -> list[StoredTensor]:
    written = _written(path)
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  it is not a mapping
            kinds = {name: (tuple(one.get_shape()), one.get_dtype()) for name, one in slices.items()}
    except SafetensorError as error:
        size = path.stat().st_size
        raise ValueError(
            f"{path} ({size:,} bytes) is not a complete safetensors file ({error}): it is damaged or truncated; "
            "download it again"
        ) from error
    unknown = [(name, dtype) for name, (_, dtype) in kinds.items() if dtype not in DTYPES]
    if unknown:
        raise ValueError(f"{path}: the dtype {unknown[0][1]} of {shown_name(unknown[0][0])} is not supported")
    absurd = next((name for name in kinds if any(map(_is_absurd, name.split(".")))), None)
    if absurd is not None:
        raise ValueError(f"{path}: the index in {shown_name(absurd)!r} is not a number of at most {MAX_DIGITS} digits")
    return [StoredTensor(name, path, shape, DTYPES[dtype], written) for name, (shape, dtype) in kinds.items()]


def _is_absurd(part: str) -> bool:
    """Whether a part of a name looks like an index, but cannot be a layer's or an expert's: transformers converts it to an integer."""
    return part.isdigit() and not (part.isascii() and len(part) <= MAX_DIGITS)


def _written(path: Path) -> tuple[int, ...]:
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


def _replaced(folder: Path) -> str:
    return f"{folder} was replaced while it was being read: load it again"


class Reader:
    """Reads boxes of stored tensors. Keeps a few files open; closes the least recently used."""

    def __init__(self) -> None:
        self._open: OrderedDict[Path, Any] = OrderedDict()

    def read(self, tensor: StoredTensor, box: Box) -> Tensor:
        file = self._file(tensor)
        if not box:  # a scalar has no slices
            return file.get_tensor(tensor.name)
        return file.get_slice(tensor.name)[tuple(slice(*one) for one in box)]

    def _file(self, tensor: StoredTensor) -> Any:
        path = tensor.file
        if path not in self._open:
            if len(self._open) == OPEN_FILES:
                self._open.popitem(last=False)[1].__exit__(None, None, None)
            self._open[path] = safe_open(path, framework="pt").__enter__()
            if _written(path) != tensor.written:
                raise RuntimeError(_replaced(path.parent))
        self._open.move_to_end(path)
        return self._open[path]

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].__exit__(None, None, None)
