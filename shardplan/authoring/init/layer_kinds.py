"""Layers with a state and layers of another kind that have the same pattern: each kind has its own rules while a plan is searched."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from shardplan.compiler.layout.solver.draft import Draft, Options, Rules, alternative, further, is_alternative
from shardplan.core.tree import ModuleInfo, ModuleTree, element, full_name, parent

NUMBERS = re.compile(r"\{\d+(,\d+)*\}")


@dataclass(frozen=True)
class KindedTree(ModuleTree):
    """A tree whose patterns distinguish parts of blocks with several classes, by the numbers of these layers in the reduced
    model: `model.layers.{0,2}.mixer.in_proj`.

    Args:
        kinds: part -> its pattern.
    """

    kinds: Mapping[str, str] = field(default_factory=dict)

    def pattern(self, name: str) -> str:
        """As `ModuleTree.pattern`."""
        plain, names = super().pattern(name), name.split(".")
        for length in range(1, len(names) + 1):
            own = self.kinds.get(".".join(names[:length]))
            if own is not None:
                return ".".join((own, *plain.split(".")[length:]))
        return plain


def kinded(reduced: ModuleTree, tree: ModuleTree) -> tuple[ModuleTree, ModuleTree]:
    """The trees of the reduced model and of the model itself; they distinguish kinds of layers where one of these has a state."""
    classes: dict[str, dict[str, list[str]]] = {}
    for name, module in reduced.modules.items():
        if element(parent(name)):
            classes.setdefault(reduced.pattern(name), {}).setdefault(module.class_name, []).append(name)
    patterns: dict[tuple[str, str], str] = {}
    for pattern, found in classes.items():
        if len(found) > 1 and any(_has_state(reduced, name) for names in found.values() for name in names):
            for class_name, names in found.items():
                patterns[pattern, class_name] = _numbered(names)
    if not patterns:
        return reduced, tree
    return _told(reduced, patterns), _told(tree, patterns)


def _numbered(names: Iterable[str]) -> str:
    """A name such as `model.layers.{0,2}.mixer` for parts of elements of one list."""
    split = [(*name.rpartition(".")[0].rpartition("."), name.rpartition(".")[2]) for name in names]
    above, _, _, last = split[0]
    return full_name(above, f"{{{','.join(number for _, _, number, _ in split)}}}.{last}")


def _has_state(tree: ModuleTree, name: str) -> bool:
    below = [module for other, module in tree.modules.items() if f"{other}.".startswith(f"{name}.")]
    return (
        any(module.kind == "depthwise" for module in below)
        or any(len(p.shape) == 1 for p in tree.modules[name].parameters)
        or any(tree.modules[name].buffers.values())  # decays for each head
    )


def _told(tree: ModuleTree, patterns: Mapping[tuple[str, str], str]) -> KindedTree:
    kinds = {
        name: own
        for name, module in tree.modules.items()
        if (own := patterns.get((tree.pattern(name), module.class_name))) is not None and element(parent(name))
    }
    return KindedTree(**{one.name: getattr(tree, one.name) for one in fields(ModuleTree)}, kinds=kinds)


def plain(pattern: str) -> str:
    """The pattern in a plan for all layers."""
    return NUMBERS.sub("*", pattern)


def together(draft: Draft, tree: ModuleTree) -> Draft | None:
    """The draft with one rule for all kinds of layers where theirs are equal, else with `having`; None where no name distinguishes them.

    Args:
        tree: the reduced model's, as `kinded` returns it.
    """
    if not isinstance(tree, KindedTree):
        return draft
    split, sequence = _joined(draft.tensor_parallel, {}, tree), draft.sequence_parallel
    sliced = None if sequence is None else _joined(sequence, draft.tensor_parallel, tree)
    if split is None or (sliced is None and sequence is not None):
        return None
    norms = {plain(norm): {plain(p): o for p, o in rules.items()} for norm, rules in draft.together.items()}
    return replace(draft, tensor_parallel=split, sequence_parallel=sliced, together=norms)


def _joined(rules: Rules, otherwise: Rules, tree: KindedTree) -> Rules | None:
    """The rules for all kinds.

    Args:
        otherwise: the rules of modules that `rules` does not have.
    """
    whole: Options = {"style": "replicate"}
    named: dict[str, dict[str, str]] = {}  # pattern -> pattern of each kind -> a part of it
    for name in (*tree.modules, *tree.parameters):
        part = next((part for part in tree.kinds if name == part or name.startswith(f"{part}.")), None)
        if part is not None:
            named.setdefault(plain(tree.pattern(name)), {}).setdefault(tree.pattern(name), part)
    found: dict[str, Options] = {}
    for pattern, options in rules.items():
        if (key := plain(pattern)) == pattern:
            found[key] = options
        elif key not in found:
            own = {kind: rules.get(kind, otherwise.get(kind, whole)) for kind in named[key]}
            alike = sorted(own.values(), key=lambda one: (-list(own.values()).count(one), len(one), len(_shares(one))))
            found[key] = alike[0]
            others = {kind: other for kind, other in own.items() if other != alike[0]}
            if plain(tree.kinds[next(iter(named[key].values()))]) != key and len({one["style"] for one in alike}) == 1:
                both = (item for item in alike[0].items() if all(item in one.items() for one in alike))
                shares = [one for one in _shares(alike[0]) if all(one in _shares(other) for other in alike)]
                found[key] = {**dict(both), **({"shares": shares} if shares else {})}
                others = {}  # each layer's code has its number of heads
            for number, (kind, other) in enumerate(others.items()):
                below = _alone(tree, named[key], kind, key)
                if below is None:
                    return None
                place = alternative(key) if len(others) == 1 else further(key, number)
                found[place] = {**other, "having": below, "override": True}
    return dict(sorted(found.items(), key=lambda item: is_alternative(item[0])))


def _shares(options: Options) -> Sequence[Any]:
    return options.get("shares", ())


def _alone(tree: KindedTree, parts: Mapping[str, str], kind: str, key: str) -> str | None:
    """A name that exists only below the parts of this kind; None also where the rule is not for the part itself."""
    if plain(tree.kinds[parts[kind]]) != key:
        return None
    others = {name for other, part in parts.items() if other != kind for name in _below(tree, tree.modules[part])}
    return next((name for name in _below(tree, tree.modules[parts[kind]]) if name not in others), None)


def _below(tree: ModuleTree, module: ModuleInfo) -> tuple[str, ...]:
    children = (name.rpartition(".")[2] for name in tree.children[module.name])
    return (*(parameter.name for parameter in module.parameters), *children)
