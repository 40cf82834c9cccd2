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


# A small model, by settings.
SIZES = {
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "hidden_size": 64,
    "intermediate_size": 96,
    "vocab_size": 128,
    "num_key_value_heads": 4,
}
SMALL = [word for name, size in SIZES.items() for word in ("--set", f"{name}={size}")]


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
    "list --json": command("list", "--json"),
    "explain": "from shardplan.report.pages import pages; " + command("explain", "SP201"),
    "schema": command("editor", "schema"),
    "schema --report": command("editor", "schema", "--report"),
}


@pytest.mark.parametrize("name", LIGHT)
def test_no_torch(name):
    assert not imported_by(LIGHT[name]) & set(HEAVY)


# What draws no table: findings, and data of every kind, also that of a command that else draws one.
WITHOUT_TABLES = {name: code for name, code in LIGHT.items() if name != "list"} | {
    "lint --json": command("lint", "--json", "llama"),
    "lint, with findings in colour": """
import os
os.environ["FORCE_COLOR"] = "1"
from shardplan.cli.main import main
assert main(["lint", "tests/cases/err/SP113-expressions.yaml"]) == 1
""",
    "what verify, estimate and show import": """
import shardplan.cli.estimate_command, shardplan.cli.show_command, shardplan.cli.verify_command
import shardplan.report.estimate_text, shardplan.report.proof_text, shardplan.report.table
""",
}
WITH_MODELS = {
    "list MODEL --json": command("list", "llama", "--json"),
    "estimate --json": command("estimate", "llama", "auto", "--mesh", "tp=1", "--seq-len", "8", "--json", *SMALL),
    "verify --json": command("verify", "llama", "llama", "--tp", "2", "--json", *SMALL),
}


@pytest.mark.parametrize("name", WITHOUT_TABLES)
def test_no_rich(name):
    assert "rich" not in imported_by(WITHOUT_TABLES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_MODELS)
def test_no_rich_with_a_model(name):
    assert "rich" not in imported_by(WITH_MODELS[name])


@pytest.mark.parametrize("name", ["import shardplan", "--help", "--version", "schema --report"])
def test_no_pydantic(name):
    assert not imported_by(LIGHT[name]) & {"pydantic", "yaml"}


@pytest.mark.torch
def test_this_test_can_fail():
    assert "numpy" in imported_by("import shardplan, numpy")
    assert "pydantic" in imported_by("import pydantic")
    assert "rich" in imported_by(LIGHT["list"])
