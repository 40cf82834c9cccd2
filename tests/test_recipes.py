"""The recipes of docs/extending.md, done on a copy of the project: the files that the page names, and no others, are
edited by hand; the rest is written by the commands that it names, and the new thing works."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.doc_blocks import ROOT
from tests.sampling import sampled

PAGE = (ROOT / "docs" / "extending.md").read_text("utf-8")
PLAN = 'version: "1"\nname: mine\n'
COPIED = ("shardplan", "plans", "schemas", "docs", "tools", "README.md", "pyproject.toml")
TESTS = ("case_tree.py", "update_cases.py", "test_moves.py", "cases/models")


@dataclass(frozen=True)
class Recipe:
    """What somebody does who follows a recipe.

    Args:
        title: of the recipe in the page.
        edits: file -> old text -> new text; "" is the end of the file, which may be new.
        commands: those that the recipe names.
        generated: file that they write -> a text in it.
        files: files of the person's own, next to the project.
        used: command -> a text that it prints; it ends well.
    """

    title: str
    edits: Mapping[str, Mapping[str, str]]
    commands: tuple[str, ...] = ()
    generated: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    used: Mapping[str, str] = field(default_factory=dict)


PARTIAL = """    Style(
        name="rowwise_partial",
        summary="As rowwise, but the partial sums are handed on.",
        kinds=MATMUL,
        weight=IN,
        bias=ParameterStyle(None, "P"),
        input_sources=(V(-1),),
        input_destination=V(-1),
        output_source=P,
    ),
"""
STYLE = Recipe(
    "A style",
    {
        "shardplan/styles/linear.py": {
            '    Style(\n        name="rowwise_seq",\n': f'{PARTIAL}    Style(\n        name="rowwise_seq",\n'
        }
    },
    ("python tools/generate.py", "python tools/style_table.py"),
    {
        "schemas/plan.schema.json": '"rowwise_partial"',
        "docs/layouts.md": "`rowwise_partial`",
        "docs/styles.md": "`rowwise_partial`",
    },
    {"mine.yaml": f"{PLAN}tensor_parallel:\n  a.b: rowwise_partial\n"},
    {"python -m shardplan lint mine.yaml": ""},
)

# Each rank's slice among zeros is a summand of the whole.
MOVED = """
import torch
from torch import nn

from shardplan import Model, validate
from shardplan.core.moves import MOVES, MoveOps
from shardplan.core.layout import P, V
from shardplan.styles import STYLES
from shardplan.styles.style_record import ParameterStyle, Style
from shardplan.styles.sound import missing

style = Style(name="padded", summary="", weight=ParameterStyle("out", "V"), input_sources=(), output_source=V(-1), output_destination=P)
assert missing(style) is None
STYLES["padded"] = style


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x):
        return self.up(x)


model = nn.Sequential(Block(), nn.ReLU())
rules = {"0": {"style": "input_with_grad_allreduce", "output": "all_reduce"}, "0.up": "padded"}
plan = {"version": "1", "name": "mine", "tensor_parallel": rules}
report = validate(Model(model, inputs=lambda seed: {"input": torch.randn(2, 3, 8)}), plan, {"tp": 2})
assert report.ok, report
print(STYLES["padded"].output_destination, "proven")
"""
MOVE = Recipe(
    "A move",
    {
        "shardplan/core/moves.py": {
            '    ("P", "I")': '    ("V", "P"): MoveOps("pad", "slice"),\n    ("P", "I")',
        },
        "tests/test_moves.py": {"move_ops(V(1), P) is None": "move_ops(V(1), P) is not None"},
    },
    files={"moved.py": MOVED},
    used={"python moved.py": "P proven"},
)

COMPILED = """
from shardplan import load_plan
from shardplan.runtime.apply.compilation import Frames

