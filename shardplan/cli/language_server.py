"""`shardplan editor lsp`: a language server over standard input and output."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import redirect_stdout
from typing import Any
from urllib.parse import unquote, urlparse

from shardplan.api.editing import Findings, completions, hover, text_findings
from shardplan.core.diagnostics import Diagnostic, PlanError
from shardplan.core.report import Report
from shardplan.core.tree import ModuleTree
from shardplan.core.version import __version__
from shardplan.report.errors import sources_of

from .argument_parts import model_of
from .exits import CLEAN, UsageError
from .output import finish


def run(args: argparse.Namespace) -> int:
    try:
        from pygls.lsp.server import LanguageServer
    except ImportError:
        raise UsageError("the language server needs pygls: pip install 'shardplan-core[lsp]'") from None
    tree = None
    if args.model is not None:
        try:
            with redirect_stdout(sys.stderr):
                tree = model_of(args).find().tree
        except PlanError as error:
            return finish(Report(error.diagnostics, sources=sources_of(error), model=args.model), args)
    server: Any = LanguageServer("shardplan", __version__)
    _answers(server, tree)
    # Copies: the server closes its streams, and the command line flushes its own at the end.
    streams = (os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb"))
    server.start_io(*streams)
    return CLEAN


def _answers(server: Any, tree: ModuleTree | None) -> None:
    """The server's answer to each event."""
    from lsprotocol import types

    def publish(uri: str) -> None:
        document = server.workspace.get_text_document(uri)
        path = unquote(urlparse(uri).path)
        found = text_findings(document.source, path, os.path.dirname(path) or None, tree)
        params = types.PublishDiagnosticsParams(
            uri=uri, diagnostics=[_shown(d, found, path) for d in found.diagnostics]
        )
        server.text_document_publish_diagnostics(params)

    @server.feature(types.TEXT_DOCUMENT_DID_OPEN)
    def opened(params: types.DidOpenTextDocumentParams) -> None:
        publish(params.text_document.uri)

    @server.feature(types.TEXT_DOCUMENT_DID_CHANGE)
    def changed(params: types.DidChangeTextDocumentParams) -> None:
        publish(params.text_document.uri)

    @server.feature(types.TEXT_DOCUMENT_COMPLETION, types.CompletionOptions(trigger_characters=[":", ".", " "]))
    def complete(params: types.CompletionParams) -> list[types.CompletionItem]:
        document, at = server.workspace.get_text_document(params.text_document.uri), params.position
        return [types.CompletionItem(label=word) for word in completions(document.source, at.line, at.character, tree)]

    @server.feature(types.TEXT_DOCUMENT_HOVER)
    def hovered(params: types.HoverParams) -> types.Hover | None:
        document, at = server.workspace.get_text_document(params.text_document.uri), params.position
        text = hover(document.source, at.line, at.character, tree)
        return None if text is None else types.Hover(types.MarkupContent(types.MarkupKind.Markdown, text))


def _shown(diagnostic: Diagnostic, found: Findings, path: str) -> Any:
    """A finding at its place; a finding in another file, or without a place, is shown at the beginning."""
    from lsprotocol import types

    location = diagnostic.primary.location if diagnostic.primary is not None else None
    span = found.sources.span(location) if location is not None and location.file == path else None
    line, column, end_line, end = (span.line, span.column, span.end_line, span.end_column) if span else (1, 1, 1, 2)
    text = "\n".join(
        [diagnostic.message, *diagnostic.notes, *([f"help: {diagnostic.help}"] if diagnostic.help else [])]
    )
    return types.Diagnostic(
        range=types.Range(types.Position(line - 1, column - 1), types.Position(end_line - 1, max(end - 1, 0))),
        message=text,
        severity=types.DiagnosticSeverity.Error if diagnostic.is_error else types.DiagnosticSeverity.Warning,
        code=diagnostic.code,
        source="shardplan",
    )
