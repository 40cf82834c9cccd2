"""The examples on the pages of the codes: a command in the first line, and the plan that it names."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import dataclass
from functools import cache

from shardplan.compiler.bind import bind
from shardplan.compiler.check import check
from shardplan.core.diagnostics import Diagnostic
from shardplan.core.mesh import MeshSizes
from shardplan.core.plan import PlanFile, overlays_of
from shardplan.core.tree import ModuleTree
from shardplan.language import parse_text
from tests.trees import TREES

SIZES = ("tp", "dp_shard", "dp_replicate", "cp", "ep", "pp")


@cache
def tree(name: str) -> ModuleTree:
    """A tree of tests/trees.py, made once."""
    return TREES[name.removesuffix(".json")]()


def plan(text: str, file: str = "mine.yaml") -> PlanFile:
    """A plan from its YAML, which must be well formed."""
    parsed = parse_text(text, file)
    assert parsed.plan is not None, parsed.diagnostics
    return parsed.plan


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
