"""Private names of torch: all are there, and a missing one is named with the version."""

from __future__ import annotations

import ast
import importlib
import inspect
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from shardplan.runtime.parallel.fsdp_units import groups_of
from shardplan.torchlib import private as room
from shardplan.torchlib.private import NAMES, Private, private
from shardplan.torchlib.private_attributes import ATTRIBUTES, SEEN, Attributes
from shardplan.torchlib.untested import untested

PACKAGE = Path(room.__file__).parents[1]


@pytest.mark.parametrize("name", NAMES)
def test_this_torch_has_it(name):
    assert private(name) is not None


@pytest.mark.parametrize("name", NAMES)
def test_its_purpose_and_place_are_said(name):
    entry = NAMES[name]
    assert entry.purpose and entry.places
    assert all(module.startswith("torch") for module, _ in entry.places)
    module, attribute = entry.places[0]
    newest = importlib.import_module(module)
    if torch.__version__.startswith(SEEN["torch"][-1]):
        assert not attribute or hasattr(newest, attribute), "the first place is the newest torch's"


@pytest.mark.parametrize("place", [("torch.distributed", "no_such_name"), ("torch.no_such_module", "name")])
def test_a_missing_one_fails_with_its_name_and_the_version(place, monkeypatch):
    monkeypatch.setitem(room.NAMES, "gone", Private((place,), "a test"))
    with pytest.raises(RuntimeError) as error:
        private("gone")
    assert str(error.value) == f"torch {torch.__version__} has no {'.'.join(place)}, and shardplan needs it for: a test"


def test_an_older_place_is_found_where_the_newest_is_missing(monkeypatch):
    places = (("torch.distributed", "no_such_name"), ("torch.distributed", "is_available"))
    monkeypatch.setitem(room.NAMES, "moved", Private(places, "a test"))
    assert private("moved") is torch.distributed.is_available


