"""Globs over dotted names: the keys of a plan.

| in a pattern | matches |
|---|---|
| `*` | any characters of one segment, also none |
| `?` | one character |
| `[abc]`, `[a-z]`, `[!abc]` | one character of the set (or none of it) |
| `**` | zero or more whole segments |
| `{a,b}` | one of the alternatives, which may be nested, empty, and longer than a segment |

Names are compared whole and case-sensitively; nothing but `**` and an alternative reaches over a dot.

A pattern is expanded into its alternatives, each a tuple of segments, so that a reader of a tree of names can walk both
together: a literal segment is a look-up. Their number is counted before any is made.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from itertools import chain, product
from math import prod
from typing import TypeVar

MAX_LENGTH = 1000  # characters of a pattern
MAX_ALTERNATIVES = 1000  # of one pattern: 7 projections in 126 layers listed by number are 882
MAX_NESTING = 8  # of braces


class GlobError(ValueError):
    """A pattern that is not a glob.

    Args:
        reason: the problem, without a final full stop.
        start, end: the characters of the pattern that it concerns.
        too_large: whether only its size is wrong.
    """

    def __init__(self, reason: str, start: int, end: int, *, too_large: bool = False):
        super().__init__(reason)
        self.reason, self.start, self.end, self.too_large = reason, start, end, too_large


@dataclass(frozen=True, slots=True)
class CharacterSet:
    """`[...]`: single characters and ranges, both as (first, last)."""

    ranges: tuple[tuple[str, str], ...]
    negated: bool = False

    def __str__(self) -> str:
        ranges = (first if first == last else f"{first}-{last}" for first, last in self.ranges)
        return f"[{'!' if self.negated else ''}{''.join(ranges)}]"

    def fits(self, character: str) -> bool:
        return self.negated != any(first <= character <= last for first, last in self.ranges)


class Token(Enum):
    """A part of a pattern that is not literal. DOT separates segments."""

    STAR = "*"
    ONE = "?"
    DEPTH = "**"
    DOT = "."

    def __str__(self) -> str:
        return self.value


STAR, ONE, DEPTH, DOT = Token
Element = str | Token | CharacterSet  # a str is literal


@dataclass(frozen=True, slots=True)
class Segment:
    """The form of one segment of a name.

    Args:
        text: its text in the pattern, with its alternatives chosen.
        elements: its characters, one by one; (DEPTH,) for zero or more whole segments; empty if the segment is
            literally `text`.
    """

    text: str
    elements: tuple[Element, ...] = ()

    @property
    def literal(self) -> bool:
        """Whether it matches its own text and nothing else."""
        return not self.elements

    @property
    def any_depth(self) -> bool:
        """Whether it is `**`."""
        return self.elements == (DEPTH,)

    def matches(self, segment: str) -> bool:
        """Whether one segment of a name (without dots) fits. `**` fits every segment."""
        if not self.elements:
            return self.text == segment
        if self.elements in ((STAR,), (DEPTH,)):
            return True
        return _match(self.elements, segment, STAR, _fits)


@dataclass(frozen=True, slots=True)
class Glob:
    """A parsed pattern.

    Args:
        pattern: the pattern as written.
        alternatives: its expansion, without duplicates: a name matches if it matches one of them.
    """

    pattern: str
    alternatives: tuple[tuple[Segment, ...], ...]

    def matches(self, name: str) -> bool:
        """Whether a full dotted name matches, in time of at most the pattern's length times the name's."""
        segments = name.split(".") if name else []
        return any(_match(one, segments, _ANY_DEPTH, Segment.matches) for one in self.alternatives)

    @property
    def texts(self) -> tuple[str, ...]:
        """The alternatives as patterns without braces."""
        return tuple(".".join(segment.text for segment in alternative) for alternative in self.alternatives)


_ANY_DEPTH = Segment("**", (DEPTH,))
_P = TypeVar("_P")
_I = TypeVar("_I")


def _fits(element: Element, character: str) -> bool:
    if isinstance(element, CharacterSet):
        return element.fits(character)
    return element is ONE or element == character


def _match(pattern: Sequence[_P], items: Sequence[_I], star: _P, fits: Callable[[_P, _I], bool]) -> bool:
    """Whether the items match a pattern in which `star` matches any number of them.

    The part between two stars is best matched where it first fits, so only the last star is ever retried.
    """
    p = i = 0
    after_star = from_item = -1
    while i < len(items):
        if p < len(pattern) and pattern[p] == star:
            p += 1
            after_star, from_item = p, i
        elif p < len(pattern) and fits(pattern[p], items[i]):
            p += 1
            i += 1
        elif after_star >= 0:
            from_item += 1
            p, i = after_star, from_item
        else:
            return False
    return all(element == star for element in pattern[p:])


@lru_cache(maxsize=2048)
def parse_glob(pattern: str) -> Glob:
    """Reads a pattern.

    Raises:
        GlobError: it is malformed or too large.
    """
    if len(pattern) <= MAX_LENGTH and _SIMPLE.fullmatch(pattern):
        return Glob(pattern, (tuple(map(_simple_segment, pattern.split("."))),))
    return _read(pattern)


@lru_cache(maxsize=2048)
def _simple_segment(text: str) -> Segment:
    return Segment(text, (STAR,)) if text == "*" else Segment(text)


def _read(pattern: str) -> Glob:
    """Reads any pattern, character by character."""
    if not pattern:
        raise GlobError("the pattern is empty", 0, 0)
    if len(pattern) > MAX_LENGTH:
        reason = f"the pattern has {len(pattern)} characters, at most {MAX_LENGTH} are allowed"
        raise GlobError(reason, 0, len(pattern), too_large=True)
    tree = _Reader(pattern).read()
    count = _count(tree)
    if count > MAX_ALTERNATIVES:
        most = f"at most {MAX_ALTERNATIVES} are allowed"
        reason = f"the pattern has {_number(count)} alternatives, {most}"
        raise GlobError(reason, 0, len(pattern), too_large=True)
    expanded = (_segments(elements, pattern) for elements in _expand(tree))
    return Glob(pattern, tuple(dict.fromkeys(expanded)))


def _number(count: int) -> str:
    return str(count) if count < 10**9 else "at least 10^9"


# A sequence of elements and of choices between sequences: `{a,{b,c}d}` before it is expanded.
_Tree = tuple["Element | _Choice", ...]


@dataclass(frozen=True, slots=True)
class _Choice:
    options: tuple[_Tree, ...]


def _count(tree: _Tree) -> int:
    return prod(sum(map(_count, part.options)) for part in tree if isinstance(part, _Choice))


def _expand(tree: _Tree) -> Iterator[tuple[Element, ...]]:
    for chosen in product(*map(_ways, tree)):
        yield tuple(element for piece in chosen for element in piece)


def _ways(part: Element | _Choice) -> list[tuple[Element, ...]]:
    if isinstance(part, _Choice):
        return [way for option in part.options for way in _expand(option)]
    return [(part,)]


def _segments(elements: tuple[Element, ...], pattern: str) -> tuple[Segment, ...]:
    """One alternative as segments. Stars in a row, which an alternative can produce, become one star."""
    pieces: list[list[Element]] = [[]]
    for element in elements:
        if element is DOT:
            pieces.append([])
        elif not (element is STAR and pieces[-1][-1:] == [STAR]):
            pieces[-1].append(element)
    result: list[Segment] = []
    for piece in pieces:
        if not piece:
            chosen = _text(elements)
            where = f"`{chosen}`, one of its alternatives," if chosen != pattern else "it"
            raise GlobError(f"{where} has an empty segment", 0, len(pattern))
        segment = _segment(piece, pattern)
        if not (segment.any_depth and result and result[-1].any_depth):
            result.append(segment)
    return tuple(result)


def _segment(piece: list[Element], pattern: str) -> Segment:
    text = _text(piece)
    if all(isinstance(element, str) for element in piece):
        return Segment(text)
    if DEPTH in piece and len(piece) > 1:
        reason = f"`**` matches whole segments, and cannot be a part of one (`{text}`)"
        raise GlobError(reason, 0, len(pattern))
    characters = (list(element) if isinstance(element, str) else [element] for element in piece)
    return Segment(text, tuple(chain.from_iterable(characters)))


def _text(elements: Iterable[Element]) -> str:
    return "".join([element if isinstance(element, str) else str(element) for element in elements])


class _Reader:
    """Reads a pattern from left to right."""

    def __init__(self, pattern: str):
        self.pattern = pattern
        self.position = 0

    def read(self) -> _Tree:
        (tree,) = self._options(depth=0, opened=0)
        return tree

    def _options(self, depth: int, opened: int) -> tuple[_Tree, ...]:
        """The texts between commas, up to the closing brace (at depth 0: up to the end)."""
        if depth > MAX_NESTING:
            reason = f"braces are nested more than {MAX_NESTING} deep"
            raise GlobError(reason, opened, opened + 1, too_large=True)
        options: list[_Tree] = []
        current: list[Element | _Choice] = []
        while self.position < len(self.pattern):
            at = self.position
            if plain := _PLAIN.match(self.pattern, at):
                current.append(plain[0])
                self.position = plain.end()
                continue
            character = self.pattern[at]
            self.position += 1
            if character == "{":
                current.append(_Choice(self._options(depth + 1, at)))
            elif character == "}":
                if depth == 0:
                    raise GlobError("a `}` has no `{`", at, at + 1)
                options.append(tuple(current))
                if options == [()]:
                    raise GlobError("`{}` holds no alternatives", opened, at + 1)
                return tuple(options)
            elif character == ",":
                if depth == 0:
                    raise GlobError("a comma separates alternatives only between `{` and `}`", at, at + 1)
                options.append(tuple(current))
                current = []
            else:
                current.append(self._element(character, at))
        if depth:
            raise GlobError("a `{` is not closed", opened, opened + 1)
        return (tuple(current),)

    def _element(self, character: str, at: int) -> Element:
        if character == "*":
            while self.pattern[self.position : self.position + 1] == "*":
                self.position += 1
            if self.position - at > 2:
                raise GlobError("more than two `*` in a row", at, self.position)
            return STAR if self.position - at == 1 else DEPTH
        if character == "[":
            return self._set(at)
        if character in _SPECIAL:
            return _SPECIAL[character]
        if character in _REFUSED or character.isspace() or not character.isprintable():
            reason = _REFUSED.get(character, f"the character {character!a} cannot be in a name")
            raise GlobError(reason, at, at + 1)
        return character

    def _set(self, opened: int) -> CharacterSet:
        closed = self.pattern.find("]", self.position)
        if closed < 0:
            raise GlobError("a `[` is not closed", opened, opened + 1)
        inner = self.pattern[self.position : closed]
        self.position = closed + 1
        negated = inner[:1] in ("!", "^")
        characters = inner[negated:]
        if not characters:
            raise GlobError("`[...]` holds no characters", opened, closed + 1)
        if "." in characters:
            reason = "`[...]` matches one character of a segment, never a dot"
            raise GlobError(reason, opened, closed + 1)
        if not characters.isprintable():
            raise GlobError("`[...]` holds a character that cannot be in a name", opened, closed + 1)
        ranges = [(match[1], match[2] or match[1]) for match in _RANGE.finditer(characters)]
        for first, last in ranges:
            if last < first:
                raise GlobError(f"the range `{first}-{last}` is empty", opened, closed + 1)
        return CharacterSet(tuple(ranges), negated)


_PLAIN = re.compile(r"\w+")
_SIMPLE = re.compile(r"(?:\w+|\*)(?:\.(?:\w+|\*))*")  # the form of most patterns
_RANGE = re.compile(r"(.)(?:-(.))?", re.DOTALL)
_SPECIAL: dict[str, Element] = {"?": ONE, ".": DOT}
_REFUSED = {
    "]": "a `]` has no `[`",
    "\\": "a backslash has no meaning in a pattern; `[*]` matches the character `*`",
    "/": "names are separated by dots, not by `/`",
}
