"""The Python files of a release: of a wheel, a source distribution or a folder."""

from __future__ import annotations

import ast
import gc
import re
import tarfile
import zipfile
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path, PurePosixPath

PACKAGES = ("transformers", "torch", "nemo_automodel", "deepspeed")
READ = (".py", ".pyi")
# Of thousands of files, those that are parsed. Private names of torch are looked for in the texts of all.
PARSED = {
    "transformers": re.compile(r"\w+\.py$|distributed/|models/auto/|models/\w+/(modeling|configuration)_"),
    "torch": re.compile(r"distributed/"),
}


class Release:
    """A release.

    Args:
        path: a wheel, a source distribution (.tar.gz), or a folder that has the package's folder.

    Attributes:
        package: which of `PACKAGES`.
        texts: path from the package's folder on -> text.
        alike: paths of files that need not be parsed, as the release to compare with has the same ones.

    Raises:
        ValueError: none of the packages is in it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        found: dict[str, dict[str, str]] = {}
        for name, text in _files(path):
            parts = PurePosixPath(name).parts
            # A source distribution has all of it in a folder of its own.
            at = next((i for i in (0, 1) if len(parts) > i + 1 and parts[i] in PACKAGES), None)
            if at is not None:
                found.setdefault(parts[at], {})["/".join(parts[at + 1 :])] = text
        if len(found) != 1:
            raise ValueError(
                f"{path} has {' and '.join(sorted(found)) or 'none'} of {', '.join(PACKAGES)}; one is needed"
            )
        ((self.package, self.texts),) = found.items()
        self.alike: frozenset[str] = frozenset()

    @cached_property
    def trees(self) -> dict[str, ast.Module]:
        """Path -> what is in it; files that this Python cannot read are left out."""
        found = {}
        wanted = PARSED.get(self.package, re.compile(""))
        for name, text in self.texts.items():
            if wanted.match(name) and name not in self.alike and (tree := parsed(text)) is not None:
                found[name] = tree
        return found

    @property
    def name(self) -> str:
        """What it is called in a list."""
        return self.path.name.removesuffix(".tar.gz").partition("-py3")[0].partition("-cp3")[0]


def parsed(text: str) -> ast.Module | None:
    """What is in a file; None where this Python cannot read it."""
    collects = gc.isenabled()
    gc.disable()  # trees have no circles, and looking for these takes longer than the parsing
    try:
        return ast.parse(text)
    except SyntaxError:
        return None
    finally:
        if collects:
            gc.enable()


def _files(path: Path) -> Iterator[tuple[str, str]]:
    if path.is_dir():
        for file in sorted(path.rglob("*")):
            if file.suffix in READ:
                yield file.relative_to(path).as_posix(), file.read_text("utf-8", "replace")
    elif zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as opened:
            for name in sorted(opened.namelist()):
                if name.endswith(READ):
                    yield name, opened.read(name).decode("utf-8", "replace")
    else:
        with tarfile.open(path) as opened:
            for member in sorted(opened.getmembers(), key=lambda one: one.name):
                if member.isfile() and member.name.endswith(READ) and (read := opened.extractfile(member)):
                    yield member.name, read.read().decode("utf-8", "replace")
