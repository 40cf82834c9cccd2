"""Regular expressions over names of weights -> globs over modules, as far as there is one.

The expression is never run: one that takes for ever on some name would.
"""

from __future__ import annotations

import re

from shardplan.core.globs import GlobError, parse_glob

ANY = "{*,*.**.*}"  # any characters, dots among them
REST = "{*,*.**}"  # the rest of a name, in or behind the segment
WEIGHT = ".weight"


class NoGlob(Exception):
    """An expression that no glob says.

    Args:
        reason: which part of it, without a final full stop.
    """


def globs_of(expression: str) -> tuple[str, ...]:
    """The globs of the modules whose `<name>.weight` an expression matches from the first character on (`re.match`); none
    where it matches no weight.

    Raises:
        NoGlob: a part of it has no counterpart.
    """
    found = []
    for text, ended in _Reader(expression).alternatives():
        module = _module(text, ended)
        if module is not None:
            try:
                parse_glob(module)
            except GlobError as error:
                raise NoGlob(f"as a glob it would be `{module}`: {error.reason}") from None
            found.append(module)
    return tuple(dict.fromkeys(found))


def _module(text: str, ended: bool) -> str | None:
    """From a glob over weights to one over modules."""
    if text.endswith(ANY):  # what is behind it does not count
        text, ended = text.removesuffix(ANY), False
    if text.endswith(WEIGHT):
        text, ended = text.removesuffix(WEIGHT), True
    elif ended:
        return None  # the name of no weight
    elif text.endswith("."):
        raise NoGlob("it ends in the middle of a name")
    text = text if ended else text + REST
    # What a glob says in fewer characters: any parts in front of a dot, and of a part.
    if text.startswith(f"{ANY}."):
        text = "*.**." + text.removeprefix(f"{ANY}.")
    elif text.startswith(ANY):
        text = "**.*" + text.removeprefix(ANY)
    return text.replace(f".{ANY}.", ".*.**.")


class _Reader:
    def __init__(self, expression: str):
        self.expression, self.position = expression, 0

    def alternatives(self) -> list[tuple[str, bool]]:
        """Each alternative as a glob, and whether it ends where the name ends."""
        found = []
        for part in self._split():
            found.append(part)
        if self.position < len(self.expression):
            raise NoGlob("a `)` closes nothing")
        return found

    def _split(self) -> list[tuple[str, bool]]:
        found, text, ended = [], "", False
        while self.position < len(self.expression) and self.expression[self.position] != ")":
            character = self.expression[self.position]
            if character == "|":
                self.position += 1
                found.append((text, ended))
                text, ended = "", False
                continue
            if ended:
                raise NoGlob("something stands behind `$`")
            if character == "^":
                if text:
                    raise NoGlob("a `^` in the middle")
                self.position += 1
            elif character == "$":
                self.position += 1
                ended = True
            else:
                text += self._item(text)
        return [*found, (text, ended)]

    def _item(self, before: str) -> str:
        for pattern, glob in RUNS:
            match = pattern.match(self.expression, self.position)
            if match:
                self.position = match.end()
                return glob
        single = self._single()
        following = self.expression[self.position : self.position + 1]
        if following == "?":
            self.position += 1
            if self.expression[self.position : self.position + 1] in ("?", "+"):
                raise NoGlob("a repeated `?`")
            return f"{{{single},}}"
        if following and following in "*+{":
            raise NoGlob(f"`{following}` behind something else than `.`, `[^.]` or `\\d`")
        return single

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
            return "{?,.}"
        if character == "[":
            return self._set()
        if character == "(":
            return self._group()
        if re.fullmatch(r"[\w-]", character):
            return character
        raise NoGlob(f"`{character}`")

    def _set(self) -> str:
        match = SET.match(self.expression, self.position)
        if match is None:
            raise NoGlob("a set of other than plain characters")
        self.position = match.end()
        return f"[{match[1]}]"

    def _group(self) -> str:
        if self.expression.startswith("?", self.position):
            if not self.expression.startswith("?:", self.position):
                raise NoGlob("a group with `?`")
            self.position += 2
        parts = self._split()
        if self.expression[self.position : self.position + 1] != ")":
            raise NoGlob("a `(` that is not closed")
        self.position += 1
        if any(ended for _, ended in parts):
            raise NoGlob("a `$` in parentheses")
        return f"{{{','.join(text for text, _ in parts)}}}" if len(parts) > 1 else parts[0][0]


RUNS = (
    (re.compile(r"\.\*(?![?+])"), ANY),
    (re.compile(r"\[\^\\?\.\][*+](?![?+])"), "*"),
    # List indices: no name of Python's begins with a digit.
    (re.compile(r"(?:\\d|\[0-9\])\+(?![?+])"), "[0-9]*"),
)
SET = re.compile(r"((?:\w(?:-\w)?)+)\]")
