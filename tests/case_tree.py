"""The case tree: in each file a command line, the files that it reads and the exact text that it prints.

    tests/cases/err/<CODE>-<slug>.case   a command with findings (exit code 1)
    tests/cases/ok/<slug>.case           a command without errors (exit code 0)
    tests/cases/changed/<slug>.case      a command that says what differs (exit code 1, without findings)
    tests/cases/models/*.json            configurations of models that cases name

A case has the form of Go's txtar archives, which holds text of any kind, also what is no YAML and no UTF-8:

    # run: validate models/llama-3.1-8b.json plan.yaml --tp 2
    -- plan.yaml --
    version: "1"
    tensor_parallel: {}
    -- expected --
    ...

The command runs in a folder that holds the case's files and `models`. Lines are counted from a file's marker.
`python tests/update_cases.py` writes what stands under `expected`, which comes last: what the command prints, and after a
line `-- wrote NAME --` each file that it made or changed. Versions of what is installed stand there as `<torch>`,
rounding errors of a proof, which another processor has others of, as `<error>`.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

ROOT = Path(__file__).parent.parent
CASES = ROOT / "tests" / "cases"
EXIT_CODES = {"ok": 0, "err": 1, "changed": 1}
COMMAND = "# run: "
FILE = re.compile(rb"^-- (\S+) --\n", re.MULTILINE)
EXPECTED = re.compile(rb"^-- expected --\n.*", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Case:
    """One file of the tree.

    Args:
        path: where it is.
        command: the words after `shardplan`.
        files: the files that the command reads, by name.
        expected: the text that it prints; None where none has been written yet.
    """

    path: Path
    command: tuple[str, ...]
    files: Mapping[str, bytes]
    expected: str | None

    @property
    def name(self) -> str:
        return f"{self.path.parent.name}/{self.path.stem}"

    @property
    def code(self) -> str | None:
        """The diagnostic code that an `err` case is named after."""
        return self.path.name.partition("-")[0] if self.path.parent.name == "err" else None

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.path.parent.name]


def read(path: Path) -> Case:
    """Raises ValueError where the file does not begin with its command line."""
    head, *rest = FILE.split(path.read_bytes())
    first = head.decode().partition("\n")[0]
    if not first.startswith(COMMAND):
        raise ValueError(f"{path} does not begin with `{COMMAND}`")
    files = {name.decode(): content for name, content in zip(rest[::2], rest[1::2], strict=True)}
    expected = files.pop("expected", None)
    words = tuple(shlex.split(first.removeprefix(COMMAND)))
    return Case(path, words, files, None if expected is None else expected.decode())


def write_expected(case: Case, text: str) -> None:
    """What stands above stays as it is."""
    above = EXPECTED.sub(b"", case.path.read_bytes())
    end = b"" if above.endswith(b"\n") else b"\n"
    case.path.write_bytes(above + end + b"-- expected --\n" + text.encode())


def cases() -> Iterator[Case]:
    """Every case, by folder and name."""
    for folder in sorted(EXIT_CODES):
        yield from map(read, sorted((CASES / folder).glob("*.case")))


def unpack(case: Case, folder: Path) -> None:
    """Put what the command reads into a folder."""
    (folder / "models").symlink_to(CASES / "models")
    for name, content in case.files.items():
        (folder / name).write_bytes(content)


def _written(case: Case, folder: Path) -> str:
    """The files that a command made or changed."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    texts = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
    new = {name: text.decode() for name, text in texts.items() if case.files.get(name) != text}
    return "".join(f"-- wrote {name} --\n{text}" for name, text in new.items())


def _without_versions(text: str) -> str:
    """An installed version stands next to its name alone (`"torch": "2.13.0"`, `torch: 2.13.0 -> 2.14.0`)."""
    from shardplan.core.versions import installed_versions

    for name, version in installed_versions().items():
        text = re.sub(rf'({name}"?: .*?){re.escape(version)}(?="|$)', rf"\1<{name}>", text, flags=re.MULTILINE)
    return text


def without_operation(text: str) -> str:
    """In its errors torch names the operation since 2.15."""
    return text.replace("RuntimeError: mm: ", "RuntimeError: ")


def _without_errors(text: str) -> str:
    return re.sub(r"(?<=<td class=n>)\d\.\de-(0[6-9]|1\d)(?=</td>)", "<error>", text)


def run_case(case: Case) -> tuple[int, str]:
    """The exit code, and the output of a case's command, without colour, with the files that it wrote."""
    from shardplan.cli.main import main

    environment = {key: value for key, value in os.environ.items() if key not in {"NO_COLOR", "FORCE_COLOR"}}
    output = io.StringIO()
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.chdir(folder),
        contextlib.redirect_stdout(output),
        patch.dict(os.environ, environment, clear=True),
        patch.object(sys, "path", [*sys.path]),  # to which the command adds its folder
    ):
        unpack(case, Path(folder))
        code = main(list(case.command))
        written = _written(case, Path(folder))
    return code, _without_errors(without_operation(_without_versions(output.getvalue() + written)))
