"""Expressions over config numbers: value, names, refusals; against Python's own arithmetic."""

import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardplan.core.expressions import EvaluationError, ExpressionError, evaluate, names, parse_expression
from tests.sampling import examples

NUMBERS = {
    "hidden_size": 4096,
    "heads": 32,
    "text_config.heads": 8,
    "eps": 1e-5,
    "theta": 10000.0,
    "tied": True,
    "zero": 0,
}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("heads", 32),
        ("12", 12),
        (" text_config.heads *(hidden_size//heads) ", 1024),
        ("1 - 2 - 3", -4),
        ("2 + 3 * 4", 14),
        ("100 // 7 // 2", 7),
        ("(2 + 3) * (4)", 20),
        ("theta", 10000),
        ("heads-1", 31),
    ],
)
def test_value(text: str, value: int) -> None:
    assert evaluate(parse_expression(text), NUMBERS) == value


@pytest.mark.parametrize(
    ("text", "reason", "meant"),
    [
        ("", "the end is found where a number or a name is expected", ""),
        ("heads *", "the end is found where a number or a name is expected", ""),
        ("heads heads", "`heads` is found where an operator (+ - * //) is expected", "heads"),
        ("(heads", "the end is found where an operator or `)` is expected", ""),
        ("heads)", "`)` is found where an operator (+ - * //) is expected", ")"),
        ("-1", "`-` is found where a number or a name is expected", "-"),
        ("heads / 2", "`/` has no meaning here; write `//` to divide", "/"),
        ("heads ** 2", "`*` is found where a number or a name is expected", "*"),
        ("f(1)", "`(` is found where an operator (+ - * //) is expected", "("),
        ("a[0]", "`[` has no meaning here", "["),
        ("1.5", "`.` has no meaning here", "."),
        ("__import__('os')", "`(` is found where an operator (+ - * //) is expected", "("),
        ("a.", "`.` has no meaning here", "."),
        ("²", "`²` has no meaning here", "²"),
        ("9" * 13, "a number may have at most 12 digits", "9" * 13),
        ("(" * 11 + "1" + ")" * 11, "parentheses are nested more than 10 deep", "("),
        ("1+" * 100 + "1", "the expression has 201 characters, at most 200 are allowed", "1+" * 100 + "1"),
    ],
)
def test_refusal(text: str, reason: str, meant: str) -> None:
    with pytest.raises(ExpressionError) as raised:
        parse_expression(text)
    assert raised.value.reason == reason
    assert text[raised.value.start : raised.value.end] == meant


PYTHON_ONLY = [
    "f()", "f(heads)", "heads(1)", "(heads)(1)", "heads .zero", "heads. zero", "(heads).zero", "().heads", "()", "heads,", "(1, 2)",
    "[1]", "{1}", "{1: 2}", "heads[0]", "heads[:]", "1 < 2", "1 < 2 < 3", "1 == 1", "1 != 2", "(a := 1)", "a = 1", "lambda: 1",
    "lambda x: x", "1 if heads else 2", "1if heads else 2", "not heads", "heads and zero", "1 in heads", "1 is 1", "heads is zero",
    "await heads", "yield 1", "*heads", "**heads", "-heads", "+1", "~1", "1 - -1", "2 ** 3", "heads % 2", "heads / 2", "1 << 2",
    "1 @ 2", "1 | 2", "'1'", '"1"', "'1' + heads", "f'{heads}'", "b'1'", "r'1'", "1  # one", "# one", "1; 2", "1\\\n+ 1", "1_000",
    "0x10", "0o7", "0b1", "1e5", "1.", ".5", "1.0", "1j", "1J", "...", "1 for a in b", "(a for a in b)", "print(1)", "heads!",
    "h\u00e9ads", "\uff48eads", "\ufb01", "he\u0301ads", "\u0663", "\u2460", "1\u00a0+ 1", "\u22121", "1 \u00d7 2", "1\0",
    "\ud800",
]  # fmt: skip


@pytest.mark.parametrize("text", PYTHON_ONLY)
def test_what_only_python_has_is_refused(text: str) -> None:
    with pytest.raises(ExpressionError, match=r"` has no meaning here|` is found where |the end stands where "):
        parse_expression(text)


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("a.0.b * a.1b", ["a.0.b", "a.1b"]),
        ("if + lambda - None // True * yield", ["if", "lambda", "None", "True", "yield"]),
        ("__debug__ * text_config.class", ["__debug__", "text_config.class"]),
        ("007 + 00", []),
        ("a\n+\r\n b\f*\v(\tc\n)", ["a", "b", "c"]),
        ("\n 1 + a \n", ["a"]),
    ],
)
def test_what_python_refuses_is_read(text: str, read: list[str]) -> None:
    assert list(names(parse_expression(text))) == read


def test_none_and_true_are_names_like_any_other() -> None:
    with pytest.raises(EvaluationError, match="no number True and no number None"):
        evaluate(parse_expression("True + None"), NUMBERS)


@pytest.mark.parametrize(
    ("text", "value"),
    [("10" + "-1" * 99, -89), ("(" * 10 + "7" + ")" * 10, 7), ("1" + "*999999999999" * 15, 999999999999**15)],
)
def test_the_longest_and_the_deepest(text: str, value: int) -> None:
    assert evaluate(parse_expression(text), {}) == value


@pytest.mark.parametrize(
    "text", ["(" * 200, "-" * 200, "1+(" * 66, "((((((((((1))))))))))(((((", "1" * 200, "x." * 100]
)
def test_texts_that_would_burden_pythons_parser(text: str) -> None:
    with pytest.raises(ExpressionError):
        parse_expression(text)


@pytest.mark.parametrize("text", ["1if", "0or 1", "1 is 1", "1(2)", "1[0]", r"'\d'", "0777", "1\\d"])
def test_no_warning_of_pythons_parser_is_seen(text: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            parse_expression(text)
        except ExpressionError as error:
            assert "Warning" not in error.reason


def test_names_without_a_number_are_all_named() -> None:
    with pytest.raises(EvaluationError) as raised:
        evaluate(parse_expression("a + heads * b.c + a"), NUMBERS)
    assert raised.value.unknown == ("a", "b.c")
    assert raised.value.reason == "the configuration has no number a and no number b.c"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("heads // (heads - 32)", "32 // 0 is a division by zero"),
        ("eps", "eps is 1e-05, not a whole number"),
        ("tied", "tied is True, not a whole number"),
    ],
)
def test_no_value(text: str, reason: str) -> None:
    with pytest.raises(EvaluationError) as raised:
        evaluate(parse_expression(text), NUMBERS)
    assert raised.value.reason == reason and raised.value.unknown == ()


expressions = st.recursive(
    st.integers(0, 999).map(str) | st.sampled_from(["heads", "hidden_size", "zero"]),
    lambda inner: (
        st.tuples(inner, st.sampled_from(["+", "-", "*", "//"]), inner).map(" ".join)
        | inner.map(lambda text: f"({text})")
    ),
    max_leaves=12,
)


@settings(max_examples=examples(200), deadline=None)
@given(expressions)
def test_agrees_with_python(text: str) -> None:
    try:
        expected = eval(text, {}, NUMBERS)
    except ZeroDivisionError:
        with pytest.raises(EvaluationError):
            evaluate(parse_expression(text), NUMBERS)
    else:
        assert evaluate(parse_expression(text), NUMBERS) == expected


@settings(max_examples=examples(200), deadline=None)
@given(st.text("ab1.+-*/() _é\n", max_size=25))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        list(names(parse_expression(text)))
    except ExpressionError as error:
        assert 0 <= error.start <= error.end <= len(text)
