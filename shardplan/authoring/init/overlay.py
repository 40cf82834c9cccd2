"""The sequence-parallel overlay of a draft: between blocks, each rank holds a slice of the sequence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import product

from shardplan.compiler.layout.finding import Finding
from shardplan.compiler.layout.solver.draft import (
    PARTIAL,
    Draft,
    DraftTrials,
    Options,
    Rules,
    partial_gradients,
)
from shardplan.compiler.layout.solver.flow import Flow
from shardplan.core.by_key import by_key
from shardplan.core.layout import R
from shardplan.core.search_bounds import BOUNDS
from shardplan.core.tree import ModuleInfo, ancestors, element, parent, part
from shardplan.styles import STYLES
from shardplan.styles.block_inputs import BLOCK_INPUT, RESULT

from .ends import COMPLETE, GATHERED, GATHERS, Ends
from .layer_kinds import plain

GATHERING = ("gather_seq_input", "colwise_seq")


def with_overlay(trials: DraftTrials, flow: Flow, draft: Draft) -> Draft | str:
    """The draft with a sequence-parallel section that passes the layout check; else the check's error."""
    reasons = []
    for listing in lists_of_blocks(trials, flow, draft):
        found = _with_list(trials, flow, draft, listing)
        if isinstance(found, str):
            reasons.append(found)
        else:
            draft = found
    if draft.sequence_parallel is not None:
        return draft
    return reasons[0] if reasons else "there is no list of blocks that run one after the other"


def lists_of_blocks(trials: DraftTrials, flow: Flow, draft: Draft) -> tuple[str, ...]:
    """The outermost lists whose elements are called and have split parts, in the model's order: for example an encoder's and a decoder's."""
    ran = {event.module for event in flow.run.events if event.kind == "enter"}
    split = {
        name for name in trials.tree.modules if name in ran and element(name) and _split_below(trials, draft, name)
    }
    found = dict.fromkeys(parent(name) for name in trials.tree.modules if name in split)
    return tuple(name for name in found if not any(element(one) for one in (name, *ancestors(name))))


def _split_below(trials: DraftTrials, draft: Draft, name: str) -> bool:
    pattern = trials.tree.pattern(name)
    alike = pattern.endswith("*")  # elements with different patterns are not blocks
    rules = map(plain, draft.tensor_parallel)
    return alike and any(rule == pattern or rule.startswith(f"{pattern}.") for rule in rules)


def _with_list(trials: DraftTrials, flow: Flow, draft: Draft, listing: str) -> Draft | str:
    """As `with_overlay`, for the blocks of one list."""
    overlay = Overlay(trials, flow, draft, listing)
    candidates = list(overlay.candidates())
    if overlay.ends.time_first(trials.rows):
        return f"{overlay.ends.first} reads [sequence, batch, ...]: rules with `seq_dim: 0` are written by hand"
    if overlay.ends.length % trials.tp:
        return f"{overlay.ends.first} reads {overlay.ends.length} positions, which tp={trials.tp} does not divide"
    by_token = Overlay(trials, flow, draft, listing, by_token=True).candidates()
    only_right = [candidate for candidate in by_token if candidate not in candidates]  # nothing is repaired in these
    found = _right(trials, flow, candidates, only_right)
    return next(filter(trials.right_with_padding, found), None) or trials.reason(candidates[-1], overlay=True)


def _right(
    trials: DraftTrials, flow: Flow, candidates: Sequence[Draft], only_right: Sequence[Draft]
) -> Iterator[Draft]:
    """The drafts that are right: of the candidates, and of what is made of them by repairs and with whole parts."""
    counts: dict[int, int] = {}  # candidate -> the number of its errors
    for number, candidate in enumerate((*only_right, *candidates), -len(only_right)):
        report = trials.report(candidate, overlay=True)
        if report is not None and report.ok:
            yield candidate
        elif number >= 0 and report is not None and len(report.diagnostics) <= BOUNDS.overlay_errors:
            counts[number] = len(report.diagnostics)
    for number in sorted(counts, key=lambda number: (counts[number], number))[: BOUNDS.overlays_fixed]:
        if (found := trials.fixed(candidates[number], overlay=True)) is not None:
            yield found
    for candidate in candidates:
        if (found := with_whole_parts(trials, flow, candidate)) is not None:
            yield found


