"""Writing a plan as a file that is easy to edit: short patterns, one block for each kind of part, comments that say why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from shardplan.compiler.layout.solver.draft import Options, Rules, listed, section_documents
from shardplan.core.by_key import by_key
from shardplan.core.folded_names import Row, braced, folded
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
    return [f"{section}:", *_rules(joined(ordered, parameters), set() if written is None else written)]


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


def joined(rules: Rules, parameters: frozenset[str] = frozenset()) -> Rules:
    """Join equal rules whose patterns differ in one segment to one rule with `{a,b}` as this segment, at the position of the first.

    Args:
        parameters: the patterns that match parameters; they are not joined with patterns of modules.
    """
    order = {pattern: number for number, pattern in enumerate(rules)}
    equal = by_key(((value_text(options), pattern in parameters), pattern) for pattern, options in rules.items())
    placed = [
        (min(order[patterns[number]] for number in numbers), text, rules[patterns[0]])
        for patterns in equal.values()
        for text, numbers in folded(patterns, _joins, braced).items()
    ]
    return {pattern: options for _, pattern, options in sorted(placed, key=itemgetter(0))}


def _joins(row: Row, at: int) -> bool:
    """Whether patterns may differ in a segment: not in the first, and not in numbers of layers."""
    return at > 0 and not row[at].isdigit() and row[at] != "*"


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
