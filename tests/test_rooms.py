"""The rooms: who may import whom. Imports are read, not run."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "shardplan"

# From the top down: a room imports only rooms below it; rooms of one line do not import each other.
LAYERS = (
    {"__main__"},
    {"cli"},
    {"compat"},
    {"api"},
    {"render"},
    {"proof"},
    {"compiler"},
    {"synth"},
    {"costs"},
    {"weights"},
    {"training"},
    {"apply"},
    {"lower"},
    {"layout"},
    {"check"},
    {"twin"},
    {"models"},
    {"bind"},
    {"parse"},
    {"styles", "backends"},
    {"torchlib"},
    {"core"},
)
PLACE = {room: i for i, layer in enumerate(LAYERS) for room in layer}
ROOT = {"__init__"}  # exports names of rooms when they are asked for; anyone may read its version

# Packages that are heavy, or private to a room: the rooms that may import them. What is not here is free.
DATA_ROOMS = {"core", "styles", "backends", "parse", "bind", "check", "render"}
EXTERNAL = {
    "torch": set(PLACE) - DATA_ROOMS,
    "transformers": set(PLACE) - DATA_ROOMS,
    "pydantic": {"parse"},
    "yaml": {"parse"},
}
NO_PACKAGES = {"core"}  # the standard library alone


def room_of(path: Path) -> str:
    """The room of a file: the first part of its path under the package."""
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def imports(tree: ast.AST, package: str) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of all that a module imports, at any depth, names of `from` imports
    included.

    Args:
        tree: the module.
        package: the dotted name of the package that holds it, for relative imports.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            base = parents[: len(parents) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}"


def violations(source: str, path: Path) -> list[str]:
    """What a file imports that its room may not."""
    room = room_of(path)
    package = ".".join(("shardplan", *path.relative_to(PACKAGE).parts[:-1]))
    found = []
    for line, name in imports(ast.parse(source), package):
        top, _, rest = name.partition(".")
        if top == "shardplan":
            target = rest.partition(".")[0]
            if target not in PLACE and target != "__version__":
                found.append(f"{path.name}:{line}: {name} is in no known room")
            elif target in PLACE and target != room and PLACE[target] <= PLACE[room]:
                found.append(f"{path.name}:{line}: {room} imports {target}, which is not below it")
        elif room not in EXTERNAL.get(top, {room}):
            found.append(f"{path.name}:{line}: {room} imports {top}")
        elif room in NO_PACKAGES and top not in STDLIB:
            found.append(f"{path.name}:{line}: {room} imports {top}, which is not in the standard library")
    return found


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


STDLIB = __import__("sys").stdlib_module_names
FILES = sorted(PACKAGE.rglob("*.py"))


def test_every_room_has_its_place():
    unknown = {room_of(path) for path in FILES} - set(PLACE) - ROOT
    assert not unknown, f"give these rooms their place in LAYERS: {sorted(unknown)}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_room_imports_only_rooms_below_it(path):
    if room_of(path) not in ROOT:
        assert violations(path.read_text("utf-8"), path) == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_private_names_of_torch_are_in_torchlib_alone(path):
    if room_of(path) != "torchlib":
        assert private_torch_names(path.read_text("utf-8")) == []


@pytest.mark.parametrize(
    ("room", "source", "problem"),
    [
        ("bind", "from shardplan.check import CHECKS", "bind imports check, which is not below it"),
        ("bind", "from ..check.facts import heads", "bind imports check, which is not below it"),
        ("bind", "from .. import api", "bind imports api, which is not below it"),
        ("bind", "def f():\n    import shardplan.lower", "bind imports lower, which is not below it"),
        (
            "styles",
            "from shardplan.backends import BACKENDS",
            "styles imports backends, which is not below it",
        ),
        ("check", "import torch.nn", "check imports torch"),
        ("render", "from transformers import AutoConfig", "render imports transformers"),
        ("bind", "from pydantic import BaseModel", "bind imports pydantic"),
        ("core", "import numpy", "core imports numpy, which is not in the standard library"),
        ("bind", "from shardplan.newroom import x", "shardplan.newroom.x is in no known room"),
    ],
)
def test_the_room_test_can_fail(room, source, problem):
    (found,) = violations(source, PACKAGE / room / "sample.py")
    assert found.endswith(problem)


@pytest.mark.parametrize(
    "source",
    [
        "from shardplan.core.plan import Plan\nfrom .glob import Glob\nfrom ..parse import parse_plan",
        "from shardplan import __version__\nimport shardplan.core.mesh",
    ],
)
def test_the_room_test_lets_pass_what_is_allowed(source):
    assert violations(source, PACKAGE / "bind" / "sample.py") == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed._local_tensor",
        "from torch.distributed.tensor._dtensor_spec import DTensorSpec",
        "from torch.nn import _reduction",
        "import torch\ntorch._C._log_api_usage_once('x')",
        "import torch.distributed as dist\ndist._functional_collectives",
        "from torch import distributed as dist\ndef f():\n    return dist._world",
        "def f():\n    from torch.testing._internal import common_utils",
    ],
)
def test_the_private_name_test_can_fail(source):
    assert private_torch_names(source)


def test_the_private_name_test_lets_pass_what_is_public():
    source = "import torch\nfrom torch import nn\ntorch.__version__\nnn.Module\nself._thing\nfrom ._own import _x"
    assert private_torch_names(source) == []
