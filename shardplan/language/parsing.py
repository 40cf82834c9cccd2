"""The way from a text to a plan: read, check the form, check the rules, read the parent, build."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardplan.core.diagnostics import Code, Diagnostic, Label, Location, Severity
from shardplan.core.plan import PlanFile
from shardplan.core.sources import SourceFile, SourceMap
from shardplan.core.suggest import closest, did_you_mean, nearest_path
from shardplan.core.user_files import CannotRead

from .build_plan import build_plan
from .form import check_form
from .nodes import Document, Scalar, node_at, spans, split_lines
from .parents import LISTED, Origin, builtin_origin, file_origin, find_parent
from .parse_findings import LONGEST_PATH, TOO_LARGE, Findings, quoted
from .plan_files import CANNOT_READ, builtin_plans, decode_plan, is_file, read_text
from .python_reader import read_python
from .read_rules import check_rules
from .reader import Format, read_document


@dataclass(frozen=True, slots=True)
class Parsed:
    """The result of parsing a text.

    Args:
        plan: None if there are errors.
        sources: the text of the plan and of its ancestors, for the places of findings.
        diagnostics: all findings, the plan's own before its parents'.
    """

    plan: PlanFile | None
    sources: SourceMap
    diagnostics: tuple[Diagnostic, ...]


def parse_plan(source: str | os.PathLike[str] | Mapping[str, Any], *, name: str | None = None) -> Parsed:
    """Reads a plan and what it extends. Every error in it is a finding.

    Args:
        source: a file (a path, or a word with a path separator or the ending .yaml, .yml or .json), the name
            of a built-in plan, or a plan as a dict.
        name: the plan's name, if the plan gives none.

    Raises:
        TypeError: the source is something else.
    """
    if isinstance(source, Mapping):
        origin = Origin("<dict>", name or "<dict>")
        return compile_document(read_python(source, origin.display), SourceFile(origin.display), (origin,))
    if not isinstance(source, str | os.PathLike) or not isinstance(os.fspath(source), str):
        raise TypeError(f"a plan is a path, a built-in plan's name or a dict, not {type(source).__name__}")
    word = os.fspath(source)
    if isinstance(source, str) and not is_file(word):
        if word not in builtin_plans():
            message = f"there is no built-in plan {quoted(word)}"
            return _refused(word, CANNOT_READ, message, help=_similar_builtin(word))
        path, origin = builtin_plans()[word], builtin_origin(word)
    else:
        path, origin = Path(word), file_origin(Path(word), word)
    try:
        text = read_text(path)
    except CannotRead as error:
        return _not_read(word, error, help=_similar_file(path) if error.missing else None)
    return _parse(text, (replace(origin, name=name or origin.name),))


def parse_text(
    text: str,
    file: str = "<text>",
    format: Format = "yaml",
    folder: str | os.PathLike[str] | None = None,
) -> Parsed:
    """Reads a plan from its text.

    Args:
        file: the display name, for findings.
        format: the language of the text.
        folder: the folder of files that it extends; without it, it can extend built-in plans only.
    """
    origin = Origin(file, Path(file).stem, format, Path(folder) if folder is not None else None)
    try:
        checked = decode_plan(text.encode("utf-8", "surrogatepass"))
    except CannotRead as error:
        return _not_read(file, error)
    return _parse(checked, (origin,))


def _not_read(file: str, error: CannotRead, help: str | None = None) -> Parsed:
    code = TOO_LARGE if error.too_large else CANNOT_READ
    return _refused(file, code, f"{quoted(file, LONGEST_PATH)} {error.reason}", help=help)


def _refused(file: str, code: Code, message: str, help: str | None = None) -> Parsed:
    """Nothing was read."""
    finding = Diagnostic(code, Severity.ERROR, message, Label(Location(file)), help=help)
    return Parsed(None, SourceMap({file: SourceFile(file)}), (finding,))


def _similar_builtin(word: str) -> str:
    if word == "-":
        return "write /dev/stdin for a plan on standard input"
    near = closest(word, builtin_plans())
    if near:
        return did_you_mean(word, near)
    return f"name a file with its ending, or a built-in plan; {LISTED}"


def _similar_file(path: Path) -> str | None:
    near = nearest_path(path)
    if near is None and (name := closest(path.stem, builtin_plans())) is not None:
        return f"did you mean the built-in plan `{name}`?"
    return near


def _parse(text: str, chain: tuple[Origin, ...]) -> Parsed:
    origin = chain[-1]
    document = read_document(text, origin.display, origin.format)
    places = spans(document.root) if document.root is not None else {}
    return compile_document(document, SourceFile(origin.display, split_lines(text), places), chain)


def compile_document(document: Document, source: SourceFile, chain: tuple[Origin, ...]) -> Parsed:
    """From a document to a plan.

    Args:
        chain: the document's origin, then the plans that extend it.
    """
    origin = chain[-1]
    if document.root is None:
        return Parsed(None, SourceMap({source.name: source}), document.findings)
    findings = Findings(origin.display, document.findings)
    form = check_form(document.root, findings)
    check_rules(document.root, findings)
    extends = node_at(document.root, ("extends",))
    parent = None
    if isinstance(extends, Scalar) and isinstance(extends.value, str):
        parent = _parent(extends.value, chain, findings)
    own = Parsed(None, SourceMap({source.name: source}), findings.all)
    if parent is not None:
        files = {**own.sources.files, **parent.sources.files}
        own = Parsed(None, SourceMap(files), own.diagnostics + parent.diagnostics)
    if any(d.is_error for d in own.diagnostics):
        return own
    assert form is not None and (parent is None) == (form.extends is None)
    plan = build_plan(form, origin.display, origin.name, parent.plan if parent else None, built_in=origin.built_in)
    return replace(own, plan=plan)


def _parent(word: str, chain: tuple[Origin, ...], findings: Findings) -> Parsed | None:
    """The plan that a plan extends; None, and a finding, if there is none that may be read."""
    found = find_parent(word, chain, findings)
    if found is None:
        return None
    origin, text = found
    return _parse(text, (*chain, origin))
