"""Writing a plan as a file that is easy to edit: short patterns, one block for each kind of part, comments that say why."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from shardplan.compiler.layout.solver.draft import Options, Rules, listed, section_documents
from shardplan.core.tree import ModuleTree
from shardplan.language.plan_texts import value_text, word_text
from shardplan.styles import NONE, STYLES

WIDTH = 110
SUMMED = "The block's sum is reduced once."
SHARES = "`shares`: the numbers and tensors in the model's code that depend on what is split."


@dataclass(frozen=True, slots=True)
class Heading:
    """The head of a plan file, above its rules.

    Args:
        name: the plan's name.
        description: the plan in one line.
        models: the model types or class names that it is for.
        notes: comment lines above the rules.
    """

    name: str
    description: str
    models: tuple[str, ...]
    notes: tuple[str, ...] = ()


WRAPPING = {"reshard_after_forward": "all_but_last"}  # the fields of `data_parallel` other than the units


def plan_text(
    heading: Heading,
    sections: Mapping[str, Rules],
    tree: ModuleTree | None,
    units: Sequence[str] = (),
    pipeline: Mapping[str, Any] | None = None,
    wrapping: Mapping[str, Any] = WRAPPING,
) -> str:
    """The plan file as YAML.

    Args:
        sections: name -> pattern -> style and options.
        tree: the tree of the model, which gives the rules' order; None keeps their order.
        units: the patterns of the modules that data parallelism wraps.
        pipeline: the fields of `pipeline_parallel`; None leaves this section out.
        wrapping: the other fields of `data_parallel`.
    """
    lines = ['version: "1"', f"name: {word_text(heading.name)}", f"description: {word_text(heading.description)}"]
    lines += [f"models: [{', '.join(heading.models)}]"] if heading.models else []
    lines += ["", *(f"# {line}" for line in heading.notes)]
    written: set[str] = set()
    for section, rules in sections.items():
        if rules:
            outside, _, inside = section.rpartition(".")
            indent = "  " * bool(outside)
            lines = lines[:-1] if outside else lines  # the last entry belongs to the section before it
            lines += [*(f"{indent}{line}" for line in section_lines(inside, rules, tree, written)), ""]
    if units:
        lines += ["data_parallel:", "  backend: fsdp2", f"  units: {value_text(units)}"]
        lines += [*(f"  {name}: {value_text(value)}" for name, value in wrapping.items()), ""]
    if pipeline is not None:
        lines += [
            "pipeline_parallel:",
            *(
                f"  {field}: {word_text(value) if isinstance(value, str) else value_text(value)}"
                for field, value in pipeline.items()
            ),
            "",
        ]
    return "\n".join(lines[:-1]) + "\n"


def section_lines(section: str, rules: Rules, tree: ModuleTree | None, written: set[str] | None = None) -> list[str]:
    """One section of a plan file.

    Args:
        written: the comments above it; this function adds its own.
    """
    parameters = frozenset(_pattern(tree, name) for name in tree.parameters) if tree is not None else frozenset()
    ordered = in_order(rules, tree) if tree is not None else rules
    return [f"{section}:", *_rules(folded(ordered, parameters), set() if written is None else written)]


def plan_document(
    heading: Heading,
    sections: Mapping[str, Rules],
    units: Sequence[str] = (),
    pipeline: Mapping[str, Any] | None = None,
    wrapping: Mapping[str, Any] = WRAPPING,
) -> dict[str, Any]:
    """The plan as data, with the arguments of `plan_text`."""
    found = {"version": "1", "name": heading.name, **section_documents(sections), "description": heading.description}
    if heading.models:
        found["models"] = list(heading.models)
    if units:
        found["data_parallel"] = {"backend": "fsdp2", "units": list(units), **wrapping}
    if pipeline is not None:
        found["pipeline_parallel"] = dict(pipeline)
    return found


def in_order(rules: Rules, tree: ModuleTree) -> Rules:
    """The rules in the tree's order; the rule of a container comes before those of its contents."""
    places: dict[str, int] = {}
    for number, name in enumerate((*tree.modules, *tree.parameters)):
        places.setdefault(tree.address(name), number)
        places.setdefault(_pattern(tree, name), number)
    owners = {_pattern(tree, full): places[_pattern(tree, owner.name)] for full, (owner, _) in tree.parameters.items()}

    def place(pattern: str) -> tuple[float, str]:
        if pattern in owners:
            return (owners[pattern] + 0.5, pattern)
        return (places.get(pattern, len(places)), "")

    return dict(sorted(rules.items(), key=lambda item: place(item[0])))


