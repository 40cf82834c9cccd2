"""Expressions over config numbers: value, names, refusals; against Python's own arithmetic."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardplan.core.expressions import EvaluationError, ExpressionError, evaluate, names, parse_expression

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
        ("", "the end stands where a number or a name is expected", ""),
        ("heads *", "the end stands where a number or a name is expected", ""),
        ("heads heads", "`heads` stands where an operator (+ - * //) is expected", "heads"),
        ("(heads", "the end stands where an operator or `)` is expected", ""),
        ("heads)", "`)` stands where an operator (+ - * //) is expected", ")"),
        ("-1", "`-` stands where a number or a name is expected", "-"),
        ("heads / 2", "`/` has no meaning here; write `//` to divide", "/"),
        ("heads ** 2", "`*` stands where a number or a name is expected", "*"),
        ("f(1)", "`(` stands where an operator (+ - * //) is expected", "("),
        ("a[0]", "`[` has no meaning here", "["),
        ("1.5", "`.` has no meaning here", "."),
        ("__import__('os')", "`(` stands where an operator (+ - * //) is expected", "("),
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


@settings(max_examples=200, deadline=None)
@given(expressions)
def test_agrees_with_python(text: str) -> None:
    try:
        expected = eval(text, {}, NUMBERS)
    except ZeroDivisionError:
        with pytest.raises(EvaluationError):
            evaluate(parse_expression(text), NUMBERS)
    else:
        assert evaluate(parse_expression(text), NUMBERS) == expected


@settings(max_examples=200, deadline=None)
@given(st.text("ab1.+-*/() _é\n", max_size=25))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        list(names(parse_expression(text)))
    except ExpressionError as error:
        assert 0 <= error.start <= error.end <= len(text)
