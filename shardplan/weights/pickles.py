"""How large the values of a pickle are when they are written out: a few hundred bytes can name a tuple twice in a tuple, sixty times over,
and whoever hashes or prints it never ends. torch's reader of data runs no code, and does both."""

from __future__ import annotations

import pickle
from io import SEEK_SET, BufferedReader, RawIOBase
from pickletools import genops
from typing import IO, Any
from zipfile import ZIP_STORED, ZipFile

from shardplan.torchlib.private import private

MOST, TIMES = 10_000_000, 10  # values, written out, and how many for each byte, where these are more
_MAGIC = b"PK\x03\x04"  # by which torch tells the archives that `torch.save` writes from its older forms
# Of so many values; None is all since the last mark.
_NEW = {"TUPLE": None, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3, "REDUCE": 2, "NEWOBJ": 2, "BINPERSID": 1}
_INTO = {"APPEND": 1, "APPENDS": None, "SETITEM": 2, "SETITEMS": None, "BUILD": 1}  # the value below them
_SILENT = {"PROTO", "FRAME", "STOP"}
_LEAF = 0  # the number of every value that holds none


class Part(RawIOBase):
    """Some bytes of a file, as a file. torch's own counts from the end in the wrong direction."""

    def __init__(self, stream: BufferedReader, start: int, length: int):
        self.stream, self.start, self.length, self.at = stream, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = SEEK_SET) -> int:
        self.at = max(offset + (0, self.at, self.length)[whence], 0)
        return self.at

    def readinto(self, buffer: Any) -> int:
        self.stream.seek(self.start + self.at)
        read = self.stream.readinto(memoryview(buffer)[: max(self.length - self.at, 0)])
        self.at += read
        return read


def check_archive(stream: IO[bytes] | RawIOBase) -> None:
    """Compare what `torch.save` wrote with what may be read. The stream is left at its beginning.

    Raises:
        UnpicklingError: it is no such archive, is compressed, or its pickle holds itself or a value that is too large.
        Exception: it is damaged.
    """
    if stream.read(len(_MAGIC)) != _MAGIC:
        raise pickle.UnpicklingError("it is no archive of torch.save")
    with ZipFile(stream) as archive:
        if any(one.compress_type != ZIP_STORED for one in archive.infolist()):
            raise pickle.UnpicklingError("it is compressed, and torch.save compresses nothing")
    stream.seek(0)
    check_pickle(private("ArchiveReader")(stream).get_record("data.pkl"))
    stream.seek(0)


def check_pickle(content: bytes) -> None:
    """Raise UnpicklingError where a pickle holds itself, or more values than may be read."""
    held = _held(content)
    sizes = [0] * len(held)  # 0 is unknown, -1 a value whose parts are being counted
    sizes[_LEAF] = 1
    below = {part for parts in held for part in parts}
    for top in range(len(held)):
        path = [top]
        while path:
            one = path[-1]
            if sizes[one] > 0:
                path.pop()
            elif sizes[one] < 0:
                sizes[one] = 1 + sum(sizes[part] for part in held[one])
            else:
                sizes[one] = -1
                unknown = [part for part in held[one] if sizes[part] <= 0]
                if any(sizes[part] < 0 for part in unknown):
                    raise pickle.UnpicklingError("it has a value that holds itself")
                path += unknown
    if sum(size for one, size in enumerate(sizes) if one not in below) > max(MOST, TIMES * len(content)):
        raise pickle.UnpicklingError(
            "it names the same values again and again, and is too large when they are written out"
        )


def _held(content: bytes) -> list[list[int]]:
    """The values that each value holds, by their numbers, as torch's reader makes them."""
    held: list[list[int]] = [[]]
    memo: dict[Any, int] = {}
    stack, marked = list[int](), list[list[int]]()
    for code, argument, _ in genops(content):
        name = code.name
        if name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name == "MARK":
            marked.append(stack)
            stack = []
        elif name in _NEW or name in _INTO:
            if (count := _NEW.get(name, _INTO.get(name))) is None:
                parts, stack = stack, marked.pop()
            else:
                parts = [stack.pop() for _ in range(count)]
            if name in _NEW:
                stack.append(len(held) if parts else _LEAF)
                held += [parts] if parts else []
            elif stack[-1] == _LEAF:
                raise pickle.UnpicklingError("it puts values into one that can hold none")
            else:
                held[stack[-1]] += parts
        elif name.startswith("EMPTY_") and name != "EMPTY_TUPLE":
            held.append([])
            stack.append(len(held) - 1)
        elif not code.stack_before and len(code.stack_after) == 1:
            stack.append(_LEAF)
        elif name not in _SILENT:
            raise pickle.UnpicklingError(f"it has the instruction {name}, which torch.save does not write")
    return held
