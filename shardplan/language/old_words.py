"""Words of rules that `shares` replaced: their new form, and the text of a YAML plan with it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from operator import getitem
from typing import Any

from .format_plan import comments
from .nodes import Entry, MapNode, Node, Scalar, line_starts, split_lines, to_data
from .plan_edits import last_line_of
from .plan_texts import value_text
from .read_rules import rule_entries, rule_mappings
from .reader import read_document

OLD = ("divide", "set", "groups", "split_arguments", "split_buffers")
WIDTH = 120


def shares_of(options: Mapping[str, Any]) -> Any:
    """The shares that a rule's old words mean; None if the words have another form, or if a norm's `groups` come without a number to divide."""
    numbers, groups = _listed(options.get("divide", [])), options.get("groups")
    if numbers is None or (groups is not None and not numbers):
        return None
    found = [*(_listed(options.get("shares", [])) or ()), *({n: {"groups": groups}} if groups else n for n in numbers)]
    for word in ("set", "split_arguments", "split_buffers"):
        said = options.get(word, {})
        if not isinstance(said, Mapping):
            return None
        found += [
            {name: one if word == "set" or isinstance(one, Mapping) else {"dim": one}} for name, one in said.items()
        ]
    return found[0] if len(found) == 1 else found or None


def _listed(value: Any) -> list[Any] | None:
    return value if isinstance(value, list) else [value] if isinstance(value, str | Mapping) else None


def with_shares(text: str, file: str = "<text>") -> str:
    """The text of a YAML plan with `shares` in place of the older words. A rule stays if anything else in it would
    change, even a comment."""
    found = read_document(text, file).root
    if found is None:
        return text
    root: Node = found
    rules = [one for entry, at in rule_entries(root) for one in rule_mappings(entry.value, at)]
    for path, rule in reversed(rules):  # text before a change keeps its place
        made = _rewritten(text, rule)
        if made is None:
            continue
        expected = to_data(root)
        again = read_document(made, file).root
        said: Any = reduce(getitem, path, expected)  # type: ignore[arg-type]
        said["shares"] = shares_of(said)
        for word in OLD:
            said.pop(word, None)
        if again is not None and to_data(again) == expected and comments(made) == comments(text):
            text, root = made, again
    return text


def _rewritten(text: str, rule: MapNode) -> str | None:
    """The text with the old words of one rule replaced: the first by all shares, the others by nothing."""
    old = [entry for entry in rule.entries if entry.key in (*OLD, "shares")]
    shares = shares_of({entry.key: to_data(entry.value) for entry in old})
    if shares is None or {entry.key for entry in old} == {"shares"} or rule.span is None:
        return None
    lines, starts = list(split_lines(text)), line_starts(text)
    in_lines = lines[rule.span.line - 1][rule.span.column - 1] != "{"
    for entry in reversed(old):
        assert entry.span is not None
        begin = starts[entry.span.line - 1] + entry.span.column - 1
        end = _end(entry, lines, starts)
        if entry is old[0]:
            text = text[:begin] + _shares(shares, entry.span.column - 1, in_lines) + text[end:]
        elif in_lines:
            text = text[: starts[entry.span.line - 1]] + text[end:].lstrip("\n")
        else:
            before = rule.entries[rule.entries.index(entry) - 1]
            text = text[: _end(before, lines, starts)] + text[end:]
    return text


def _end(entry: Entry, lines: list[str], starts: list[int]) -> int:
    """The place in the text where an entry's value ends."""
    assert entry.span is not None
    span = entry.value.span
    if span is not None and (isinstance(entry.value, Scalar) or lines[span.line - 1][span.column - 1] in "{["):
        return starts[span.end_line - 1] + span.end_column - 1
    line = last_line_of(entry.value, entry.span)
    return starts[line - 1] + len(lines[line - 1])


def _shares(shares: Any, indent: int, in_lines: bool) -> str:
    said = f"shares: {value_text(shares)}"
    if not in_lines or indent + len(said) <= WIDTH or not isinstance(shares, list):
        return said
    items = (value_text(one) if isinstance(one, str) else value_text(one)[1:-1] for one in shares)
    return "\n".join(("shares:", *(f"{' ' * indent}  - {one}" for one in items)))
