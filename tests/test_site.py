"""The site is whole: every page has its place, and every public name is on the page of the Python interface."""

import ast
import re
from pathlib import Path

import shardplan
from shardplan.cli.reference import cli_document
from shardplan.language.form import KNOWN_VERSION
from shardplan.report import json as reports
from shardplan.report import lock_json

ROOT = Path(__file__).parent.parent
CONFIG = (ROOT / "mkdocs.yml").read_text("utf-8")


def test_every_page_is_in_the_navigation():
    listed = set(re.findall(r"^ +- [^:]+: (\S+\.md)$", CONFIG, flags=re.MULTILINE))
    docs = ROOT / "docs"
    written = {str(path.relative_to(docs)) for pattern in ("*.md", "guides/*.md") for path in docs.glob(pattern)}
    assert listed - {"decisions/README.md"} == written
    by_question = (docs / "index.md").read_text("utf-8")
    assert [page for page in sorted(listed - {"index.md"}) if f"({page})" not in by_question] == []


def test_every_public_name_is_on_the_page_of_the_python_interface():
    page, _, others = (ROOT / "docs" / "api.md").read_text("utf-8").partition("## Plans of other projects")
    named = re.findall(r"^::: (\S+)\.(\w+)$", page, flags=re.MULTILINE)
    training = ast.parse((ROOT / "shardplan" / "runtime" / "training" / "__init__.py").read_text("utf-8")).body[-1]
    assert isinstance(training, ast.Assign)
    public = {
        *shardplan.__all__,
        *ast.literal_eval(training.value),
        *"FSDP2Config MegatronFSDPConfig DDPConfig Muon".split(),
    }
    assert others and sorted(name for _, name in named) == sorted(public - {"__version__"})


def test_the_names_are_where_the_page_says():
    for module, name in re.findall(
        r"^::: (\S+)\.(\w+)$", (ROOT / "docs" / "api.md").read_text("utf-8"), flags=re.MULTILINE
    ):
        place = ROOT / module.replace(".", "/")
        path = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
        assert re.search(rf"^(def|class) {name}\b", path.read_text("utf-8"), flags=re.MULTILINE), f"{module}.{name}"


def test_the_page_of_what_is_stable_has_the_versions():
    page = (ROOT / "docs" / "stable.md").read_text("utf-8")
    rows = {
        cells[1].strip(): cells[2].strip()
        for cells in (line.split("|") for line in page.splitlines())
        if len(cells) == 5
    }
    said = {re.sub(r"\]\([^)]*\)|\[", "", name): version for name, version in rows.items() if version.isdigit()}
    assert said == {
        "the plan language": KNOWN_VERSION,
        "the JSON Schema of plans": KNOWN_VERSION,
        "the JSON Schema of reports": reports.VERSION,
        "locks of plans": lock_json.VERSION,
    }
    codes = re.findall(r"^\| (\d) \|", cli_document().partition("## Exit codes")[2], flags=re.MULTILINE)
    (row,) = (line for line in page.splitlines() if "exit-codes" in line)
    assert re.findall(r"\b\d\b", row) == codes
