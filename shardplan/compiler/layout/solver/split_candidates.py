"""Drafts that split the matrices of a group: the styles that their shapes and the code around them allow, the most likely first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice, product

from shardplan.core.search_bounds import BOUNDS
from shardplan.core.tree import ModuleTree, ancestors, is_count, parent
from shardplan.styles.block_inputs import BLOCK_INPUT

from .draft import PARTIAL, Draft, DraftTrials, Options, Rules, partial_gradients, sharing
from .flow import Flow
from .lengths import Lengths, output_features
from .regions import Group

EXPERTS = "expert"  # part of the names of numbers that count experts
# The style for a matrix stored [out, in] -> the style for one stored [in, out].
TURNED = {
    "colwise": "rowwise",
    "rowwise": "colwise",
    "packed_colwise": "packed_rowwise",
    "packed_rowwise": "packed_colwise",
}
# A table of biases [positions, heads] whose look-ups stay split: all layers read those of their heads.
TABLE: Options = {"style": "local_params"}


class SplitCandidates:
    """Makes drafts that split a group; they are tried elsewhere.

    Args:
        trials: tries drafts on the reduced model.
        flow: the unsharded run.
        tree: the tree of the model itself.
    """

    def __init__(self, trials: DraftTrials, flow: Flow, tree: ModuleTree):
        self.trials, self.flow, self.tree = trials, flow, tree
        self.lengths = Lengths(trials.tree, tree, trials.recorded_models[0].model)

    def drafts(self, group: Group) -> Iterator[Draft]:
        """Possible rules of the matrices, the most likely first."""
        choices = [list(self._column(group, column)) for column in group.columns]
        for styles in chain(islice(product(*choices), BOUNDS.packings), self._apart(group)):
            if group.container is not None:
                container: Options = {"style": BLOCK_INPUT, **self._others(group.container)}
                split = self._split(group, styles, names=self._named)
                name = self.flow.last_norm(self.flow.entries(group.container)[-1].module)
                if name is not None:  # the sum is reduced before it
                    norm = self.trials.tree.pattern(name)
                    reduced = self._split(group, styles, names=partial(self._named_next_to, norm))
                    yield Draft({group.container: container, **reduced, norm: {"style": "reduce_input"}})
                yield Draft({group.container: {**container, "output": "all_reduce"}, **split})
            yield Draft({**self.experts(group), **self._split(group, styles, names=self._itself)})

        yield from self._stacked(group)
        yield from self._in_own_modules(group, choices)
        yield from self._read_by_others(group)

    def gathered(self, group: Group) -> Draft:
        """The rules with split matrices, where every rank computes everything between them in full."""
        gathered: list[Options] = [{"style": "colwise_gather_output"}] * len(group.columns)
        split = self._split(group, gathered, names=self._itself)
        modules = {self.trials.tree.pattern(name): module for name, module in self.trials.tree.modules.items()}
        around = {
            pattern for pattern in map(parent, group.rows) if pattern in modules and modules[pattern].training_reads
        }
        unfused: Rules = dict.fromkeys(sorted(around), {"style": "replicate", "fused": False})
        return Draft({**unfused, **split, **dict.fromkeys(group.rows, {"style": "rowwise_split_input"})})

    def narrow(self, group: Group) -> Iterator[Draft]:
        """Drafts in which the narrower of the first matrices are whole: few key-value heads, which all query heads read. If no
        module of the block has only their input, each of them reduces the gradient of its own input."""
        widths = [output_features(self.tree, column) for column in group.columns]
        known = [width for width in widths if width is not None]
        if len(known) == len(widths) and len(set(widths)) > 1 and not group.latent and group.container is None:
            styles = [next(self._column(group, column)) for column in group.columns]
            narrow = [one if width == max(known) else PARTIAL for one, width in zip(styles, widths, strict=True)]
            draft = Draft(self._split(group, narrow, names=self._itself))
            yield draft
            modules = {self.trials.tree.pattern(name): module for name, module in self.trials.tree.modules.items()}
            own = [p for p, one in zip(group.columns, narrow, strict=True) if one is PARTIAL and p in modules]
            if own:
                rules: dict[str, Options] = dict.fromkeys(own, {"style": BLOCK_INPUT})
                for pattern in own:
                    rules.update(partial_gradients(pattern, modules[pattern]))
                yield draft.with_rules(rules)

    def _named_next_to(self, norm: str, pattern: str) -> tuple[str, ...]:
        """As `_named` for matrices where a norm of another pattern is a sibling of theirs or of a module around them; else as `_itself`."""
        tree, place = self.trials.tree, parent(norm)
        around = next((one for one in ancestors(self.flow.product(pattern).name) if self._is(one, place)), None)
        has_norm = around is not None and any(self._is(child, norm) for child in tree.children[around])
        return self._named(pattern) if has_norm else self._itself(pattern)

    def _is(self, name: str, pattern: str) -> bool:
        return self.trials.tree.pattern(name) == pattern

    def _others(self, container: str) -> Options:
        """The option that moves a module's further arguments with a gradient (keys and values, after queries). The first layer's may have
        none: they are the model's inputs."""
        named = ((e.names, e.outputs) for e in self.flow.entries(container))
        having = [[n for n, i in zip(*one, strict=True) if self.flow.run.requires_grad[i]] for one in named]
        others = max(having, key=len)[1:]
        return {"arguments": dict.fromkeys(others, BLOCK_INPUT)} if others else {}

    def _apart(self, group: Group) -> Iterator[Sequence[Options | None]]:
        """Styles that the first matrices can have only together."""
        if group.latent:
            return
        yield [{"style": "packed_colwise"}] * len(group.columns)  # halves that meet: differential attention

    def _in_own_modules(self, group: Group, choices: Sequence[Sequence[Options | None]]) -> Iterator[Draft]:
        """Where modules of the model's own multiply by a matrix, as nn.Linear does: they move their inputs or their results."""
        columns, rows = (self._owners(patterns) for patterns in (group.columns, group.rows))
        if rows and not columns.keys() & rows.keys() and group.container is None:
            moves: Rules = dict.fromkeys(columns, {"style": BLOCK_INPUT}) | dict.fromkeys(rows, {"style": "all_reduce"})
            for styles in islice(product(*choices), BOUNDS.packings):
                yield Draft({**moves, **self._split(group, styles, names=self._itself)})

    def _stacked(self, group: Group) -> Iterator[Draft]:
        """Where the matrices are parameters with a dim for the heads, split along this dim; where they hold the experts one
        below the other, split each expert."""
        tree, matrices = self.trials.tree, (*group.columns, *group.rows)
        known = {tree.pattern(name): parameter.shape for name, (_, parameter) in tree.parameters.items()}
        shapes = [known.get(matrix, ()) for matrix in matrices]
        if not group.latent and all(len(shape) > 2 for shape in shapes):
            ways = ("colwise", "headwise", "rowwise")
            for first, last in product(ways, ("headwise", "colwise", "rowwise")):
                split = dict.fromkeys(group.columns, {"style": first}) | dict.fromkeys(group.rows, {"style": last})
                yield Draft({**self.experts(group), **split})
        if group.container is not None and all(len(shape) == 2 and shape[0] == shapes[0][0] for shape in shapes):
            yield from self._one_below_the_other(group.container, matrices, shapes[0][0])

    def _one_below_the_other(self, container: str, matrices: Sequence[str], rows: int) -> Iterator[Draft]:
        """Split each expert in the matrices, and divide the module's numbers that count an expert's rows."""
        counts = [
            name for name in self.trials.tree.numbers if EXPERTS in name and is_count(self.tree.numbers.get(name))
        ]
        own = next(m.numbers for name, m in self.trials.tree.modules.items() if self._is(name, container))
        for name in counts:
            count = self.trials.tree.numbers[name]
            numbers = [number for number, value in own.items() if is_count(value) and value * count == rows]
            experts = sharing({"style": "moe_tp_experts"}, numbers)
            each: Options = {"style": "packed_colwise", "packed": name}
            yield Draft({container: experts, **dict.fromkeys(matrices, each)})

    def _split(
        self, group: Group, styles: Sequence[Options | None], names: Callable[[str], tuple[str, ...]]
    ) -> dict[str, Options]:
        rules: dict[str, Options] = {}
        for column, options in zip(group.columns, styles, strict=True):
            if options is not None:
                rules.update(dict.fromkeys(names(column), self._as_stored(column, options)))
            if options is TABLE:
                rules[f"{column}.weight"] = {"style": "colwise"}
        for row in group.rows:
            rules.update(dict.fromkeys(names(row), self._as_stored(row, {"style": "rowwise"})))
        return rules

    def _as_stored(self, pattern: str, options: Options) -> Options:
        """The rule for a matrix that is stored [in, out]."""
        if not self.flow.product(pattern).turned:
            return options
        return {**options, "style": TURNED.get(options["style"], options["style"])}

    def _itself(self, pattern: str) -> tuple[str, ...]:
        return (pattern,)

    def _named(self, pattern: str) -> tuple[str, ...]:
        """The names in rules inside a container: those of parameters, as the container moves the values for all."""
        modules = [
            module for name, module in self.trials.tree.modules.items() if self.trials.tree.pattern(name) == pattern
        ]
        return tuple(f"{pattern}.{parameter.name}" for parameter in modules[0].parameters) if modules else (pattern,)

    def experts(self, group: Group) -> Rules:
        """Rules for modules that own matrices as parameters, and move values for themselves; around one that is not called, the outer module does."""
        return dict.fromkeys(self._owners((*group.columns, *group.rows)), {"style": "moe_tp_experts"})

    def _owners(self, patterns: Iterable[str]) -> dict[str, None]:
        """The innermost called modules around the matrices that are parameters."""
        parameters = {
            self.trials.tree.pattern(name): owner.name for name, (owner, _) in self.trials.tree.parameters.items()
        }
        owners: dict[str, None] = {}
        for pattern in patterns:
            owner = parameters.get(pattern, "")
            while owner and not self.flow.entries(self.trials.tree.pattern(owner)):
                owner = parent(owner)
            owners |= {self.trials.tree.pattern(owner): None} if owner else {}
        return owners

    def _read_by_others(self, group: Group) -> Iterator[Draft]:
        """Drafts where some of the first matrices read the results of others. Either the readers are tables that all heads read, and are
        whole; or the matrices that they read are narrow, and are whole together with the norms of their results."""
        if not group.latent or group.container is not None:
            return
        pattern, tree = self.trials.tree.pattern, self.trials.tree
        readers = [
            column
            for column in group.columns
            if any(pattern(source.name) in group.latent for source in self.flow.feeding(self.flow.product(column))[0])
        ]
        styles = [PARTIAL if column in readers else next(self._split_column(column)) for column in group.columns]
        whole = replace(group.regions[0], columns=tuple(c for c in group.columns if c not in readers))
        yield Draft({**self.experts(Group((whole,))), **self._split(group, styles, names=self._itself)})
        modules = {pattern(name): module for name, module in tree.modules.items()}
        if not modules.keys() >= set(group.latent):
            return
        split = [None if column in group.latent else next(self._split_column(column)) for column in group.columns]
        rules = self._split(group, split, names=self._itself)
        for latent in group.latent:
            rules |= {latent: {"style": BLOCK_INPUT}, **partial_gradients(latent, modules[latent])}
        for norm in dict.fromkeys(norm for column in readers for norm in self._norms_before(column)):
            rules[norm] = PARTIAL
        yield Draft({**self.experts(group), **rules})

    def _norms_before(self, column: str) -> Iterator[str]:
        """The norms between a matrix and the matrices that feed it."""
        products = self.flow.products
        for number, event in self.flow.run.back(
            self.flow.product(column).inputs, lambda number, event: number in products
        ):
            if event is not None and number not in products and self.trials.tree.modules[event.module].kind == "norm":
                yield self.trials.tree.pattern(event.module)

    def _column(self, group: Group, column: str) -> Iterator[Options | None]:
        if column in group.latent:
            yield {"style": "mla_kv_a_proj"}
            yield None
            return
        yield from self._split_column(column)

    def _split_column(self, column: str) -> Iterator[Options]:
        module = self.trials.tree.modules.get(self.flow.product(column).name)
        if module is not None and module.kind == "embedding":  # a table of biases [positions, heads]
            yield {"style": "embedding_colwise"}
            yield PARTIAL  # [positions, head_dim]: all heads read it
            yield TABLE
            return
        said = self.lengths.packed(self.flow, self.flow.product(column), output_features(self.tree, column))
        if said is not None:
            packed: Options = {"style": "packed_colwise"} | ({} if said == 2 else {"packed": said})
            yield packed
            if isinstance(said, list) and not self.tree.numbers:
                least = min(map(int, said))  # the shortest parts are one head of keys and values
                yield {**packed, "heads": [int(length) // least for length in said]}
        yield {"style": "colwise"}
