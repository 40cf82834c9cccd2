"""Expressions over the numbers of a model's configuration: `num_key_value_heads * (hidden_size // 32)`.

    expression = term {("+" | "-") term}
    term       = factor {("*" | "//") factor}
    factor     = whole number | name {"." name} | "(" expression ")"

A condition over its numbers and booleans, such as `num_local_experts > 1 and not q_lora_rank`, adds comparisons (`==`,
`!=`, `<`, `<=`, `>`, `>=`), `not`, `and` and `or`, with Python's precedence. Each yields 1 or 0, as does a boolean of
the configuration; a field that is None counts as 0. A condition holds if its value is not 0.

Python's parser decides the precedence. It never reads the text of a plan, only a skeleton such as `0*(1//2)` whose
numbers represent the operands. So names that Python does not allow (`layers.0.size`), its keywords, warnings and limits
do not matter.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial, reduce
from typing import Literal

MAX_LENGTH = 200  # characters
MAX_DIGITS = 12  # of a number written out
MAX_NESTING = 10  # of parentheses

Operator = Literal["+", "-", "*", "//", "==", "!=", "<", "<=", ">", ">=", "and", "or"]
ARITHMETIC: dict[Operator, Callable[[float, float], float]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
}
LOGIC: dict[Operator, Callable[[float, float], float]] = {  # only in conditions
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "and": lambda a, b: bool(a) and bool(b),
    "or": lambda a, b: bool(a) or bool(b),
}
OPERATORS = ARITHMETIC | LOGIC
NOT = "not"
WORDS = frozenset(sign for sign in (*LOGIC, NOT) if sign.isalpha())  # elsewhere they are names


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


@dataclass(frozen=True, slots=True)
class Negation:
    """`not` of an expression, in a condition."""

    operand: Expression


Expression = Number | Name | Operation | Negation


class ExpressionError(ValueError):
    """A text that is not an expression.

    Args:
        reason: the problem, without a final full stop.
        start, end: the characters that it concerns.
    """

    def __init__(self, reason: str, start: int, end: int):
        super().__init__(reason)
        self.reason, self.start, self.end = reason, start, end


class EvaluationError(ValueError):
    """An expression that has no value for these numbers.

    Args:
        reason: the problem, without a final full stop.
        unknown: the names missing in the table.
    """

    def __init__(self, reason: str, unknown: tuple[str, ...] = ()):
        super().__init__(reason)
        self.reason, self.unknown = reason, unknown


def parse_expression(text: str) -> Expression:
    """Reads an expression.

    Raises:
        ExpressionError: it is malformed or too long.
    """
    return _parse(text, condition=False)


_parsed = lru_cache(maxsize=1024)(parse_expression)


def count_of(expression: str, numbers: Mapping[str, int | float]) -> int | str:
    """The value of an expression that counts something, or the reason why it has none."""
    try:
        count = evaluate(_parsed(expression), numbers)
    except EvaluationError as error:
        return error.reason
    return count if count > 0 else f"{expression} is {count}"


def parse_condition(text: str) -> Expression:
    """Reads a condition.

    Raises:
        ExpressionError: it is malformed or too long.
    """
    return _parse(text, condition=True)


def _parse(text: str, *, condition: bool) -> Expression:
    if len(text) > MAX_LENGTH:
        reason = f"the expression has {len(text)} characters, at most {MAX_LENGTH} are allowed"
        raise ExpressionError(reason, 0, len(text))
    signs = OPERATORS if condition else ARITHMETIC
    operands: list[Number | Name] = []
    skeleton: list[str] = []
    depth, complete = 0, False  # open parentheses; whether an operand has ended
    for match in _TOKEN.finditer(text.rstrip()):
        word = match["word"]
        operand = bool(match["operand"]) and not (condition and word in WORDS)
        wrong = partial(ExpressionError, start=match.start("word"), end=match.end())
        if match["other"] or (word in LOGIC and not operand and not condition):
            instead = "`//` to divide" if word == "/" else "`==` to compare" if word == "=" and condition else ""
            shown = word if word.isprintable() else ascii(word)[1:-1]
            raise wrong(f"`{shown}` has no meaning here{instead and '; write '}{instead}")
        if complete:
            fits = word in signs or word == (")" if depth else "")
            known = " ".join(signs)
            expected = "an operator or `)`" if depth else f"an operator ({known})"
        else:
            negates = condition and word == NOT and (skeleton or ["("])[-1] in ("(", "and", "or", NOT)
            fits, expected = operand or word == "(" or negates, "a number or a name"
        if not fits:
            raise wrong(f"{f'`{word}`' if word else 'the end'} is found where {expected} is expected")
        if word.isdigit() and len(word) > MAX_DIGITS:
            raise wrong(f"a number may have at most {MAX_DIGITS} digits")
        depth += (word == "(") - (word == ")")
        if depth > MAX_NESTING:
            raise wrong(f"parentheses are nested more than {MAX_NESTING} deep")
        if operand:
            operands.append(Number(int(word)) if word.isdigit() else Name(word))
        complete = operand or word == ")"
        skeleton.append(str(len(operands) - 1) if operand else word)
    tree = ast.parse(" ".join(skeleton), mode="eval").body
    if any(isinstance(node, ast.Compare) and len(node.ops) > 1 for node in ast.walk(tree)):
        raise ExpressionError("comparisons are not chained; join them with `and`", 0, len(text))
    return _read(tree, operands)


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
    return int(_value(expression, lambda name: _whole(name, numbers[name])))


def holds(condition: Expression, fields: Mapping[str, int | float | str | None]) -> bool:
    """Whether a condition holds.

    Args:
        fields: the fields of the configuration by name (`ModuleTree.fields`).

    Raises:
        EvaluationError: names of no field (all of them), a field that is neither a number nor a boolean nor None, a division
            by zero.
    """
    unknown = tuple(dict.fromkeys(name for name in names(condition) if name not in fields))
    if unknown:
        raise EvaluationError(f"the configuration has no field {' and no field '.join(unknown)}", unknown)
    return bool(_value(condition, lambda name: _number(name, fields[name])))


def names(expression: Expression) -> Iterator[str]:
    """The names that an expression reads, from left to right."""
    match expression:
        case Name(name):
            yield name
        case Operation(_, left, right):
            yield from names(left)
            yield from names(right)
        case Negation(operand):
            yield from names(operand)


def _value(expression: Expression, read: Callable[[str], float]) -> float:
    match expression:
        case Number(value):
            return value
        case Name(name):
            return read(name)
        case Negation(operand):
            return not _value(operand, read)
        case Operation(sign, left, right):
            a, b = _value(left, read), _value(right, read)
            if sign == "//" and b == 0:
                raise EvaluationError(f"{a} // 0 is a division by zero")
            return OPERATORS[sign](a, b)


def _number(name: str, value: float | str | None) -> float:
    if isinstance(value, str):
        raise EvaluationError(f"{name} is {value}, not a number, a boolean or None")
    return value or 0


def _whole(name: str, value: int | float) -> int:
    if isinstance(value, bool) or not (isinstance(value, int) or value.is_integer()):
        raise EvaluationError(f"{name} is {value}, not a whole number")
    return int(value)


# A word with the blanks before it: an operand, a sign, something without meaning, or nothing at the end.
_TOKEN = re.compile(
    r"\s*(?P<word>(?P<operand>[0-9]+|[A-Za-z_]\w*(?:\.\w+)*)|//|[=!<>]=|[-+*()<>]|(?P<other>.)|)", re.ASCII | re.DOTALL
)
_SIGNS: dict[type[ast.AST], Operator] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.FloorDiv: "//",
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.And: "and",
    ast.Or: "or",
}


def _read(node: ast.expr, operands: Sequence[Number | Name]) -> Expression:
    """The expression of a skeleton."""
    match node:
        case ast.Constant(int(index)):
            return operands[index]
        case ast.BinOp(left, sign, right) | ast.Compare(left, [sign], [right]):
            return Operation(_SIGNS[type(sign)], _read(left, operands), _read(right, operands))
        case ast.BoolOp(sign, values):
            first, *others = (_read(value, operands) for value in values)
            return reduce(partial(Operation, _SIGNS[type(sign)]), others, first)
        case ast.UnaryOp(ast.Not(), operand):
            return Negation(_read(operand, operands))
    raise AssertionError(ast.dump(node))
