"""JSON text (RFC 8259) -> nodes.

JSON is nearly, but not quite, YAML: surrogate escapes, long keys and tabs differ.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterator
from typing import Literal, NamedTuple, NoReturn, get_args

from shardplan.core.diagnostics import Diagnostic, Span

from .limits import MAX_DEPTH, MAX_NODES
from .nodes import Document, Entry, ListNode, MapNode, Node, Scalar, line_starts
from .parse_findings import quoted
from .scalars import number, whole
from .syntax import Unreadable, note_duplicate, refuse, refuse_depth, refuse_nodes

_BLANK = re.compile(r"[ \t\n\r]*")
_TOKEN = re.compile(
    r'(?P<text>"(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*")'
    r"|(?P<number>-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?(?![0-9A-Za-z_.]))"
    r"|(?P<word>(?:true|false|null)(?![0-9A-Za-z_]))"
    r"|(?P<sign>[][{}:,])"
)
_SURROGATE = re.compile("[\ud800-\udfff]")
_WORDS = {"true": True, "false": False, "null": None}

_Kind = Literal["text", "number", "word", "sign", "end"]
_KINDS: tuple[_Kind, ...] = get_args(_Kind)


class _Token(NamedTuple):
    kind: _Kind
    text: str
    start: int
    end: int


def read_json(text: str, file: str) -> Document:
    """Reads a document.

    What ends the reading comes as one finding; of a key that is there twice the first is kept.

    Args:
        text: without a byte order mark.
        file: the display name, for the findings.
    """
    reader = _Reader(text, file)
    try:
        return Document(reader.read(), tuple(reader.findings))
    except Unreadable as stop:
        return Document(None, (*reader.findings, stop.diagnostic))


class _Reader:
    def __init__(self, text: str, file: str):
        self.text, self.file = text, file
        self.findings: list[Diagnostic] = []
        self.starts = line_starts(text)
        self.nodes = 0
        self.tokens = self._tokens()

    def read(self) -> Node:
        root = self._value(next(self.tokens), 0)
        rest = next(self.tokens)
        if rest.kind != "end":
            self._wrong(rest, "the end of the file")
        return root

    def _tokens(self) -> Iterator[_Token]:
        position = 0
        while True:
            blank = _BLANK.match(self.text, position)
            assert blank is not None  # it may be empty
            position = blank.end()
            match = _TOKEN.match(self.text, position)
            if match is None:
                break
            kind = match.lastgroup
            assert kind in _KINDS, kind
            yield _Token(kind, match[0], position, match.end())
            position = match.end()
        if position < len(self.text):
            self._refuse_character(position)
        yield _Token("end", "", position, position)

    def _value(self, token: _Token, depth: int) -> Node:
        span = self._span(token.start, token.end)
        self.nodes += 1
        if self.nodes > MAX_NODES:
            refuse_nodes(self.file, span)
        match token:
            case ("text", *_):
                text = self._text(token)
                return Scalar(text, text, span)
            case ("number", digits, *_):
                is_whole = digits.lstrip("-").isdigit()
                return Scalar(whole(digits) if is_whole else number(float(digits)), digits, span)
            case ("word", word, *_):
                return Scalar(_WORDS[word], word, span)
            case (_, "[" | "{" as sign, *_):
                if depth == MAX_DEPTH:
                    refuse_depth(self.file, span)
                return self._list(token, depth + 1) if sign == "[" else self._mapping(token, depth + 1)
            case _:
                self._wrong(token, "a value")

    def _list(self, opened: _Token, depth: int) -> ListNode:
        items: list[Node] = []
        token = next(self.tokens)
        while token.text != "]" or token.kind != "sign":
            items.append(self._value(token, depth))
            token = self._after_item("]")
        return ListNode(tuple(items), self._span(opened.start, token.end))

    def _mapping(self, opened: _Token, depth: int) -> MapNode:
        entries: dict[str, Entry] = {}
        token = next(self.tokens)
        while token.text != "}" or token.kind != "sign":
            if token.kind != "text":
                self._wrong(token, "a key in double quotes")
            key, span = self._text(token), self._span(token.start, token.end)
            colon = next(self.tokens)
            if colon.text != ":" or colon.kind != "sign":
                self._wrong(colon, "`:`")
            self.nodes += 1
            value = self._value(next(self.tokens), depth)
            if key in entries:
                note_duplicate(self.findings, self.file, entries[key], span)
            else:
                entries[key] = Entry(key, value, span)
            token = self._after_item("}")
        return MapNode(tuple(entries.values()), self._span(opened.start, token.end))

    def _after_item(self, closing: str) -> _Token:
        """The closing sign, or after a comma the first token of the next item."""
        token = next(self.tokens)
        if token.kind == "sign" and token.text == closing:
            return token
        if token.text != "," or token.kind != "sign":
            self._wrong(token, f"`,` or `{closing}`")
        following = next(self.tokens)
        if following.kind == "sign" and following.text == closing:
            refuse(
                self.file,
                f"not valid JSON: a comma before `{closing}`",
                self._span(token.start, token.end),
                help="remove the comma",
            )
        return following

    def _text(self, token: _Token) -> str:
        text = json.loads(token.text)
        if _SURROGATE.search(text):
            refuse(
                self.file,
                "not valid JSON: half of a surrogate pair is not a character",
                self._span(token.start, token.end),
                help="write the character itself",
            )
        return text

    def _wrong(self, token: _Token, expected: str) -> NoReturn:
        found = quoted(token.text) if token.text else "the end of the file"
        if not self.text.strip():
            refuse(self.file, "the file is empty", Span(1, 1, 1, 1), help='begin with `{"version": "1"`')
        span = self._span(token.start, max(token.end, token.start + 1))
        refuse(self.file, f"not valid JSON: {found} where {expected} is expected", span)

    def _refuse_character(self, position: int) -> NoReturn:
        character = self.text[position]
        rest = self.text[position : position + 2]
        help = None
        if character == "'":
            help = "JSON has double quotes only"
        elif character == "#" or rest in ("//", "/*"):
            help = "JSON has no comments; a plan with comments is a .yaml file"
        reason = f"{quoted(character)} has no meaning here"
        if character == '"':
            reason = "a text that is not closed, or holds a line break or an unknown escape"
        refuse(self.file, f"not valid JSON: {reason}", self._span(position, position + 1), help=help)

    def _span(self, start: int, end: int) -> Span:
        line, end_line = bisect_right(self.starts, start), bisect_right(self.starts, end)
        return Span(line, start - self.starts[line - 1] + 1, end_line, end - self.starts[end_line - 1] + 1)
