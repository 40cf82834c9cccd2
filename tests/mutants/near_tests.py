"""Which fast tests are asked for a module: those that say its names or those of what imports it, then those of its room."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

from .sites import ROOT

NAMED = 4  # files that are asked first: those that say the names of a module
FARTHER = 0.3  # what a name counts that only a module above says, for each step
# These read code as text, or all of it: what they say of a mutant is of its form.
OF_FORM = {f"test_{name}" for name in "rooms recipes mutants docs distributions walk".split()}
# The others that prove a room, in words of the names of their files; "" for a room as a whole.
ROOMS = {
    "cli": "cli.* terminal lazy completion cases fit fmt lock diff export report_html fix compared fit_search early lsp generated",
    "weights": "folders weights materialize full_parameters flipped refit processes_.*weights processes_saves hostile_headers "
    "finetune processes_merging checkpoints",
    "pipeline": "stage_proof refused_stages processes_pipeline.* proof_mesh schedules example_pipeline other_sides",
    "training": "watch_ranks processes_gradients processes_expert_bias processes_micro_batches processes_unshard padding arguments frozen_towers "
    "processes_training processes_context_.*",
    "apply": "pitfalls_.* backend_axes live same_inputs processes_calls processes_precision expert_mesh unfit_models build_mesh "
    "before_weights early_optimizers processes_fsdp processes_left_steps processes_parts dropout torch_attention processes_expert_mesh "
    "processes_context_axis processes_broadcast growth processes_fused_logits",
    "parallel": "moves pitfalls_.* processes_logits processes_fused_logits processes_logprobs calls_outputs proof processes_experts "
    "expert_driver key_value_heads context_axis dim_exchange processes_parts merging processes_async inductor processes_kinds "
    "processes_switches processes_helper regather reading means expert_mesh processes_training plans_matrix dropout processes_scalars",
}


def near(path: str) -> list[str]:
    """Files of tests for a file of the package, in the order in which they are asked."""
    weights = _weights(path)
    found: dict[str, float] = {}
    for file, words in _words_of_tests().items():
        score = sum(weight / len(_files_with(word)) for word, weight in weights.items() if word in words)
        if score:
            found[file] = score
    first = sorted(found, key=lambda file: (-found[file], file))[:NAMED]
    room = Path(path).parent.name
    those = [
        file
        for word in ROOMS[room].split()
        for file in _words_of_tests()
        if re.fullmatch(f"tests/test_{word}.py", file)
    ]
    return list(dict.fromkeys((*first, *sorted(those, key=lambda file: -found.get(file, 0)))))


@cache
def _words_of_tests() -> dict[str, frozenset[str]]:
    files = sorted((ROOT / "tests").glob("test_*.py"))
    return {
        f"tests/{one.name}": frozenset(re.findall(r"\w{3,}", one.read_text()))
        for one in files
        if one.stem not in OF_FORM
    }


@cache
def _files_with(word: str) -> tuple[str, ...]:
    return tuple(file for file, words in _words_of_tests().items() if word in words)


def _weights(path: str) -> dict[str, float]:
    """The names that lead to a module, and what each counts."""
    weights: dict[str, float] = {}
    ring, seen, weight = {path}, {path}, 1.0
    while ring and weight > FARTHER**3:
        for word in (word for one in ring for word in _own(one) if _files_with(word)):
            weights.setdefault(word, weight)
        ring = {above for one in ring for above in _importers()[one]} - seen
        seen |= ring
        weight *= FARTHER
    return weights


@cache
def _own(path: str) -> frozenset[str]:
    """The name of a module and of what it defines; of a command its word."""
    tree = ast.parse((ROOT / path).read_text())
    named = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    stem = Path(path).stem
    return frozenset({name for name in named if name[0] != "_"} | {stem, stem.removesuffix("_command")}) - {
        "main",
        "__init__",
    }


@cache
def _importers() -> dict[str, set[str]]:
    """Which files of the package import a file, by themselves or through the room that offers its names."""
    found: dict[str, set[str]] = defaultdict(set)
    for file in sorted((ROOT / "shardplan").rglob("*.py")):
        path = str(file.relative_to(ROOT))
        package = Path(path).parent
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                base = Path(*package.parts[: len(package.parts) - node.level + 1])
                target = base / (node.module or "").replace(".", "/")
                within = (target / f"{name.name}.py" for name in node.names)
                for one in (target.with_suffix(".py"), target / "__init__.py", *within):
                    if (ROOT / one).is_file():
                        found[str(one)].add(path)
    return found