def _pattern(tree: ModuleTree, name: str) -> str:
    return tree.address(tree.pattern(name))


def folded(rules: Rules, parameters: frozenset[str] = frozenset()) -> Rules:
    """Join equal rules whose patterns differ in one segment to one rule with `{a,b}` as this segment, at the position of the first.

    Args:
        parameters: the patterns that match parameters; they are not joined with patterns of modules.
    """
    keyed = [(number, p, (value_text(o), p in parameters)) for number, (p, o) in enumerate(rules.items())]
    placed: list[tuple[int, str, Options]] = []
    for wanted in dict.fromkeys(key for _, _, key in keyed):
        rows = {tuple(p.split(".")): number for number, p, key in keyed if key == wanted}
        options = next(rules[p] for _, p, key in keyed if key == wanted)
        for position in reversed(range(max(map(len, rows)))):
            rows = _fold(rows, position)
        placed += [(number, ".".join(parts), options) for parts, number in rows.items()]
    return {pattern: options for _, pattern, options in sorted(placed, key=itemgetter(0))}


def _fold(rows: Mapping[tuple[str, ...], int], position: int) -> dict[tuple[str, ...], int]:
    """Join rows (segments -> position) that differ only in the segment at `position`."""
    alike: dict[tuple[str, ...], list[tuple[str, int]]] = {}
    for row, number in rows.items():
        foldable = 0 < position < len(row) and not row[position].isdigit() and row[position] != "*"
        key = (*row[:position], "", *row[position + 1 :]) if foldable else row
        alike.setdefault(key, []).append((row[position] if foldable else "", number))
    return {
        tuple(braced([word for word, _ in members]) if part == "" else part for part in key): min(
            number for _, number in members
        )
        for key, members in alike.items()
    }


def braced(words: Sequence[str]) -> str:
    """Join words: q_proj, k_proj and v_proj become `{q,k,v}_proj`. What they share up to an underscore or a number is written once."""
    if len(words) == 1 or any("{" in word for word in words):
        return words[0] if len(words) == 1 else f"{{{','.join(words)}}}"
    head, tail = os.path.commonprefix(words), os.path.commonprefix([word[::-1] for word in words])[::-1]
    if not all(word[len(head) :].isdigit() for word in words):
        head = head[: head.rfind("_") + 1]
    tail = tail[tail.find("_") :] if "_" in tail else ""
    inner = [word[len(head) : len(word) - len(tail)] for word in words]
    if not all(inner):
        return f"{{{','.join(words)}}}"
    return f"{head}{{{','.join(inner)}}}{tail}"


def _rules(rules: Rules, written: set[str]) -> Iterator[str]:
    for pattern, found in listed(rules).items():
        why = [line for options in found for line in (_comment(options), SHARES if "shares" in options else "")]
        yield from (f"  # {line}" for line in dict.fromkeys(why) if line and line not in written)
        written.update(why)
        if len(found) == 1:
            yield from _entry(pattern, found[0])
        else:
            yield f"  {word_text(pattern)}:"
            yield from (f"    - {value_text(options)}" for options in found)


def _comment(options: Options) -> str:
    """The comment above the first rule of its style, which says why it is there."""
    style = options.get("style")
    if style is None:
        return SUMMED
    return "" if style == NONE or (style == "replicate" and "shares" in options) else STYLES[style].comment


def _entry(pattern: str, options: Options) -> Iterator[str]:
    key = word_text(pattern)
    if options.keys() == {"style"}:
        yield f"  {key}: {options['style']}"
        return
    line = f"  {key}: {value_text(options)}"
    if len(line) <= WIDTH:
        yield line
        return
    yield f"  {key}:"
    for name, value in options.items():
        line = f"    {name}: {value_text(value)}"
        if name != "shares" or len(line) <= WIDTH:
            yield line
            continue
        yield f"    {name}:"
        yield from (f"      - {value_text(one).removeprefix('{').removesuffix('}')}" for one in value)
