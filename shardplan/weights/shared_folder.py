"""A folder that all ranks write into, and that is complete or absent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from .all_ranks import all_or_none, is_first, of_first
from .folders import begin, commit, saving


@contextmanager
def whole_folder(folder: Path, *, marks: tuple[str, ...], overwrite: bool = False) -> Iterator[Path]:
    """Make a hidden folder for all ranks to write into, renamed to `folder` at the end. Until then an old `folder` is complete.
    If two jobs save one folder, the one that began last succeeds.

    Args:
        folder: on a disk that all ranks of the default process group see.
        marks: names of files and folders. An old folder must have one of them to be overwritten, and no other subfolders.
        overwrite: `folder` may exist and have files.

    Raises:
        ValueError: on the first rank: `folder` has files, and `overwrite` is not given or the folder has no mark.
        RuntimeError: another rank failed, or another job saves the folder. Every rank raises.
    """
    new: Path | None = None
    with ExitStack() as stack:
        with all_or_none(None, f"preparing to save {folder}"):
            if is_first(None):
                new = begin(folder, overwrite=overwrite, marks=marks)
                stack.enter_context(saving(new, folder))
        with all_or_none(None, f"saving {folder}"):
            yield of_first(new)
        with all_or_none(None, f"finishing {folder}"):
            if new is not None:
                commit(new, folder, lambda name: False)
