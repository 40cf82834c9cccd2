"""Text -> nodes: what YAML 1.2 and JSON say, and where it stands."""

import json
from enum import StrEnum

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardplan.core.diagnostics import Span
from shardplan.language import limits, python_reader, reader, syntax
from shardplan.language.limits import MAX_DEPTH, MAX_NODES
from shardplan.language.nodes import Document, Scalar, node_at, spans, split_lines, to_data
from shardplan.language.python_reader import read_python
from shardplan.language.reader import read_document
from tests.sampling import examples

INF = float("inf")
FEWER = 2_000  # keys and values


def data(document: Document) -> object:
    assert document.root is not None, document.findings
    return to_data(document.root)


def messages(document: Document) -> list[str]:
    return [finding.message for finding in document.findings]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("no", "no"),
        ("on", "on"),
        ("Yes", "Yes"),
        ("true", True),
        ("FALSE", False),
        ("tRUE", "tRUE"),
        ("", None),
        ("~", None),
        ("Null", None),
        ("'null'", "null"),
        ("12", 12),
        ("-0", 0),
        ("012", 12),
        ("0o17", 15),
        ("0x1F", 31),
        ("0b11", "0b11"),
        ("1_000", "1_000"),
        ("1e3", 1000),
        ("1.0", 1),
        (".5", 0.5),
        ("1.", 1),
        ("1:30", "1:30"),
        ("2020-01-01", "2020-01-01"),
        ("-.INF", -INF),
        ("9" * 400, INF),
        ("1e999", INF),
        ("=", "="),
        ('"\\u2028\\N"', "\u2028\x85"),
        ('"1"', "1"),
        ("!!str 1", "1"),
        ("! 1", 1),
        ('!!int "3"', 3),
        ("!!float 1", 1),
    ],
)
def test_scalars_are_those_of_yaml_1_2(text: str, value: object) -> None:
    (result,) = data(read_document(f"- {text}\n", "f"))
    assert result == value and type(result) is type(value)


def test_keys_are_text() -> None:
    assert data(read_document("1: a\nno: b\nnull: c\n1.0: d\n", "f")) == {"1": "a", "no": "b", "null": "c", "1.0": "d"}


TEXT = """\
version: "1"
tensor_parallel:
  "é.[a]": &anchor {style: colwise, shares: [a, b]}
  x.y: *anchor
description: >
  Two
  lines.
models:
  - llama
  - qwen3
"""


def test_every_key_and_value_has_its_place() -> None:
    document = read_document(TEXT, "f")
    lines, places = split_lines(TEXT), spans(document.root)

    def cut(path: tuple, part: str) -> str:
        span = places[path, part]
        if span.line == span.end_line:
            return lines[span.line - 1][span.column - 1 : span.end_column - 1]
        return lines[span.line - 1][span.column - 1 :] + "|" + lines[span.end_line - 1][: span.end_column - 1]

    assert cut(("version",), "key") == "version"
    assert cut(("version",), "value") == '"1"'
    assert cut(("tensor_parallel", "é.[a]"), "key") == '"é.[a]"'
    assert cut(("tensor_parallel", "é.[a]"), "value") == "&anchor {style: colwise, shares: [a, b]}"
    assert cut(("tensor_parallel", "é.[a]", "shares", 1), "value") == "b"
    assert cut(("tensor_parallel", "x.y"), "value") == "*anchor"
    assert cut(("tensor_parallel", "x.y", "style"), "key") == "style"
    assert places[("tensor_parallel", "x.y", "style"), "key"].line == 3
    assert cut(("description",), "value") == ">|  lines."
    assert cut(("models",), "value") == "- llama|  - qwen3"
    assert places[(), "key"] == Span(1, 1, 1, 1)


def test_json_places() -> None:
    text = '{"a": [1,\r\n  {"b\\u0063": "x"}], "d": true}'
    places = spans(read_document(text, "f", "json").root)
    assert places[("a", 1, "bc"), "key"] == Span(2, 4, 2, 13)
    assert places[("a",), "value"] == Span(1, 7, 2, 20)
    assert places[("d",), "value"] == Span(2, 27, 2, 31)


