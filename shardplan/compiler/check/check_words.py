"""Words for the checks' messages: lists of sizes, names of numbers, problems of a rule, fields of a section."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from shardplan.core.by_key import by_key
from shardplan.core.diagnostics import Code, Diagnostic, Label, Severity
from shardplan.core.plan import Rule
from shardplan.core.sections import Section
from shardplan.core.tree import ModuleInfo, is_count, named

MOST_SIZES = 8  # sizes that are listed one by one


def join(words: Iterable[str], last: str) -> str:
    """ "a, b and c"."""
    words = tuple(words)
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}" if words else ""


def by_rule(
    problems: Iterable[tuple[Code, str, Rule, str]], words: Callable[[Code, Rule], tuple[str, str]]
) -> Iterator[Diagnostic]:
    """One finding for each rule and reason.

    Args:
        problems: (code, reason, rule, module or parameter).
        words: (code, rule) -> the problem, and the help.
    """
    for (rule, code, reason), found in by_key(((rule, code, why), name) for code, why, rule, name in problems).items():
        names, (what, help) = tuple(dict.fromkeys(found)), words(code, rule)
        yield Diagnostic(
            code=code,
            severity=Severity.ERROR,
            message=f"{what} for {named(names)}: {reason}",
            primary=Label(rule.location),
            help=help,
            modules=names,
        )


def sizes(allowed: Iterable[int]) -> str:
    """The help for a tp size that does not fit: the sizes above 1 that do."""
    above = [size for size in allowed if size > 1]
    if not above:
        return "use tp 1: no larger size fits everything that this plan splits"
    return f"use tp {listed(above)}: {'each' if len(above) > 1 else 'it'} fits everything that this plan splits"


def listed(sizes: Sequence[int]) -> str:
    """ "2, 4 or 8"; of many, the first and the last."""
    words = list(map(str, sizes))
    return (
        join(words, "or") if len(words) <= MOST_SIZES else f"{', '.join(words[: MOST_SIZES - 1])}, ... or {words[-1]}"
    )


def head_words(count: int, key_value: bool, numbers: Mapping[str, int | float]) -> str | None:
    """The config number that counts these heads, if there is one."""
    first = ("num_attention_heads", "num_key_value_heads")
    for name in reversed(first) if key_value else first:
        if numbers.get(name) == count:
            return name
    return _only(n for n, value in numbers.items() if value == count and "head" in n and "dim" not in n)


def feature_words(count: int, near: Iterable[ModuleInfo], numbers: Mapping[str, int | float]) -> str | None:
    """The name of the number that gives the width of this dimension. First choice is an attribute of the modules
    around it that is in the config too, then the only matching width in the config, then any such attribute."""
    own = [name for module in near for name, value in module.numbers.items() if is_count(value) and value == count]
    shared = [name for name in own if numbers.get(name) == count]
    if shared:
        return shared[0]
    widths = (n for n, value in numbers.items() if value == count and n.endswith(("_size", "_dim")))
    return _only(widths) or (own[0] if own else None)


def _only(names: Iterable[str]) -> str | None:
    found = tuple(names)
    return found[0] if len(found) == 1 else None


def field_label(section: Section | None, field: str) -> Label | None:
    """The field's value, in the document that sets it; else the section, if a document has it."""
    if section is None:
        return None
    if field in section.given:
        return Label(replace(section.given[field], part="value"))
    return Label(section.location) if section.location else None
