"""Checks the rules of a document: patterns, styles, options and expressions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from shardplan.core.diagnostics import Code, Part, Span
from shardplan.core.expressions import MAX_LENGTH as MAX_EXPRESSION
from shardplan.core.expressions import Expression, ExpressionError, parse_condition, parse_expression
from shardplan.core.plan import SECTIONS, section_at, section_path
from shardplan.core.sections import Sections
from shardplan.core.suggest import closest, did_you_mean
from shardplan.styles import NONE, STYLES, canonical_style

from .document import glob_lists
from .globs import MAX_LENGTH as MAX_GLOB
from .globs import GlobError, parse_glob
from .limits import MAX_ALTERNATIVES, MAX_VALUES
from .nodes import Entry, ListNode, MapNode, Node, Path, Scalar, node_at
from .parse_findings import TOO_LARGE, Findings, quoted
from .rule_options import group_takers, moving_styles, style_names, takers, takes

UNKNOWN_STYLE = Code("SP106")
WRONG_OPTION = Code("SP107")
WRONG_GLOB = Code("SP112")
WRONG_EXPRESSION = Code("SP113")
NONE_WITHOUT_PARENT = Code("SP115")

GLOB_LISTS = tuple(glob_lists(Sections))


class _Rule(NamedTuple):
    """A rule with the places of its parts."""

    path: Path
    style: str | None
    style_path: Path
    options: MapNode | None


def check_rules(root: Node, findings: Findings) -> None:
    """Checks patterns, styles, options and expressions.

    Values of a wrong type are skipped here: they are findings about the form.
    """
    _check_globs(root, findings)
    if isinstance(condition := node_at(root, ("for",)), Scalar):
        _check_expression(condition, ("for",), parse_condition, "a condition", findings)
    extends = node_at(root, ("extends",)) is not None
    for rule in _rules(root):
        if findings.full:
            return
        _check_style(rule, findings, extends=extends)
        if rule.options is not None:
            _check_expressions(rule.options, rule.path, findings)


def _rules(root: Node) -> Iterator[_Rule]:
    for entry, path in rule_entries(root):
        if isinstance(entry.value, Scalar) and isinstance(entry.value.value, str):
            yield _Rule(path, entry.value.value, path, None)
        for at, options in rule_mappings(entry.value, path):
            style = options.get("style")
            text = style.value if isinstance(style, Scalar) and isinstance(style.value, str) else None
            yield _Rule(at, text, (*at, "style"), options)


def rule_entries(root: Node) -> Iterator[tuple[Entry, Path]]:
    """The rules of all sections, and their places."""
    for section in SECTIONS:
        at = section_path(section)
        rules = node_at(root, at)
        for entry in rules.entries if isinstance(rules, MapNode) else ():
            if section_at((*at, entry.key)) == section:  # else it is a nested section
                yield entry, (*at, entry.key)


def rule_mappings(entry: Node, path: Path) -> Iterator[tuple[Path, MapNode]]:
    """The mappings of a key: one, or a list of them."""
    if isinstance(entry, MapNode):
        yield path, entry
    for i, item in enumerate(entry.items if isinstance(entry, ListNode) else ()):
        if isinstance(item, MapNode):
            yield (*path, i), item


# The styles that a finding names if a style is no known word.
USUAL = (
    "colwise",
    "rowwise",
    "packed_colwise",
    "embedding_rowwise",
    "colwise_gather_output",
    "input_with_grad_allreduce",
    "replicate",
)


def _check_style(rule: _Rule, findings: Findings, *, extends: bool) -> None:
    if rule.style is None:
        return
    style = canonical_style(rule.style)
    if style is None:
        names = style_names()
        near = closest(rule.style, names, cutoff=0.75) or closest(
            re.sub("[_-]?parallel", "", rule.style, flags=re.IGNORECASE), names
        )
        help = (
            did_you_mean(rule.style, near)
            if near
            else f"most plans need {', '.join(USUAL)}; the page Styles has all {len(names)}"
        )
        words = (near,) if near else ()
        findings.add(UNKNOWN_STYLE, f"there is no style {quoted(rule.style)}", rule.style_path, help=help, words=words)
        return
    if style == NONE and not extends and rule.path[0] != "expert_parallel":
        findings.add(
            NONE_WITHOUT_PARENT,
            "the style `none` removes an inherited rule, but this plan extends no other",
            rule.style_path,
            help="remove the rule, or name the plan that it extends",
            words=(None,),
        )
    for entry in rule.options.entries if rule.options else ():
        path = (*rule.path, entry.key)
        if not takes(style, entry.key):
            message = f"the style `{rule.style}` has no option `{entry.key}`"
            findings.add(WRONG_OPTION, message, path, "key", help=_who_takes(entry.key))
        elif entry.key == "arguments" and isinstance(entry.value, MapNode):
            _check_arguments(rule, entry.value, path, findings)
        elif entry.key == "shares" and not STYLES[style].features.means:
            for share, at in _shares(entry.value, path):
                if isinstance(share, MapNode) and share.get("groups") is not None:
                    message = f"the style `{rule.style}` has no shares with `groups`"
                    who = f"remove it; it goes with {', '.join(group_takers())}"
                    findings.add(WRONG_OPTION, message, (*at, "groups"), "key", help=who)
        elif entry.key == "output" and isinstance(entry.value, Scalar):
            _check_output(rule.style, style, entry.value.value, path, findings)


def _shares(node: Node | None, path: Path) -> Iterator[tuple[Node, Path]]:
    """Checks each share that has more than a name."""
    if isinstance(node, MapNode):
        yield from ((entry.value, (*path, entry.key)) for entry in node.entries)
    for i, item in enumerate(node.items if isinstance(node, ListNode) else ()):
        yield from _shares(item, (*path, i)) if isinstance(item, MapNode) else ()


def _check_output(written: str, style: str, value: object, path: Path, findings: Findings) -> None:
    able = STYLES[style].options.output
    others = takers("output", value) if isinstance(value, str) else ()
    if value not in able and others:
        only = " and ".join(f"`{one}`" for one in able)
        message = f"the style `{written}` has no `output: {value}`, only {only}"
        findings.add(WRONG_OPTION, message, path, help=f"`output: {value}` goes with {', '.join(others)}")


def _check_arguments(rule: _Rule, arguments: MapNode, path: Path, findings: Findings) -> None:
    first = rule.options.get("argument") if rule.options is not None else None
    for entry in arguments.entries:
        at = (*path, entry.key)
        style = entry.value.value if isinstance(entry.value, Scalar) else None
        if isinstance(style, str) and style not in moving_styles():
            message = f"{quoted(style)} is no style of an argument that a block input moves"
            findings.add(UNKNOWN_STYLE, message, at, help=f"the styles are {', '.join(moving_styles())}")
        if isinstance(first, Scalar) and first.value == entry.key:
            message = f"{quoted(entry.key)} is the `argument` of the rule, and among its `arguments`"
            findings.add(WRONG_OPTION, message, at, "key", help="remove one of them")


def _who_takes(option: str) -> str:
    names = takers(option)
    if len(names) < len(style_names()) - 1:
        return f"remove it; it goes with {', '.join(names)}"
    return "remove it"


def _check_expressions(options: MapNode, path: Path, findings: Findings) -> None:
    if isinstance(condition := options.get("when"), Scalar):
        _check_expression(condition, (*path, "when"), parse_condition, "a condition", findings)
    for option in ("shares", "packed", "divides", "heads"):
        if (size := _size(options.get(option))) > MAX_VALUES:
            message = f"`{option}` has {size} values, and at most {MAX_VALUES} are allowed"
            return findings.add(TOO_LARGE, message, (*path, option), "key")
    for share, at in _shares(options.get("shares"), (*path, "shares")):
        inside = [(share.get(name), (*at, name)) for name in ("heads", "groups")] if isinstance(share, MapNode) else []
        for node, place in inside or [(share, at)]:
            if isinstance(node, Scalar):
                _check_expression(node, place, parse_expression, "an expression", findings)
    for option in ("packed", "divides", "heads"):
        node = options.get(option)
        items = node.items if isinstance(node, ListNode) else (node,)
        for i, item in enumerate(items):
            if isinstance(item, Scalar):
                at = (*path, option, i) if isinstance(node, ListNode) else (*path, option)
                _check_expression(item, at, parse_expression, "an expression", findings)


def _size(node: Node | None) -> int:
    """The number of values in a node."""
    if isinstance(node, MapNode):
        return sum(_size(entry.value) for entry in node.entries)
    return sum(map(_size, node.items)) if isinstance(node, ListNode) else int(node is not None)


def _check_expression(
    node: Scalar, path: Path, parse: Callable[[str], Expression], what: str, findings: Findings
) -> None:
    """Checks a text that has the right form; any other value is a finding about the form."""
    text = node.value
    if not isinstance(text, str) or not 0 < len(text) <= MAX_EXPRESSION:
        return
    try:
        parse(text)
    except ExpressionError as error:
        span = _part(node.span, text, error.start, error.end)
        findings.add(WRONG_EXPRESSION, f"{quoted(text)} is not {what}: {error.reason}", path, span=span)


def _check_globs(root: Node, findings: Findings) -> None:
    """Checks every pattern, and the number of alternatives of all together."""
    alternatives = 0
    for pattern, path, part, span in _globs(root):
        if findings.full:
            return
        try:
            alternatives += len(parse_glob(pattern).alternatives)
        except GlobError as error:
            code = TOO_LARGE if error.too_large else WRONG_GLOB
            message = f"{quoted(pattern)} is not a glob: {error.reason}"
            if error.too_large or not pattern:
                message = error.reason
            findings.add(code, message, path, part, span=_part(span, pattern, error.start, error.end))
        if alternatives > MAX_ALTERNATIVES:
            findings.add(
                TOO_LARGE,
                f"the patterns of this plan have more than {MAX_ALTERNATIVES} alternatives",
                path,
                part,
                help="write `*` for what is the same in all layers",
            )
            return


def _globs(root: Node) -> Iterator[tuple[str, Path, Part, Span | None]]:
    for entry, at in rule_entries(root):
        yield entry.key, at, "key", entry.span
        for path, options in rule_mappings(entry.value, at):
            yield from _items(options.get("sum_outputs"), (*path, "sum_outputs"))
    for listed in GLOB_LISTS:
        yield from _items(node_at(root, listed), listed)


def _items(globs: Node | None, path: Path) -> Iterator[tuple[str, Path, Part, Span | None]]:
    items = (
        [(item, (*path, i)) for i, item in enumerate(globs.items)] if isinstance(globs, ListNode) else [(globs, path)]
    )
    for item, at in items:
        if isinstance(item, Scalar) and isinstance(item.value, str) and 0 < len(item.value) <= MAX_GLOB:
            yield item.value, at, "value", item.span


def _part(span: Span | None, text: str, start: int, end: int) -> Span | None:
    """The place of some characters of a text; of all of it, if it is written with escapes or over several lines."""
    if span is None or span.line != span.end_line:
        return span
    quotes = {0: 0, 2: 1}.get(span.end_column - span.column - len(text))
    if quotes is None:
        return span
    first = span.column + quotes + start
    return replace(span, column=first, end_column=max(first + end - start, first + 1))
