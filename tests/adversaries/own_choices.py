"""Code that decides for all tokens of a rank by which of its own ones are chosen, or by how many.

In the batches of the proof no token is chosen, or the same ones on all ranks; in the last batch of the run those of one rank are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .adversary import Adversary, document
from .branches import RARE
from .context import ENDS, MESHES, plan
from .context import of as over_cp
from .mixtures import SAME, SLICE, mixture
from .mixtures import of as mixed
from .parts import LAST_NORM, LENGTH, MLP, MLP_SEQUENCE, WIDTH, Block, Mlp, MlpBlock, Stack, features


def peaked(seed: int) -> dict[str, Tensor]:
    """The values of the first half of a rare batch are larger."""
    made = features(seed)
    if seed >= 100:
        made["x"][:, : LENGTH // 2] *= 20
    return made


def sunk(seed: int) -> dict[str, Tensor]:
    """The values of the second half of a rare batch are smaller."""
    made = features(seed)
    if seed >= 100:
        made["x"][:, LENGTH // 2 :] /= 20
    return made


def halved(x: Tensor, way: Tensor | bool) -> Tensor:
    return x / 2 if way else x


def kept(x: Tensor, rows: Tensor) -> Tensor:
    return x.masked_scatter(rows[..., None], x[rows].clamp(-9, 9))


def fewer(x: Tensor, rows: Tensor) -> Tensor:
    chosen = x[rows]
    return x - chosen.mean(0) if len(chosen) else x


def each(x: Tensor, rows: Tensor) -> Tensor:
    for _ in rows.nonzero():
        x = x * 1.1
    return x


def by_kind(x: Tensor, rows: Tensor) -> Tensor:
    """Each token by the feature that is largest, one kind after the other."""
    kinds, result = x.detach().argmax(-1), torch.zeros_like(x)
    for kind in kinds.unique().tolist():
        result[kinds == kind] = x[kinds == kind] * (1 + kind / 16)
    return result


def by_expert(x: Tensor, rows: Tensor) -> Tensor:
    """Each token by the feature that is largest; kinds without tokens are left out."""
    kinds, result = x.detach().argmax(-1), torch.zeros_like(x)
    for kind in range(WIDTH):
        chosen = torch.where(kinds == kind)
        if len(chosen[0]):
            result[chosen] = x[chosen] * (1 + kind / 16)
    return result


def refusing(x: Tensor, rows: Tensor) -> Tensor:
    if rows.all():
        raise FloatingPointError("every token is chosen")
    return x


def spared(x: Tensor, rows: Tensor) -> Tensor:
    return x.masked_fill(rows[..., None], 0.0) if rows.any() else x


# What is done to the residual stream, given which tokens are chosen. "wrong": where ranks have slices.
HOWS: dict[str, tuple[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "any": ("wrong", lambda x, rows: halved(x, rows.any())),
    "every": ("wrong", lambda x, rows: halved(x, not (~rows).all())),
    "count": ("wrong", lambda x, rows: halved(x, rows.sum() > 0)),
    "several": ("wrong", lambda x, rows: halved(x, rows.sum() > 5)),
    "nearly_all": ("wrong", lambda x, rows: halved(x, rows.float().mean() > 0.8)),
    "number": ("wrong", lambda x, rows: x / (1 + int(rows.sum()))),
    "mean": ("wrong", lambda x, rows: x * (1 + rows.float().mean())),
    "where": ("wrong", lambda x, rows: torch.where(rows.any(), x / 2, x)),
    "item": ("wrong", lambda x, rows: halved(x, rows.any().item())),
    "list": ("wrong", lambda x, rows: halved(x, True in rows.flatten().tolist())),
    "length": ("wrong", lambda x, rows: x / (1 + x[rows].shape[0])),
    "nonzero": ("wrong", lambda x, rows: x / (1 + torch.nonzero(rows).shape[0])),
    "where_rows": ("wrong", lambda x, rows: halved(x, len(torch.where(rows)[0]) > 0)),
    "selected": ("wrong", lambda x, rows: halved(x, x.masked_select(rows[..., None]).numel() > 0)),
    "unique": ("wrong", lambda x, rows: halved(x, rows.unique().numel() > 1)),
    "fewer": ("wrong", fewer),
    "each": ("wrong", each),
    "spared": ("right", spared),
    "kept": ("right", kept),
    "by_kind": ("right", by_kind),
    "by_expert": ("right", by_expert),
    "refusing": ("wrong", refusing),
    "again": ("right", lambda x, rows: kept(x, x.detach().abs().amax(-1) > 9) if rows.any() else x),
    "row": ("right", lambda x, rows: torch.where((rows[..., None] & (x > 0)).any(-1, keepdim=True), x / 2, x)),
}


class Choosing(MlpBlock):
    """Asks its residual stream which tokens have a large value."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(HOWS[self.how][1](x, x.detach().abs().amax(-1) > 9))


