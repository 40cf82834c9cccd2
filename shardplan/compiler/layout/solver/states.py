"""The rules of state space and linear attention layers, whose states are split by heads or channels, like attention."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, product
from typing import Any

from shardplan.core.search_bounds import BOUNDS
from shardplan.core.tree import ModuleInfo, ModuleTree, full_name
from shardplan.model.forward_code import forward_reads
from shardplan.styles.block_inputs import BLOCK_INPUT

from .channels import POSITION_OF_CHANNELS, Part, parts_of
from .draft import Draft, DraftTrials, Options, Score, divided, sharing
from .flow import Flow, Product
from .lengths import Lengths, Sized, counted_by, matrix_of, output_features
from .regions import Group

Rules = dict[str, dict[str, Any]]
Choice = tuple[tuple[Rules, tuple[Sized, ...]], ...]  # the rule and the parts of each matrix, convolution and norm


class States:
    """Makes rules from the code of a module with a state: from the parts into which it cuts the results of its matrices and of
    its convolution, the heads of each part, and the numbers that count them.

    Args:
        trials: tries drafts on the reduced model.
        flow: the unsharded run.
        tree: the tree of the model itself.
        group: the matrices that one module calls.
    """

    def __init__(self, trials: DraftTrials, flow: Flow, tree: ModuleTree, group: Group):
        self.trials, self.flow, self.tree, self.group = trials, flow, tree, group
        self.columns = [one for one in map(flow.product, group.columns) if not self._of_heads(one)]
        self.rows = [flow.product(name) for name in group.rows]
        self.home = self.rows[0].module
        self.inside = [m for name, m in trials.tree.modules.items() if name == self.home or self._below(name)]
        self.convolutions = [module for module in self.inside if module.kind == "depthwise"]
        pairs = [(module, self._full(module)) for module in self.inside]
        known = [(one, full) for one, full in pairs if full is not None]
        self.lengths = Lengths(trials.tree, tree, trials.recorded_models[0].model, known)

    @property
    def has_state(self) -> bool:
        """Whether the group belongs to one module, and this convolves channels or has parameters of its own that are not matrices."""
        together = {one.module for one in self.rows} == {self.home} and self.home != ""
        own = self.trials.tree.modules[self.home].parameters
        return together and (bool(self.convolutions) or any(len(p.shape) == 1 for p in own))

    def _below(self, name: str) -> bool:
        return name.startswith(f"{self.home}.")

    def _of_heads(self, product: Product) -> bool:
        """Whether a product multiplies by a matrix for each head: this mixes no heads, and counts as a vector of matrices."""
        found = self.trials.tree.parameters.get(product.name)
        return found is not None and len(found[1].shape) > 2

    def _full(self, module: ModuleInfo) -> ModuleInfo | None:
        """The module in the model itself."""
        pattern = self.trials.tree.pattern(module.name)
        same = (one for name, one in self.tree.modules.items() if self.tree.pattern(name) == pattern)
        return next((one for one in same if one.class_name == module.class_name), None)

    # The split parts.

    def solved(self) -> tuple[Draft | None, Draft | None]:
        """Rules that split the group and are right on their own; where there are none, the draft that ran furthest."""
        best: tuple[Score, Choice] | None = None
        seen: list[Draft] = []
        for choice in islice(self._choices(), BOUNDS.choices_of_states):
            draft = self._draft(choice)
            if draft in seen:
                continue
            if len(seen) == BOUNDS.packings_of_states:
                break
            seen.append(draft)
            score = self.trials.score(draft)
            if score is not None and (best is None or score > best[0]):
                best = score, choice
            if best is not None and best[0].fits:
                break
        if best is None:
            return None, next(map(self._draft, self._choices()), None)
        score, choice = best
        draft = self._draft(choice) if score.fits else self._with_fewer(choice, score)
        fits = (self.trials.score(draft) or score).fits
        return (self.trials.summed(draft) or self.trials.fixed(draft) if fits else None), draft

    def _with_fewer(self, choice: Choice, score: Score) -> Draft:
        """The draft without those divided attributes whose removal lets it run further: other numbers may have the same value."""
        draft, without = self._draft(choice), frozenset[str]()
        for _ in range(BOUNDS.removed):
            numbers = divided(draft.tensor_parallel[self._pattern(self.home)])
            found = [
                (reached, one)
                for one in numbers
                if (reached := self.trials.score(self._draft(choice, without | {one})))
            ]
            further = max(found, default=(score, ""), key=lambda item: item[0])
            if further[0] <= score:
                break
            score, without = further[0], without | {further[1]}
            draft = self._draft(choice, without)
        return draft

    def _choices(self) -> Iterator[Choice]:
        columns = [list(islice(self._split(column), BOUNDS.packings_of_matrix)) for column in self.columns]
        channels = [list(islice(self._convolved(one), BOUNDS.packings_of_matrix)) for one in self.convolutions]
        norms = [list(self._normed(module)) for module in self.inside if module.kind == "norm"]
        yield from product(*columns, *channels, *norms, list(self._summed()))

    def _summed(self) -> Iterator[tuple[Rules, tuple[Sized, ...]]]:
        """Rules for the last matrices. Each reduces its result or, where the module's code reads the bias of one, the module reduces afterwards."""
        yield {self._pattern(one.name): {"style": "rowwise"} for one in self.rows}, ()
        modules = [self.trials.tree.modules.get(one.name) for one in self.rows]
        if any(one is not None and one.parameter("bias") for one in modules):
            rules: Rules = {self._pattern(self.home): {"output": "all_reduce"}}
            for one in modules:
                styles = {"weight": "rowwise", "bias": "replicated_divided"}
                own = () if one is None else one.parameters
                rules |= {
                    f"{self._pattern(one.name)}.{p.name}": {"style": styles[p.name]} for p in own if one is not None
                }
            yield rules, ()

    def _draft(self, choice: Choice, without: frozenset[str] = frozenset()) -> Draft:
        """The rules of a choice.

        Args:
            without: attributes that are not divided.
        """
        sized = [one for _, parts in choice for one in parts]
        rules = {pattern: options for found, _ in choice for pattern, options in found.items()} | self._vectors(sized)
        convolved = [
            parts
            for found, parts in choice
            if any(options.get("style", "").endswith("depthwise") for options in found.values())
        ]
        return Draft(rules).with_rules(self._numbers(sized, convolved, without))

    def _pattern(self, name: str) -> str:
        return self.trials.tree.pattern(name)

    def _ruled(self, column: Product) -> str:
        """The name in a matrix's rule: the module that does nothing else, even where other code multiplies by its weight."""
        owner = self.trials.tree.parameters[column.name][0] if column.name in self.trials.tree.parameters else None
        return self._pattern(owner.name if owner is not None and owner.kind == "linear" else column.name)

    def _split(self, column: Product) -> Iterator[tuple[Rules, tuple[Sized, ...]]]:
        """The rule of a matrix, and its parts. A matrix that reads another's result sums it up; a third one reads it whole."""
        pattern = self._ruled(column)
        if self._depth(column) % 2:
            yield {pattern: {"style": "rowwise_with_grad_allreduce"}}, ()
            return
        value = column.outputs[0]
        parts = parts_of(self.flow, value, self.flow.run.values[value].ndim - 1)
        width = output_features(self.tree, self._pattern(column.name))
        for options, sized in (
            self._packed(parts, width, matrix_of(self.trials.tree, column.name)) if width is not None else ()
        ):
            yield {pattern: {"style": "packed_colwise" if len(parts) > 1 else "colwise", **options}}, sized
        if len(parts) == 1:
            yield {pattern: {"style": "colwise"}}, ()

    def _depth(self, column: Product) -> int:
        """The number of the group's matrices in the chain before a matrix."""
        before = [one for one in self.columns if one in self.flow.feeding(column)[0] and one != column]
        return 1 + max(map(self._depth, before)) if before else 0

    def _convolved(self, module: ModuleInfo) -> Iterator[tuple[Rules, tuple[Sized, ...]]]:
        event = next((e for e in self.flow.run.events if self.flow.depthwise(e) == module.name), None)
        weight, pattern = self._full(module), self._pattern(module.name)
        if event is None or weight is None:
            return
        parts = parts_of(self.flow, event.outputs[0], POSITION_OF_CHANNELS)
        if len(parts) == 1:
            yield {pattern: {"style": "depthwise"}}, ()
            return
        for options, sized in self._packed(parts, weight.parameters[0].shape[0], full_name(module.name, "weight")):
            yield {pattern: {"style": "packed_depthwise", **options}}, sized

    def _packed(self, parts: Sequence[Part], size: int, of: str) -> Iterator[tuple[Options, tuple[Sized, ...]]]:
        """The options for how a matrix is packed, and its parts; for a single part, the option for its heads."""
        for sized in self.lengths.parts(parts, size, of):
            heads = [one.heads.words for one in sized if one.heads is not None]
            counted: dict[str, Any] = (
                {"heads": heads if len(sized) > 1 else heads[0]} if len(heads) == len(sized) else {}
            )
            if len({one.words for one in sized}) > 1:
                yield {"packed": [one.words for one in sized], **counted}, sized
            else:
                yield counted if len(sized) == 1 else {} if len(sized) == 2 else {"packed": len(sized)}, sized
        if len(parts) > 1 and len({part.length for part in parts}) == 1 and size % len(parts) == 0:
            yield {"packed": len(parts)} if len(parts) > 2 else {}, ()

    def _vectors(self, sized: Sequence[Sized]) -> Rules:
        """Rules for parameters with one number for each split head or channel."""
        pairs = _counted(sized)
        counts = {one.part.length for one in sized} | {count for count, _ in pairs} | self._widths
        found: Rules = {}
        matrices = {one.name for one in (*self.columns, *self.rows)}
        owned = ((module, p) for module in self.inside if module.kind == "other" for p in module.parameters)
        for module, parameter in owned:
            name = full_name(module.name, parameter.name)
            shape = [size for size in parameter.shape if size > 1]
            if name not in matrices and shape and shape[0] in counts and shape[0] % self.trials.tp == 0:
                found[self._pattern(name)] = {"style": "headwise" if len(shape) > 2 else "colwise"}
                if module.name != self.home:
                    own = self._attributes(module.name)
                    counting = {name for pair in pairs for name in own.get(pair, ())}
                    numbers = [name for name in module.numbers if name in counting]
                    found[self._pattern(module.name)] = dict(sharing({"style": "local_params"}, numbers))
        return found

    @property
    def _widths(self) -> set[int]:
        """The numbers of input features of the last matrices, and of channels of the convolutions."""
        rows = {self.flow.run.values[number].shape[-1] for row in self.rows for number in row.inputs[:1]}
        return rows | {module.parameters[0].shape[0] for module in self.convolutions}

    def _normed(self, module: ModuleInfo) -> Iterator[tuple[Rules, tuple[Sized, ...]]]:
        """The possible rules of a norm before the last matrix, whose features are split."""
        width = module.parameters[0].shape[-1]
        full = self._full(module)
        if width in self._widths and full is not None:
            for name, value in module.numbers.items():
                whole = full.numbers.get(name)
                if type(value) is int and type(whole) is int and value > 1 and width % value == 0:
                    # The shape of a convolution depends on the number of groups; that of a norm does not.
                    shaped = (self.convolutions or [module])[0]
                    for count in self.lengths.called(width // value, full_name(shaped.name, "weight")):
                        if count.full * whole == full.parameters[0].shape[-1]:
                            options = {"style": "colwise_norm", "shares": [{name: {"groups": count.words}}]}
                            yield {self._pattern(module.name): options}, ()
            yield {self._pattern(module.name): {"style": "colwise_norm"}}, ()
        yield {}, ()

    # The numbers of the module.

    def _numbers(self, sized: Sequence[Sized], convolved: Sequence[Sequence[Sized]], without: frozenset[str]) -> Rules:
        """The module's rule: it divides the numbers that count split parts, and sets the channels of the convolution."""
        own = self._attributes(self.home)
        divide = [name for pair in _counted(sized) for name in own.get(pair, ())]
        divide = [n for n in self.trials.tree.modules[self.home].numbers if n in divide and n not in without]
        settings: list[dict[str, str]] = []
        for parts in convolved:
            total = sum(one.part.length for one in parts), sum(one.full for one in parts)
            words = self._sum(parts, divide)
            for name in own.get(total, ()):
                if words is None:
                    divide.append(name)
                else:
                    settings.append({name: words})
        options = dict(sharing({"style": BLOCK_INPUT}, [*divide, *settings, *self._buffers(sized)]))
        options |= {"fused": False} if self.trials.tree.modules[self.home].training_reads else {}
        return {self._pattern(self.home): options}

    def _buffers(self, sized: Sequence[Sized]) -> list[dict[str, Any]]:
        """The module's buffers with an entry for each split head or channel, or for each output feature of a matrix."""
        widths = {self.flow.run.values[c.outputs[0]].shape[-1]: c.name for c in self.columns if self._below(c.name)}
        counts = {count for count, _ in _counted(sized)} | {one.part.length for one in sized}
        found: dict[str, Any] = {}
        for name, shape in self.trials.tree.modules[self.home].buffers.items():
            for dim, size in enumerate(shape):
                if size in widths:
                    found[name] = {"dim": dim, "like": widths[size].removeprefix(f"{self.home}.")}
                elif size in counts and size % self.trials.tp == 0:
                    found.setdefault(name, {"dim": dim})
        return [{name: one} for name, one in found.items()]

    def _attributes(self, of: str) -> Mapping[tuple[int, int], tuple[str, ...]]:
        """The values in the reduced model and in the model itself -> the attributes with these values that the module's code reads."""
        module = self.trials.tree.modules[of]
        full = self._full(module)
        if full is None:
            return {}
        read = forward_reads(type(self.trials.recorded_models[0].model.get_submodule(of)))
        alike = [m for m in self.trials.tree.modules.values() if self._pattern(m.name) == self._pattern(of)]
        same = {name: n for name, n in module.numbers.items() if all(m.numbers.get(name) == n for m in alike)}
        return counted_by((name, value, full.numbers.get(name)) for name, value in same.items() if name in read)

    def _sum(self, parts: Sequence[Sized], divide: Sequence[str]) -> str | None:
        """The total length of parts, as an expression over the module's own numbers; those in `divide` are a rank's.
        None where the module has no numbers for a part."""
        terms: dict[str, int] = {}
        own = self._attributes(self.home)
        for one in parts:
            whole = [name for name in own.get((one.part.length, one.full), ()) if name in divide]
            counted: list[str] = []
            if one.heads is not None and one.size is not None:
                heads = own.get((one.heads.reduced, one.heads.full), ())
                sizes = own.get((one.size.reduced, one.size.full), ())
                counted = [f"{a} * {b}" for a in heads if a in divide for b in sizes if b not in divide]
            words = next(iter((*counted, *whole) if one.part.heads == 1 else (*whole, *counted)), None)
            if words is None:
                return None
            terms[words] = terms.get(words, 0) + 1
        return " + ".join(words if times == 1 else f"{times} * {words}" for words, times in terms.items())


def _counted(sized: Sequence[Sized]) -> set[tuple[int, int]]:
    """The numbers that count split parts, in the reduced model and in the model itself. A length of 1 is none of them, as many numbers are 1;
    a part may have one head (Mamba 2 with one group)."""
    lengths = {(one.part.length, one.full) for one in sized if one.part.heads != 1 and one.part.length > 1}
    return lengths | {(one.heads.reduced, one.heads.full) for one in sized if one.heads is not None}
