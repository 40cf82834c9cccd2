"""Whatever text a plan holds: findings or a plan, never an exception, and no file opened outside the plan's folder."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from shardplan.language import builtin_plans, lint_plan, parse_plan, parse_text
from shardplan.language.limits import MAX_FINDINGS
from shardplan.language.parsing import Parsed
from shardplan.report import text as render
from tests.case_tree import ROOT, cases
from tests.sampling import examples

SEEDS = [
    *(path.read_bytes() for path in sorted((ROOT / "plans").glob("*.yaml"))),
    *(text for case in cases() if (case.code or "SP1").startswith("SP1") for text in case.files.values()),
]
PIECES = [
    b"*", b"**", b"{", b"}", b"[", b"]", b",", b": ", b"\n", b"\n  ", b"\t", b"#", b"&a ", b"*a", b"!!python/object:os.system ",
    b"!!binary ", b"<<: ", b"? ", b"- ", b"|\n", b">-\n", b"---\n", b"...\n", b"%YAML 1.1\n", b"%TAG ! x\n", b'"', b"'", b"\\",
    b"\0", b"\xff", b"\xef\xbb\xbf", "\u2028".encode(), "\u202e".encode(), "\U0001f600".encode(), b"\xed\xa0\x80",
    b"{a,b}" * 12, b"[" * 60, b"{" * 60, b"- " * 60, b"*" * 40, b"(" * 40, b"9" * 500, b"1e999", b".inf", b"0x", b"x" * 1500,
    b"extends: ../x.yaml\n", b"extends: /etc/passwd\n", b"extends: /dev/stdin\n", b"extends: self.yaml\n", b"version: 1\n",
    b"none", b"null", b"style: ", b"packed: ", b"__import__('os')", b"hidden_size // ",
]  # fmt: skip

OPENED: list[str] | None = None


WATCHED = {"open", "os.listdir", "os.scandir", "os.system", "subprocess.Popen", "socket.connect", "exec", "import"}


def listen(event: str, args: tuple) -> None:
    if OPENED is not None and event in WATCHED and not (event == "open" and isinstance(args[0], int)):
        OPENED.append(f"{event} {args[0]}")  # a number is a file that has been opened by its name before


sys.addaudithook(listen)  # a hook cannot be taken away: it does nothing while OPENED is None


@pytest.fixture
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """What is opened, imported and run while a test runs."""
    global OPENED
    first = tmp_path_factory.mktemp("first")
    for ending, text in (("yaml", b"extends: lama\n"), ("json", b"{"), ("yaml", b"\xff"), ("yaml", b"version: [")):
        path = first / f"plan.{ending}"
        path.write_bytes(text)
        check(lint_plan(path))  # imports what is imported once
    check(lint_plan(builtin_plans()["qwen3"]))
    OPENED = []
    yield OPENED
    OPENED = None


def check(parsed: Parsed) -> None:
    """What holds for every text."""
    errors = [d for d in parsed.diagnostics if d.is_error]
    assert (parsed.plan is None) == bool(errors)
    assert len(parsed.diagnostics) <= (MAX_FINDINGS + 1) * max(len(parsed.sources.files), 1)
    for finding in parsed.diagnostics:
        assert finding.message.isprintable() and len(finding.message) < 1000
        span = finding.primary and parsed.sources.span(finding.primary.location)
        if span is not None:
            lines = parsed.sources.files[finding.primary.location.file].lines
            assert 1 <= span.line <= span.end_line <= len(lines)
            assert 1 <= span.column <= len(lines[span.line - 1]) + 1
            assert (span.line, span.column) <= (span.end_line, span.end_column)
    render(parsed.diagnostics, parsed.sources, color=False).encode()


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A plan with some bytes or lines replaced, removed, repeated, or joined with those of another."""
    text = draw(st.sampled_from(SEEDS))
    for _ in range(draw(st.integers(1, 5))):
        start = draw(st.integers(0, len(text)))
        end = min(len(text), start + draw(st.integers(0, 12)))
        match draw(st.integers(0, 4)):
            case 0:
                text = text[:start] + draw(st.sampled_from(PIECES)) + text[end:]
            case 1:
                text = text[:start] + draw(st.binary(max_size=4)) + text[end:]
            case 2:
                text = text[:start] + text[end:]
            case 3:
                lines = text.splitlines(keepends=True) or [b""]
                i = draw(st.integers(0, len(lines) - 1))
                text = b"".join(lines[:i] + lines[i : i + 1] * draw(st.integers(0, 3)) + lines[i + 1 :])
            case 4:
                other = draw(st.sampled_from(SEEDS))
                text = text[:start] + other[draw(st.integers(0, len(other))) :]
    return text


@settings(max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=mutated(), ending=st.sampled_from(["yaml", "json"]))
def test_mutated_plans(tmp_path: Path, opened: list[str], content: bytes, ending: str) -> None:
    path = tmp_path / f"self.{ending}"
    path.write_bytes(content)
    opened.clear()
    parsed = lint_plan(path)
    builtin = {f"open {plan.resolve()}" for plan in builtin_plans().values()}
    outside = {event for event in opened if event not in builtin and event != f"os.listdir {tmp_path}"}
    opened.clear()
    assert outside == {f"open {path}"}
    check(parsed)