@pytest.mark.parametrize(
    ("text", "message", "place"),
    [
        ("a: 1\nb: [", "not valid YAML, while parsing a flow node: did not find expected node content", (2, 5)),
        ("a: b: c", "not valid YAML: mapping values are not allowed in this context", (1, 5)),
        ("a: *b", "the alias `*b` refers to nothing", (1, 4)),
        ("a: &b [*b]", "the alias `*b` is part of the value that it refers to", (1, 8)),
        ("a: &b {x: 1}\n? *b\n: c", "a key must be text", (2, 3)),
        ("[a]: b", "a key must be text", (1, 1)),
        ("a: !mine b", "the tag `!mine` has no meaning in a plan", (1, 4)),
        ("!mine a: b", "the tag `!mine` has no meaning in a plan", (1, 1)),
        ("a: !!python/name:os.system b", "the tag `!!python/name:os.system` has no meaning in a plan", (1, 4)),
        ("a: !!int x", "the tag `!!int` has no meaning in a plan", (1, 4)),
        ("a: !!set {x: 1}", "the tag `!!set` has no meaning in a plan", (1, 4)),
        ("%TAG !e! tag:x,1:\n---\na: !e!b c", "the tag `tag:x,1:b` has no meaning in a plan", (3, 4)),
        ("a: 1\n---\nb: 2", "the file has several documents", (2, 1)),
        ("%YAML 1.1\n---\na: 1", "the file declares YAML 1.1, plans are YAML 1.2", (1, 1)),
        ("a: é\0", "the character U+0000 is not allowed in a plan", (1, 5)),
        ("a: 1\nb: \x1b[31m", "the character U+001B is not allowed in a plan", (2, 4)),
        ("a: \ud800", "the character U+D800 is not allowed in a plan", (1, 4)),
        ("a: 1\nb: x\u2028y", "the character U+2028 is not allowed in a plan", (2, 5)),
        ('a: "\x85"', "the character U+0085 is not allowed in a plan", (1, 5)),
        ("", "the file is empty", (1, 1)),
        ("# only this", "the file is empty", (1, 1)),
        ("<<: {a: 1}", "`<<` merges mappings in YAML 1.1 only; plans are YAML 1.2", (1, 1)),
    ],
)
def test_what_ends_the_reading_of_yaml(text: str, message: str, place: tuple[int, int]) -> None:
    document = read_document(text, "f")
    (finding,) = document.findings
    assert document.root is None and finding.code == "SP102"
    assert finding.message == message
    assert (finding.primary.location.span.line, finding.primary.location.span.column) == place


@pytest.mark.parametrize(
    ("text", "message", "column"),
    [
        ("", "the file is empty", 1),
        ("{", "not valid JSON: expecting property name enclosed in double quotes, at the end of the file", 2),
        ('{"a"', "not valid JSON: expecting ':' delimiter, at the end of the file", 5),
        ('{"a":', "not valid JSON: expecting value, at the end of the file", 6),
        ('{"a":1', "not valid JSON: expecting ',' delimiter, at the end of the file", 7),
        ('{"a":1,}', "not valid JSON: a comma before `}`", 7),
        ("[1, \n ]", "not valid JSON: a comma before `]`", 3),
        ('{"a":[,]}', "not valid JSON: a comma before `]`", 7),
        ("[1 2]", "not valid JSON: expecting ',' delimiter, at `2`", 4),
        ("[01]", "not valid JSON: expecting ',' delimiter, at `1`", 3),
        ("[.5]", "not valid JSON: expecting value, at `.`", 2),
        ("[NaN]", "not valid JSON: `NaN` is not a value", 2),
        ("[-Infinity]", "not valid JSON: `-Infinity` is not a value", 2),
        ("[\u2028]", "not valid JSON: expecting value, at `\\u2028`", 2),
        ("[True]", "not valid JSON: expecting value, at `T`", 2),
        ("[yes]", "not valid JSON: expecting value, at `y`", 2),
        ("{a: 1}", "not valid JSON: expecting property name enclosed in double quotes, at `a`", 2),
        ("{1: 1}", "not valid JSON: expecting property name enclosed in double quotes, at `1`", 2),
        ('"a\\x"', "not valid JSON: invalid \\escape, at `\\`", 3),
        ('"a', 'not valid JSON: unterminated string starting, at `"`', 1),
        ('",\n]"', "not valid JSON: invalid control character, at `\\n`", 3),
        ('"\\udc00"', "not valid JSON: half of a surrogate pair is not a character", 1),
        ("{} {}", "not valid JSON: extra data, at `{`", 4),
        ("[]]", "not valid JSON: extra data, at `]`", 3),
    ],
)
def test_what_ends_the_reading_of_json(text: str, message: str, column: int) -> None:
    document = read_document(text, "f", "json")
    (finding,) = document.findings
    assert document.root is None and finding.code == "SP102"
    assert (finding.message, finding.primary.location.span.column) == (message, column)


@pytest.mark.parametrize(("format", "text"), [("yaml", "{a: 1, b: 2, a: 3}"), ("json", '{"a":1,"b":2,"a":3}')])
def test_of_equal_keys_the_first_is_kept_and_both_are_shown(format, text: str) -> None:
    document = read_document(text, "f", format)
    (finding,) = document.findings
    assert data(document) == {"a": 1, "b": 2}
    assert finding.code == "SP103"
    assert finding.primary.location.span.column > finding.related[0].location.span.column == 2


def nested(depth: int) -> list:
    inner: list = []
    for _ in range(depth - 1):
        inner = [inner]
    return inner