def choosing(how: str) -> nn.Module:
    return Stack(Choosing(how), Choosing(how))


class Skipping(MlpBlock):
    """Its MLP is for tokens with a large value, and does not run where there are none."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.detach().abs().amax(-1, keepdim=True) > 1
        return x + self.mlp(self.norm(x)).masked_fill(~rows, 0.0) if rows.any() else x


def skipping() -> nn.Module:
    return Stack(Skipping(), Skipping())


class ChoosingBlock(Block):
    """The same between attention and an MLP."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        x = HOWS[self.how][1](x, x.detach().abs().amax(-1) > 9)
        return x + self.mlp(self.norm2(x))


def choosing_blocks(how: str) -> nn.Module:
    return Stack(ChoosingBlock(how), ChoosingBlock(how))


def repeated(seed: int) -> dict[str, Tensor]:
    """The parts of a row have the same ids, in another order; but for a rare batch, in which those of the first half are one id."""
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.tensor([5, 9, 20, 33])[torch.randperm(4, generator=generator)] for _ in range(4)]
    made = torch.cat(parts).view(2, LENGTH)
    if seed >= 100:
        made[:, : LENGTH // 2] = 3
    return {"ids": made}


def by_id(x: Tensor, ids: Tensor) -> Tensor:
    result = torch.zeros_like(x)
    for one in ids.unique().tolist():
        result[ids == one] = x[ids == one] * (1 + one / 64)
    return result


def sorted_by_id(x: Tensor, ids: Tensor) -> Tensor:
    """One id after the other, by the numbers of their tokens."""
    flat, order = x.flatten(0, 1), ids.flatten().argsort(stable=True)
    counts = ids.flatten().bincount(minlength=64).tolist()
    parts = [part * (1 + one / 64) for one, part in enumerate(flat[order].split(counts))]
    return torch.zeros_like(flat).index_copy(0, order, torch.cat(parts)).view_as(x)


def legal(x: Tensor, ids: Tensor) -> Tensor:
    if ids.max() > 63 or (ids < 0).any():
        raise ValueError("no such id")
    return x


# The same, given the ids of the tokens.
ID_HOWS: dict[str, tuple[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "largest": ("wrong", lambda x, ids: x * (1 + ids.max() / 64)),
    "least": ("wrong", lambda x, ids: halved(x, ids.amin() < 4)),
    "most": ("wrong", lambda x, ids: halved(x, ids.max() <= 3)),
    "one": ("wrong", lambda x, ids: halved(x, ids.min() == 3)),
    "different": ("wrong", lambda x, ids: x / ids.unique().numel()),
    "any": ("wrong", lambda x, ids: halved(x, (ids == 3).any())),
    "sum": ("wrong", lambda x, ids: halved(x, (ids == 3).sum() > 5)),
    "bins": ("wrong", lambda x, ids: halved(x, ids.flatten().bincount(minlength=64).max() > 5)),
    "mean": ("wrong", lambda x, ids: x * (1 + ids.float().mean() / 64)),
    "mode": ("wrong", lambda x, ids: x * (1 + ids.flatten().mode().values / 64)),
    "set": ("wrong", lambda x, ids: x / len(set(ids.flatten().tolist()))),
    "equal": ("wrong", lambda x, ids: halved(x, torch.equal(ids[:, 1:], ids[:, :-1]))),
    "contains": ("wrong", lambda x, ids: halved(x, 3 in ids)),
    "masked": ("right", lambda x, ids: x.masked_fill((ids == 3)[..., None], 0.0)),
    "spared": ("right", lambda x, ids: x.masked_fill((ids == 3)[..., None], 0.0) if (ids == 3).any() else x),
    "scaled": ("right", lambda x, ids: x * (1 + ids[..., None] / 64)),
    "by_id": ("right", by_id),
    "sorted": ("right", sorted_by_id),
    "legal": ("right", legal),
}


class Marks(nn.Module):
    """Asks for the ids of its tokens."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return ID_HOWS[self.how][1](x, ids)


class MarkedBlock(MlpBlock):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.marks = Marks(how)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return super().forward(self.marks(x, ids))


class Marked(Stack):
    """Layers that are given the ids."""

    def __init__(self, how: str) -> None:
        super().__init__(MarkedBlock(how), MarkedBlock(how))
        self.embed = nn.Embedding(64, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, ids)
        return self.norm(x)


def alike(seed: int) -> dict[str, Tensor]:
    """The tokens of a rare batch choose the same experts."""
    made = features(seed)
    return made if seed < 100 else {"x": made["x"][:1, :1] + made["x"] / 100}


def half_alike(seed: int) -> dict[str, Tensor]:
    """The tokens of the first half of a rare batch do."""
    made = features(seed)
    if seed >= 100:
        made["x"][:, : LENGTH // 2] = made["x"][:1, :1] + made["x"][:, : LENGTH // 2] / 100
    return made


class Table(Stack):
    """Layers after a table of embeddings.

    Args:
        options: of the table.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(MlpBlock(), MlpBlock())
        self.embed = nn.Embedding(64, WIDTH, **options)

    def forward(self, ids: Tensor) -> Tensor:
        return self.trunk(self.embed(ids))


def ids(seed: int) -> dict[str, Tensor]:
    """A rare batch has the first row of each half of the table; no other has."""
    made = torch.randint(1, 32, (2, LENGTH), generator=torch.Generator().manual_seed(seed))
    made[:, ::2] += 32
    if seed >= 100:
        made[0, :2], made[1, 3] = torch.tensor([0, 32]), 32
    return {"ids": made}


def looked(style: str, verdict: Any, why: str, ending: str = "", overlay: Any = None, **options: Any) -> Adversary:
    name = "_".join(options)
    return Adversary(
        f"table_{name}/{style}{ending}",
        partial(Table, **options),
        ids,
        document({**MLP, "embed": style}, overlay),
        verdict,
        why,
        sequence_parallel=overlay is not None,
        seeds=RARE,
    )


TABLE_SEQUENCE = {
    "embed": "embedding_rowwise_seq",
    "layers.0": "split_seq_input",
    "layers.*.norm": "sequence_parallel",
    "layers.*.mlp": "gather_seq_input",
    "layers.*.mlp.down": "rowwise_seq",
    **LAST_NORM,
}
FREQUENCIES = "each rank counts how often a row is looked up"


CUT_IDS = {"layers.*.marks": {"style": "split_seq_input", "argument": "ids"}}


def _marked(how: str, ending: str, **more: Any) -> Adversary:
    verdict = ID_HOWS[how][0]
    why = "a rank asks the ids of its tokens" if verdict == "wrong" else "each token by itself"
    return Adversary(
        f"marks_{how}/{ending}",
        partial(Marked, how),
        repeated,
        verdict=verdict,
        why=why,
        seeds=RARE,
        **more,
    )


def _case(how: str, ending: str, verdict, why: str, overlay, mesh: dict[str, int], **more) -> Adversary:
    return Adversary(
        f"chooses_{how}/{ending}",
        partial(choosing, how),
        peaked,
        document(MLP, overlay),
        verdict,
        why,
        sequence_parallel=overlay is not None,
        seeds=RARE,
        mesh=mesh,
        **more,
    )


BOUND = 1e4
# Integers that a rank makes of its own features, and turns into numbers of their dtype: all are 0 where none reaches the bound.
NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {
    "bins": lambda h: torch.bucketize(h.sum(-1, keepdim=True), torch.tensor([BOUND, 2 * BOUND])),
    "largest_bins": lambda h: torch.bucketize(h.amax(-1, keepdim=True), torch.tensor([BOUND, 2 * BOUND])),
    "long": lambda h: (h.sum(-1, keepdim=True) / BOUND).long(),
    "argmax": lambda h: torch.stack([torch.full(h.shape[:2], BOUND), h.sum(-1)]).argmax(0)[..., None],
}


class Numbering(Mlp):
    """Scales its features by such an integer."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def hidden(self, x: Tensor) -> Tensor:
        h = super().hidden(x)
        return h * (1 + NUMBERS[self.how](h.detach()).to(h))


def numbering(how: str) -> nn.Module:
    return Stack(MlpBlock(Numbering(how)), MlpBlock(Numbering(how)))


# What code makes of a partial sum, and what it makes of numbers that no batch has.
CAPS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "clamp": ("refused", lambda y: y.clamp(-BOUND, BOUND)),
    "minimum": ("refused", lambda y: torch.minimum(y, torch.tensor(BOUND))),
    "hardtanh": ("refused", lambda y: F.hardtanh(y, -BOUND, BOUND)),
    "tanh": ("refused", lambda y: 1e5 * torch.tanh(y / 1e5)),
    "shrink": ("refused", lambda y: F.hardshrink(y, 1e-9)),
    "finite": ("right", lambda y: torch.nan_to_num(y)),
    "scaled": ("right", lambda y: (y * 1e4).roll(1, -1) / 3 - y.mean(-1, keepdim=True)),
    "filtered": ("right", lambda y: F.avg_pool1d(y, 3, 1, 1)),
}
WAITING = {
    "layers.*.mlp": {"style": "input_with_grad_allreduce", "output": "all_reduce"},
    "layers.*.mlp.up": "colwise",
    "layers.*.mlp.down": "local_params",
    "layers.*.mlp.down.weight": "rowwise",
}


class Capping(Mlp):
    """Caps its result."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        return CAPS[self.how][1](super().forward(x))


def capping(how: str) -> nn.Module:
    return Stack(MlpBlock(Capping(how)), MlpBlock(Capping(how)))


CASES = (
    *(
        Adversary(f"caps_{how}", partial(capping, how), features, document(WAITING), verdict, "of a partial sum")
        for how, (verdict, _) in CAPS.items()
    ),
    *(
        _case(
            how,
            "slice",
            verdict,
            "a rank asks its slice" if verdict == "wrong" else "each token by itself",
            MLP_SEQUENCE,
            {"tp": 2},
        )
        for how, (verdict, _) in HOWS.items()
    ),
    *(_case(how, "four", HOWS[how][0], "four slices", MLP_SEQUENCE, {"tp": 4}) for how in ("any", "length", "kept")),
    *(
        replace(_case("any", "", verdict, why, overlay, {"tp": 2}), name=f"skips/{end}", build=skipping, inputs=sunk)
        for end, verdict, why, overlay in (
            ("slice", "wrong", "a rank without such tokens leaves the others waiting", MLP_SEQUENCE),
            ("whole", "right", "all ranks have all tokens", None),
        )
    ),
    *(_case(how, "whole", "right", "no rank has a slice", None, {"tp": 2}) for how in ("any", "length")),
    *(
        replace(
            over_cp(f"chooses_{how}", mesh, partial(choosing_blocks, how), HOWS[how][0], "a rank asks its tokens"),
            inputs=peaked,
            seeds=RARE,
        )
        for how, mesh in (
            *((how, "cp") for how in ("any", "number", "length", "fewer", "spared", "kept", "by_expert")),
            ("any", "cp_tp"),
            ("kept", "cp_dp"),
        )
    ),
    *(
        replace(
            mixed(f"router_{kind}", partial(mixture, router=kind), mesh, verdict, why, sequence_parallel=split),
            inputs=half_alike if kind == "unused" else alike,
            seeds=RARE,
        )
        for kind in ("overfull", "unused", "loose")
        for mesh, split, verdict, why in (("ep_tp", True, "wrong", SLICE), ("ep", False, "right", SAME))
    ),
    *(
        _marked(how, "slice", plan=document(MLP, {**MLP_SEQUENCE, **CUT_IDS}), sequence_parallel=True)
        for how in ID_HOWS
    ),
    *(
        _marked(how, mesh, plan=plan({**ENDS, **CUT_IDS}, {}), mesh=MESHES[mesh])
        for how, mesh in (*((how, "cp") for how in ID_HOWS), ("any", "cp_dp"), ("by_id", "cp_dp"))
    ),
    looked("embedding_rowwise", "right", FREQUENCIES, scale_grad_by_freq=True),
    looked("embedding_rowwise", "right", FREQUENCIES, "_sequence", TABLE_SEQUENCE, scale_grad_by_freq=True),
    looked("embedding_colwise", "right", "each rank has the ids", scale_grad_by_freq=True),
    *(looked("embedding_rowwise", "right", "one rank has the row", str(row), padding_idx=row) for row in (0, 3, 40)),
    looked("embedding_colwise", "right", "each rank has a part of the row", padding_idx=3),
    looked("embedding_rowwise", "right", "one rank has the row", "_sequence", TABLE_SEQUENCE, padding_idx=32),
    *(looked(f"embedding_{way}wise", "refused", "a sparse gradient", sparse=True) for way in ("row", "col")),
    *(
        Adversary(
            f"numbers_{how}/split",
            partial(numbering, how),
            features,
            document(MLP),
            "refused",
            "of a rank's own features",
        )
        for how in NUMBERS
    ),
    Adversary("numbers_bins/whole", partial(numbering, "bins"), features, document({}), "right", "of all features"),
)
