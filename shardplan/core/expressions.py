"""Expressions over the numbers of a model's configuration: `num_key_value_heads * (hidden_size // 32)`.

    expression = term {("+" | "-") term}
    term       = factor {("*" | "//") factor}
    factor     = whole number | name {"." name} | "(" expression ")"

Read by hand and evaluated over a table of numbers: nothing in an expression can name code.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

MAX_LENGTH = 200  # characters
MAX_DIGITS = 12  # of a number written out
MAX_NESTING = 10  # of parentheses

Operator = Literal["+", "-", "*", "//"]
OPERATORS: dict[Operator, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
}


@dataclass(frozen=True, slots=True)
class Number:
    """A whole number."""

    value: int


@dataclass(frozen=True, slots=True)
class Name:
    """A number of the configuration by its (dotted) name."""

    name: str


@dataclass(frozen=True, slots=True)
class Operation:
    """Two expressions combined."""

    operator: Operator
    left: Expression
    right: Expression


Expression = Number | Name | Operation


class ExpressionError(ValueError):
    """A text that is no expression.

    Args:
        reason: what is wrong, without a final full stop.
        start, end: the characters that are meant.
    """

    def __init__(self, reason: str, start: int, end: int):
        super().__init__(reason)
        self.reason, self.start, self.end = reason, start, end


class EvaluationError(ValueError):
    """An expression that has no value for these numbers.

    Args:
        reason: what is wrong, without a final full stop.
        unknown: the names that the table does not have.
    """

    def __init__(self, reason: str, unknown: tuple[str, ...] = ()):
        super().__init__(reason)
        self.reason, self.unknown = reason, unknown


def parse_expression(text: str) -> Expression:
    """Reads an expression.

    Raises:
        ExpressionError: it is malformed or too long.
    """
    if len(text) > MAX_LENGTH:
        raise ExpressionError(
            f"the expression has {len(text)} characters, at most {MAX_LENGTH} are allowed", 0, len(text)
        )
    return _Reader(text).read()


def evaluate(expression: Expression, numbers: Mapping[str, int | float]) -> int:
    """The value of an expression.

    Args:
        numbers: the numbers of the configuration by name (`ModuleTree.numbers`).

    Raises:
        EvaluationError: names without a number (all of them), a number that is not whole, a division by zero.
    """
    unknown = tuple(dict.fromkeys(name for name in names(expression) if name not in numbers))
    if unknown:
        raise EvaluationError(f"the configuration has no number {' and no number '.join(unknown)}", unknown)
    return _value(expression, numbers)


def names(expression: Expression) -> Iterator[str]:
    """The names that an expression reads, from left to right."""
    match expression:
        case Name(name):
            yield name
        case Operation(_, left, right):
            yield from names(left)
            yield from names(right)


def _value(expression: Expression, numbers: Mapping[str, int | float]) -> int:
    match expression:
        case Number(value):
            return value
        case Name(name):
            return _whole(name, numbers[name])
        case Operation(sign, left, right):
            a, b = _value(left, numbers), _value(right, numbers)
            if sign == "//" and b == 0:
                raise EvaluationError(f"{a} // 0 is a division by zero")
            return OPERATORS[sign](a, b)


def _whole(name: str, value: int | float) -> int:
    if isinstance(value, bool) or not (isinstance(value, int) or value.is_integer()):
        raise EvaluationError(f"{name} is {value}, not a whole number")
    return int(value)


_TOKEN = re.compile(r"\s*(?:(?P<number>[0-9]+)|(?P<name>[A-Za-z_]\w*(?:\.\w+)*)|(?P<sign>//|[-+*()]))", re.ASCII)
_BLANK = re.compile(r"\s*")
_SUMS = ("+", "-")
_PRODUCTS = ("*", "//")


@dataclass(frozen=True, slots=True)
class _Token:
    kind: Literal["number", "name", "sign", "end"]
    text: str
    start: int


def _tokens(text: str) -> Iterator[_Token]:
    position = 0
    while match := _TOKEN.match(text, position):
        kind = match.lastgroup
        yield _Token(kind, match[kind], match.start(kind))
        position = match.end()
    position = _BLANK.match(text, position).end()
    if position < len(text):
        hint = "; write `//` to divide" if text[position] == "/" else ""
        raise ExpressionError(f"`{text[position]}` has no meaning here{hint}", position, position + 1)
    yield _Token("end", "", position)


class _Reader:
    """Reads tokens from left to right, one token ahead."""

    def __init__(self, text: str):
        self.tokens = _tokens(text)
        self.ahead = next(self.tokens)

    def read(self) -> Expression:
        expression = self._sum(0)
        if self.ahead.kind != "end":
            raise self._wrong("an operator (+ - * //)")
        return expression

    def _sum(self, depth: int) -> Expression:
        return self._chain(_SUMS, lambda: self._chain(_PRODUCTS, lambda: self._factor(depth)))

    def _chain(self, signs: tuple[Operator, ...], operand: Callable[[], Expression]) -> Expression:
        left = operand()
        while self.ahead.text in signs:
            left = Operation(self._next().text, left, operand())
        return left

    def _factor(self, depth: int) -> Expression:
        token = self._next() if self.ahead.kind in ("number", "name") or self.ahead.text == "(" else None
        if token is None:
            raise self._wrong("a number or a name")
        if token.kind == "name":
            return Name(token.text)
        if token.kind == "number":
            if len(token.text) > MAX_DIGITS:
                end = token.start + len(token.text)
                raise ExpressionError(f"a number may have at most {MAX_DIGITS} digits", token.start, end)
            return Number(int(token.text))
        if depth == MAX_NESTING:
            raise ExpressionError(f"parentheses are nested more than {MAX_NESTING} deep", token.start, token.start + 1)
        inner = self._sum(depth + 1)
        if self.ahead.text != ")":
            raise self._wrong("an operator or `)`")
        self._next()
        return inner

    def _next(self) -> _Token:
        token = self.ahead
        self.ahead = next(self.tokens)
        return token

    def _wrong(self, expected: str) -> ExpressionError:
        token = self.ahead
        found = f"`{token.text}`" if token.text else "the end"
        reason = f"{found} stands where {expected} is expected"
        return ExpressionError(reason, token.start, token.start + len(token.text))
