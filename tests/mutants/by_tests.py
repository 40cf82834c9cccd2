"""The fast tests that are near a change, run in a copy of the project that has it."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from .asked import in_process
from .sites import ROOT

LIMIT = 900  # seconds for the tests of a mutant, also while other programs run: what takes longer waits for what does not come


class Copy:
    """The project in a folder of its own.

    Args:
        folder: that has it.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        listed = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, check=True
        )
        for name in filter(None, listed.stdout.decode().split("\0")):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)

    @contextmanager
    def changed(self, path: str, tree: ast.Module) -> Iterator[None]:
        """A file with other code."""
        file = self.folder / path
        self._write(file, ast.unparse(tree))
        try:
            yield
        finally:
            self._write(file, (ROOT / path).read_text())

    def _write(self, file: Path, text: str) -> None:
        file.write_text(text)
        for compiled in file.parent.glob(f"__pycache__/{file.stem}.*.pyc"):  # of the same second and length, perhaps
            compiled.unlink()

    def failing(self, files: Sequence[str]) -> str:
        """The first test of these that fails, or ""; "hangs" where they do not end."""
        try:
            return in_process(lambda: self._tested(files), LIMIT)
        except TimeoutError:
            return "hangs"
        except RuntimeError as error:  # the process died
            return str(error)

    def kills(self, path: str, tree: ast.Module, files: Sequence[str]) -> str:
        """The first test that fails where a file has other code, and passes where it has its own; "" where none does."""
        with self.changed(path, tree):
            failed = self.failing(files)
            those = [failed] if "::" in failed else files
            again = failed and self.failing(those)
        if not failed or failed == "hangs":
            return failed
        return failed if again and not self.failing(those) else ""  # a busy machine fails tests, too

    def _tested(self, files: Sequence[str]) -> str:
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
        seen = _Seen()
        options = [
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            "-m",
            "not slow and not exhaustive",
            f"--rootdir={self.folder}",
        ]
        for file in files:  # one by one: most mutants end with the first, and collecting all takes longer
            code = pytest.main([*options, file], plugins=[seen])
            assert code in (0, 1, 2, 3, 5), code
            if code in (1, 2, 3):
                return seen.failed or file
        return ""


class _Seen:
    failed = ""

    def pytest_runtest_logreport(self, report: object) -> None:
        if getattr(report, "failed", False):
            self.failed = self.failed or getattr(report, "nodeid", "")

    def pytest_collectreport(self, report: object) -> None:
        self.pytest_runtest_logreport(report)


@contextmanager
def copied() -> Iterator[Copy]:
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        yield Copy(Path(folder))