names = st.sampled_from(
    ["version", "name", "extends", "models", "tensor_parallel", "sequence_parallel", "data_parallel", "compile", "style",
     "activation_checkpointing", "modules", "units", "packed", "divides", "output", "mixed_precision", "prefetch", "a.*.b", "{a,b}", "a.**"]
) | st.text(max_size=6)  # fmt: skip
scalars = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10)
    | st.sampled_from(["1", "llama", "colwise", "none", "fsdp2", "gather", "x y", "../x", "a\0"])
)  # fmt: skip
structures = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=5), max_leaves=25
)


@settings(max_examples=examples(50), deadline=None)
@given(st.dictionaries(names, structures, max_size=8))
@example({"tensor_parallel": {"version": {"packed": "\U00018cd6"}}})  # a character that is not printable
def test_any_structure_as_a_dict(content: dict) -> None:
    check(parse_plan(content))
    check(parse_plan({"version": "1", **content}))


@settings(max_examples=examples(80), deadline=None)
@given(st.text(max_size=80), st.sampled_from(["yaml", "json"]))
def test_any_text(content: str, format: str) -> None:
    check(parse_text(content, format=format))


@settings(max_examples=examples(50), deadline=None)
@given(st.lists(st.sampled_from([piece.decode("utf-8", "replace") for piece in PIECES]), max_size=25).map("".join))
def test_any_sequence_of_odd_pieces(content: str) -> None:
    check(parse_text(content))
    check(parse_text(f'version: "1"\ntensor_parallel:\n  {content}'))


RULE = 'version: "1"\ntensor_parallel:\n  a.b: {style: colwise, '
LARGE = {
    "brackets": "[" * 1_000_000,
    "braces": "{a: " * 250_000,
    "dashes": "- " * 500_000,
    "question marks": "? " * 500_000,
    "empty lines": "\n" * 1_000_000,
    "one key": "x" * 1_000_000,
    "one text": '"' + "\\\\" * 500_000 + '"',
    "many keys": "".join(f"k{i}:\n" for i in range(130_000)),
    "equal keys": "a:\n" * 300_000,
    "documents": "--- a\n" * 170_000,
    "anchors": "".join(f"- &a{i} x\n" for i in range(80_000)),
    "bomb": "- &a0 [x, x]\n" + "".join(f"- &a{i + 1} [{', '.join([f'*a{i}'] * 10)}]\n" for i in range(50)),
    "bomb in keys": "&a a: {&b b: &c {*a : *b, *b : *a}}\n" + "x: [" + "*c, " * 60_000 + "]",
    "rules": 'version: "1"\ntensor_parallel:\n' + "".join(f"  a.{i}: colwise\n" for i in range(45_000)),
    "wrong rules": 'version: "1"\ntensor_parallel:\n' + "".join(f"  a..{i}: colwize{i}\n" for i in range(40_000)),
    "wrong options": 'version: "1"\ntensor_parallel:\n' + "".join(f"  a.{i}: {{stile: {i}}}\n" for i in range(30_000)),
    "stars": 'version: "1"\ntensor_parallel:\n' + "".join(f"  {i}.{'*a' * 300}: colwise\n" for i in range(1_500)),
    "alternatives": 'version: "1"\ntensor_parallel:\n'
    + "".join(f"  m{i}.{'{a,b}' * 9}: colwise\n" for i in range(10_000)),
    "numbers": "a: " + "9" * 1_000_000,
    "tag": "!!" + "%41" * 300_000 + " a",
    "twice in maps": "a0: &a0 {x: y}\n" + "".join(f"a{i + 1}: &a{i + 1} {{l: *a{i}, r: *a{i}}}\n" for i in range(60)),
    "twice in keys": "? &a0 [x]\n: 1\n" + "".join(f"? &a{i + 1} [*a{i}, *a{i}]\n: 1\n" for i in range(60)),
    "twice in merges": "a0: &a0 {x: y}\n" + "".join(f"a{i + 1}: &a{i + 1} {{<<: [*a{i}, *a{i}]}}\n" for i in range(60)),
    "itself": "tensor_parallel: &a {x: *a}\nextends: &b [*b]\n? &c [*c]\n: 1\n",
    "powers": RULE + "when: 'num_hidden_layers ** 999999999 ** 9999999 > 1'}",
    "a long condition": RULE + "when: '" + "not " * 200_000 + "true'}",
    "brackets in a condition": RULE + "when: '" + "(" * 200_000 + "1" + ")" * 200_000 + "'}",
    "shifts in sizes": RULE + "packed: ['1 << hidden_size * 99999999', '1']}",
    "products in sizes": RULE + f"packed: ['{'99999999*' * 50_000}1', '1']}}",
}


SLOW = {"many keys", "anchors", "rules", "wrong rules", "wrong options", "stars"}  # a second or two each


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in LARGE])
def test_large_texts_end(name: str) -> None:
    """Each is near the limit of a file. That the test ends is what it shows."""
    content = LARGE[name][: 2**20]
    check(parse_text(content))
    if name in ("brackets", "braces", "one text", "numbers"):
        check(parse_text(content, format="json"))


@pytest.mark.parametrize(
    "word", ["/dev/zero", "/dev/stdin", "/proc/self/mem", "./x\0", "x" * 300 + ".yaml", "\ud800.yaml"]
)
def test_odd_files_are_refused(word: str) -> None:
    parsed = parse_plan(word)
    assert parsed.plan is None
    check(parsed)


def test_the_audit_can_fail(opened: list[str], tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    assert opened[-1] == f"open {tmp_path / 'x'}"