@pytest.fixture
def fewer_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A smaller limit, which is read as fast as it is met."""
    for module in (limits, python_reader, reader, syntax):
        monkeypatch.setattr(module, "MAX_NODES", FEWER)


@pytest.mark.usefixtures("fewer_nodes")
@pytest.mark.parametrize(
    "read", [lambda value: read_document(json.dumps(value), "f", "json"), lambda value: read_python(value, "f")]
)
def test_depth_and_size_are_limited_in_json_and_python(read) -> None:
    assert read(nested(MAX_DEPTH)).root is not None
    assert messages(read(nested(MAX_DEPTH + 1))) == [f"lists and mappings are nested more than {MAX_DEPTH} deep"]
    assert read([0] * (FEWER - 1)).root is not None
    assert messages(read([0] * FEWER)) == [f"the plan has more than {FEWER} keys and values"]


@pytest.mark.usefixtures("fewer_nodes")
def test_depth_and_size_are_limited_in_yaml() -> None:
    assert read_document("- " * MAX_DEPTH + "x", "f").root is not None
    assert [f.code for f in read_document("- " * (MAX_DEPTH + 1) + "x", "f").findings] == ["SP111"]
    assert [f.code for f in read_document("[" * 500_000, "f").findings] == ["SP111"]
    assert [f.code for f in read_document("[" + "a," * FEWER + "]", "f").findings] == ["SP111"]


def test_aliases_count_each_time_in_size_and_in_depth() -> None:
    bomb = "- &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"- &{to} [{', '.join(['*' + of] * 10)}]\n" for of, to in zip("abcdefgh", "bcdefghi", strict=True)
    )
    (finding,) = read_document(bomb, "f").findings
    assert finding.message == f"the plan has more than {MAX_NODES} keys and values, with what its aliases repeat"
    tower = "- &a0 [x]\n" + "".join(f"- &a{i + 1} [*a{i}]\n" for i in range(300))
    (finding,) = read_document(tower, "f").findings
    assert finding.message == f"lists and mappings are nested more than {MAX_DEPTH} deep"


class Word(StrEnum):
    A = "a"


def test_a_dict_holds_what_a_text_can_say() -> None:
    cyclic: dict = {}
    cyclic["a"] = cyclic
    assert data(read_python({"a": (1, 2.0, None), Word.A.value + "b": Word.A}, "f")) == {"a": [1, 2, None], "ab": "a"}
    assert type(data(read_python({"a": Word.A}, "f"))["a"]) is str
    assert data(read_python({"a": 10**5000}, "f")) == {"a": INF}
    assert messages(read_python(cyclic, "f")) == [f"lists and mappings are nested more than {MAX_DEPTH} deep"]
    assert messages(read_python({1: 2}, "f")) == ["a key must be text, not an object of class int"]
    assert messages(read_python({"a": object()}, "f")) == [
        "a plan holds text, numbers, lists and mappings, not an object of class object"
    ]
    assert messages(read_python({"a": {"\ud800": 1}}, "f")) == ["the key `\\ud800` holds half of a surrogate pair"]
    assert messages(read_python({"a": "\ud800"}, "f")) == ["the text `\\ud800` holds half of a surrogate pair"]


numbers = st.integers(-(10**13), 10**13) | st.floats(allow_nan=False, allow_infinity=False).filter(
    lambda x: abs(x) < 1e13
)
values = st.recursive(
    st.none() | st.booleans() | numbers | st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=examples(150), deadline=None)
@given(values, st.sampled_from([None, 1, "\t"]), st.booleans())
@example({"k" * 2000: "\x7f\x85\u2028\U0001f600", "<<": ["yes", "1e5", 1e5, -0.5]}, "\t", True)  # none of it is YAML's
@example({"k" * 2000: "\x7f\x85\u2028\U0001f600", "<<": ["yes", "1e5", 1e5, -0.5]}, None, False)
def test_json_is_what_python_reads(value: object, indent, ascii: bool) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii)
    document, lines = read_document(text, "f", "json"), split_lines(text)
    assert data(document) == data(read_python(value, "f")) == value
    for (path, part), span in spans(document.root).items():
        if path and isinstance(node := node_at(document.root, path), Scalar):
            written = lines[span.line - 1][span.column - 1 : span.end_column - 1]
            assert json.loads(written) == (path[-1] if part == "key" else node.value)


@settings(max_examples=examples(150), deadline=None)
@given(values, st.sampled_from([None, 1]))
def test_yaml_reads_json_alike(value: object, indent) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    document = read_document(text, "f")
    if document.root is not None:  # DEL, for one, is allowed in JSON only
        assert to_data(document.root) == value
    else:
        assert not text.replace("\n", "").isprintable()


@settings(max_examples=examples(400), deadline=None)
@given(st.text('{}[]:,"\\u0e1 -.tfnab\n\x01é', max_size=12))
def test_json_is_valid_where_python_finds_it_valid(text: str) -> None:
    document = read_document(text, "f", "json")
    try:
        value = json.loads(text)
    except ValueError:
        assert document.root is None and document.findings
    else:
        assert document.root is not None or "\\u" in text  # half of a surrogate pair
        if not document.findings:
            assert data(document) == value
