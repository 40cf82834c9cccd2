"""Checksums of the files of a folder: a file that is not as it was written is named before anything is read from it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist

from .all_ranks import all_or_none, is_first

CHECKSUMS = "checksums.json"


def write_checksums(folder: Path) -> None:
    """Write the lengths and the SHA-256 of all files. A collective: each rank reads its share of them.

    Raises:
        RuntimeError, OSError: a rank failed. Every rank raises.
    """
    with all_or_none(None, f"reading what was written to {folder}"):
        names = sorted(path.name for path in folder.iterdir())
        mine = {name: ((folder / name).stat().st_size, _digest(folder / name)) for name in _share(names)}
    shares = [mine] * dist.get_world_size()
    dist.all_gather_object(shares, mine)
    with all_or_none(None, f"writing {CHECKSUMS}"):
        if is_first(None):
            found = {name: file for share in shares for name, file in share.items()}
            (folder / CHECKSUMS).write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", "utf-8")


def check_checksums(folder: Path) -> None:
    """Compare this rank's share of the files with what was written. No collective.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is not as it was written.
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


def _read(file: Path) -> Mapping[str, tuple[int, str]]:
    try:
        found = json.loads(file.read_text("utf-8"))
        written = {name: (int(length), str(digest)) for name, (length, digest) in found.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is damaged: {error}") from error
    if any(Path(name).name != name for name in written):
        raise ValueError(f"{file} names a file outside of its folder: it is damaged")
    return written


def _share(names: list[str]) -> list[str]:
    """Those that this rank reads."""
    return names[dist.get_rank() :: dist.get_world_size()]


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