def with_whole_parts(trials: DraftTrials, flow: Flow, draft: Draft) -> Draft | None:
    """The draft with the sequence gathered before, and split after, the parts of blocks that cannot work with slices of it.
    Inside, these parts run as without sequence parallelism. Values that a block's own code combines with whole ones are
    gathered too. None where this is not enough."""
    for _ in range(BOUNDS.overlay_whole):
        assert draft.sequence_parallel is not None  # the draft has an overlay
        proof = trials.proof(draft, overlay=True)
        if proof is None:
            return None
        if not proof.findings:
            report = trials.report(draft, overlay=True)
            return draft if report is not None and report.ok else None
        finding = proof.findings[0]
        found = part(finding.module)
        rules = (
            gathered_between(flow, draft.sequence_parallel, finding)
            if found is None
            else gathered_around(trials, draft, found)
        )
        if rules is None:
            return None
        draft = replace(draft, sequence_parallel=rules)
    return None


def gathered_around(trials: DraftTrials, draft: Draft, found: str) -> Rules | None:
    """Rules that make a part of a block compute with the whole sequence; None where it already does, or is split."""
    rules, pattern = draft.sequence_parallel or {}, trials.tree.pattern(found)
    options = draft.tensor_parallel.get(pattern, {"style": "replicate"})
    if rules.get(pattern, {}).get("style") == "replicate_seq" or options["style"] != "replicate":
        return None
    outside = {p: o for p, o in rules.items() if p != pattern and not p.startswith(f"{pattern}.")}
    return {**outside, pattern: {**options, "style": "replicate_seq"}}


def gathered_between(flow: Flow, rules: Rules, finding: Finding) -> Rules | None:
    """Rules where a block's own code combines a module's result with values for the whole sequence (such as vectors of each
    token for each layer): the sequence is gathered after this module, and split before the next one."""
    if finding.kind != "crash" or not element(finding.module):
        return None
    inside = [n for one in finding.operands for n in one.from_modules if n.startswith(f"{finding.module}.")]
    maker = next((n for n in inside if rules.get(flow.tree.pattern(n)) == {"style": "sequence_parallel"}), None)
    ran = dict.fromkeys(
        e.module for e in flow.run.events if e.kind == "enter" and flow.tree.modules[e.module].parameters
    )
    order = [name for name in ran if name.startswith(f"{finding.module}.")]
    if maker is None or maker not in order[:-1]:
        return None
    reader = order[order.index(maker) + 1]
    pattern = flow.tree.pattern(reader)
    own = partial_gradients(pattern, flow.tree.modules[reader])
    return {**rules, flow.tree.pattern(maker): GATHERED, pattern: {"style": "split_seq_input"}, **own}


def reads(style: str) -> bool:
    """Whether a style is for a module that reads the input of a split part."""
    return R in STYLES[style].input_sources