@pytest.mark.parametrize(
    ("state", "groups"),
    [
        (SimpleNamespace(_fsdp_param_groups=["a", "b"]), ["a", "b"]),  # torch 2.12 and later
        (SimpleNamespace(_fsdp_param_group="a"), ["a"]),  # torch 2.11
        (SimpleNamespace(_fsdp_param_group=None), []),
    ],
)
def test_parameter_groups_of_fsdp2_are_found_in_the_state_of_each_release(state, groups):
    assert groups_of(state) == groups


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def defined_names(tree: ast.Module) -> set[str]:
    """Private names that a file defines: functions, classes, variables, fields, and attributes of `self`."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id == "self":
                names.add(node.attr)
    return {name for name in names if _is_private(name)}


def read_names(tree: ast.Module) -> set[str]:
    """Private names that are attributes of anything."""
    return {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and _is_private(node.attr)}


def foreign_names(texts: list[str]) -> set[str]:
    """Private attributes that none of the files defines."""
    trees = [ast.parse(text) for text in texts]
    return set().union(*map(read_names, trees)) - set().union(*map(defined_names, trees))


def test_every_private_attribute_of_others_is_listed():
    texts = [path.read_text("utf-8") for path in PACKAGE.rglob("*.py")]
    listed = {name for one in ATTRIBUTES for name in one.names}
    assert len(texts) > 400
    assert foreign_names(texts) - listed == set(), "list them in shardplan/torchlib/private_attributes.py"


def test_an_attribute_that_nobody_defines_is_found():
    assert foreign_names(["class A:\n    def _own(self): self._kept = x._theirs\n", "y._own, y._kept"]) == {"_theirs"}


@pytest.mark.parametrize("one", ATTRIBUTES, ids=lambda one: f"{one.module}.{one.owner}")
def test_attributes_are_where_they_were_seen(one: Attributes):
    """In a release that is listed: those that it had, and no others. In one that is not, nothing is known."""
    package = one.module.partition(".")[0]
    if package in ("argparse", "random", "sys"):
        installed = ".".join(platform.python_version_tuple()[:2])
    else:
        installed = version(package).partition("+")[0]
    owner = importlib.import_module(one.module)
    for part in one.owner.split(".") if one.owner else ():
        owner = getattr(owner, part)
    missing = [name for name in one.names if not _has(owner, name)]
    assert one.purpose and one.names
    if installed in one.releases:
        assert missing == []
    elif one.seen and installed in SEEN[package]:
        assert missing == list(one.names)


def _has(owner: object, name: str) -> bool:
    """Whether an object has it, or a class whose instances get it from its code."""
    if hasattr(owner, name):
        return True
    own = [one for one in getattr(owner, "__mro__", ()) if not one.__module__.startswith("builtins")]
    return any(
        f"self.{name}" in inspect.getsource(one)
        for one in own
        if one.__module__.startswith(("torch.", "transformers", "accelerate", "argparse"))
    )


VERSIONS = {"torch": SEEN["torch"][-1], "transformers": SEEN["transformers"][-1]}


@pytest.mark.parametrize(
    ("newer", "said"),
    [
        ({}, ""),
        ({"torch": SEEN["torch"][0] + "+cpu", "transformers": "not installed"}, ""),
        ({"torch": SEEN["torch"][-1].rpartition(".")[0] + ".99"}, ""),
        ({"torch": "9.0.0a0+git123"}, "torch 9.0.0a0+git123: "),
        ({"torch": "9.0", "transformers": "10.1.dev0"}, "torch 9.0 and transformers 10.1.dev0: "),
    ],
)
def test_what_is_newer_than_the_tested_releases(newer, said):
    found = untested({**VERSIONS, **newer})
    assert found.startswith(said) and bool(found) == bool(said)
    assert all(f"tested with {name} 2.11 to" in found for name in newer if said and name == "torch")


def test_the_command_and_the_library_warn_once_and_work():
    """The command prints nothing else of what is warned about."""
    old = "from shardplan.torchlib import private_attributes as p; p.SEEN.update(torch=('99.0',), transformers=('5.0.0',)); import sys, warnings; "
    library = old + "from shardplan import unshard, validate, verify"
    command = old + (
        "sys.argv[1:] = ['validate', 'llama', 'auto', '--tp', '2', '--no-proof']; "
        "from shardplan.cli import main; main.import_module = lambda name: (warnings.warn('other'), __import__(name, fromlist='x'))[1]; "
        "main.console()"
    )
    for code, begin in ((library, "UntestedVersionWarning: "), (command, "shardplan: warning: ")):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert (
            done.stderr.count(f"{begin}transformers {version('transformers')}: shardplan ")
            == done.stderr.lower().count("warning: ")
            == 1
        )
    assert "report it with the message and the output of `shardplan --version`" in done.stderr


def test_a_newer_torch_without_a_private_name_is_one_warning_and_one_error_that_names_it():
    newer = (
        "import sys; from importlib import metadata; real = metadata.version; "
        "metadata.version = lambda name: '99.1.0' if name == 'torch' else real(name); "
        "from torch.distributed import _functional_collectives; del _functional_collectives.all_reduce; "
    )
    command = (
        "sys.argv[1:] = ['validate', 'llama', 'auto', '--tp', '2']; from shardplan.cli.main import console; console()"
    )
    for code, begin in (
        ("from shardplan import unshard, validate, verify", ""),
        (command, "shardplan: internal error: "),
    ):
        done = subprocess.run([sys.executable, "-c", newer + code], capture_output=True, text=True)
        assert done.returncode == (3 if begin else 1) and done.stdout == ""
        assert done.stderr.lower().count("warning: ") == 1 and "torch 99.1.0: shardplan " in done.stderr
        assert (
            f"{begin}RuntimeError: torch {torch.__version__} has no torch.distributed._functional_collectives.all_reduce, and shardplan "
            "needs it for: collectives that torch.compile can trace"
        ) in done.stderr
        assert not begin or ("Traceback" not in done.stderr and "Please report it" in done.stderr)
