"""The pages of the Python interface: docs/api.md, and docs/api/*.md with signatures and docstrings, read from the source."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
HEADS = ("Args:", "Attributes:", "Raises:", "Returns:", "Yields:")
NAMES = re.compile(r"^(\*{0,2}\w+(?:, \*{0,2}\w+)*): (.*)$", re.DOTALL)


@dataclass(frozen=True)
class Page:
    """A page of docs/api/.

    Args:
        title: its heading.
        intro: what is said under the heading.
        names: module -> the names that are defined there, in the page's order.
    """

    title: str
    intro: str
    names: dict[str, str]

    @property
    def places(self) -> Iterator[tuple[str, str]]:
        """The module and the name of each definition."""
        return ((module, name) for module, names in self.names.items() for name in names.split())


PAGES = {
    "checking": Page(
        "Plans and checks",
        "Imported from `shardplan`.",
        {
            "shardplan.api.plans": "load_plan init_plan",
            "shardplan.core.plan": "Plan",
            "shardplan.api.check": "validate verify coverage",
            "shardplan.compiler.user_inputs": "Model",
            "shardplan.core.report": "Report",
            "shardplan.core.diagnostics": "PlanError",
        },
    ),
    "comparing": Page(
        "Compare, repair, lock, report, export",
        "Imported from `shardplan`.",
        {
            "shardplan.api.comparing": "diff_plans",
            "shardplan.core.plan_changes": "PlanDiff",
            "shardplan.api.fixing": "fix_plan",
            "shardplan.api.locking": "lock_plan check_lock",
            "shardplan.core.plan_lock": "LockedQuestion",
            "shardplan.api.reporting": "plan_report",
            "shardplan.api.exporting": "export_plan ExportedPlan",
        },
    ),
    "applying": Page(
        "Applying",
        "Imported from `shardplan`.",
        {
            "shardplan.runtime.apply.build_mesh": "build_mesh",
            "shardplan.api.apply": "apply_plan compile_plan",
            "shardplan.runtime.apply.applied": "applied",
            "shardplan.runtime.pipeline.pipeline_options": "PipelineOptions",
            "shardplan.runtime.pipeline.pipelined_model": "Pipeline",
        },
    ),
    "weights": Page(
        "Weights",
        "Imported from `shardplan`.",
        {
            "shardplan.weights.materialize": "materialize",
            "shardplan.weights.load": "load_checkpoint Loaded",
            "shardplan.weights.save": "save_checkpoint",
            "shardplan.weights.training_state": "save_training_state load_training_state",
            "shardplan.weights.full_parameters": "full_parameters",
            "shardplan.weights.refit": "refit Refit",
            "shardplan.weights.progress": "Progress",
        },
    ),
    "training": Page(
        "In the training loop",
        "Imported from `shardplan`; `Muon` from `shardplan.optimizers`.",
        {
            "shardplan.runtime.training.micro_batches": "micro_batches",
            "shardplan.runtime.apply.applied": "without_sequence_parallel",
            "shardplan.runtime.parallel.vocabulary_loss": "causal_lm_loss",
            "shardplan.runtime.training.gradients": "clip_grad_norm_",
            "shardplan.runtime.training.padding": "pad_to_multiple",
            "shardplan.runtime.training.context_parallel": "context_parallel",
            "shardplan.runtime.training.expert_bias": "count_expert_tokens update_expert_bias",
            "shardplan.runtime.training.inference": "unshard",
            "shardplan.runtime.training.watch_ranks": "watch_ranks",
            "shardplan.optimizers.muon": "Muon",
        },
    ),
    "probabilities": Page(
        "Probabilities and norms",
        "Imported from `shardplan.runtime.training`, which has the names of [the training loop](training.md) too, but `Muon`.",
        {
            "shardplan.runtime.parallel.vocabulary_loss": "vocabulary_parallel_nll cross_entropy",
            "shardplan.runtime.parallel.vocabulary_probabilities": "log_probabilities entropy top_k",
            "shardplan.runtime.parallel.fused_logits": "fused_logits",
            "shardplan.runtime.training.gradients": "get_grad_norm clip_grad_by_total_norm_",
            "shardplan.torchlib.local_parts": "to_local_if_dtensor",
        },
    ),
    "costs": Page(
        "Costs",
        "Imported from `shardplan`.",
        {
            "shardplan.api.cost": "estimate",
            "shardplan.api.fitting": "fit",
            "shardplan.core.estimates": "TrainingStep EngineRanks",
        },
    ),
    "other-projects": Page(
        "Names and plans of other projects",
        "The configurations are imported from `shardplan.compat`; [their names, one by one](../compat.md) has all of them. "
        "`convert_plan` is imported from `shardplan.convert`; [converting plans](../converting.md) shows it.",
        {
            "shardplan.compat.configs": "FSDP2Config MegatronFSDPConfig DDPConfig",
            "shardplan.convert.converting": "convert_plan",
        },
    ),
    "building-on": Page(
        "For packages that build on shardplan",
        "`shardplan.compat` and `shardplan.convert` are written with the names of these pages, and could be a distribution of "
        "their own.\n`Diagnostic`, `Code`, `Label`, `Location` and `Severity` are in `shardplan.core.diagnostics`, the texts that "
        "findings point into\n(`SourceMap`) in `shardplan.core.sources`, the `ModuleTree` that `Model(...).find().tree` is in "
        "`shardplan.core.tree`. From the rooms\n(`shardplan.language`, `shardplan.styles` and so on):",
        {
            "shardplan.language.parsing": "parse_text",
            "shardplan.language.any_file": "read_data",
            "shardplan.language.globs": "parse_glob",
            "shardplan.core.report": "ordered",
            "shardplan.authoring.init.write": "plan_text plan_document Heading",
            "shardplan.authoring.init.cut_parts": "cut_parts",
            "shardplan.styles": "canonical_style",
            "shardplan.weights.shared_folder": "whole_folder",
            "shardplan.weights.all_ranks": "all_or_none",
            "shardplan.weights.folders": "remove clear",
            "shardplan.runtime.parallel.single_style": "OwnStyle",
            "shardplan.runtime.parallel.process_groups": "root_of flatten",
            "shardplan.model.packed": "patch_is_packed_sequence",
        },
    ),
}


def index_document() -> str:
    """docs/api.md: every name with the first sentence about it."""
    lines = [
        "# Python",
        "",
        "Names are imported when they are first used: `import shardplan` is quick, and linting a plan imports no torch.",
    ]
    for page, about in PAGES.items():
        lines += ["", f"## [{about.title}](api/{page}.md)", "", "| name | |", "|---|---|"]
        for module, name in about.places:
            sentence = _first_sentence(ast.get_docstring(_definition(module, name)) or "")
            lines.append(f"| [`{name}`](api/{page}.md#{name.lower()}) | {sentence.replace('|', chr(92) + '|')} |")
    return "\n".join(lines) + "\n"


def page_document(page: str) -> str:
    """docs/api/PAGE.md: signatures and docstrings."""
    about = PAGES[page]
    parts = [f"# {about.title}", about.intro]
    for module, name in about.places:
        parts += _described(module, _definition(module, name))
    return "\n\n".join(parts) + "\n"


def source_of(module: str) -> Path:
    """The file of a module."""
    place = ROOT / module.replace(".", "/")
    return place / "__init__.py" if place.is_dir() else place.with_suffix(".py")


@cache
def _parsed(module: str) -> tuple[list[str], ast.Module]:
    text = source_of(module).read_text("utf-8")
    return text.splitlines(), ast.parse(text)


def _definition(module: str, name: str) -> ast.FunctionDef | ast.ClassDef:
    """The last definition: those before it are overloads."""
    found = [n for n in _parsed(module)[1].body if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name == name]
    assert found, f"{source_of(module)} does not define {name}"
    return found[-1]


def _described(module: str, node: ast.FunctionDef | ast.ClassDef) -> Iterator[str]:
    """The parts of a definition: its heading, signature and docstring, then its public methods that have a docstring."""
    yield f"## {node.name}"
    yield _block(_signature(module, node))
    yield from _text(ast.get_docstring(node) or "")
    for method in _methods(node):
        said = ast.get_docstring(method)
        if said and not method.name.startswith("_"):
            yield f"### {node.name}.{method.name}"
            yield _block(_signature(module, method))
            yield from _text(said)


def _methods(node: ast.AST) -> list[ast.FunctionDef]:
    return [one for one in node.body if isinstance(one, ast.FunctionDef)] if isinstance(node, ast.ClassDef) else []


def _signature(module: str, node: ast.FunctionDef | ast.ClassDef) -> str:
    """A definition as its source has it, without its body: of a class the fields, or `__init__`."""
    shown = [f"@{text}" for one in node.decorator_list if (text := ast.unparse(one)) in ("property", "staticmethod")]
    if isinstance(node, ast.FunctionDef):
        return "\n".join([*shown, _head(module, node)])
    fields = [
        one for one in node.body if isinstance(one, ast.AnnAssign) and not ast.unparse(one.target).startswith("_")
    ]
    decorators = [f"@{text}" for one in node.decorator_list if (text := ast.unparse(one)).startswith("dataclass")]
    made = next((one for one in _methods(node) if one.name == "__init__"), None)
    inside = [f"    {ast.unparse(field)}" for field in fields if decorators]
    inside += [textwrap.indent(_head(module, made), "    ")] if made is not None else []
    return "\n".join([*decorators, _head(module, node) + (":" if inside else ""), *inside])


def _head(module: str, node: ast.FunctionDef | ast.ClassDef) -> str:
    """The lines from `def` or `class` to the colon."""
    lines = _parsed(module)[0][node.lineno - 1 : node.body[0].lineno - 1]
    return textwrap.dedent("\n".join(lines)).rstrip().removesuffix(":")


def _block(text: str) -> str:
    return f"```python\n{text}\n```"


def _text(docstring: str) -> Iterator[str]:
    """The paragraphs of a docstring; its sections are lists."""
    for part in re.split(rf"^(?=(?:{'|'.join(HEADS)})$)", docstring, flags=re.MULTILINE):
        head, _, rest = part.partition("\n")
        if head not in HEADS:
            if part.strip():
                yield part.strip("\n")
            continue
        entries = list(_entries(textwrap.dedent(rest).strip("\n")))
        if head in ("Returns:", "Yields:"):
            yield f"**{head.removesuffix(':')}**: " + "\n".join(entries)
            continue
        yield f"**{head.removesuffix(':')}**"
        yield "\n".join(f"- {_entry(entry)}" for entry in entries)


def _entries(text: str) -> Iterator[str]:
    """The entries of a section. A line at the margin begins one, but where the line before it ends with a comma."""
    entry: list[str] = []
    for line in text.splitlines():
        if entry and line[:1].strip() and not entry[-1].endswith(","):
            yield "\n".join(entry)
            entry = []
        entry.append(line)
    if entry:
        yield "\n".join(entry)


def _entry(text: str) -> str:
    """An entry with its names as code."""
    lines = " ".join(line.strip() for line in text.splitlines() if line.strip())
    if (match := NAMES.match(lines)) is None:
        return lines
    return f"{', '.join(f'`{name}`' for name in match[1].split(', '))}: {match[2]}"


def _first_sentence(docstring: str) -> str:
    paragraph = " ".join(docstring.partition("\n\n")[0].split())
    return re.split(r"(?<=\.)\s+(?=[A-Z`])", paragraph)[0]
