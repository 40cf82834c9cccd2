"""Checksums of the files of a folder: a changed file is named before anything is read from it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import torch.distributed as dist
from torch.distributed.checkpoint import filesystem

from shardplan.core.user_files import LONGEST_NAME, CannotRead, read_bytes, shown_name
from shardplan.torchlib.gathering import of_all

from .all_ranks import all_or_none, is_first

CHECKSUMS = "checksums.json"
MOST = 32 * 2**20  # bytes of it: a quarter of a million files
Written = tuple[int, str]  # a file's length and SHA-256


class SummedFiles(filesystem.FileSystem):
    """torch's file system. It also computes the checksums of files while it writes them, so it reads nothing back. `written` has
    the files of one folder by name."""

    def __init__(self) -> None:
        super().__init__()
        self.written: dict[str, Written] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[Any, None, None]:
        with super().create_stream(path, mode) as stream:
            summed = _Summed(cast(IO[bytes], stream))
            yield summed
        self.written[Path(path).name] = (summed.length, summed.digest.hexdigest())

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.written[Path(new_path).name] = self.written.pop(Path(path).name)


class _Summed:
    """A file that is written from beginning to end, and summed on the way."""

    def __init__(self, stream: IO[bytes]):
        self.stream = stream
        self.digest, self.length = hashlib.sha256(), 0

    def write(self, data: Any) -> int:
        self.digest.update(data)
        self.length += memoryview(data).nbytes
        return self.stream.write(data)

    def tell(self) -> int:
        return self.length

    def flush(self) -> None:
        self.stream.flush()

    def close(self) -> None:
        self.stream.close()

    def fileno(self) -> int:
        return self.stream.fileno()


def write_checksums(folder: Path, mine: Mapping[str, Written]) -> None:
    """Write the lengths and the SHA-256 of all files. A collective.

    Args:
        mine: the files that this rank wrote.

    Raises:
        RuntimeError, OSError: a rank failed, or wrote into another folder. Every rank raises.
    """
    shares = of_all(dict(mine))
    with all_or_none(None, f"writing {CHECKSUMS}"):
        if is_first(None):
            found = {name: file for share in shares for name, file in share.items()}
            lost = found.keys() - {path.name for path in folder.iterdir()}
            if lost:
                raise RuntimeError(f"{min(lost)}, which a rank wrote, is not in {folder}: all ranks need one folder")
            (folder / CHECKSUMS).write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", "utf-8")


def identity(folder: Path) -> str | None:
    """An identifier of the saved state; None if there is none. Raises ValueError where its checksums cannot be read."""
    content = _content(folder / CHECKSUMS)
    return None if content is None else hashlib.sha256(content).hexdigest()


def check_checksums(folder: Path) -> Collection[str]:
    """Compare this rank's share of the files with what was written. No collective.

    Returns:
        The names of all files.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file has changed since it was written.
    """
    written = _read(folder / CHECKSUMS)
    for name, (length, _) in written.items():
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder / name} is missing, but {CHECKSUMS} names it")
        if (size := (folder / name).stat().st_size) != length:
            raise ValueError(f"{folder / name} has {size:,} bytes, and {length:,} were written: it is damaged")
    for name in _share(list(written)):
        if _digest(folder / name) != written[name][1]:
            raise ValueError(f"{folder / name} is damaged: its contents are not what was written ({CHECKSUMS})")
    return written.keys()


def _content(file: Path) -> bytes | None:
    """What is in the file of checksums; None if there is none."""
    try:
        return read_bytes(file, MOST)
    except CannotRead as error:
        if error.missing or not file.parent.is_dir():
            return None
        raise ValueError(f"{file} {error.reason}") from None


def _read(file: Path) -> Mapping[str, tuple[int, str]]:
    try:
        found = json.loads((_content(file) or b"").decode())
        written = {name: (int(length), str(digest)) for name, (length, digest) in found.items()}
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{file} is damaged: {error}") from error
    for name in written:
        if Path(name).name != name or name in ("", "..") or not name.isprintable() or len(name) > LONGEST_NAME:
            raise ValueError(f"{file} names {shown_name(name)}, which is no file of its folder: it is damaged")
    return written


def _share(names: list[str]) -> list[str]:
    """The files that this rank reads."""
    return names[dist.get_rank() :: dist.get_world_size()]


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
