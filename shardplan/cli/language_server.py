"""`shardplan editor lsp`: a language server over standard input and output."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from contextlib import redirect_stdout
from typing import Any, BinaryIO
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

MAX_MESSAGE = 64 * 2**20  # bytes of a message; an editor sends a document as a whole, which may have 1 MiB


class _Messages:
    """What an editor sends. A length that no message has ends the server, as what follows cannot be read."""

    def __init__(self, stream: BinaryIO):
        self.stream = stream

    def readline(self) -> bytes:
        return self.stream.readline(MAX_MESSAGE)

    def read(self, size: int) -> bytes:
        if size > MAX_MESSAGE:
            raise UsageError(f"a message of {size} bytes is announced, and at most {MAX_MESSAGE} are read")
        return self.stream.read(size)

    def close(self) -> None:
        self.stream.close()


class _Line(logging.Formatter):
    """Messages that are wrong are told in a line each: the editor gets them, too."""

    def format(self, record: logging.LogRecord) -> str:
        error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
        return f"{record.getMessage().splitlines()[0]}{f': {error}' if error else ''}"[:500]


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
    if not args.debug:
        log = logging.StreamHandler()
        log.setFormatter(_Line())
        logging.getLogger("pygls").addHandler(log)
    # Copies: the server closes its streams, and the command line flushes its own at the end.
    server.start_io(_Messages(os.fdopen(os.dup(0), "rb")), os.fdopen(os.dup(1), "wb"))
    return CLEAN


def _answers(server: Any, tree: ModuleTree | None) -> None:
    """The server's answer to each event."""
    from lsprotocol import types

    def text_of(uri: str) -> str:
        """The text of a document that is open. The server reads no file for its name alone."""
        document = server.workspace.text_documents.get(unquote(uri))
        return "" if document is None else document.source

    def publish(uri: str) -> None:
        path = unquote(urlparse(uri).path)
        found = text_findings(text_of(uri), path, os.path.dirname(path) or None, tree)
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
        text, at = text_of(params.text_document.uri), params.position
        return [types.CompletionItem(label=word) for word in completions(text, at.line, at.character, tree)]

    @server.feature(types.TEXT_DOCUMENT_HOVER)
    def hovered(params: types.HoverParams) -> types.Hover | None:
        text, at = text_of(params.text_document.uri), params.position
        found = hover(text, at.line, at.character, tree)
        return None if found is None else types.Hover(types.MarkupContent(types.MarkupKind.Markdown, found))


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
