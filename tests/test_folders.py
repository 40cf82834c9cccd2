"""Folders that are whole or not there, wherever the processes that write them are killed, or stopped and continued."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from stopped_processes import Killed, Process, stop, stopping

from shardplan.weights.folders import Superseded, begin, commit, remove, repair, saves_of, saving

MARK = "config.json"
FILES = (MARK, "weights")
BOTH = pytest.mark.parametrize("first", [True, False], ids=["the first save", "over an old one"])


def save(folder: Path, content: str) -> None:
    """As the functions that save do it."""
    new = begin(folder, overwrite=True, marks=(MARK,))
    with saving(new, folder):
        for name in FILES:
            stop()
            (new / name).write_text(content)
        commit(new, folder, lambda name: False)


def content(folder: Path) -> str | None:
    """What is in a whole folder; None where there is none."""
    if not folder.exists():
        return None
    found = {name: (folder / name).read_text() for name in FILES}
    assert len(set(found.values())) == 1, f"a mixture: {found}"
    return found[MARK]


def left(folder: Path) -> set[str]:
    """What is next to the folder: "new", "old", "gone", and "ended" for the file that ends a save."""
    if not saves_of(folder).exists():
        return set()
    return {"ended" if path.is_file() else path.suffix[1:] for path in saves_of(folder).iterdir()} or {"the folder"}


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Iterator[Path]]:
    """New places for a folder. The processes in them stop before each operation."""

    def each() -> Iterator[Path]:
        for number in itertools.count():
            place = tmp_path / str(number)
            place.mkdir()
            yield place / "model"
            shutil.rmtree(place)

    with stopping(monkeypatch):
        yield each()


def place(folders: Iterator[Path], first: bool) -> Path:
    folder = next(folders)
    if not first:
        save(folder, "0")
    return folder


def judge(folder: Path, first: bool, saves: dict[str, Process], after: dict[str, set[str]] | None = None) -> None:
    """What has the name in the end is whole, and no save that succeeded is lost.

    Args:
        after: those that began when another had ended.
    """
    repair(folder)
    found, fine = content(folder), {name for name, process in saves.items() if process.succeeded}
    failed = {name for name, process in saves.items() if process.error and not isinstance(process.error, Killed)}
    assert all(isinstance(saves[name].error, Superseded) for name in failed), saves[failed.pop()].error
    assert found not in failed, f"{found} raised, and has the name"
    if fine:
        assert found not in (None, "0"), f"{fine} are lost"
    assert found is not None or first, "the old one is lost"
    for one, later in (after or {}).items():
        assert found != one or not later & fine, f"{one} took the place of {later}, which began after it had ended"
    if not any(process.killed for process in saves.values()):
        assert fine, "one of them is the last"
        assert left(folder) <= {"ended"}, "of one that came to its end while the other looked, a file may stay"
    save(folder, "last")
    assert content(folder) == "last" and left(folder) <= {"ended"}


def length(folder: Path, *, first: bool) -> int:
    """The number of operations of a save."""
    process, count = Process(lambda: save(folder, "1")), 1
    while process.step():
        count += 1
    assert process.succeeded
    return count


@BOTH
def test_a_save_that_is_killed_leaves_a_whole_folder(first, folders):
    seen = set()
    for step in range(length(place(folders, first), first=first)):
        folder = place(folders, first)
        process = Process(lambda folder=folder: save(folder, "1"))
        process.steps(step + 1)
        process.kill()
        repair(folder)
        seen.add(content(folder))
        judge(folder, first, {"1": process})
    assert seen == {None if first else "0", "1"}


@BOTH
def test_after_a_kill_between_the_renames_the_new_one_gets_the_name_and_not_the_old(first, folders):
    found = []
    for step in itertools.count(1):
        folder = place(folders, first)
        process = Process(lambda folder=folder: save(folder, "1"))
        if not process.steps(step):
            break
        process.kill()
        if not folder.exists() and "old" in left(folder):
            assert {"new", "old"} <= left(folder), "both are whole"
            repair(folder)
            found.append(content(folder))
    assert set(found) == {"1"}


@BOTH
@pytest.mark.parametrize("every", [pytest.param(29), pytest.param(1, marks=pytest.mark.exhaustive)])
def test_a_second_save_that_is_killed_too_removes_nothing_that_is_whole(every, first, folders):
    count = length(place(folders, first), first=first)
    for one, two in itertools.product(range(count), range(count + 12)):
        if (one + two) % every:
            continue
        folder = place(folders, first)
        saves = {}
        for name, step in (("1", one), ("2", two)):
            saves[name] = Process(lambda folder=folder, name=name: save(folder, name))
            saves[name].steps(step + 1)
            saves[name].kill()
        judge(folder, first, saves)


@BOTH
def test_a_save_that_is_stopped_while_another_runs(first, folders):
    """Wherever the first stands: the other counts, and nothing is left next to it."""
    ended = 0
    for step in range(length(place(folders, first), first=first) + 1):
        folder = place(folders, first)
        saves = {name: Process(lambda folder=folder, name=name: save(folder, name)) for name in "12"}
        saves["1"].steps(step)
        saves["2"].to_end()
        assert saves["2"].succeeded and content(folder) == "2"
        inode = folder.stat().st_ino
        saves["1"].to_end()
        if saves["1"].error:
            ended += 1
            assert folder.stat().st_ino == inode and not left(folder), "it was not moved for a moment, either"
        judge(folder, first, saves)
    assert ended > 10


@BOTH
@pytest.mark.parametrize("every", [pytest.param(31), pytest.param(1, marks=pytest.mark.exhaustive)])
def test_a_save_that_is_stopped_while_another_is_killed(every, first, folders):
    count = length(place(folders, first), first=first)
    for step, killed in itertools.product(range(1, count + 1), range(1, count + 12)):
        if (step + killed) % every:
            continue
        folder = place(folders, first)
        saves = {name: Process(lambda folder=folder, name=name: save(folder, name)) for name in "12"}
        saves["1"].steps(step)
        saves["2"].steps(killed)
        saves["2"].kill()
        saves["1"].to_end()
        judge(folder, first, saves)


@BOTH
@pytest.mark.parametrize("every", [pytest.param(41), pytest.param(1, marks=pytest.mark.exhaustive)])
def test_two_saves_that_take_turns(every, first, folders):
    """One runs to a step, the other to a step, the first to a further step, and so on to their ends."""
    count = length(place(folders, first), first=first)
    for one, two, more in itertools.product(range(1, count), range(1, count + 12), (1, 2, 5, 9)):
        if (one + two + more) % every:
            continue
        folder = place(folders, first)
        saves = {name: Process(lambda folder=folder, name=name: save(folder, name)) for name in "12"}
        saves["1"].steps(one)
        saves["2"].steps(two)
        saves["1"].steps(more)
        saves["2"].to_end()
        saves["1"].to_end()
        judge(folder, first, saves)


@BOTH
@pytest.mark.parametrize("every", [pytest.param(29), pytest.param(1, marks=pytest.mark.exhaustive)])
def test_a_save_and_a_load_that_are_stopped_while_others_save(every, first, folders):
    """A load helps a decided save along. It may be stopped in that while two others save."""
    count = length(place(folders, first), first=first)
    for one, two in itertools.product(range(1, count + 1), range(1, 12)):
        if (one + two) % every:
            continue
        folder = place(folders, first)
        saves = {name: Process(lambda folder=folder, name=name: save(folder, name)) for name in "123"}
        load = Process(lambda folder=folder: repair(folder))
        saves["1"].steps(one)
        load.steps(two)
        saves["2"].to_end()
        saves["3"].steps(one)
        load.to_end()
        saves["1"].to_end()
        saves["3"].to_end()
        assert load.succeeded, load.error
        judge(folder, first, saves, {"2": {"3"}})


def test_a_save_that_was_ended_touches_nothing_and_says_so(folders):
    folder = place(folders, False)
    old = Process(lambda: save(folder, "1"))
    old.steps(12)
    save(folder, "2")
    before = folder.stat().st_ino
    old.to_end()
    assert str(old.error) == (
        f"another job began to save {folder} after this one: this save is given up, and the files of the other are untouched. "
        "End one of the jobs, or let them save to different folders"
    )
    assert content(folder) == "2" and folder.stat().st_ino == before and not left(folder)


def test_a_removal_that_is_killed_leaves_no_part_under_the_name(folders):
    for step in itertools.count(1):
        folder = place(folders, False)
        process = Process(lambda folder=folder: remove(folder))
        more = process.steps(step)
        process.kill()
        assert content(folder) in (None, "0")
        if not more:
            assert not folder.exists() and not left(folder)
            return
        save(folder, "1")
        assert content(folder) == "1" and not left(folder)


def test_only_folders_that_are_named_are_overwritten(tmp_path):
    folder = tmp_path / "model"
    save(folder, "1")
    (folder / "state").mkdir()
    with pytest.raises(ValueError, match="contains the folder 'state', which would be lost"):
        begin(folder, overwrite=True, marks=(MARK,))
    assert not left(folder)
    assert begin(folder, overwrite=True, marks=(MARK, "state")).parent == saves_of(folder)


@pytest.mark.parametrize("which", [1, 2])
def test_a_rename_that_fails_leaves_the_old_folder_and_nothing_next_to_it(which, tmp_path, monkeypatch):
    folder = tmp_path / "model"
    save(folder, "1")
    calls = []

    def fail(source, target):
        calls.append(target)
        if len(calls) == which:
            raise OSError("the disk is gone")
        return rename(source, target)

    from shardplan.weights import folders

    rename = folders.os.rename
    monkeypatch.setattr(folders.os, "rename", fail)
    with pytest.raises(OSError, match="the disk is gone"):
        save(folder, "2")
    monkeypatch.undo()
    assert content(folder) == "1" and not left(folder)


def test_files_of_strangers_in_the_place_of_a_decided_state_are_not_touched(folders):
    folder = place(folders, False)
    process = Process(lambda: save(folder, "1"))
    while folder.exists():
        process.step()
    process.kill()
    folder.mkdir()
    (folder / "notes").write_text("mine")
    with pytest.raises(OSError, match="has files that no save wrote, and .* move one of them away"):
        repair(folder)
    assert (folder / "notes").read_text() == "mine" and {"new", "old"} <= left(folder)
