"""How large and how deep the values of a pickle are when they are written out. A few hundred bytes can name a tuple twice in a tuple, sixty
times over, and whoever hashes or prints it never ends; of one in a hundred thousand others Python's own code for hashes ends the process. No
reader of data looks at this before it hashes, calls and prints."""

from __future__ import annotations

import pickle
from io import SEEK_SET, BufferedReader, RawIOBase
from pickletools import anyobject, genops, opcodes
from typing import IO, Any
from zipfile import ZIP_STORED, ZipFile

from shardplan.torchlib.private import private

MOST, TIMES = 10_000_000, 10  # values, written out, and how many for each byte, where these are more
DEEPEST = 200  # values in values
_MAGIC = b"PK\x03\x04"  # by which torch tells the archives that `torch.save` writes from its older forms
# Of so many values; None is all since the last mark.
_NEW = {"TUPLE": None, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3, "REDUCE": 2, "NEWOBJ": 2, "BINPERSID": 1,
        "EMPTY_LIST": 0, "EMPTY_DICT": 0, "EMPTY_SET": 0}  # fmt: skip
_INTO = {"APPEND": 1, "APPENDS": None, "SETITEM": 2, "SETITEMS": None, "BUILD": 1}  # the value below them
_GLOBAL = {"GLOBAL": 0, "STACK_GLOBAL": 2}
_PUT, _GET, _SILENT = {"BINPUT", "LONG_BINPUT", "MEMOIZE"}, {"BINGET", "LONG_BINGET"}, {"PROTO", "FRAME", "STOP"}
# A number, a text, bytes or None: no instruction that gives any object.
_LEAVES = {
    one.name for one in opcodes if not one.stack_before and one.stack_after and one.stack_after[0] is not anyobject
} - {"MARK", *_NEW}
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
    """Follow a pickle as a reader makes its values, and make none.

    Raises:
        UnpicklingError: it has a value that holds itself, values that are deeper or more than may be read, or an instruction that torch
            does not write.
        Exception: it is damaged.
    """
    sizes, depths, is_in_another = [1], [0], bytearray(1)
    memo: dict[Any, int] = {}
    stack, marked = list[int](), list[list[int]]()
    for code, argument, _ in genops(content):
        name = code.name
        if name in _LEAVES:
            stack.append(_LEAF)
        elif name in _GET:
            stack.append(memo[argument])
        elif name in _PUT:
            place = len(memo) if name == "MEMOIZE" else int(argument or 0)
            if place > len(content):  # Python's reader in C has room for all places below the largest
                raise pickle.UnpicklingError(f"it remembers a value as number {place}")
            memo[place] = stack[-1]
        elif name == "MARK":
            marked.append(stack)
            stack = []
        elif name in _NEW or name in _INTO:
            if (count := _NEW.get(name, _INTO.get(name))) is None:
                parts, stack = stack, marked.pop()
            else:
                parts = stack[len(stack) - count :]
                del stack[len(stack) - count :]
            if name in _NEW:
                stack.append(len(sizes))
                sizes.append(1)
                depths.append(0)
                is_in_another.append(False)
            one = stack[-1]
            for part in parts:
                is_in_another[part] = True
            if one == _LEAF or is_in_another[one]:
                raise pickle.UnpicklingError("it has a value that holds itself, or one that can hold none")
            sizes[one] += sum([sizes[part] for part in parts])
            depths[one] = max([depths[one], *[1 + depths[part] for part in parts]])
            if depths[one] > DEEPEST:
                raise pickle.UnpicklingError(f"it has values in values, more than {DEEPEST} deep")
        elif name in _GLOBAL:
            del stack[len(stack) - _GLOBAL[name] :]
            stack.append(_LEAF)
        elif name not in _SILENT:
            raise pickle.UnpicklingError(f"it has the instruction {name}, which torch does not write")
    if sum(size for size, inner in zip(sizes, is_in_another, strict=True) if not inner) > max(
        MOST, TIMES * len(content)
    ):
        raise pickle.UnpicklingError(
            "it names the same values again and again, and is too large when they are written out"
        )
