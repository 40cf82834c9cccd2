"""The meshes that a plan is proven on: they cover every axis and every pair of axes of the mesh that is asked for."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from shardplan.core.mesh import Axis, MeshSizes
from shardplan.core.proof_meshes import MOST, proof_meshes, stage_meshes

AXES = (Axis.CP, Axis.PP, Axis.DP_REPLICATE, Axis.DP_SHARD, Axis.EP, Axis.TP)
SIZES = {
    "tp": (1, 2, 4, 8, 16),
    "dp_shard": (1, 2, 8),
    "dp_replicate": (1, 2),
    "cp": (1, 2),
    "pp": (1, 2, 4),
    "ep": (1, 2, 4, 16),
}
ASKED = [
    sizes
    for values in product(*SIZES.values())
    if (sizes := MeshSizes(**dict(zip(SIZES, values, strict=True)))).ep_misfit is None
    and sizes.needs_rules
    and 1 in (sizes.pp, sizes.cp)
]


def relation(sizes: MeshSizes) -> int:
    """Of ep to tp: below it, equal, above."""
    tp = sizes.of(Axis.TP)
    return (sizes.ep > tp) - (sizes.ep < tp)


def several_batches(sizes: MeshSizes) -> bool:
    """Whether an expert gets tokens of several data-parallel ranks."""
    return sizes.ep > sizes.of(Axis.TP) * sizes.cp


def test_every_axis_and_every_pair_of_axes_takes_part_on_eight_ranks_at_most() -> None:
    assert len(ASKED) > 300
    for asked in ASKED:
        made = proof_meshes(asked)
        axes = [axis for axis in AXES if asked.of(axis) > 1]
        assert made[0].tp == asked.tp and all(any(mesh.of(axis) > 1 for mesh in made) for axis in axes), asked
        for pair in combinations(axes, 2):
            assert any(all(mesh.of(axis) > 1 for axis in pair) for mesh in made), (asked, pair)
        for mesh in made:
            assert mesh.world_size <= max(MOST, asked.of(Axis.TP)), (asked, mesh)
            assert mesh.ep_misfit is None and asked.of(Axis.TP) % mesh.of(Axis.TP) == asked.ep % mesh.ep == 0
            assert (mesh.ep > 1) == (asked.ep > 1) and (mesh.cp > 1) <= (asked.cp > 1)
        assert asked.ep == 1 or any(relation(mesh) == relation(asked) for mesh in made), asked
        if several_batches(asked):
            assert any(several_batches(mesh) and (mesh.cp > 1) == (asked.cp > 1) for mesh in made), asked


@pytest.mark.parametrize(
    ("asked", "made"),
    [
        (MeshSizes(tp=4), [MeshSizes(tp=4)]),
        (MeshSizes(tp=1, dp_shard=64, ep=8), [MeshSizes(tp=1, dp_shard=4, ep=2)]),
        (MeshSizes(tp=1, dp_shard=8, ep=8), [MeshSizes(tp=1, dp_shard=2, ep=2)]),
        (MeshSizes(tp=2, dp_shard=2, ep=4), [MeshSizes(tp=2, dp_shard=2, ep=4)]),
        (MeshSizes(tp=8, dp_shard=4), [MeshSizes(tp=8), MeshSizes(tp=2, dp_shard=2)]),
        (MeshSizes(tp=8, dp_shard=8, ep=64), [MeshSizes(tp=8, ep=8), MeshSizes(tp=2, dp_shard=2, ep=4)]),
        (MeshSizes(tp=2, cp=4, ep=8), [MeshSizes(tp=2, dp_shard=2, cp=2, ep=4)]),
        (MeshSizes(tp=1, dp_shard=2, cp=2, ep=4), [MeshSizes(tp=1, dp_shard=2, cp=2, ep=4)]),
        (MeshSizes(tp=1, dp_shard=8), [MeshSizes(tp=1)]),
    ],
)
def test_they_are_the_smallest_that_tell(asked: MeshSizes, made: list[MeshSizes]) -> None:
    assert list(proof_meshes(asked)) == made


@pytest.mark.parametrize(
    ("asked", "meshes"),
    [
        ({"pp": 2}, [{"pp": 2}]),
        ({"pp": 4}, [{"pp": 3}]),
        ({"pp": 4, "tp": 8}, [{"pp": 3, "tp": 2}]),
        ({"pp": 4, "dp_shard": 4}, [{"pp": 3, "dp_shard": 2}]),
        ({"pp": 4, "tp": 2, "dp_shard": 2}, [{"pp": 3, "tp": 2}, {"pp": 2, "tp": 2, "dp_shard": 2}]),
        ({"pp": 2, "ep": 4, "tp": 2, "dp_shard": 2}, [{"pp": 2, "ep": 4, "tp": 2, "dp_shard": 2}]),
    ],
)
def test_the_meshes_of_stages(asked: dict[str, int], meshes: list[dict[str, int]]) -> None:
    assert stage_meshes(MeshSizes(**{"tp": 1, **asked})) == tuple(MeshSizes(**{"tp": 1, **one}) for one in meshes)
