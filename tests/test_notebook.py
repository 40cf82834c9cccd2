"""What a notebook shows: results as the command line prints them, a refused plan without the frames of the call, no ANSI codes."""

import subprocess
import sys
from importlib import import_module
from inspect import signature
from types import SimpleNamespace

import pytest

import shardplan
from shardplan import PlanError
from shardplan.api import load_plan
from shardplan.core.estimates import Estimate
from shardplan.core.plan_changes import PlanDiff
from shardplan.core.plan_lock import LockCheck
from shardplan.core.report import NumericProof, Report
from shardplan.report.notebook import SHOWN, show_results
from tests.case_tree import ROOT

MODEL = shardplan.Model("tests.case_models:blocks", inputs="tests.case_models:features")
RIGHT = {"version": "1", "tensor_parallel": {"layers.*.up": "colwise", "layers.*.down": "rowwise"}}
WHOLE_DOWN = {"version": "1", "tensor_parallel": {"layers.*.up": "colwise"}}
MISSPELT = {"version": "1", "tensor_parallel": {"layers.*.up": "colwyse"}, "data_paralel": {}}
# What a finding of a dict names in place of a file, a line and a column.
PLACE = '--> <dict>["tensor_parallel"]["layers.*.up"]'


class Shell:
    """As far as results are registered with it."""

    def __init__(self):
        self.printers = {}
        formatter = SimpleNamespace(for_type_by_name=self.register)
        self.display_formatter = SimpleNamespace(formatters={"text/plain": formatter})

    def register(self, module, name, printer):
        self.printers[module, name] = printer

    def show(self, value) -> str:
        written: list[str] = []
        kind = type(value)
        self.printers[kind.__module__, kind.__name__](value, SimpleNamespace(text=written.append), False)
        return "".join(written)


@pytest.fixture
def shell():
    made = Shell()
    show_results(made)
    return made


def test_what_is_registered_exists():
    kinds = (Report, NumericProof, Estimate, PlanDiff, LockCheck)
    assert {(kind.__module__, kind.__name__) for kind in kinds} == set(SHOWN)
    for file, function in SHOWN.values():
        assert "color" in signature(getattr(import_module(f"shardplan.report.{file}"), function)).parameters


def test_results_are_text(shell):
    wrong = shell.show(shardplan.validate(MODEL, WHOLE_DOWN, {"tp": 2}))
    assert "error[SP408]" in wrong and PLACE in wrong and "= help: add `layers.*.down: rowwise`" in wrong
    right = shell.show(shardplan.validate(MODEL, RIGHT, {"tp": 2}))
    assert right.startswith("no findings") and "proven at tp=2" in right
    proof = shell.show(shardplan.verify(MODEL, RIGHT, {"tp": 2}).proof)
    assert "layers.0-1.up.weight" in proof and "equal" in proof
    diff = shell.show(shardplan.diff_plans(WHOLE_DOWN, RIGHT))
    assert "no rule -> rowwise" in diff
    assert "\x1b" not in wrong + right + proof + diff


def test_print_has_the_help():
    text = str(shardplan.validate(MODEL, MISSPELT, {"tp": 2}))
    assert "error[SP106]: there is no style `colwyse`\n     = help: did you mean `colwise`?" in text


def test_a_refused_plan_is_its_findings(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    with pytest.raises(PlanError) as raised:
        load_plan(MISSPELT)
    lines = raised.value._render_traceback_()
    assert lines[0] == "PlanError" and any(PLACE in line for line in lines)
    assert "= help: did you mean `colwise`?" in "\n".join(lines) and "\x1b" not in "".join(lines)


REGISTERED = """
import sys
from types import SimpleNamespace
seen = []
formatter = SimpleNamespace(for_type_by_name=lambda module, name, printer: seen.append(name))
shell = SimpleNamespace(display_formatter=SimpleNamespace(formatters={"text/plain": formatter}))
sys.modules["IPython"] = SimpleNamespace(get_ipython=lambda: shell)
import shardplan
print(*seen, "torch" in sys.modules)
"""


def test_the_import_in_a_notebook_registers_them_and_imports_no_torch():
    done = subprocess.run([sys.executable, "-c", REGISTERED], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [*(name for _, name in SHOWN), "False"]


CELLS = f"""
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
for cell in ("import shardplan", "shardplan.load_plan({MISSPELT!r})", "shardplan.diff_plans({WHOLE_DOWN!r}, {RIGHT!r})"):
    shell.run_cell(cell)
"""


def test_ipython_itself():
    pytest.importorskip("IPython", reason="IPython is not installed")
    done = subprocess.run([sys.executable, "-c", CELLS], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""
    assert "Traceback" not in done.stdout and "\x1b[1;31m" not in done.stdout
    assert PLACE in done.stdout and "no rule -> rowwise" in done.stdout and "PlanDiff(" not in done.stdout
