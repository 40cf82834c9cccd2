"""Reads plan files: regular files only, up to a size limit."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

from shardplan.core.data_files import data_folder
from shardplan.core.diagnostics import Code
from shardplan.core.user_files import CannotRead, decode, read_bytes

from .limits import MAX_BYTES

CANNOT_READ = Code("SP101")
ENDINGS = (".yaml", ".yml", ".json")


def is_file(word: str) -> bool:
    """Whether a word names a file, not a built-in plan."""
    return "/" in word or os.sep in word or word.lower().endswith(ENDINGS)


def read_text(path: Path) -> str:
    """The text of a file, without a byte order mark.

    Raises:
        CannotRead: it does not exist, may not be read, is not a regular file, is too large, or is not UTF-8 text.
    """
    return decode(read_bytes(path, MAX_BYTES))


def decode_plan(content: bytes) -> str:
    """As `read_text`, for the bytes of a file."""
    if len(content) > MAX_BYTES:
        raise CannotRead(f"is larger than {MAX_BYTES // 2**20} MiB", too_large=True)
    return decode(content)


@cache
def builtin_plans() -> dict[str, Path]:
    """The plans that come with shardplan, by name."""
    return {path.stem: path for path in sorted(data_folder("plans").iterdir()) if path.suffix in ENDINGS}