plan = load_plan("mine.yaml").file
print(Frames(plan.compile, "eager").compile.keywords["dynamic"])
"""
FIELD = Recipe(
    "A field of a section",
    {
        "shardplan/core/sections.py": {
            '    backend: str = option("inductor"': '    dynamic: bool = option(False, "Lengths may change from step to step.")\n'
            '    backend: str = option("inductor"',
        },
        "shardplan/runtime/apply/compilation.py": {
            "fullgraph=section.fullgraph": "fullgraph=section.fullgraph, dynamic=section.dynamic",
        },
    },
    ("python tools/generate.py",),
    {"schemas/plan.schema.json": "Lengths may change from step to step."},
    {"mine.yaml": f"{PLAN}compile: {{modules: [a.*], dynamic: true}}\n", "compiled.py": COMPILED},
    {"python -m shardplan lint mine.yaml": "", "python compiled.py": "True"},
)

NOTHING = '''"""A plan that splits nothing is no plan for tp above 1."""

from __future__ import annotations

from collections.abc import Iterator

from shardplan.core.diagnostics import Code, Diagnostic, Severity

from .facts import Facts

NOTHING = Code("SP399")


def check(facts: Facts) -> Iterator[Diagnostic]:
    """One finding for the plan."""
    if not facts.splits and (facts.resolved.sizes.tp or 1) > 1:
        yield Diagnostic(code=NOTHING, severity=Severity.ERROR, message="the plan splits nothing")
'''
PAGE_OF_CODE = """---
code: SP399
title: nothing is split
---

Every rank would compute the same.

Wrong:

```yaml
# shardplan validate llama-3.2-1b.json mine.yaml --tp 2
version: "1"
name: mine
```

Right:

```yaml
# shardplan validate llama-3.2-1b.json mine.yaml
version: "1"
name: mine
```
"""
CASE = f"# run: validate models/llama-3.2-1b.json plan.yaml --tp 2\n-- plan.yaml --\n{PLAN}-- expected --\n"
CHECK = Recipe(
    "A check",
    {
        "shardplan/compiler/check/nothing.py": {"": NOTHING},
        "shardplan/compiler/check/__init__.py": {
            "    kinds,\n    packed_weights,\n    parameter_hooks,\n    sequence": "    kinds,\n    nothing,\n    packed_weights,\n    parameter_hooks,\n    sequence",
            "    training_kernels,\n)\n\nCHECKS": "    training_kernels,\n    nothing,\n)\n\nCHECKS",
        },
        "docs/diagnostics/SP399.md": {"": PAGE_OF_CODE},
        "tests/cases/err/SP399-nothing.case": {"": CASE},
    },
    ("python tests/update_cases.py SP399", "python tools/generate.py"),
    {
        "tests/cases/err/SP399-nothing.case": "error[SP399]: the plan splits nothing",
        "docs/diagnostics.md": "SP399",
        "docs/diagnostics/SP399.md": "## What it prints",
    },
    used={"python -m shardplan explain SP399": "nothing is split"},
)

FUNCTION = '''"""The data-parallel wrapping pass that leaves the model as it is."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardplan.core.sections import DataParallel

from .wrapped import Wrapped


def apply_replicas(model: nn.Module, mesh: DeviceMesh, section: DataParallel, wrapped: Wrapped) -> nn.Module:
    """The model: nobody averages its gradients."""
    return model
