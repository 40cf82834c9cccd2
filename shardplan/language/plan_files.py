"""Reading plan files: bounded, regular files only."""

from __future__ import annotations

import os
import stat
from functools import cache
from pathlib import Path

from shardplan.core.diagnostics import Code

from .limits import MAX_BYTES

CANNOT_READ = Code(
    code="SP101",
    title="the plan cannot be read",
    text="""
    There is no such file, it may not be read, it is not a regular file, or it is not UTF-8 text. A word with
    a path separator or with the ending .yaml, .yml or .json is a file; every other word is the name of a
    built-in plan (`shardplan list` shows them).
    """,
    bad="""
    $ shardplan lint lama
    """,
    good="""
    $ shardplan lint llama
    """,
)
ENDINGS = (".yaml", ".yml", ".json")


class CannotRead(Exception):
    """A file that is no plan's text.

    Args:
        reason: what is wrong with it, without a final full stop.
        missing: whether there is no such file.
        too_large: whether only its size is wrong.
    """

    def __init__(self, reason: str, *, missing: bool = False, too_large: bool = False):
        super().__init__(reason)
        self.reason, self.missing, self.too_large = reason, missing, too_large


def is_file(word: str) -> bool:
    """Whether a word names a file, not a built-in plan."""
    return "/" in word or os.sep in word or word.lower().endswith(ENDINGS)


def read_text(path: Path) -> str:
    """The text of a file, without a byte order mark. Nothing but a regular file is ever opened.

    Raises:
        CannotRead: there is none, it may not be read, it is too large or no UTF-8 text.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise CannotRead("is a folder" if os.path.isdir(path) else "is not a regular file")
        # Should it be replaced by a pipe in between, opening must not wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0))
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise CannotRead("is not a regular file")
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise CannotRead("does not exist", missing=True) from None
    except (OSError, ValueError) as error:  # a ValueError for what no path can hold
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise CannotRead(f"cannot be opened: {reason[:1].lower()}{reason[1:]}") from None
    return decode(content)


def decode(content: bytes) -> str:
    """UTF-8 text without its byte order mark.

    Raises:
        CannotRead: it is too large or no UTF-8 text.
    """
    if len(content) > MAX_BYTES:
        raise CannotRead(f"is larger than {MAX_BYTES // 2**20} MiB", too_large=True)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        byte = f"byte {error.start} is 0x{content[error.start]:02x}"
        kind = " (it looks like UTF-16)" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else ""
        raise CannotRead(f"is not UTF-8 text: {byte}{kind}") from None


@cache
def builtin_plans() -> dict[str, Path]:
    """The plans that come with shardplan, by name: plans/ beside the package, in a wheel inside it."""
    package = Path(__file__).parents[1]
    packaged = package / "_data" / "plans"
    folder = packaged if packaged.is_dir() else package.parent / "plans"
    return {path.stem: path for path in sorted(folder.iterdir()) if path.suffix in ENDINGS}
