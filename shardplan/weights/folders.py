"""Folders that are complete or do not exist: files are written to a temporary folder, which is renamed at the end.

For a folder X, `.X.new` is written to and `.X.removed` is deleted: neither is ever read. `.X.ready` (newer than X) and
`.X.old` (older than X) are complete, and exist only while they exchange places with X.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path


def begin(folder: Path, *, overwrite: bool, marks: tuple[str, ...]) -> Path:
    """An empty folder beside `folder`, to be written to. What an earlier attempt left there is removed, after the newest that
    is whole has the name.

    Args:
        overwrite: `folder` may exist and have files.
        marks: names of files and folders, one of which a folder must have to be overwritten. It has no other folders.

    Raises:
        ValueError: `folder` is a file, has files and `overwrite` is not given, or is not such a folder.
    """
    repair(folder)
    if beside(folder, "ready").exists():
        _exchange(folder)  # a process died before the first rename
    if folder.exists():
        _remove_old(folder)
    if folder.exists():
        _check_existing(folder, overwrite, marks)
    folder.parent.mkdir(parents=True, exist_ok=True)
    new = beside(folder, "new")
    abandon(new)
    new.mkdir()
    return new


def _check_existing(folder: Path, overwrite: bool, marks: tuple[str, ...]) -> None:
    if not folder.is_dir():
        raise ValueError(f"{folder} is a file: name a folder")
    names = {path.name for path in folder.iterdir()}
    if names and not overwrite:
        raise ValueError(f"{folder} has files: name another folder, or pass overwrite=True")
    if names and not names & set(marks):
        raise ValueError(
            f"{folder} has files but none of {', '.join(marks)}: it is not a checkpoint, so it is not overwritten"
        )
    below = [path.name for path in folder.iterdir() if path.is_dir() and path.name not in marks]
    if below:
        raise ValueError(f"{folder} contains the folder {below[0]!r}, which would be lost: name another folder")


def commit(new: Path, folder: Path, keep: Callable[[str], bool]) -> None:
    """Give the new folder its name. The old one, if there is one, is whole until then, and removed afterwards.

    Args:
        keep: whether a file of that name is taken over from the old folder.
    """
    for path in sorted(folder.iterdir()) if folder.exists() else ():
        if keep(path.name) and not (new / path.name).exists():
            shutil.copy2(path, new / path.name)
    for path in new.iterdir():
        _flush(path)
    _flush(new)
    ready = beside(folder, "ready")
    new.rename(ready)
    try:
        _exchange(folder)
    except OSError:
        old = beside(folder, "old")
        if old.exists() and not folder.exists():
            old.rename(folder)
        if ready.exists():
            ready.rename(new)
        raise


def repair(folder: Path) -> None:
    """Give the name to what a process that died between two renames left: the newest that is whole. Does nothing if
    something has the name."""
    for what in ("ready", "old"):
        if beside(folder, what).exists() and not folder.exists():
            beside(folder, what).rename(folder)


def _exchange(folder: Path) -> None:
    """Give the ready folder the name, and remove the old one."""
    ready, old = beside(folder, "ready"), beside(folder, "old")
    _remove_old(folder)
    if folder.exists():
        folder.rename(old)
    ready.rename(folder)
    _flush(folder.parent)
    _remove_old(folder)


def _remove_old(folder: Path) -> None:
    """Remove the old folder under another name: what is called old is always whole."""
    old, removed = beside(folder, "old"), beside(folder, "removed")
    abandon(removed)
    if old.exists():
        old.rename(removed)
        abandon(removed)


def remove(folder: Path) -> None:
    """Remove a complete folder: no part of it ever has its name."""
    removed = beside(folder, "removed")
    abandon(removed)
    folder.rename(removed)
    abandon(removed)


def abandon(new: Path) -> None:
    """Remove an unfinished folder."""
    if new.exists():
        shutil.rmtree(new)


def beside(folder: Path, what: str) -> Path:
    """The hidden folder for what is "new", "ready", "old" or "removed"."""
    return folder.with_name(f".{folder.name}.{what}")


def _flush(path: Path) -> None:
    """To the disk: a rename must not be there before what it renames."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
