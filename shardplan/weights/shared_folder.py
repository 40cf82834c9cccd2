"""A folder that all ranks write into, and that is whole or not there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from .all_ranks import all_or_none, is_first, of_first
from .folders import begin, commit, saving


@contextmanager
def whole_folder(folder: Path, *, marks: tuple[str, ...], overwrite: bool = False) -> Iterator[Path]:
    """A hidden folder for all ranks to write into, which gets the name `folder` at the end. Until then an old one of that name is
    whole. Of two jobs that save one folder, the one that began last does.

    Args:
        folder: on a disk that all ranks of the default process group see.
        marks: names of files and folders, one of which an old folder must have to be overwritten. It has no other folders.
        overwrite: `folder` may exist and have files.

    Raises:
        ValueError: on the first rank: `folder` has files and `overwrite` is not given, or is no such folder.
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
