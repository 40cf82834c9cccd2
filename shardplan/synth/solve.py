"""The rules of one region: the styles of its matrices, and what its code needs said."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from shardplan.core.tree import ModuleTree, ancestors, block, parent
from shardplan.layout.prover import Proof
from shardplan.layout.repairs import general
from shardplan.styles import STYLES, feature_dim

from .draft import MENDABLE, Board, Draft, Options
from .flow import Flow
from .parts import cut, packed
from .regions import Region

MOST_DIVIDED = 4  # attributes in one region


class Solver:
    """Finds the rules of regions.

    Args:
        board: where drafts are tried.
        flow: the unsharded run.
        tree: the model's own picture.
    """

    def __init__(self, board: Board, flow: Flow, tree: ModuleTree):
        self.board, self.flow, self.tree = board, flow, tree

    def solve(self, region: Region) -> Draft | None:
        """Rules that split a region, and are right for it alone; None where none are found."""
        best: tuple[tuple, Draft] | None = None
        for draft in self._drafts(region):
            score = self._score(draft)
            if score is not None and (best is None or score > best[0]):
                best = score, draft
            if best is not None and best[0][0]:
                break
        if best is None:
            return None
        score, draft = best
        if not score[0]:
            draft = self._divided(region, draft, score)
        mended = self.board.mended(draft)
        if mended is None or not self._splits(mended, region):
            return None
        return mended

    def _score(self, draft: Draft) -> tuple | None:
        """How far a draft gets: (nothing wrong but gradients, it runs to its end, fewer findings, more operations)."""
        proof = self.board.proof(draft)
        return None if proof is None else _progress(proof)

    def _splits(self, draft: Draft, region: Region) -> bool:
        rules = draft.tensor_parallel
        styles = {pattern: STYLES[options["style"]] for pattern, options in rules.items()}
        split = {pattern for pattern, style in styles.items() if style.shards_parameters}
        return region.row in split and any(column in split for column in region.columns)

    def _drafts(self, region: Region) -> Iterator[Draft]:
        """What may be said of the matrices, the likeliest first."""
        choices = [list(self._column(region, column)) for column in region.columns]
        for styles in product(*choices):
            rules = {c: s for c, s in zip(region.columns, styles, strict=True) if s is not None}
            yield Draft({**rules, **self._row(region)})

    def _column(self, region: Region, column: str) -> Iterator[Options | None]:
        if column in region.latent:
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
        name = next(n for n in (*self.tree.modules, *self.tree.parameters) if general(n) == pattern)
        if name in self.tree.parameters:
            owner, parameter = self.tree.parameters[name]
        else:
            owner = self.tree.modules[name]
            parameter = owner.parameter("weight")
        return parameter.shape[feature_dim(owner.kind, parameter.name, "out", len(parameter.shape))]

    def _row(self, region: Region) -> dict[str, Options]:
        """The rule of the matrix that sums up; where code multiplies by a parameter, its module reduces the result."""
        if any(general(name) == region.row for name in self.board.tree.modules):
            return {region.row: {"style": "rowwise"}}
        around = parent(parent(region.row))
        return {
            around: {"style": "input_with_grad_allreduce", "output": "all_reduce"},
            region.row: {"style": "rowwise"},
        }

    def _divided(self, region: Region, draft: Draft, score: tuple) -> Draft:
        """With those attributes divided that get it further, one by one."""
        for _ in range(MOST_DIVIDED):
            tried = []
            for pattern, attribute in self._attributes(region):
                rule = draft.tensor_parallel.get(pattern, {"style": "replicate"})
                if attribute in rule.get("divide", ()):
                    continue
                more = draft.with_rules({pattern: {**rule, "divide": [*rule.get("divide", ()), attribute]}})
                reached = self._score(more)
                if reached is not None and reached > score:
                    tried.append((reached, more))
                    if reached[0]:
                        break
            if not tried:
                return draft
            score, draft = max(tried, key=lambda one: one[0])
            if score[0]:
                break
        return draft

    def _attributes(self, region: Region) -> Iterator[tuple[str, str]]:
        """Numbers of the region's modules that may count what is split: (pattern of the module, attribute)."""
        tree = self.board.tree
        names = dict.fromkeys(
            other
            for pattern in (region.row, *region.columns)
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
                if type(value) is int and value > 1 and value % self.board.tp == 0 and key not in seen:
                    seen.add(key)
                    yield key


def _progress(proof: Proof) -> tuple:
    hard = [finding for finding in proof.findings if finding.kind not in MENDABLE]
    crashed = any(finding.kind == "crash" for finding in hard)
    return (not hard, not crashed, proof.operations if crashed else -len(hard))
