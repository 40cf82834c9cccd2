"""What must start fast imports nothing heavy. Each case runs in a fresh interpreter."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HEAVY = ("torch", "transformers", "numpy")

PROBE = """
import sys
{code}
print("imported:", *sorted({{name.partition(".")[0] for name in sys.modules}}))
"""


def imported_by(code: str) -> set[str]:
    """The top-level modules that running the code imports."""
    result = subprocess.run(
        [sys.executable, "-c", PROBE.format(code=code)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    (line,) = (line for line in result.stdout.splitlines() if line.startswith("imported:"))
    return set(line.split()[1:])


def command(*words: str) -> str:
    return f"from shardplan.cli.main import main; assert main({list(words)!r}) == 0"


LIGHT = {
    "import shardplan": "import shardplan",
    "from shardplan import PlanError, Report": "from shardplan import PlanError, Plan, Report",
    "--help": command("--help"),
    "--version": command("--version"),
    "validate --help": command("validate", "--help"),
    "lint": command("lint", "llama"),
    "list": command("list"),
    "explain": "from shardplan.render.catalog import catalog; " + command("explain", "SP201"),
    "schema": command("schema"),
    "schema --report": command("schema", "--report"),
}


@pytest.mark.parametrize("name", LIGHT)
def test_no_torch(name):
    assert not imported_by(LIGHT[name]) & set(HEAVY)


@pytest.mark.parametrize("name", ["import shardplan", "--help", "--version", "schema --report"])
def test_no_pydantic(name):
    assert not imported_by(LIGHT[name]) & {"pydantic", "yaml"}


@pytest.mark.torch
def test_this_test_can_fail():
    assert "torch" in imported_by("import shardplan, torch")
    assert "pydantic" in imported_by("import pydantic")
