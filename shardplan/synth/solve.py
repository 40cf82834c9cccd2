"""The rules of one group of regions: the styles of its matrices, and what its code needs said."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, product
from operator import itemgetter
from typing import NamedTuple

from shardplan.check.requirements import HEAD_SIZES
from shardplan.core.tree import ModuleTree, ancestors, block
from shardplan.layout.prover import Proof
from shardplan.layout.repairs import general
from shardplan.styles import feature_dim

from .draft import MENDABLE, Board, Draft, Options
from .flow import Flow
from .parts import cut, packed
from .regions import Group

MOST_DIVIDED = 4  # attributes in one group
MOST_DRAFTS = 16  # ways to say how the matrices of one group are packed


class Score(NamedTuple):
    """How far a draft gets; the larger the better.

    Attributes:
        fits: nothing is wrong but gradients of whole values.
        further: how many operations are right before the first that is wrong.
        fewer: the number of things that are wrong, negative.
    """

    fits: bool
    further: int
    fewer: int


NOWHERE = Score(False, 0, 0)


class Solver:
    """Finds the rules of regions.

    Args:
        board: where drafts are tried.
        flow: the unsharded run.
        tree: the model's own picture.
    """

    def __init__(self, board: Board, flow: Flow, tree: ModuleTree):
        self.board, self.flow, self.tree = board, flow, tree

    def solve(self, group: Group) -> Draft | None:
        """Rules that split a group, and are right for it alone; None where none are found."""
        best: tuple[Score, Draft] | None = None
        for draft in self._drafts(group):
            score = self._score(draft)
            if score is not None and (best is None or score > best[0]):
                best = score, draft
            if best is not None and best[0].fits:
                break
        if best is None:
            return None
        score, draft = best
        if not score.fits:
            draft = self._divided(group, draft, score)
        if not (self._score(draft) or NOWHERE).fits:
            return None
        return self.board.mended(draft)

    def _score(self, draft: Draft) -> Score | None:
        proof = self.board.proof(draft)
        return None if proof is None else _score(proof)

    def _drafts(self, group: Group) -> Iterator[Draft]:
        """What may be said of the matrices, the likeliest first."""
        choices = [list(self._column(group, column)) for column in group.columns]
        for styles in islice(product(*choices), MOST_DRAFTS):
            rules: dict[str, Options] = {}
            if group.container is not None:
                rules[group.container] = {"style": "input_with_grad_allreduce", "output": "all_reduce"}
            for column, options in zip(group.columns, styles, strict=True):
                if options is not None:
                    rules.update(dict.fromkeys(self._named(group, column), options))
            for row in group.rows:
                rules.update(dict.fromkeys(self._named(group, row), {"style": "rowwise"}))
            yield Draft(rules)

    def _named(self, group: Group, pattern: str) -> tuple[str, ...]:
        """What rules name: a matrix's module, whose style moves its values too; in a container its parameters, as the
        container moves for all."""
        modules = [module for name, module in self.board.tree.modules.items() if general(name) == pattern]
        if group.container is None or not modules:
            return (pattern,)
        return tuple(f"{pattern}.{parameter.name}" for parameter in modules[0].parameters)

    def _column(self, group: Group, column: str) -> Iterator[Options | None]:
        if column in group.latent:
            yield {"style": "mla_kv_a_proj"}
            yield None
            return
        made = next(p for p in self.flow.products.values() if general(p.name) == column)
        lengths = cut(self.flow, made)
        if lengths:
            said = packed(lengths, self.board.tree, self.tree, self._out_features(column))
            if said is not None:
                yield {"style": "packed_colwise"} if said == 2 else {"style": "packed_colwise", "packed": said}
        yield {"style": "colwise"}

    def _out_features(self, pattern: str) -> int:
        """Of the model's own matrix."""
        name = next(n for n in (*self.tree.modules, *self.tree.parameters) if general(n) == pattern)
        if name in self.tree.parameters:
            owner, parameter = self.tree.parameters[name]
        else:
            owner = self.tree.modules[name]
            parameter = owner.parameter("weight")
        return parameter.shape[feature_dim(owner.kind, parameter.name, "out", len(parameter.shape))]

    def _divided(self, group: Group, draft: Draft, score: Score) -> Draft:
        """With those attributes divided that get it further, one by one."""
        for _ in range(MOST_DIVIDED):
            tried = []
            for pattern, attribute in self._attributes(group):
                rule = draft.tensor_parallel.get(pattern, {"style": "replicate"})
                if attribute in rule.get("divide", ()):
                    continue
                more = draft.with_rules({pattern: {**rule, "divide": [*rule.get("divide", ()), attribute]}})
                reached = self._score(more)
                if reached is not None and reached > score:
                    tried.append((reached, more))
                    if reached.fits:
                        break
            if not tried:
                return draft
            score, draft = max(tried, key=itemgetter(0))
            if score.fits:
                break
        return draft

    def _attributes(self, group: Group) -> Iterator[tuple[str, str]]:
        """Numbers of the group's modules that may count what is split: (pattern of the module, attribute)."""
        tree = self.board.tree
        names = dict.fromkeys(
            other
            for pattern in (*group.rows, *group.columns)
            for name in tree.modules
            if general(name) == pattern
            for other in (name, *ancestors(name))
            if other != block(name) and other and other not in ancestors(block(name))
        )
        seen: set[tuple[str, str]] = set()
        for name in names:
            module = tree.modules[name]
            config = {f"config.{n}": value for n, value in (module.config or {}).items()}
            for attribute, value in {**module.numbers, **config}.items():
                key = (general(name), attribute)
                if attribute.removeprefix("config.") in HEAD_SIZES:
                    continue  # heads are split, not their features
                if type(value) is int and value > 1 and value % self.board.tp == 0 and key not in seen:
                    seen.add(key)
                    yield key


def _score(proof: Proof) -> Score:
    hard = [finding for finding in proof.findings if finding.kind not in MENDABLE]
    return Score(not hard, min((finding.at for finding in hard), default=0), -len(hard))
