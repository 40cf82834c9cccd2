"""Answers to an editor about a plan that is being written: findings, completions, the matches of a pattern."""

from __future__ import annotations

import re
from dataclasses import dataclass

from shardplan.compiler.bind import bind
from shardplan.core.diagnostics import Diagnostic
from shardplan.core.mesh import MeshSizes
from shardplan.core.plan import SECTIONS
from shardplan.core.sources import SourceMap
from shardplan.core.tree import ModuleTree, full_name
from shardplan.language.globs import GlobError, parse_glob
from shardplan.language.lint import lint_parsed
from shardplan.language.parsing import parse_text
from shardplan.styles import ALIASES, NONE, STYLES

MOST = 12  # modules that a hover lists


@dataclass(frozen=True, slots=True)
class Findings:
    """The findings about a text."""

    diagnostics: tuple[Diagnostic, ...]
    sources: SourceMap


def text_findings(text: str, file: str, folder: str | None, tree: ModuleTree | None) -> Findings:
    """The findings of `lint` and, with a model, of binding: patterns that match nothing, rules that contradict each other.

    Args:
        text: the plan's text.
        file: its display name.
        folder: the folder of the plans that it extends.
        tree: the tree of the model that the editor was started with.
    """
    format = "json" if file.lower().endswith(".json") else "yaml"
    parsed = lint_parsed(parse_text(text, file=file, format=format, folder=folder))  # type: ignore[arg-type]
    found = parsed.diagnostics
    if parsed.plan is not None and tree is not None:
        overlays = frozenset({"sequence_parallel"} if parsed.plan.has_overlay else ())
        found = (*found, *bind(parsed.plan, tree, MeshSizes(), overlays)[1])  # type: ignore[arg-type]
    return Findings(tuple(dict.fromkeys(found)), parsed.sources)


def completions(text: str, line: int, column: int, tree: ModuleTree | None) -> list[str]:
    """The words that may be written at a position: style names after a rule's colon, and patterns of the model's modules for its key.

    Args:
        line, column: from 0.
    """
    lines = text.splitlines()
    before = lines[line][:column] if line < len(lines) else ""
    if not _in_rules(lines, line) or not before.startswith(" "):
        return []
    if re.search(r":\s*(\{\s*style:\s*)?\w*$", before):
        return [*STYLES, *ALIASES, NONE]
    if tree is None or ":" in before:
        return []
    start = before.strip().strip('"')
    patterns = dict.fromkeys(tree.address(tree.pattern(name)) for name in tree.modules if name)
    return [pattern for pattern in patterns if pattern.startswith(start)]


def _in_rules(lines: list[str], line: int) -> bool:
    """Whether a line is in a section of rules."""
    for above in reversed(lines[:line]):
        if above[:1].strip() and not above.startswith("#"):
            return above.partition(":")[0] in {section.partition(".")[0] for section in SECTIONS}
    return False


def hover(text: str, line: int, column: int, tree: ModuleTree | None) -> str | None:
    """The meaning of a style, or the modules that a pattern matches in the model, with their shapes. None at any other position."""
    lines = text.splitlines()
    if line >= len(lines) or not _in_rules(lines, line):
        return None
    key, _, _value = lines[line].partition(":")
    if column > len(key):
        word = next((m[0] for m in re.finditer(r"\w+", lines[line]) if m.start() <= column <= m.end()), "")
        style = STYLES.get(ALIASES.get(word, word))
        return f"`{style.name}`: {style.summary}" if style is not None else None
    return None if tree is None else _matches(key.strip().strip('"').lstrip("- "), tree)


def _matches(pattern: str, tree: ModuleTree) -> str | None:
    try:
        glob = parse_glob(pattern)
    except GlobError:
        return None
    found = [module for name, module in tree.modules.items() if name and glob.matches(tree.address(name))]
    parameters = [
        f"- `{full_name(module.name, p.name)}` {list(p.shape)} {p.dtype}"
        for module in tree.modules.values()
        for p in module.parameters
        if glob.matches(tree.address(full_name(module.name, p.name)))
    ]
    lines = [
        f"- `{m.name}` {m.class_name}" + "".join(f", {p.short} {list(p.shape)}" for p in m.parameters) for m in found
    ]
    lines += parameters
    if not lines:
        return f"`{pattern}` matches nothing of the model"
    more = [f"- ... {len(lines) - MOST} more"] if len(lines) > MOST else []
    return "\n".join([f"`{pattern}` matches {len(lines)}:", *lines[:MOST], *more])