'''
RECORD = """REPLICAS = Backend(
    name="replicas",
    summary="whole copies whose gradients the script averages",
    fields=frozenset(),
    splits=frozenset({Axis.DP_REPLICATE}),
)

"""
BACKEND = Recipe(
    "A data-parallel backend",
    {
        "shardplan/styles/backends/__init__.py": {
            "BACKENDS: dict": f"{RECORD}BACKENDS: dict",
            "MEGATRON_FSDP, DDP)": "MEGATRON_FSDP, DDP, REPLICAS)",
        },
        "shardplan/runtime/apply/replicas.py": {"": FUNCTION},
        "shardplan/runtime/apply/backends.py": {
            "from .wrapped": "from .replicas import apply_replicas\nfrom .wrapped",
            '    "ddp": Functions(apply_ddp),\n': '    "ddp": Functions(apply_ddp),\n    "replicas": Functions(apply_replicas),\n',
        },
    },
    ("python tools/generate.py",),
    {"schemas/plan.schema.json": '"replicas"'},
    {
        "mine.yaml": f"{PLAN}data_parallel: {{backend: replicas}}\n",
        "same.py": "from shardplan.runtime.apply.backends import FUNCTIONS\nfrom shardplan.styles.backends import BACKENDS\n"
        "assert FUNCTIONS.keys() == BACKENDS.keys()\n",
    },
    {"python -m shardplan lint mine.yaml": "", "python same.py": ""},
)

ARCHITECTURE = Recipe(
    "An architecture",
    {"plans/aurora.yaml": {"": 'version: "1"\nname: aurora\nmodels: [aurora]\nextends: llama\n'}},
    used={
        "python -m shardplan validate tests/cases/models/llama-3.2-1b.json aurora --tp 2": "",
        "python -m shardplan list": "aurora",
    },
)
RECIPES = (STYLE, MOVE, FIELD, CHECK, BACKEND, ARCHITECTURE)


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def by_hand(title: str) -> list[str]:
    """The paths after `By hand:`; one that ends with a slash is a file in that folder."""
    said = re.search(r"^By hand: (.*?)$", section(title), re.MULTILINE)
    assert said is not None, title
    return re.findall(r"`([^`]+)`", said[1])


def copied(to: Path) -> Path:
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, to / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, to / name)
    for name in TESTS:
        source, target = ROOT / "tests" / name, to / "tests" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target)
        else:
            shutil.copy(source, target)
    return to


def edit(path: Path, changes: Mapping[str, str]) -> None:
    text = path.read_text("utf-8") if path.exists() else ""
    for old, new in changes.items():
        assert not old or text.count(old) == 1, (path, old)
        text = text.replace(old, new) if old else text + new
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    words = command.split()
    words[0] = sys.executable if words[0] == "python" else str(Path(sys.executable).with_name(words[0]))
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)


def matches(path: str, named: str) -> bool:
    return path == named or (named.endswith("/") and str(Path(path).parent) == named.rstrip("/"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.title)
def test_the_page_names_what_is_edited_by_hand(recipe: Recipe) -> None:
    named = by_hand(recipe.title)
    assert [path for path in recipe.edits if not any(matches(path, name) for name in named)] == []
    assert [name for name in named if not any(matches(path, name) for path in recipe.edits)] == []
    assert [command for command in recipe.commands if f"`{command}`" not in section(recipe.title)] == []


@pytest.mark.slow
@pytest.mark.parametrize("recipe", sampled(RECIPES, 3), ids=lambda recipe: recipe.title)
def test_a_recipe_is_enough(recipe: Recipe, tmp_path: Path) -> None:
    copy = copied(tmp_path / "copy")
    for path, changes in recipe.edits.items():
        edit(copy / path, changes)
    python = [path for path in recipe.edits if path.startswith("shardplan/") and path.endswith(".py")]
    gates = ["lint-imports --no-cache --no-logo"]
    gates += [f"ruff check {' '.join(python)}", f"ruff format --check {' '.join(python)}"] if python else []
    for name, text in recipe.files.items():
        (copy / name).write_text(text, "utf-8")
    for command in (*gates, *recipe.commands):
        done = run(command, copy)
        assert done.returncode == 0, (command, done.stdout, done.stderr)
    assert [p for p, text in recipe.generated.items() if text not in (copy / p).read_text("utf-8")] == []
    for command, said in recipe.used.items():
        done = run(command, copy)
        assert done.returncode == 0 and said in done.stdout, (command, done.stdout, done.stderr)


def test_a_record_that_lacks_a_move_is_refused_wherever_styles_are_read(tmp_path: Path) -> None:
    copy = copied(tmp_path / "copy")
    last = "        output_destination=V(SEQ),\n        trials=(Trial(on=MATMUL, sliced=2),),\n"
    edit(copy / "shardplan/styles/linear.py", {f"        output_source=P,\n{last}": last})
    done = run("python -m shardplan lint llama", copy)
    assert done.returncode != 0
    assert "TypeError: style rowwise_seq: has the output destination V(seq), but no output source" in done.stderr
