"""Plans as text, bound to trees and checked; the examples on the pages of the codes: a command in the first line, and the plan that it names."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from textwrap import indent
from typing import Any

from shardplan.compiler.bind import bind
from shardplan.compiler.check import check
from shardplan.core.diagnostics import Diagnostic
from shardplan.core.mesh import MeshSizes
from shardplan.core.plan import PlanFile, ResolvedPlan, overlays_of
from shardplan.core.tree import ModuleTree
from shardplan.language import parse_plan, parse_text
from tests.trees import TREES, llama_8b

LLAMA = llama_8b(layers=2)
SIZES = ("tp", "dp_shard", "dp_replicate", "cp", "ep", "pp")


@cache
def tree(name: str) -> ModuleTree:
    """A tree of tests/trees.py, made once."""
    return TREES[name.removesuffix(".json")]()


def plan(text: str, file: str = "mine.yaml") -> PlanFile:
    """A plan from its YAML, which must be well formed, or a built-in one by its name."""
    parsed = parse_text(text, file) if "\n" in text else parse_plan(text)
    assert parsed.plan is not None, parsed.diagnostics
    return parsed.plan


def rules(section: str, overlay: str = "") -> str:
    """A plan of these lines, and those of sequence parallelism."""
    section, overlay = (f"{indent(lines.strip(), '  ')}\n" for lines in (section, overlay))
    text = f'version: "1"\nname: mine\ntensor_parallel:\n{section}'
    return text + (f"sequence_parallel:\n{overlay}" if overlay.strip() else "")


def bound(
    text: str | PlanFile, model: ModuleTree = LLAMA, *, sequence_parallel: bool = False, **sizes: int | None
) -> tuple[ResolvedPlan, tuple[Diagnostic, ...]]:
    """A plan bound to a model, and what binding finds."""
    read = plan(text) if isinstance(text, str) else text
    return bind(read, model, MeshSizes(**sizes), overlays_of(sequence_parallel))


def checked(
    text: str | PlanFile, model: ModuleTree = LLAMA, *, tp: int | None = 2, seq_len: int | None = None, **given: Any
) -> tuple[Diagnostic, ...]:
    """What the checks find in a plan that binds without a finding."""
    resolved, found = bound(text, model, tp=tp, **given)
    assert found == ()
    return check(resolved, seq_len=seq_len)


def codes(found: Iterable[Diagnostic]) -> list[str]:
    return [one.code for one in found]


@dataclass(frozen=True)
class Command:
    """`shardplan validate MODEL PLAN [options]`."""

    model: str
    sizes: MeshSizes
    sequence_parallel: bool
    seq_len: int | None


def command(line: str) -> Command:
    """Reads the command line of an example."""
    parser = argparse.ArgumentParser()
    parser.add_argument("program", choices=["shardplan"])
    parser.add_argument("verb", choices=["validate"])
    parser.add_argument("model")
    parser.add_argument("plan", choices=["mine.yaml"])
    for size in SIZES:
        parser.add_argument(f"--{size.replace('_', '-')}", type=int)
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--seq-len", type=int)
    said = parser.parse_args(shlex.split(line.removeprefix("# ")))
    sizes = {size: n for size in SIZES if (n := getattr(said, size)) is not None}
    return Command(said.model, MeshSizes(**sizes), said.sequence_parallel, said.seq_len)


def findings(example: str) -> tuple[Diagnostic, ...]:
    """What binding and checking say about an example."""
    said = command(example.partition("\n")[0])
    read = plan(example)
    overlays = overlays_of(said.sequence_parallel, said.sizes, context=read.has_context)
    resolved, about = bind(read, tree(said.model), said.sizes, overlays)
    return (*about, *check(resolved, seq_len=said.seq_len))
