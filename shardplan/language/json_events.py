"""JSON text (RFC 8259) -> the events that the YAML library makes of YAML text.

The standard library decides what is JSON, and what a text in quotes means. YAML's scanner cannot read all JSON: it
rejects surrogate escapes, keys above 1,024 characters, and DEL.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterator
from typing import NoReturn

import yaml

from shardplan.core.diagnostics import Span

from .nodes import line_starts
from .parse_findings import quoted
from .syntax import refuse

_TOKEN = re.compile(r'"(?:[^"\\]+|\\.)*"|[][{}]|[^][{}:,"\s]+')  # in valid JSON
_LAST_COMMA = re.compile(r",[ \t\r\n]*([]}])")
_SURROGATE = re.compile("[\ud800-\udfff]")
_NO_COMMENTS = "JSON has no comments; a plan with comments is a .yaml file"
_HELP = {"'": "JSON has double quotes only", "#": _NO_COMMENTS, "/": _NO_COMMENTS}


def json_events(text: str, file: str) -> Iterator[yaml.Event]:
    """The events of a document; none for an empty one.

    Args:
        text: the text without a byte order mark.
        file: the display name, for a finding about text that is not JSON.

    Raises:
        Unreadable: it is not JSON, or has an invalid character or number.
    """
    starts = line_starts(text)

    def mark(at: int) -> yaml.Mark:
        line = bisect_right(starts, at) - 1
        return yaml.Mark(file, at, line, at - starts[line], None, 0)

    def wrong(problem: str, at: int, end: int, help: str | None) -> NoReturn:
        first, last = mark(at), mark(end)
        span = Span(first.line + 1, first.column + 1, last.line + 1, last.column + 1)
        refuse(file, f"not valid JSON: {problem}", span, help=help)

    if not text.strip():
        return
    try:
        json.loads(text, parse_int=str, parse_float=str)
    except json.JSONDecodeError as error:
        wrong(*_problem(error))
    except RecursionError:
        pass  # readers of the events stop at a depth far below
    for found in _TOKEN.finditer(text):
        token, places = found[0], (mark(found.start()), mark(found.end()))
        match token[0]:
            case "{":
                yield yaml.MappingStartEvent(None, None, True, *places, flow_style=True)
            case "}":
                yield yaml.MappingEndEvent(*places)
            case "[":
                yield yaml.SequenceStartEvent(None, None, True, *places, flow_style=True)
            case "]":
                yield yaml.SequenceEndEvent(*places)
            case '"':
                said = json.loads(token)
                if _SURROGATE.search(said):
                    problem = "half of a surrogate pair is not a character"
                    wrong(problem, *found.span(), "write the character itself")
                yield yaml.ScalarEvent(None, None, (False, True), said, *places, style='"')
            case _:
                if token.endswith(("NaN", "Infinity")):  # accepted by Python alone
                    wrong(f"{quoted(token)} is not a value", *found.span(), None)
                yield yaml.ScalarEvent(None, None, (True, False), token, *places)


def _problem(error: json.JSONDecodeError) -> tuple[str, int, int, str | None]:
    """The problem, its start and end, and a help line. Releases of Python describe a last comma differently."""
    text, at = error.doc, error.pos
    comma = _LAST_COMMA.match(text, at if text.startswith(",", at) else max(len(text[:at].rstrip()) - 1, 0))
    if comma and not error.msg.startswith("Invalid"):  # this one is inside of a text
        return f"a comma before `{comma[1]}`", comma.start(), comma.start() + 1, "remove the comma"
    found = "the end of the file" if at >= len(text) else quoted(text[at])
    reason = error.msg[:1].lower() + error.msg[1:].removesuffix(" at")
    return f"{reason}, at {found}", at, at + 1, _HELP.get(text[at : at + 1])
