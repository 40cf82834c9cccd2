"""The expert-parallel section of a draft: experts are distributed whole, and tokens are sent to them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from shardplan.compiler.layout.layout_check import bound_to
from shardplan.compiler.layout.layout_diagnostics import with_line
from shardplan.compiler.layout.model import ModelLayouts
from shardplan.compiler.layout.solver.draft import PARTIAL, Draft, Options, Rules
from shardplan.core.plan import Overlays, overlays_of
from shardplan.core.tree import ModuleInfo, ModuleTree, ancestors, element
from shardplan.styles import NONE
from shardplan.styles.block_inputs import BLOCK_INPUT

STACKED = 2  # the least number of matrices in a module of experts
WITHOUT: Rules = {}


def with_distributed(layouts: ModelLayouts, draft: Draft) -> Draft | str:
    """The draft with a section that passes the layout check, both with and without sequence parallelism; else the reason
    against the first candidate.

    Args:
        layouts: the reduced model on a mesh with an axis ep.
    """
    tree = replace(layouts.tree, base_prefix="")
    stacks = [name for name, module in tree.modules.items() if _is_stack(tree, module)]
    if not stacks:
        return "no module has stacks of experts, two or more matrices each"
    kinds = {tree.pattern(name): name for name in reversed(stacks)}
    each = [tuple(Distribution(tree, draft, name).candidates()) for name in kinds.values()]
    reason = None
    for sections in _together(each):
        candidate = replace(draft, distributed=sections)
        said = _reason(layouts, tree, candidate)
        if said is None:
            return candidate
        reason = reason or said
    assert reason is not None
    return reason


def _together(each: Sequence[Sequence[Mapping[str, Rules]]]) -> Iterator[dict[str, Rules]]:
    """The first sections of all kinds of experts together, then the second ones, and so on; a kind without more gives its last."""
    for number in range(max(map(len, each))):
        chosen = [candidates[min(number, len(candidates) - 1)] for candidates in each]
        yield {section: {p: o for one in chosen for p, o in one[section].items()} for section in chosen[0]}


def _is_stack(tree: ModuleTree, module: ModuleInfo) -> bool:
    """Whether every parameter of a module has one dim for its experts, and no module below has parameters."""
    shapes = [p.shape for p in module.parameters]
    below = any(one.parameters for name, one in tree.modules.items() if name.startswith(f"{module.name}."))
    counts = {shape[0] if shape else 0 for shape in shapes}
    return sum(len(shape) > 2 for shape in shapes) >= STACKED and len(counts) == 1 and not below


def _reason(layouts: ModelLayouts, tree: ModuleTree, draft: Draft) -> str | None:
    """The first error of a draft, among its variants with distributed experts."""
    plan = draft.plan()
    assert plan is not None
    wanted: list[Overlays] = [
        overlays_of(on, layouts.sizes) for on in (False, True) if draft.sequence_parallel or not on
    ]
    for overlays in wanted:
        resolved, errors = bound_to(tree, plan, layouts.sizes, overlays)
        found = errors or layouts.check_copy(resolved).diagnostics
        if found:
            return with_line(found[0])
    return None


class Distribution:
    """Makes the section from the rules of a draft.

    Args:
        tree: the reduced model's.
        draft: the rules, without such a section.
        experts: the name of a module of experts.
    """

    def __init__(self, tree: ModuleTree, draft: Draft, experts: str):
        self.tree, self.draft, self.experts = tree, draft, experts
        ruled = (name for name in ancestors(experts) if name and not element(name) and self._has_rule(name))
        self.block = next(ruled, None)
        self._modules = {tree.pattern(name) for name in tree.modules}

    def candidates(self) -> Iterator[dict[str, Rules]]:
        """Sections that may be right; those that communicate least come first."""
        own: Rules = {self.tree.pattern(self.experts): {"style": "ep_dispatch"}}
        if self.block is not None:
            inside = {**self._without_block_input(), **own, **self._token_wise()}
            shared = self._shared()
            reduced = {name: self._reduced(name) for name in shared}
            gathered = {name: {"style": "gather_seq_input", "output": "reduce_scatter"} for name in shared}
            for sliced in (gathered, self._whole(shared)) if shared else (WITHOUT,):
                yield self._sections({**inside, **reduced}, sliced)
        yield self._sections(own, WITHOUT)

    def _sections(self, rules: Rules, sliced: Rules) -> dict[str, Rules]:
        sums: Rules = {p: {"sum_outputs": []} for p in self._sums()} if len(rules) > 1 else {}
        sequence = {**self._apart(rules), **sliced} if self.draft.sequence_parallel else WITHOUT
        return {"expert_parallel": {**sums, **rules}, "expert_parallel.sequence_parallel": sequence}

    def _apart(self, rules: Rules) -> Rules:
        """Where a norm gathers the sequence for the experts' block and for other parts, let the other parts gather it
        themselves: tokens are sent to experts from the slices."""
        found: dict[str, Options] = {}
        for norm, parts in self.draft.together.items():
            gathers = (self.draft.sequence_parallel or {}).get(norm, {}).get("output") == "gather"
            if gathers and any(rules.get(pattern, {}).get("style") == NONE for pattern in parts):
                found |= {pattern: options for pattern, options in parts.items() if pattern not in rules}
        return found

    def _has_rule(self, name: str) -> bool:
        pattern = self.tree.pattern(name)
        return pattern in self.draft.tensor_parallel or pattern in (self.draft.sequence_parallel or {})

    def _without_block_input(self) -> Rules:
        """Remove the block's input move, as tokens are sent from the rank that has them. Layers without experts keep it."""
        assert self.block is not None
        pattern, child = self.tree.pattern(self.block), self.experts.removeprefix(f"{self.block}.")
        alike = [name for name in self.tree.modules if self.tree.pattern(name) == pattern]
        everywhere = all(f"{name}.{child}" in self.tree.modules for name in alike)
        return {pattern: {"style": NONE} if everywhere else {"style": NONE, "having": child}}

    def _token_wise(self) -> Rules:
        """Token-wise rules for the modules next to the experts whose gradients are partial sums while experts are split."""
        patterns = {self.tree.pattern(name) for name in self.tree.modules if name.startswith(f"{self.block}.")}
        return {
            pattern: {"style": "token_wise", **{k: v for k, v in options.items() if k == "read_outside"}}
            for pattern, options in self.draft.tensor_parallel.items()
            if options["style"] == PARTIAL["style"] and pattern in patterns
        }

    def _shared(self) -> tuple[str, ...]:
        """Split children of the block that have no input move and reduction of their own."""
        assert self.block is not None
        others = (self.tree.pattern(child) for child in self.tree.children[self.block] if child != self.experts)
        rules = self.draft.tensor_parallel
        return tuple(p for p in others if p not in rules and any(rule.startswith(f"{p}.") for rule in rules))

    def _reduced(self, shared: str) -> Options:
        """The rule for a child's input move and, unless its last matrix reduces its result itself, for its reduction."""
        rules = (rule for rule in self.draft.tensor_parallel if rule.startswith(f"{shared}."))
        if any(self.draft.tensor_parallel[rule]["style"] == "rowwise" and rule in self._modules for rule in rules):
            return {"style": BLOCK_INPUT}
        return {"style": BLOCK_INPUT, "output": "all_reduce"}

    def _whole(self, shared: tuple[str, ...]) -> Rules:
        """Rules for children that get all tokens in one row, which cannot be gathered by sequence: whole, on a rank's own tokens."""
        rules: dict[str, dict[str, str]] = {}
        parameters = {self.tree.pattern(full): owner.name for full, (owner, _) in self.tree.parameters.items()}
        for pattern in shared:
            rules[pattern] = {"style": NONE}
            for rule in self.draft.tensor_parallel:
                if rule.startswith(f"{pattern}."):
                    owner = self.tree.pattern(parameters[rule]) if rule in parameters else rule
                    rules[owner] = {"style": "token_wise"}
                    if rule in parameters:
                        rules[rule] = {"style": NONE}
        return rules

    def _sums(self) -> tuple[str, ...]:
        """Blocks whose experts return complete results, so that nothing is left to reduce together."""
        return tuple(dict.fromkeys(pattern for rules in self.draft.sums.values() for pattern in rules))
