"""Folders that are whole or not there, wherever the process that writes them is killed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from shardplan.weights.folders import begin, beside, commit, remove, repair

MARK = "config.json"
FILES = (MARK, "weights")
STEPS = range(40)  # more than there are


class Killed(BaseException):
    """The process ends: nothing after it runs."""


@contextmanager
def killed_at(step: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """The process is killed at the step-th operation on the disk, before it is done; a removal is killed after one file."""
    left, killed = [step], [False]

    def counted(operation: Callable[..., Any], half: Callable[..., Any] | None = None) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                if half is not None:
                    half(*args)
                killed[0] = True
                raise Killed
            return operation(*args, **options)

        return run

    def remove_one(path: Path) -> None:
        next(path.iterdir()).unlink()

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", counted(Path.rename))
        patch.setattr(Path, "mkdir", counted(Path.mkdir))
        patch.setattr(shutil, "rmtree", counted(shutil.rmtree, remove_one))
        patch.setattr(os, "fsync", counted(os.fsync))
        with suppress(Killed):
            yield killed


def write(folder: Path, content: str) -> None:
    for name in FILES:
        (folder / name).write_text(content)


def save(folder: Path, content: str) -> None:
    new = begin(folder, overwrite=True, marks=(MARK,))
    write(new, content)
    commit(new, folder, lambda name: False)


def content(folder: Path) -> str:
    """What is in a whole folder."""
    found = {name: (folder / name).read_text() for name in FILES}
    assert len(set(found.values())) == 1, found
    return found[MARK]


def kinds(folder: Path) -> set[str]:
    return {what for what in ("new", "ready", "old", "removed") if beside(folder, what).exists()}


@pytest.mark.parametrize("first", [True, False], ids=["the first save", "over an old one"])
@pytest.mark.parametrize("again", ["load", "save"])
def test_a_save_that_is_killed_leaves_a_whole_folder(first, again, tmp_path, monkeypatch):
    seen = set()
    for step in STEPS:
        folder = tmp_path / f"{again}{step}" / "model"
        folder.parent.mkdir()
        if not first:
            save(folder, "1")
        with killed_at(step, monkeypatch) as killed:
            save(folder, "2")
        whole_new = beside(folder, "ready").exists() or not killed[0]
        if again == "load":
            repair(folder)
            if folder.exists():
                seen.add(content(folder))
            assert folder.exists() or (first and not whole_new)
        else:
            with (
                pytest.raises(ValueError, match="has files")
                if folder.exists() or whole_new or not first
                else _nothing()
            ):
                begin(folder, overwrite=False, marks=(MARK,))
            if folder.exists():
                seen.add(found := content(folder))
                assert found == "2" or not whole_new
        save(folder, "3")
        assert content(folder) == "3" and kinds(folder) == set()
        if not killed[0]:
            break
    else:
        raise AssertionError("more steps than the test runs")
    assert seen == ({"2"} if first else {"1", "2"})


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def test_a_second_save_that_is_killed_too_removes_nothing_that_is_whole(tmp_path, monkeypatch):
    for one in STEPS:
        ended = False
        for two in STEPS:
            folder = tmp_path / f"{one}_{two}" / "model"
            folder.parent.mkdir()
            save(folder, "1")
            with killed_at(one, monkeypatch) as first_killed:
                save(folder, "2")
            was_ready = beside(folder, "ready").exists()
            with killed_at(two, monkeypatch) as killed:
                save(folder, "3")
            newest = beside(folder, "ready")
            newest = newest if newest.exists() else folder
            repair(folder)
            assert content(newest if newest.exists() else folder) in ({"2", "3"} if was_ready else {"1", "2", "3"})
            assert content(folder) in {"1", "2", "3"}
            if not killed[0]:
                ended = True
                break
        assert ended
        if not first_killed[0]:
            return
    raise AssertionError("more steps than the test runs")


def test_a_removal_that_is_killed_leaves_no_part_under_the_name(tmp_path, monkeypatch):
    for step in STEPS:
        folder = tmp_path / str(step)
        save(folder, "1")
        with killed_at(step, monkeypatch) as killed:
            remove(folder)
        assert not folder.exists() or content(folder) == "1"
        if not killed[0]:
            assert step > 0 and not folder.exists() and kinds(folder) == set()
            return
    raise AssertionError("more steps than the test runs")


def test_only_folders_that_are_named_are_overwritten(tmp_path):
    folder = tmp_path / "model"
    save(folder, "1")
    (folder / "state").mkdir()
    with pytest.raises(ValueError, match="contains the folder 'state', which would be lost"):
        begin(folder, overwrite=True, marks=(MARK,))
    assert begin(folder, overwrite=True, marks=(MARK, "state")) == beside(folder, "new")


def test_a_rename_that_fails_leaves_the_old_folder_and_nothing_beside(tmp_path, monkeypatch):
    folder = tmp_path / "model"
    save(folder, "1")
    new = begin(folder, overwrite=True, marks=(MARK,))
    write(new, "2")
    rename = Path.rename

    def fail(path: Path, target: Path) -> Path:
        if path == beside(folder, "ready") and target == folder:
            raise OSError("the disk is gone")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="the disk is gone"):
        commit(new, folder, lambda name: False)
    monkeypatch.undo()
    assert content(folder) == "1" and kinds(folder) == {"new"}  # which the caller abandons
