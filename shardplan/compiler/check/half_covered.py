"""Parameters that stay whole next to split ones. This may be intended, so these are warnings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from shardplan.core.diagnostics import Code, Diagnostic, Edit, Label, Severity
from shardplan.core.plan import Rule, section_at
from shardplan.core.tree import ModuleInfo, full_name, parent
from shardplan.language.plan_texts import rule_text
from shardplan.styles import STYLES, feature_dim
from shardplan.styles.head_counts import stays_split

from .check_words import join
from .facts import Facts

SIBLING = Code("SP350")
PARAMETER = Code("SP351")

MATMUL = ("linear", "conv1d")
ROWS = "rowwise"  # reads what a sibling splits by its output features


def check(facts: Facts) -> Iterator[Diagnostic]:
    """One finding for all whole parameters next to ones that the same rules split."""
    tree = facts.resolved.tree
    own: dict[str, dict[str, Rule]] = defaultdict(dict)  # by module: its split parameters, and their rules
    split: dict[str, dict[str, Rule]] = defaultdict(dict)  # by parent: its split matrices, and their rules
    for stored in facts.splits:
        if stays_split(stored.placement, stored.rule):
            for name in stored.names:
                owner = tree.owner(name)
                own[owner][name] = stored.rule
                if stored.module.kind in MATMUL:
                    split[parent(owner)].setdefault(owner, stored.rule)
    whole: dict[tuple[int, ...], tuple[list[str], dict[str, Rule]]] = {}
    for around, siblings in split.items():
        for name in tree.children[around]:
            if name not in own and _is_forgotten(facts, tree.modules[name], siblings):
                whole.setdefault(_ids(siblings), ([], siblings))[0].append(name)
    bare: dict[tuple[int, ...], tuple[list[str], dict[str, Rule]]] = {}
    for owner in dict.fromkeys((*split, *own)):
        others = split.get(owner, {}) | own.get(owner, {})
        for name in _unclaimed(facts, tree.modules[owner]):
            bare.setdefault(_ids(others), ([], others))[0].append(name)
    yield from (_finding(facts, SIBLING, names, others) for names, others in whole.values())
    yield from (_finding(facts, PARAMETER, names, others) for names, others in bare.values())


def _is_forgotten(facts: Facts, module: ModuleInfo, siblings: Iterable[str]) -> bool:
    """Whether a module next to split matrices is one that no rule names."""
    return module.kind in MATMUL and not facts.claimed(module.name) and not _feeds(facts, module, siblings)


def _ids(rules: Mapping[str, Rule]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(map(id, rules.values())))


def _feeds(facts: Facts, module: ModuleInfo, siblings: Iterable[str]) -> bool:
    """Whether the matrix comes before a split one that reads its whole output: the first half of a low-rank projection.

    Its output is as wide as a sibling's input; it does not read what that sibling reads, nor what a sibling splits.
    """
    modules = facts.resolved.tree.modules
    weights = {name: facts.stored.get(weight) for name in siblings if (weight := _weight(modules[name]))}
    split = [
        _widths(modules[name])
        for name, stored in weights.items()
        if stored is not None and stored.placement.shard == "out" and stored.placement.computed == "V"
    ]
    own = _widths(module)
    if own is None:
        return False
    out, into = own
    read = [widths for widths in split if widths is not None]
    return any(i == out and i != into for _, i in read) and all(o != into for o, _ in read)


def _weight(module: ModuleInfo) -> str | None:
    weight = module.parameter("weight")
    return full_name(module.name, weight.name) if weight is not None else None


def _widths(module: ModuleInfo) -> tuple[int, int] | None:
    """The output and input features of a matrix; None where its weight is stored in another form."""
    weight = module.parameter("weight")
    out, into = feature_dim(module.kind, "weight", "out", 2), feature_dim(module.kind, "weight", "in", 2)
    if weight is None or len(weight.shape) != 2 or out is None or into is None:
        return None
    return weight.shape[out], weight.shape[into]


def _unclaimed(facts: Facts, module: ModuleInfo) -> Iterator[str]:
    for parameter in module.parameters:
        name = full_name(module.name, parameter.name)
        if parameter.adapter is None and name not in facts.stored and module.name not in facts.whole:
            yield name


def _finding(facts: Facts, code: Code, names: list[str], split: dict[str, Rule]) -> Diagnostic:
    tree = facts.resolved.tree
    what = tree.named(names)
    others = join(list(dict.fromkeys(f"`{name.rpartition('.')[2]}`" for name in split)), "and")
    replicate = "replicate" if " and " in what else f"{what}: replicate"
    edits = _like_siblings(facts, names, split) if code == SIBLING else ()
    add = " and ".join(f"`{edit.pattern}: {edit.value}`" for edit in edits)
    return Diagnostic(
        code=code,
        severity=Severity.WARNING,
        message=f"no rule names {what}, which stays whole next to the split {others}",
        primary=Label(next(iter(split.values())).location, "splits its siblings"),
        help=f"add {add or 'a rule'}; for a whole copy on every rank, write `{replicate}`",
        modules=tuple(names),
        proposals=edits if len(edits) == 1 else (),
    )


def _like_siblings(facts: Facts, names: list[str], split: dict[str, Rule]) -> tuple[Edit, ...]:
    """Rules that split forgotten matrices like siblings of the same widths, or as readers of what these split; none if one has no such sibling."""
    tree = facts.resolved.tree
    edits: dict[str, Edit] = {}
    around = {parent(sibling) for sibling in split}  # of one layer, for all
    patterns = {tree.pattern(name) for name in names}
    near = [name for name in names if parent(name) in around]
    for name in near:
        own, rule = _widths(tree.modules[name]), None
        for sibling, other in split.items():
            sides = STYLES[other.style].weight.shard
            widths = _widths(tree.modules[sibling]) if parent(sibling) == parent(name) else None
            if own is None or widths is None:
                continue
            if widths == own and own[0] != own[1]:
                rule = rule_text(other)
            elif rule is None and sides == "out" and own == widths[::-1] and other.packed is None:
                rule = ROWS
        if rule is None:
            return ()
        section = section_at(next(iter(split.values())).location.path) or "tensor_parallel"
        edits.setdefault(tree.pattern(name), Edit(section, tree.pattern(name), rule))
    return tuple(edits.values()) if edits.keys() == patterns else ()
