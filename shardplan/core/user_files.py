"""Files that users name: read up to a limit, and written whole or not at all."""

from __future__ import annotations

import json
import os
import re
import stat
import tempfile
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

BYTE_ORDER_MARK = "\ufeff"
STREAMS = ("/dev/", "/proc/")  # regular files here are the process's own streams
_LINE_END = re.compile(r"\r\n|\r|\n")


class CannotRead(Exception):
    """A file that cannot be read as required.

    Args:
        reason: the problem, without a final full stop.
        missing: whether there is no such file.
        too_large: whether only its size is wrong.
    """

    def __init__(self, reason: str, *, missing: bool = False, too_large: bool = False):
        super().__init__(reason)
        self.reason, self.missing, self.too_large = reason, missing, too_large


def read_bytes(path: str | os.PathLike[str], most: int) -> bytes:
    """The content of a file. Only regular files are opened, and at most `most` bytes are read.

    Raises:
        CannotRead: it does not exist, may not be read, is not a regular file, or is too large.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise CannotRead("is a folder" if os.path.isdir(path) else "is not a regular file")
        # If it is replaced by a pipe in between, opening must not wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0))
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise CannotRead("is not a regular file")
            content = file.read(most + 1)
    except FileNotFoundError:
        raise CannotRead("does not exist", missing=True) from None
    except (OSError, ValueError) as error:  # a ValueError for a string that no path can be
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise CannotRead(f"cannot be opened: {reason[:1].lower()}{reason[1:]}") from None
    if len(content) > most:
        raise CannotRead(
            f"is larger than {f'{most // 2**20} MiB' if most >= 2**20 else f'{most} bytes'}", too_large=True
        )
    return content


LONGEST_NAME = 255  # characters of the name of a file


def shown_name(name: str, longest: int = 200) -> str:
    """A name from a file as a message shows it: at most so many characters, and none that a terminal obeys."""
    shown = name if name.isprintable() and name else ascii(name)
    return shown if len(shown) <= longest else f"{shown[:longest]}..."


def decode(content: bytes) -> str:
    """UTF-8 text without its byte order mark.

    Raises:
        CannotRead: it is not UTF-8 text.
    """
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        byte = f"byte {error.start} is 0x{content[error.start]:02x}"
        kind = " (it looks like UTF-16)" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else ""
        raise CannotRead(f"is not UTF-8 text: {byte}{kind}") from None


def read_json(path: str | os.PathLike[str], most: int) -> Any:
    """The data of a JSON file.

    Raises:
        CannotRead: as `read_bytes`; or it is not JSON text.
    """
    return parse_json(decode(read_bytes(path, most)))


def parse_json(text: str) -> Any:
    """The data of a JSON text with finite numbers.

    Raises:
        CannotRead: it is not JSON, is nested too deeply, or has a number that JSON does not have.
    """
    try:
        return json.loads(text, parse_constant=_no_number)
    except json.JSONDecodeError as error:
        what = f"{error.msg[:1].lower()}{error.msg[1:]}"
        raise CannotRead(f"is not JSON: {what} at line {error.lineno}, column {error.colno}") from None
    except (RecursionError, ValueError):  # Python reads no integers of thousands of digits
        raise CannotRead("is nested too deeply or contains a number with too many digits") from None


def _no_number(word: str) -> NoReturn:
    raise CannotRead(f"is not JSON: {word} is no number there")


def line_ends_of(text: str) -> str:
    """The most frequent line end of a text; "\\n" for a single line."""
    found = Counter(_LINE_END.findall(text))
    return found.most_common(1)[0][0] if found else "\n"


def with_unix_ends(text: str) -> str:
    """The text with line ends of one character."""
    return _LINE_END.sub("\n", text)


def in_form_of(old: bytes, text: str) -> str:
    """A text in the form of a file's old content: with that content's line ends (if it has several, the most
    frequent) and its byte order mark. The text itself has line ends of one character."""
    was = old.decode("utf-8", "replace")
    mark = BYTE_ORDER_MARK if was.startswith(BYTE_ORDER_MARK) else ""
    return mark + text.replace("\n", line_ends_of(was))


def replace_whole(path: str | os.PathLike[str], content: str) -> None:
    """Write a file whole or not at all in a folder that others may write to, in the place of whatever has its name: a link is not
    followed, and a pipe is not opened.

    Raises:
        OSError: it cannot be written.
    """
    _move_there(Path(path), content.encode(), None)


def is_trusted(path: str | os.PathLike[str]) -> bool:
    """Whether the user or root owns a file, where files have owners. Raises OSError where there is no such file."""
    return not hasattr(os, "geteuid") or os.stat(path).st_uid in (0, os.geteuid())


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write a file whole or not at all: it is written next to its place, then moved there. If that fails, or the
    process is killed, the old file is unchanged. A link stays a link; the mode stays, and the owner if allowed. A hard link
    to the old file keeps the old content. Other than regular files (a pipe, a terminal, /dev/stdout) are written directly.

    Args:
        content: a text is written as UTF-8, with its line ends unchanged.

    Raises:
        OSError: it cannot be written.
    """
    data = content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content
    try:
        old = os.stat(path)
    except FileNotFoundError:
        old = None
    except ValueError as error:  # a string that no path can be
        raise OSError(str(error)) from None
    if (old is not None and not stat.S_ISREG(old.st_mode)) or os.fspath(path).startswith(STREAMS):
        with open(path, "wb") as stream:
            stream.write(data)
        return
    target = Path(os.path.realpath(path))
    if old is not None and not os.access(target, os.W_OK):
        raise PermissionError(13, "Permission denied", os.fspath(path))
    _move_there(target, data, old)


def _move_there(target: Path, data: bytes, old: os.stat_result | None) -> None:
    """Write a file next to its place, and move it there."""
    descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=".shardplan-", suffix=".tmp")
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            _as_before(temporary, old)
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def _as_before(path: str, old: os.stat_result | None) -> None:
    """Give a new file the owner and mode of the file that it replaces, or those of any new file."""
    if old is None:
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(path, 0o666 & ~mask)
        return
    if hasattr(os, "chown"):
        with suppress(PermissionError):  # only root gives files away; the mode is set after it, as it resets bits
            os.chown(path, old.st_uid, old.st_gid)
    os.chmod(path, stat.S_IMODE(old.st_mode))
