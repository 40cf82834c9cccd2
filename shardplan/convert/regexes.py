"""Regular expressions over names of weights -> equal globs over modules, where they exist.

The expression is never run, as some expressions never end on some names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from shardplan.language import GlobError, parse_glob

ANY = "{*,*.**.*}"  # any characters, dots among them
REST = "{*,*.**}"  # the rest of a name: of this segment, and all later segments
ONE = "{?,.}"  # any character
WEIGHT = "weight"
MOST = 100  # alternatives of one expression


class NoGlob(Exception):
    """An expression without an equal glob; the message names the part, without a final full stop."""


def globs_of(expression: str) -> tuple[str, ...]:
    """The globs of the modules whose `<name>.weight` an expression matches from the first character on (`re.match`); none
    where it matches no weight. Modules that are called `weight` are ignored.

    Raises:
        NoGlob: a part of the expression has no counterpart.
    """
    found = [_short(module) for text, ended in _Reader(expression).read() for module in _modules(text, ended)]
    for module in found:
        try:
            parse_glob(module)
        except GlobError as error:
            raise NoGlob(f"as a glob it would be `{module}`: {error.reason}") from None
    return tuple(dict.fromkeys(found))


def _modules(text: str, ended: bool) -> Iterator[str]:
    """Turn a glob over names of weights into globs over modules. It matches the beginnings of names or, if `ended`, whole names."""
    if text.endswith(ANY):  # any text may follow
        text, ended = text.removesuffix(ANY), False
    if text.endswith(ONE + WEIGHT):
        text = f"{text.removesuffix(ONE + WEIGHT)}.{WEIGHT}"
    if text.endswith(ONE):
        raise NoGlob("it ends with a `.` for any character")
    above, dot, last = _last_part(text)
    tail = "" if ended else "*"
    loose = re.split(f"{re.escape(ANY)}|{re.escape(ONE)}", last)  # these may also match across a dot
    if loose[1:] and parse_glob(f"*{loose[-1]}{tail}").matches(WEIGHT):
        raise NoGlob("`.*` or `.` in front of what may be a part of `weight`")
    if dot and not loose[1:] and parse_glob(f"{last}{tail}" or "?").matches(WEIGHT):
        yield above
    if not ended and last != WEIGHT:
        yield text + REST


def _last_part(text: str) -> tuple[str, str, str]:
    """The glob split at its last dot outside braces: before, the dot, after."""
    hidden = text.replace(ANY, "*" * len(ANY)).replace(ONE, "?" * len(ONE))
    cut = hidden.rfind(".")
    return (text[:cut], ".", text[cut + 1 :]) if cut >= 0 else ("", "", text)


def _short(glob: str) -> str:
    """The same glob in fewer characters."""
    if glob == REST:
        return "**"
    if glob.startswith(f"{ANY}."):
        glob = "*.**." + glob.removeprefix(f"{ANY}.")
    elif glob.startswith(ANY):
        glob = "**.*" + glob.removeprefix(ANY)
    if glob.endswith(f".{REST}"):
        glob = f"{glob.removesuffix(REST)}*.**"
    return glob.replace(f".{ANY}.", ".*.**.")


class _Reader:
    """Reads an expression from left to right. Alternatives are multiplied out."""

    def __init__(self, expression: str):
        self.expression, self.position = expression, 0

    def read(self) -> list[tuple[str, bool]]:
        """Each alternative as a glob, and whether it must match to the end of the name."""
        found = self._alternatives()
        if self.position < len(self.expression):
            raise NoGlob("a `)` has no `(`")
        return found

    def _alternatives(self) -> list[tuple[str, bool]]:
        found: list[tuple[str, bool]] = []
        texts, ended = [""], False
        while self.position < len(self.expression) and self.expression[self.position] != ")":
            character = self.expression[self.position]
            if character == "|":
                self.position += 1
                found += [(text, ended) for text in texts]
                texts, ended = [""], False
            elif ended:
                raise NoGlob("there is text after `$`")
            elif character in "^$":
                if character == "^" and texts != [""]:
                    raise NoGlob("a `^` in the middle")
                self.position += 1
                ended = character == "$"
            else:
                texts = [text + more for more in self._item() for text in texts]
            if len(found) + len(texts) > MOST:
                raise NoGlob(f"it has more than {MOST} alternatives")
        return [*found, *((text, ended) for text in texts)]

    def _item(self) -> list[str]:
        for pattern, glob in RUNS:
            match = pattern.match(self.expression, self.position)
            if match:
                self.position = match.end()
                return [glob]
        found = self._group() if self.expression[self.position] == "(" else [self._single()]
        following = self.expression[self.position : self.position + 1]
        if following == "?":
            self.position += 1
            if self.expression[self.position : self.position + 1] in ("?", "+"):
                raise NoGlob("a repeated `?`")
            return [*found, ""]
        if following and following in "*+{":
            raise NoGlob(f"`{following}` after something other than `.`, `[^.]` or `\\d`")
        return found

    def _single(self) -> str:
        character = self.expression[self.position]
        self.position += 1
        if character == "\\":
            escaped = self.expression[self.position : self.position + 1]
            self.position += 1
            if escaped == "d":
                return "[0-9]"
            if escaped in (".", "_", "-"):
                return escaped
            raise NoGlob(f"`\\{escaped}`")
        if character == ".":
            return ONE
        if character == "[":
            return self._set()
        if re.fullmatch(r"[\w-]", character):
            return character
        raise NoGlob(f"`{character}`")

    def _set(self) -> str:
        match = SET.match(self.expression, self.position)
        if match is None:
            raise NoGlob("a set of other than plain characters")
        self.position = match.end()
        return f"[{match[1]}]"

    def _group(self) -> list[str]:
        self.position += 1
        if self.expression.startswith("?", self.position):
            if not self.expression.startswith("?:", self.position):
                raise NoGlob("a group with `?`")
            self.position += 2
        parts = self._alternatives()
        if self.expression[self.position : self.position + 1] != ")":
            raise NoGlob("a `(` that is not closed")
        self.position += 1
        if any(ended for _, ended in parts):
            raise NoGlob("a `$` in parentheses")
        return [text for text, _ in parts]


RUNS = (
    (re.compile(r"\.\*(?![?+])"), ANY),
    (re.compile(r"\[\^\\?\.\][*+](?![?+])"), "*"),
    # List indices: no Python name begins with a digit.
    (re.compile(r"(?:\\d|\[0-9\])\+(?![?+])"), "[0-9]*"),
)
SET = re.compile(r"((?:\w(?:-\w)?)+)\]")
