"""Expressions over the numbers of a model's configuration: `num_key_value_heads * (hidden_size // 32)`.

    expression = term {("+" | "-") term}
    term       = factor {("*" | "//") factor}
    factor     = whole number | name {"." name} | "(" expression ")"

Python's parser decides what binds to what. It never reads the text of a plan, only a skeleton such as `0*(1//2)` whose
numbers stand for the operands. Names that Python does not allow (`layers.0.size`), its keywords, warnings and limits
therefore do not matter.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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
    """A text that is not an expression.

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
        reason = f"the expression has {len(text)} characters, at most {MAX_LENGTH} are allowed"
        raise ExpressionError(reason, 0, len(text))
    operands: list[Number | Name] = []
    skeleton = ""
    depth, complete = 0, False  # open parentheses; whether an operand has ended
    for match in _TOKEN.finditer(text.rstrip()):
        word, operand = match["word"], match["operand"]
        wrong = partial(ExpressionError, start=match.start("word"), end=match.end())
        if match["other"]:
            raise wrong(f"`{word}` has no meaning here{'; write `//` to divide' if word == '/' else ''}")
        if complete:
            fits = word in OPERATORS or word == (")" if depth else "")
            expected = "an operator or `)`" if depth else "an operator (+ - * //)"
        else:
            fits, expected = operand or word == "(", "a number or a name"
        if not fits:
            raise wrong(f"{f'`{word}`' if word else 'the end'} stands where {expected} is expected")
        if word.isdigit() and len(word) > MAX_DIGITS:
            raise wrong(f"a number may have at most {MAX_DIGITS} digits")
        depth += (word == "(") - (word == ")")
        if depth > MAX_NESTING:
            raise wrong(f"parentheses are nested more than {MAX_NESTING} deep")
        if operand:
            operands.append(Number(int(word)) if word.isdigit() else Name(word))
        complete = bool(operand) or word == ")"
        skeleton += str(len(operands) - 1) if operand else word
    return _read(ast.parse(skeleton, mode="eval").body, operands)


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


# A word with the blanks before it: an operand, a sign, what has no meaning, or at the end nothing.
_TOKEN = re.compile(
    r"\s*(?P<word>(?P<operand>[0-9]+|[A-Za-z_]\w*(?:\.\w+)*)|//|[-+*()]|(?P<other>.)|)", re.ASCII | re.DOTALL
)
_OPERATORS: dict[type[ast.operator], Operator] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.FloorDiv: "//"}


def _read(node: ast.expr, operands: Sequence[Number | Name]) -> Expression:
    """The expression of a skeleton."""
    match node:
        case ast.Constant(int(index)):
            return operands[index]
        case ast.BinOp(left, sign, right):
            return Operation(_OPERATORS[type(sign)], _read(left, operands), _read(right, operands))
    raise AssertionError(ast.dump(node))
