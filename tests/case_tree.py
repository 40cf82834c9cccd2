"""The case tree: plans, command lines and the exact text that they give.

    tests/cases/err/<CODE>-<slug>.yaml|.json   a plan with findings (exit code 1)
    tests/cases/ok/<slug>.yaml|.json           a plan without errors (exit code 0)
    <same name>.args                           the command line, one line; without it `lint {plan}`
    <same name>.out                            the exact output, written by `python tests/update_cases.py`
    tests/cases/models/*.json                  configurations of models that cases name

In a command line {plan} is the case's plan and {models} the folder of configurations; both are relative to
the project's root, where cases are run. A folder `parts` beside the cases holds what plans extend.
"""

from __future__ import annotations

import contextlib
import io
import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

ROOT = Path(__file__).parent.parent
CASES = Path("tests/cases")
ENDINGS = {".yaml", ".yml", ".json"}
EXIT_CODES = {"ok": 0, "err": 1}


@dataclass(frozen=True)
class Case:
    """One plan of the tree; paths are relative to the root."""

    plan: Path

    @property
    def name(self) -> str:
        return f"{self.plan.parent.name}/{self.plan.name}"

    @property
    def out(self) -> Path:
        return ROOT / self.plan.with_suffix(".out")

    @property
    def code(self) -> str | None:
        """The diagnostic code that an `err` case is named after."""
        return self.plan.name.partition("-")[0] if self.plan.parent.name == "err" else None

    @property
    def expected_exit(self) -> int:
        return EXIT_CODES[self.plan.parent.name]

    @property
    def words(self) -> list[str]:
        """The command line."""
        args = ROOT / self.plan.with_suffix(".args")
        line = args.read_text("utf-8") if args.exists() else "lint {plan}"
        line = line.replace("{plan}", shlex.quote(self.plan.as_posix()))
        return shlex.split(line.replace("{models}", (CASES / "models").as_posix()))


def cases() -> Iterator[Case]:
    """Every case, by folder and name."""
    for folder in sorted(EXIT_CODES):
        for path in sorted((ROOT / CASES / folder).iterdir()):
            if path.suffix in ENDINGS:
                yield Case(path.relative_to(ROOT))


def run_command(words: list[str]) -> tuple[int, str]:
    """The exit code and the output of a command line that is run at the project's root, without colour."""
    from shardplan.cli.main import main

    environment = {key: value for key, value in os.environ.items() if key not in {"NO_COLOR", "FORCE_COLOR"}}
    output = io.StringIO()
    with (
        contextlib.chdir(ROOT),
        contextlib.redirect_stdout(output),
        patch.dict(os.environ, environment, clear=True),
    ):
        code = main(words)
    return code, output.getvalue()
