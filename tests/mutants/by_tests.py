"""The fast tests that run a change, in a copy of the project that has it."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from .asked import in_process
from .near_tests import near
from .reaching_tests import MODULE, folder_of_notes, key, reaching, with_notes
from .sites import ROOT, Site

WHOLE = 900.0  # seconds that a file of tests may take without a change, also while other programs run
LEAST, TIMES = (
    60.0,
    5,
)  # seconds that tests of a mutant may take, and how many times what they took without it: then they hang
REMEMBERED = ROOT / "build/mutants.json"


@dataclass
class Ran:
    """Tests that ran.

    Args:
        tests: each -> whether it passed.
        failed: the first that failed; a file that cannot be imported; what ended the process; "hangs".
        seconds: how long they all took.
    """

    tests: dict[str, bool] = field(default_factory=dict)
    failed: str = ""
    seconds: float = 0.0


class Copy:
    """The project in a folder of its own.

    Args:
        folder: that has it.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        for name in _files():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)

    @contextmanager
    def changed(self, texts: Mapping[str, str]) -> Iterator[None]:
        """Files with other text."""
        for path, text in texts.items():
            self._write(self.folder / path, text)
        try:
            yield
        finally:
            for path in texts:
                self._write(self.folder / path, (ROOT / path).read_text())

    def _write(self, file: Path, text: str) -> None:
        file.write_text(text)
        for compiled in file.parent.glob(f"__pycache__/{file.stem}.*.pyc"):  # of the same second and length, perhaps
            compiled.unlink()

    def run(self, file: str, tests: Sequence[str] | None = None, *, limit: float = WHOLE, first: bool = True) -> Ran:
        """Run the fast tests of a file, or these of them.

        Args:
            limit: seconds.
            first: end with the first that fails.
        """
        begun = time.monotonic()
        try:
            ran = Ran(*in_process(lambda: self._tested(file, tests, first), limit))
        except TimeoutError:
            ran = Ran(failed="hangs")
        except RuntimeError as error:  # the process died
            ran = Ran(failed=f"{file}: {error}")
        ran.seconds = time.monotonic() - begun
        return ran

    def kills(self, texts: Mapping[str, str], file: str, tests: Sequence[str], limit: float) -> str:
        """The first of these tests that fails twice where files have other text, as a busy machine fails tests, too; "" where none
        does."""
        with self.changed(texts):
            failed = self.run(file, tests, limit=limit).failed
            if failed in ("", "hangs"):
                return failed
            return failed if self.run(file, [failed] if "::" in failed else tests, limit=limit).failed else ""

    def _tested(self, file: str, tests: Sequence[str] | None, first: bool) -> tuple[dict[str, bool], str]:
        import pytest

        own = (ROOT, ROOT / "tests")  # tests that this process has collected are modules of both
        for name, module in [*sys.modules.items()]:
            if (
                name.split(".")[0] in ("tests", "shardplan")
                or Path(getattr(module, "__file__", None) or "").parent in own
            ):
                del sys.modules[name]
        sys.path[:] = [str(self.folder), *(one for one in sys.path if Path(one or ".").resolve() not in own)]
        os.environ["PYTHONPATH"] = str(self.folder)
        os.chdir(self.folder)
        seen = _Seen(tests)
        code = pytest.main(
            [
                *(["-x"] if first else []),
                "-q",
                "-p",
                "no:cacheprovider",
                "-m",
                "not slow and not exhaustive",
                f"--rootdir={self.folder}",
                file,
            ],
            plugins=[seen],
        )
        assert code in (0, 1, 2, 3, 5), code
        return seen.tests, (seen.failed or file) if code in (1, 2, 3) else ""


class _Seen:
    """Tests as they end, of those that are wanted."""

    def __init__(self, wanted: Sequence[str] | None):
        self.wanted = None if wanted is None else {*wanted}
        self.tests: dict[str, bool] = {}
        self.failed = ""

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        if self.wanted is not None:
            items[:] = [item for item in items if item.nodeid in self.wanted]

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.tests[report.nodeid] = self.tests.get(report.nodeid, True) and not report.failed
        if report.failed:
            self.failed = self.failed or report.nodeid

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.failed = self.failed or report.nodeid


@contextmanager
def copied() -> Iterator[Copy]:
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        yield Copy(Path(folder))


class Tests:
    """Which tests kill changes of code. What was found out is remembered in a file: a run that was stopped goes on.

    Args:
        sites: all that are asked for.
        path: of the file. A test that killed a change does as long as both files are the same; "passes" holds for one state of the
            project, and which tests run a place for one of the package and of their file.
    """

    def __init__(self, copy: Copy, sites: Sequence[Site], path: Path = REMEMBERED):
        self.copy, self.sites, self.path = copy, sites, path
        self.known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def verdict(self, site: Site, files: int | None = None) -> str:
        """The test that kills a change, of so many near files at most; "" where none does."""
        told, of_file = key(site), _digest(site.path)
        for by, *rest in self.known.get(told, []):
            if rest == [of_file, _digest(*([by.partition(":")[0]] if by else _files()))]:
                return by
        text = {site.path: ast.unparse(site.tree())}
        for file in near(site.path)[:files]:
            tests, seconds = self._reaching(site, file)
            if by := self.copy.kills(text, file, tests, LEAST + TIMES * seconds) if tests else "":
                by = f"{file}: hangs" if by == "hangs" else by
                self._remember(told, [[by, of_file, _digest(by.partition(":")[0])]])
                return by
        if files is None:
            self._remember(told, [["", of_file, _digest(*_files())]])
        return ""

    def _reaching(self, site: Site, file: str) -> tuple[list[str], float]:
        """The tests of a file that run a place, and how many seconds the whole file takes. Those that fail without a change are none."""
        code = [one for one in _files() if one.startswith("shardplan/")]
        told = f"{file} {_digest(file, *code)} {sha256(repr([*map(key, self.sites)]).encode()).hexdigest()[:12]}"
        if told not in self.known:
            by_path = defaultdict[str, list[Site]](list)
            for one in self.sites:
                by_path[one.path].append(one)
            texts = {path: with_notes(path, those) for path, those in by_path.items()}
            notes = folder_of_notes(self.copy.folder)
            notes.write_text("")
            notes.chmod(0o666)
            (self.copy.folder / "shardplan/_reached.py").write_text(MODULE)
            with self.copy.changed(texts):
                ran = self.copy.run(file, first=False)
            assert ran.tests or not ran.failed, f"{file} does not run to its end: {ran.failed}"
            failed = [test for test, passed in ran.tests.items() if not passed]
            again = self.copy.run(file, failed, first=False).tests if failed else {}  # without notes
            tests = {test: passed for test, passed in ran.tests.items() if passed or again.get(test)}
            self._remember(told, [reaching(notes.read_text(), tests), ran.seconds])
        found, seconds = self.known[told]
        return found.get(key(site), []), seconds

    def _remember(self, told: str, found: Any) -> None:
        self.known[told] = found
        self.path.parent.mkdir(exist_ok=True)
        self.path.write_text(json.dumps(self.known, indent=1))


@cache
def _files() -> tuple[str, ...]:
    """All files of the project that git would keep."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, check=True
    )
    return tuple(name for name in listed.stdout.decode().split("\0") if name and (ROOT / name).is_file())


@cache
def _digest(*files: str) -> str:
    return sha256(b"\0".join(name.encode() + b"\n" + (ROOT / name).read_bytes() for name in files)).hexdigest()[:12]
