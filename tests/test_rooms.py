"""What imports may be, besides the contracts in pyproject.toml that `lint-imports` checks. Imports are read, not run."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import grimp

from tools import sizes

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "shardplan"


@cache
def graph() -> grimp.ImportGraph:
    """Who imports whom, at any depth of a file, by the names of modules; of other packages the first part of the name."""
    return grimp.build_graph("shardplan", include_external_packages=True, cache_dir=None)


def test_no_imports_run_in_a_circle():
    """Not between files of one room either: the contract is about rooms."""
    TopologicalSorter({m: graph().find_modules_directly_imported_by(m) for m in graph().modules}).prepare()


def test_core_imports_the_standard_library_alone():
    core = {"shardplan.core", *graph().find_descendants("shardplan.core")}
    imported = {name for module in core for name in graph().find_modules_directly_imported_by(module)}
    assert len(core) > 10
    assert imported - core - sys.stdlib_module_names == set()


def test_no_two_files_have_one_name():
    names = [path.name for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"]
    assert sorted({name for name in names if names.count(name) > 1}) == []


def private_torch_names(source: str) -> list[tuple[int, str]]:
    """(line, dotted name) of names of torch that have a private part: imported, or reached by attributes of
    what was imported. Names with two underscores (`__version__`) are public."""
    tree = ast.parse(source)
    bound: dict[str, str] = {}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found.add((node.lineno, alias.name))
                top = alias.name.partition(".")[0]
                bound[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                found.add((node.lineno, f"{node.module}.{alias.name}"))
                bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        parts: list[str] = []
        inner = node
        while isinstance(inner, ast.Attribute):
            parts.append(inner.attr)
            inner = inner.value
        if parts and isinstance(inner, ast.Name) and inner.id in bound:
            found.add((node.lineno, ".".join([bound[inner.id], *reversed(parts)])))
    return sorted((line, name) for line, name in found if name.partition(".")[0] == "torch" and _is_private(name))


def _is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def test_private_names_of_torch_are_in_torchlib_alone():
    texts = {path.relative_to(PACKAGE): path.read_text("utf-8") for path in PACKAGE.rglob("*.py")}
    outside = {str(path): text for path, text in texts.items() if path.parts[0] != "torchlib" and "torch" in text}
    found = {path: private_torch_names(text) for path, text in outside.items()}
    assert len(found) > 100
    assert {path: names for path, names in found.items() if names} == {}


PRIVATE = (
    "import torch.distributed._local_tensor",
    "from torch.distributed.tensor._dtensor_spec import DTensorSpec",
    "from torch.nn import _reduction",
    "import torch\ntorch._C._log_api_usage_once('x')",
    "import torch.distributed as dist\ndist._functional_collectives",
    "from torch import distributed as dist\ndef f():\n    return dist._world",
    "def f():\n    from torch.testing._internal import common_utils",
)
PUBLIC = "import torch\nfrom torch import nn\ntorch.__version__\nnn.Module\nself._thing\nfrom ._own import _x"


def test_the_private_name_test_finds_private_names_and_no_others():
    assert [source for source in PRIVATE if not private_torch_names(source)] == []
    assert private_torch_names(PUBLIC) == []


# Imports that the contracts forbid, by the file that has them, and what is printed about each.
FORBIDDEN = {
    "compiler/bind/sample.py": {
        "from shardplan.compiler.check import CHECKS": "shardplan.compiler.bind.sample -> shardplan.compiler.check (l.1)",
        "from ..check.facts import heads": "shardplan.compiler.bind.sample -> shardplan.compiler.check.facts (l.2)",
        "from ... import api": "shardplan.compiler.bind.sample -> shardplan.api (l.3)",
        "def f(): import shardplan.compiler.lower": "shardplan.compiler.bind.sample -> shardplan.compiler.lower (l.4)",
        "from pydantic import BaseModel": "shardplan.compiler.bind.sample -> pydantic (l.5)",
        "def f(): from rich.table import Table": "shardplan.compiler.bind.sample -> rich (l.6)",
        # What is allowed.
        "from shardplan.core.plan import Plan": None,
        "from .dead import dead_keys": None,
        "from ...language import parse_plan": None,
    },
    "compiler/layout/solver/sample.py": {
        "from ..model import ModelLayouts": "shardplan.compiler.layout.solver.sample -> shardplan.compiler.layout.model"
    },
    "styles/sample.py": {"import shardplan.language": "shardplan.styles.sample -> shardplan.language (l.1)"},
    "compiler/check/sample.py": {"import torch.nn": "shardplan.compiler.check.sample -> torch (l.1)"},
    "report/sample.py": {
        "from transformers import AutoConfig": "shardplan.report.sample -> transformers (l.1)",
        "import yaml": "shardplan.report.sample -> yaml (l.2)",
    },
    "api/sample.py": {
        "def f(): from shardplan.compat import adopt": "shardplan.api.sample -> shardplan.compat (l.1)",
        "def g(): from shardplan.convert import convert_plan": "shardplan.api.sample -> shardplan.convert (l.2)",
    },
    "convert/sample.py": {
        "import shardplan.language.reader": "shardplan.convert.sample -> shardplan.language.reader (l.1)"
    },
    "compat/sample.py": {
        "import shardplan.runtime.apply": "shardplan.compat.sample -> shardplan.runtime.apply (l.1)",
        "from shardplan.weights.folders import begin": "shardplan.compat.sample -> shardplan.weights.folders (l.2)",
        # What is allowed.
        "from shardplan import applied, load_plan": None,
        "from shardplan.weights import whole_folder": None,
    },
    "newroom/__init__.py": {"": "- shardplan.newroom"},
}


def test_every_contract_can_fail(tmp_path):
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(PACKAGE, tmp_path / "shardplan", ignore=shutil.ignore_patterns("__pycache__"))
    for path, lines in FORBIDDEN.items():
        file = tmp_path / "shardplan" / path
        file.parent.mkdir(exist_ok=True)
        file.write_text("\n".join(lines))
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache", "--no-logo"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert "Contracts: 0 kept, 9 broken." in result.stdout, result
    said = [said for lines in FORBIDDEN.values() for said in lines.values() if said]
    assert [one for one in said if one not in result.stdout] == []
    assert all(
        f"bind.sample -> shardplan.{room}" not in result.stdout for room in ("core", "language", "compiler.bind")
    )


def test_a_part_that_grows_needs_a_reason(tmp_path, capsys):
    for file, text in {"shardplan/core/one.py": "a = 1\nb = 2\n", "shardplan/core/data.json": "{}\n"}.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    rows = tmp_path / sizes.ROWS
    rows.parent.mkdir()
    rows.write_text("shardplan/core | 2 | 2 | it is needed\ndata of shardplan|9|0|\nshardplan/gone|1|1|\n")
    assert sizes.main([], tmp_path) == 1
    assert capsys.readouterr().err.startswith("shardplan/gone: there is no such part.")
    assert sizes.main(["--write"], tmp_path) == 0
    assert sizes.read(rows) == {"shardplan/core": (2, 2, "it is needed"), "data of shardplan": (1, 0, "")}
    (tmp_path / "shardplan/core/one.py").write_text("a = 1; b = 2; c = 3\n")
    assert sizes.main(["--write"], tmp_path) == 1
    said = capsys.readouterr().err
    assert "shardplan/core: 1 lines and 3 statements are more than its row in tools/sizes.txt allows." in said
    assert sizes.read(rows)["shardplan/core"] == (1, 2, "it is needed")
    rows.write_text("")
    assert sizes.main([], tmp_path) == 1  # a new part needs a row