class Overlay:
    """Makes an overlay from the structure of the run.

    Args:
        trials: tries it on the reduced model.
        flow: the unsharded run.
        draft: the tensor-parallel rules, and the sequence-parallel rules for other lists.
        listing: the list of the blocks.
        by_token: whole parts of several modules compute with a slice of the sequence, as small matrices between streams do, and not
            with the whole sequence.
    """

    def __init__(self, trials: DraftTrials, flow: Flow, draft: Draft, listing: str, *, by_token: bool = False):
        self.trials, self.flow, self.draft, self.tree, self.by_token = trials, flow, draft, trials.tree, by_token
        self.ends = Ends(flow, draft, listing)

    def candidates(self) -> Iterator[Draft]:
        """Drafts with sections that may be right; those that communicate least come first."""
        seen: list[Rules] = []
        others = self.draft.sequence_parallel or {}
        for (enter, leave), together in product(self.ends.pairs, (self.together, {})):
            rules = {**others, **enter, **self.within, **self._shared(together), **leave}
            if rules not in seen:
                seen.append(rules)
                both = {**self.draft.together, **together}
                yield replace(self.draft, sequence_parallel=rules, together=both)

    @cached_property
    def within(self) -> Rules:
        """The parts of each kind of block."""
        rules: dict[str, Options] = {}
        for name in self.ends.blocks:
            for child in self._parts(name):
                for pattern, options in self._part(child).items():
                    rules.setdefault(pattern, options)
        return rules

    def _parts(self, name: str) -> Iterator[str]:
        """The parts of a block that ran. Sublayers in a list that is not called (T5) are replaced by their parts, where they
        have a residual connection of their own."""
        for child in (c for c in self.tree.children[name] if c in self.ends.order):
            if self.tree.modules[child].kind != "list" or child in self.ends.called:
                yield child
                continue
            for inner in (c for c in self.tree.children[child] if c in self.ends.order):
                yield from self._parts(inner) if self._has_residual(inner) else (inner,)

    def _has_residual(self, name: str) -> bool:
        """Whether a module adds to its input."""
        read = {number for e in self.flow.run.events if e.kind == "enter" and e.module == name for number in e.inputs}
        own = (e for e in self.flow.run.events if e.kind == "op" and e.module == name and "add" in e.name)
        return any(read.intersection(event.inputs) for event in own)

    @cached_property
    def together(self) -> Mapping[str, Rules]:
        """Norms that several split parts of a block read -> the rules of the norm and of these parts, where each part gathers the
        sequence itself."""
        found: dict[str, Rules] = {}
        for name in self.ends.blocks:
            parts = self.tree.children[name]
            left = {
                n: e.module for e in self.flow.run.events if e.kind == "leave" and e.module in parts for n in e.outputs
            }
            entered = (e for e in self.flow.run.events if e.kind == "enter" and e.module in parts)
            readers = ((left[number], event.module) for event in entered for number in event.inputs if number in left)
            for source, own in by_key(readers).items():
                if self._is_norm(source) and len(own) > 1 and all(map(self._needs_all, own)):
                    patterns = [self.tree.pattern(one) for one in (source, *own)]
                    found[patterns[0]] = {p: self.within[p] for p in patterns if p in self.within}
        return found

    def _shared(self, together: Mapping[str, Rules]) -> Rules:
        """Norms that gather the sequence once for all their readers, instead of the readers' block inputs."""
        rules: dict[str, Options] = {}
        for norm, parts in together.items():
            rules |= {pattern: self._without_block_input(pattern) for pattern in parts if pattern != norm}
            partial = any(self._is_partial(pattern) for pattern in parts if pattern != norm)
            rules[norm] = {**GATHERED, "grad": "partial"} if partial else GATHERED
        return rules

    def _needs_all(self, name: str) -> bool:
        """Whether a part gathers the sequence, or is split and reads the whole sequence (no `packed_colwise` gathers it)."""
        pattern = self.tree.pattern(name)
        if pattern in self.within:
            return self.within[pattern]["style"] in GATHERING
        return reads(self.draft.tensor_parallel.get(pattern, {"style": "replicate"})["style"])

    def _is_norm(self, name: str) -> bool:
        return self.within.get(self.tree.pattern(name), {}).get("style") == "sequence_parallel"

    def _without_block_input(self, pattern: str) -> Options:
        options = self.within[pattern]
        if options["style"] == "colwise_seq":
            return {**options, "style": "colwise"}
        if "output" in options or self._is_partial(pattern):
            return {**options, **PARTIAL}
        return {**options, "style": "replicate"}

    def _is_partial(self, pattern: str) -> bool:
        """Whether parameters of a part are whole, and their gradients partial sums."""
        return any(o == PARTIAL and rule.startswith(f"{pattern}.") for rule, o in self.draft.tensor_parallel.items())

    def _part(self, child: str) -> Rules:
        """The rules of a block's part: a split part, a token-wise module, or a whole part that needs the whole sequence."""
        pattern = self.tree.pattern(child)
        inside = {
            rule: options
            for rule, options in self.draft.tensor_parallel.items()
            if rule == pattern or rule.startswith(f"{pattern}.")
        }
        if not inside:
            return self._whole(self.tree.modules[child], pattern)
        if any(options["style"] == "rowwise_split_input" for options in inside.values()):
            unfused = {name: value for name, value in inside.get(pattern, {}).items() if name == "fused"}
            return {pattern: {"style": "replicate_seq", **unfused}}  # between its matrices, values are computed whole
        rules: dict[str, Options] = dict(self._between(child, inside)) if pattern not in inside else {}
        container = False
        for rule, options in inside.items():
            style = options["style"]
            if style == BLOCK_INPUT:
                moved = {"output": "reduce_scatter"} if "output" in options else {}
                container = container or bool(moved)
                rules[rule] = {**options, **GATHERS, **self._arguments(rule, options), **moved}
        for rule, options in inside.items():
            if options["style"] == "rowwise" and not container and rule in map(self.tree.pattern, self.tree.modules):
                rules[rule] = {**options, "style": "rowwise_seq"}
            elif rule == pattern and options["style"] == "colwise":
                rules[rule] = {**options, "style": "colwise_seq"}
            elif options["style"] == RESULT:  # a norm whose readers gather
                rules[rule] = {"style": "sequence_parallel"}
            elif options["style"] == "reduce_input":
                rules[rule] = {**options, "style": "reduce_seq_input"}
                norm = next(m for name, m in self.tree.modules.items() if self.tree.pattern(name) == rule)
                rules |= partial_gradients(rule, norm)
        nested = any(options["style"] == BLOCK_INPUT for options in inside.values())
        if self._reads_split(child, inside):
            rules |= {rule: {**o, "style": "colwise_seq"} for rule, o in inside.items() if o["style"] == "colwise"}
        elif not nested and pattern not in inside and any(reads(options["style"]) for options in inside.values()):
            alike = dict.fromkeys(self.flow.alike(pattern), GATHERS["style"])
            rules[pattern] = {**COMPLETE, "arguments": alike} if alike else COMPLETE
        elif pattern in inside and inside[pattern]["style"] == "replicate":
            rules[pattern] = {**inside[pattern], **COMPLETE}
        return rules

    def _arguments(self, rule: str, options: Options) -> Options:
        """The option for further arguments of a block input. An argument with the same value as the first (keys and values of
        self-attention) is gathered like the first; one from another sequence is whole."""
        if "arguments" not in options:
            return {}
        event = self.flow.entries(rule)[0]
        values = dict(zip(event.names, event.inputs, strict=True))
        first = values.get(options.get("argument", event.names[0]))
        return {
            "arguments": {
                name: GATHERS["style"] if values.get(name) == first else style
                for name, style in options["arguments"].items()
            }
        }

    def _between(self, child: str, inside: Rules) -> Rules:
        """Rules for norms of a split part that are outside the block inputs in it, or after its last matrix."""
        block_inputs = [rule for rule, options in inside.items() if options["style"] == BLOCK_INPUT]
        found = (
            (self.tree.pattern(name), module)
            for name, module in self.tree.modules.items()
            if name.startswith(f"{child}.") and module.parameters and self.tree.pattern(name) not in inside
        )
        return {
            pattern: {"style": "sequence_parallel"}
            for pattern, module in found
            if (block_inputs or not any(reads(o["style"]) for o in inside.values()) or self._reads_split(child, inside))
            and not any(pattern == block_input or pattern.startswith(f"{block_input}.") for block_input in block_inputs)
            and all(len(p.shape) == 1 for p in module.parameters)
        }

    def _reads_split(self, child: str, inside: Rules) -> bool:
        """Whether a part begins with the row-wise matrix for another part's split result; its input is then no slice of the sequence."""
        event = self.flow.entries(self.tree.pattern(child))[:1]
        read = {number for one in event for number in one.inputs[:1]}
        made = (
            p for p in self.flow.products.values() if read.intersection(p.inputs) and p.name.startswith(f"{child}.")
        )
        return any(inside.get(self.tree.pattern(p.name), {}).get("style") == "rowwise" for p in made)

    def _whole(self, module: ModuleInfo, pattern: str) -> Rules:
        below = [
            m for name, m in self.tree.modules.items() if name == module.name or name.startswith(f"{module.name}.")
        ]
        if module.kind == "list" or not any(m.parameters for m in below):
            return {}
        if len(below) == 1 and (module.kind != "other" or all(len(p.shape) == 1 for p in module.parameters)):
            return {pattern: {"style": "sequence_parallel"}}
        if self.by_token or all(len(p.shape) == 1 for m in below for p in m.parameters):  # a norm in a wrapper
            return {self.tree.pattern(m.name): {"style": "sequence_parallel"} for m in below if m.parameters}
        return {pattern: {"style": "replicate_seq"}}
