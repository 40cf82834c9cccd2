"""The sequence-parallel overlay of a draft: between its blocks each rank holds a slice of the sequence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

from shardplan.core.tree import ModuleInfo, ancestors, element, parent
from shardplan.layout.repairs import general

from .draft import Board, Draft, Options, Rules
from .flow import Flow

DOOR = "input_with_grad_allreduce"
GATHERS: Options = {"style": "gather_seq_input"}
# What the parts of a block become when their values are slices of the sequence.
SEQUENCE = {"rowwise": "rowwise_seq", "colwise": "colwise_seq"}


def with_overlay(board: Board, flow: Flow, draft: Draft) -> Draft | str:
    """The draft with a sequence-parallel section that the layout check has no objection to; else what it objects to."""
    candidates = [replace(draft, sequence_parallel=rules) for rules in Overlay(board, flow, draft).candidates()]
    for candidate in candidates:
        found = board.mended(candidate, overlay=True)
        if found is not None and found.tensor_parallel == draft.tensor_parallel:
            return found
    if not candidates:
        return "there is no list of blocks that run one after the other"
    return board.objection(candidates[-1], overlay=True)


class Overlay:
    """Reads an overlay off the structure of the run.

    Args:
        board: where it is tried.
        flow: the unsharded run.
        draft: the tensor-parallel rules.
    """

    def __init__(self, board: Board, flow: Flow, draft: Draft):
        self.board, self.flow, self.draft, self.tree = board, flow, draft, board.tree

    def candidates(self) -> Iterator[Rules]:
        """Sections that may be right, the one that communicates least first."""
        if self.first is None:
            return
        body = {**self.entrance, **self.within, **self.exit}
        for table in (self.partial, {}):
            yield {**table, **body}

    @cached_property
    def order(self) -> dict[str, int]:
        """Each module that ran -> the number of its last operation."""
        last: dict[str, int] = {}
        for number, event in enumerate(self.flow.run.events):
            if event.kind == "op":
                for name in (event.module, *ancestors(event.module)):
                    last[name] = number
        return last

    @cached_property
    def first(self) -> str | None:
        """The block that runs first."""
        return next((name for name in self.order_of_blocks), None)

    @cached_property
    def order_of_blocks(self) -> tuple[str, ...]:
        """The blocks of the list whose blocks have split parts, in the order of the run."""
        lists = [parent(name) for name in self.tree.modules if element(name) and self._split_below(name)]
        if not lists:
            return ()
        blocks = [name for name in self.tree.modules if parent(name) == lists[0] and name in self.order]
        return tuple(sorted(blocks, key=lambda name: self.order[name]))

    def _split_below(self, name: str) -> bool:
        pattern = general(name)
        return any(rule == pattern or rule.startswith(f"{pattern}.") for rule in self.draft.tensor_parallel)

    @cached_property
    def partial(self) -> Rules:
        """Look-ups in front of the blocks that stay partial sums until the first block splits them."""
        split = {p for p, o in self.draft.tensor_parallel.items() if o["style"] == "embedding_rowwise"}
        if not split:
            return {}
        rules: dict[str, Options] = {}
        for product in dict.fromkeys(self.flow.products.values()):
            module = self.tree.modules.get(product.name)
            if module is None or module.kind != "embedding" or general(product.name) != product.name:
                continue
            style = "embedding_rowwise_seq" if product.name in split else "embedding_replicated_seq"
            if self.order[product.name] < self.order[self.first]:
                rules[product.name] = {"style": style}
        return rules

    @property
    def entrance(self) -> Rules:
        return {self.first: {"style": "split_seq_input"}}

    @cached_property
    def within(self) -> Rules:
        """The parts of each kind of block."""
        rules: dict[str, Options] = {}
        for name in self.order_of_blocks:
            for child in self.tree.children[name]:
                for pattern, options in self._part(child).items():
                    rules.setdefault(pattern, options)
        return rules

    def _part(self, child: str) -> Rules:
        """One part of a block: split, a token-wise module, or one that needs all of the sequence and stays whole."""
        pattern = general(child)
        inside = {
            rule: options
            for rule, options in self.draft.tensor_parallel.items()
            if rule == pattern or rule.startswith(f"{pattern}.")
        }
        if not inside:
            return self._whole(self.tree.modules[child], pattern)
        if any(options["style"] == "rowwise_split_input" for options in inside.values()):
            return {pattern: {"style": "replicate_seq"}}  # what is between its matrices is computed whole
        rules: dict[str, Options] = {}
        container = False
        for rule, options in inside.items():
            style = options["style"]
            if style == DOOR:
                moved = {"output": "reduce_scatter"} if "output" in options else {}
                container = container or bool(moved)
                rules[rule] = {**options, **GATHERS, **moved}
        for rule, options in inside.items():
            if options["style"] == "rowwise" and not container and self._is_module(rule):
                rules[rule] = {**options, "style": "rowwise_seq"}
            elif rule == pattern and options["style"] == "colwise":
                rules[rule] = {**options, "style": "colwise_seq"}
        if not any(options["style"] == DOOR for options in inside.values()) and pattern not in inside:
            rules[pattern] = GATHERS
        elif pattern in inside and inside[pattern]["style"] == "replicate":
            rules[pattern] = {**inside[pattern], **GATHERS}
        return rules

    def _is_module(self, pattern: str) -> bool:
        return any(general(name) == pattern for name in self.tree.modules)

    def _whole(self, module: ModuleInfo, pattern: str) -> Rules:
        below = [m for name, m in self.tree.modules.items() if name == module.name or name.startswith(f"{module.name}.")]
        if module.kind == "list" or not any(m.parameters for m in below):
            return {}
        if len(below) == 1 and (module.kind != "other" or all(len(p.shape) == 1 for p in module.parameters)):
            return {pattern: {"style": "sequence_parallel"}}
        return {pattern: {"style": "replicate_seq"}}

    @cached_property
    def exit(self) -> Rules:
        """The first module with parameters behind the blocks, which hands on the whole sequence."""
        last = self.order[self.order_of_blocks[-1]]
        behind = [
            name
            for name, module in self.tree.modules.items()
            if module.parameters and self.order.get(name, -1) > last and general(name) == name
        ]
        if not behind:
            return {}
        name = min(behind, key=lambda name: self.order[name])
        return {name: {"style": "sequence_parallel", "output": "gather"}}
