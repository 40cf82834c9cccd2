"""Folders that are complete or absent, however many processes write them, and wherever each is stopped, continued or killed.

A save of a folder X has a unique key: a number and a token. Its files are in a hidden folder next to X, `.X.saves`:

- `KEY.new` is written to. It is complete before the next step.
- `KEY.old` is the former X, or an empty folder where there was no X. The rename that creates it is the decision: from then on
  `KEY.new` is the newest state, and any process that finds it renames it to X, as the save itself would have done.
- `KEY.gone` is deleted.

The save that begins last wins. It ends each earlier save that has not decided, by making a *file* named `KEY.old`: then no folder can be
renamed to that name. So a process that is continued after hours fails at its decision, and has changed nothing. Such a file stays until
the process that it ends has seen it. If that process is dead, the file stays for good.

So nothing here relies on an earlier look: each step names its own key, and the file system refuses a step that comes too late.
Only names in `.X.saves` and X itself are renamed. NFS does that on the server, and no locks are needed (docs/decisions/0016).
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_OCCUPIED = (
    errno.EEXIST,
    errno.ENOTEMPTY,
    errno.ENOTDIR,
)  # the errors of a rename onto a file, or onto a folder with files
_NAME = re.compile(r"([0-9]{6,})-([0-9a-f]{16})\.(new|old|gone)")
_TIMES = 100  # how often another save may remove the empty hidden folder just before it is used


class Superseded(RuntimeError):
    """Another save of the same folder began after this one."""


@dataclass(frozen=True, order=True)
class _Key:
    number: int
    token: str

    def path(self, saves: Path, what: str) -> Path:
        return saves / f"{self.number:06}-{self.token}.{what}"


def begin(folder: Path, *, overwrite: bool, marks: tuple[str, ...]) -> Path:
    """Make an empty folder to write to, which `commit` renames to `folder`. First the newest complete state gets that name. Then
    earlier saves that have not decided are ended, and the remains of dead saves are removed.

    Args:
        overwrite: `folder` may exist and have files.
        marks: names of files and folders. A folder must have one of them to be overwritten, and no other subfolders.

    Raises:
        ValueError: `folder` is a file, has files and `overwrite` is not given, or is not such a folder.
        Superseded: another save began at the same time.
    """
    repair(folder)
    _check_existing(folder, overwrite, marks)
    folder.parent.mkdir(parents=True, exist_ok=True)
    new = _claim(folder, "new")
    try:
        _end_others(new, folder)
        _check_existing(folder, overwrite, marks)  # again: a decided save may have ended just now
    except BaseException:
        abandon(new)
        raise
    return new


def _check_existing(folder: Path, overwrite: bool, marks: tuple[str, ...]) -> None:
    if folder.is_file():
        raise ValueError(f"{folder} is a file: name a folder")
    names = {path.name for path in _entries(folder)}
    if names and not overwrite:
        raise ValueError(f"{folder} has files: name another folder, or pass overwrite=True")
    if names and not names & set(marks):
        raise ValueError(
            f"{folder} has files but none of {', '.join(marks)}: it is not a checkpoint, so it is not overwritten"
        )
    below = [path.name for path in _entries(folder) if path.is_dir() and path.name not in marks]
    if below:
        raise ValueError(f"{folder} contains the folder {below[0]!r}, which would be lost: name another folder")


def _claim(folder: Path, what: str) -> Path:
    """Make a folder with a key above all existing ones."""
    saves = saves_of(folder)
    for _ in range(_TIMES):
        with suppress(FileExistsError):
            os.mkdir(saves)
        with suppress(FileNotFoundError):  # another save has just removed `saves`, which was empty
            number = 1 + max((key.number for key in _found(saves)), default=0)
            claimed = _Key(number, secrets.token_hex(8)).path(saves, what)
            os.mkdir(claimed)
            return claimed
    raise OSError(f"{saves} is removed again and again while {folder} is being saved")


def _end_others(new: Path, folder: Path) -> None:
    """End every other save: each has already ended, or raises when it comes to its decision.

    Of two saves that begin at once, each has made its folder before it looks for others, so at least one sees the other. The
    key decides which one goes on.
    """
    own, saves = _key_of(new), new.parent
    for key in sorted(_found(saves)):
        if key == own:
            continue
        theirs, old = key.path(saves, "new"), key.path(saves, "old")
        if _kind(old) is None and _kind(theirs) is not None:
            if key > own:
                raise Superseded(_superseded(folder))
            with suppress(FileExistsError):  # another save has ended it, or it has decided by now
                os.close(os.open(old, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
                _flush(saves)
        if _kind(old) == "folder":  # it has decided
            _finish(theirs, folder)
            _delete(old)
        elif _kind(old) == "file":
            _delete(theirs)
        _delete(key.path(saves, "gone"))


def commit(new: Path, folder: Path, keep: Callable[[str], bool]) -> None:
    """Rename the new folder to `folder`, inside of `saving`. Until then an old one is complete; afterwards it is removed.

    Args:
        new: what `begin` returned.
        keep: whether the old folder's file of this name is kept in the new one.

    Raises:
        Superseded: another save of the same folder began after this one. The other's files were not touched.
        OSError: the disk failed; `folder` is as it was.
    """
    old = _key_of(new).path(new.parent, "old")
    for path in _entries(folder):
        if keep(path.name) and not (new / path.name).exists():
            shutil.copy2(path, new / path.name)
    for path in new.iterdir():
        _flush(path)
    _flush(new)
    replaced = _decide(folder, old)
    try:
        _finish(new, folder)
        if not folder.is_dir() and _kind(old) is not None:
            raise OSError(f"{new} was removed while {folder} was being saved")
    except BaseException:
        with suppress(OSError):  # another process has already renamed the new one
            os.rename(old, folder) if replaced else os.rmdir(old)
        raise
    _delete(old)
    _leave(new.parent)


def _decide(folder: Path, old: Path) -> bool:
    """Move the folder away: the decision. Returns whether there was a folder. Fails if another save made a file of that name."""
    try:
        try:
            os.rename(folder, old)
            return True
        except FileNotFoundError:
            os.mkdir(old)
            return False
    except OSError as error:
        if error.errno in _OCCUPIED:
            raise Superseded(_superseded(folder)) from error
        raise


def _finish(new: Path, folder: Path) -> None:
    """Rename a decided state to its final name. The first process that finds it does so."""
    try:
        os.rename(new, folder)
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno not in _OCCUPIED:
            raise
        text = f"{folder} has files that no save wrote, and {new} is the state that should have its name: move one of them away"
        raise OSError(error.errno, text) from error
    _flush(folder.parent)


@contextmanager
def saving(new: Path, folder: Path) -> Iterator[None]:
    """Write to `new` in this context and commit it. A save that fails is abandoned.

    Raises:
        Superseded: the save failed because another save of the same folder began later.
    """
    try:
        yield
    except BaseException as error:
        ended = _kind(_key_of(new).path(new.parent, "old")) == "file"
        abandon(new)
        if ended and isinstance(error, OSError | RuntimeError) and not isinstance(error, Superseded):
            raise Superseded(_superseded(folder)) from error
        raise


def _superseded(folder: Path) -> str:
    return (
        f"another job began to save {folder} after this one: this save is given up, and the files of the other are untouched. End "
        "one of the jobs, or let them save to different folders"
    )


def repair(folder: Path) -> None:
    """Finish the save of a process that died after its decision: its state is newer than the one that has the name."""
    saves = saves_of(folder)
    for key in sorted(_found(saves)):
        if _kind(key.path(saves, "old")) == "folder":
            _finish(key.path(saves, "new"), folder)


def clear(folder: Path) -> None:
    """Remove what dead saves left in the hidden folder, as the next save would. A decided state gets the name."""
    if _found(saves_of(folder)):
        own = _claim(folder, "new")
        try:
            _end_others(own, folder)
        finally:
            abandon(own)


def remove(folder: Path) -> None:
    """Remove a complete folder. At no time is only a part of it under its name."""
    gone = _claim(folder, "gone")
    os.rename(folder, gone)
    _delete(gone)
    _leave(gone.parent)


def abandon(new: Path) -> None:
    """Abandon a save: remove its folder, unless it has decided."""
    saves = new.parent
    old = _key_of(new).path(saves, "old")
    if _kind(old) == "folder":
        return
    _delete(new)
    with suppress(FileNotFoundError, IsADirectoryError, PermissionError):
        os.unlink(old)  # the file that ended this save has done its work
    _leave(saves)


def saves_of(folder: Path) -> Path:
    """The hidden folder for the saves that have not ended."""
    return folder.with_name(f".{folder.name}.saves")


def _key_of(path: Path) -> _Key:
    found = _NAME.fullmatch(path.name)
    assert found is not None, path
    return _Key(int(found[1]), found[2])


def _found(saves: Path) -> set[_Key]:
    try:
        names = os.listdir(saves)
    except FileNotFoundError:
        return set()
    return {_key_of(saves / name) for name in names if _NAME.fullmatch(name)}


def _entries(folder: Path) -> list[Path]:
    """The entries of a folder; empty where there is none."""
    with suppress(FileNotFoundError):
        return sorted(folder.iterdir())
    return []


def _kind(path: Path) -> str | None:
    """ "file", "folder", or None."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return None
    return "folder" if stat.S_ISDIR(mode) else "file"


def _delete(path: Path) -> None:
    """Remove a folder of `.X.saves` after renaming it, so that a folder named new or old always has all its files.

    Any process deletes unused folders. What cannot be deleted now (NFS keeps a file that is open) is left to the next process."""
    gone = _Key(_key_of(path).number, secrets.token_hex(8)).path(path.parent, "gone")
    with suppress(FileNotFoundError):
        os.rename(path, gone)
        shutil.rmtree(gone, ignore_errors=True)


def _leave(saves: Path) -> None:
    """Remove the hidden folder if it is empty."""
    with suppress(OSError):
        os.rmdir(saves)


def _flush(path: Path) -> None:
    """Flush to the disk: a rename must not be on disk before the files that it renames."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
