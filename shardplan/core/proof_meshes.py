"""The meshes on which a plan for a mesh is proven: every axis above 1 and every pair of such axes in one run, at the smallest telling sizes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from itertools import combinations

from .mesh import Axis, MeshSizes

MOST = 8  # ranks at once, unless tp alone is larger
# In the order in which they join a run; tp is in each.
_OTHERS = (Axis.CP, Axis.DP_SHARD, Axis.PP, Axis.DP_REPLICATE)


def ranks_over_cp(shared: Mapping[int, int], kept: MeshSizes | None = None) -> int:
    """The number of ranks of cp that shows what its rules do: two, or two for each key-value head that several have.

    Args:
        shared: numbers of such heads -> the number of them on a rank of tp.
        kept: the mesh, if heads are exchanged in a proof model with the model's own numbers of heads: then all its ranks of cp, or as many as fit.
    """
    if kept is None:
        return 2 * max(shared.values(), default=1)
    room = MOST // _least(kept.of(Axis.TP))
    return next(n for n in range(max(2, min(room, kept.cp)), 0, -1) if kept.cp % n == 0)


def proof_meshes(sizes: MeshSizes, *, over_cp: int = 2) -> tuple[MeshSizes, ...]:
    """The meshes that represent a mesh in the proof.

    The first has tp as requested, since the relation of tp to numbers of heads decides what runs. If more axes are above 1 than
    fit with it, further meshes have the smallest tp above 1 that divides it. Every other axis has its smallest telling size: 2,
    or the smallest divisor above 1. ep stays below, equal to or above tp, as requested, unless the requested tp leaves no room
    for ep above it. A data-parallel axis is included only if another axis splits something: without one, a plan splits nothing.

    Args:
        sizes: the mesh, with a size of tp. The axes data-parallel, ep and pp may be of any size, and need not fit each other.
        over_cp: the number of ranks of cp that shows what the plan's rules for it do.

    Returns:
        At least one; none has more than `MOST` ranks if that is possible with tp and two more axes.
    """
    if not sizes.needs_rules:
        return (MeshSizes(tp=sizes.of(Axis.TP)),)
    asked = [axis for axis in _OTHERS if sizes.of(axis) > 1]
    if sizes.cp > 1 and _order(sizes) == 3 and Axis.DP_SHARD not in asked:
        asked.insert(0, Axis.DP_SHARD)
    small = _small(sizes)
    with_ = partial(_with, sizes=sizes, asked=asked, over_cp=over_cp)
    made = [with_(_whole(sizes))]
    if not any(_order(mesh) == _order(sizes) for mesh in made):
        made.append(with_(small[0]))
    split = [axis for axis in (Axis.TP, Axis.EP) if sizes.of(axis) > 1]
    for pair in combinations((*split, *asked), 2):
        if not any(_has(mesh, pair) for mesh in made):
            enough = [mesh for base in small if _has(mesh := with_(base, needed=pair), pair)]
            made.append(next((mesh for mesh in enough if mesh.world_size <= MOST), enough[-1]))
    return tuple(dict.fromkeys(made))


def stage_meshes(sizes: MeshSizes) -> tuple[MeshSizes, ...]:
    """The meshes on which pipeline stages are proven for a mesh. Here tp too has the smallest telling size, while
    `proof_meshes` has the requested tp for the whole model. The first has a middle stage if the mesh has one and there is room.

    Args:
        sizes: the mesh, with several pp ranks and a size of tp.
    """
    small = _small(sizes)[0]
    made = [mesh for mesh in proof_meshes(replace(sizes, tp=small.tp, ep=small.ep)) if mesh.pp > 1]
    if sizes.pp > 2:
        if made[0].world_size // 2 * 3 <= MOST:
            made[0] = replace(made[0], pp=3)
        elif small.world_size * 3 <= MOST:
            made.insert(0, replace(small, pp=3))
    return tuple(made)


def _has(mesh: MeshSizes, axes: Iterable[Axis]) -> bool:
    return all(mesh.of(axis) > 1 for axis in axes)


def _order(sizes: MeshSizes) -> int:
    """0 without ep; 1, 2, 3: ep is below tp, equal to it, above it."""
    tp, ep = sizes.of(Axis.TP), sizes.ep
    return 0 if ep == 1 else 1 if ep < tp else 2 if ep == tp else 3


def _least(size: int) -> int:
    """The smallest divisor above 1; 1 for 1."""
    return next((n for n in range(2, size + 1) if size % n == 0), 1)


def _whole(sizes: MeshSizes) -> MeshSizes:
    """tp as requested, and ep with the dp_shard it needs, if there is room."""
    tp, order = sizes.of(Axis.TP), _order(sizes)
    if order < 3:
        return MeshSizes(tp=tp, ep=sizes.ep)
    over = _least(max(2, sizes.ep // tp))
    return MeshSizes(tp=tp, ep=tp * over, dp_shard=over) if tp == 1 or tp * over <= MOST else MeshSizes(tp=tp, ep=tp)


def _small(sizes: MeshSizes) -> list[MeshSizes]:
    """The smallest meshes of tp and ep: first those with the requested relation of ep to tp, last those without tp."""
    tp, ep, order = sizes.of(Axis.TP), _least(sizes.ep), _order(sizes)
    if order == 0:
        return [MeshSizes(tp=_least(tp)), MeshSizes(tp=1)]
    both, over = _least(math.gcd(tp, sizes.ep)), _least(max(2, sizes.ep // tp))
    below = MeshSizes(tp=ep * _least(max(1, tp // sizes.ep)), ep=ep)
    equal, above = MeshSizes(tp=both, ep=both), MeshSizes(tp=both, ep=both * over, dp_shard=over)
    alone = MeshSizes(tp=1, ep=ep, dp_shard=ep)
    return [{1: below, 2: equal, 3: above}[order], equal, alone] if tp > 1 else [above]


def _with(
    mesh: MeshSizes, sizes: MeshSizes, asked: Iterable[Axis], over_cp: int, needed: Iterable[Axis] = ()
) -> MeshSizes:
    """The mesh with the needed axes, and as many of the requested ones as fit; with dp_shard too, if ranks of the
    requested mesh have the same experts."""
    for axis in needed:
        if axis in _OTHERS and mesh.of(axis) == 1:
            mesh = replace(mesh, **{axis.value: over_cp if axis is Axis.CP else 2})
    left = sizes.dp_shard * sizes.cp * sizes.of(Axis.TP) // sizes.ep if _order(mesh) == 3 else 1
    for axis in asked:
        few = over_cp if axis is Axis.CP else 2
        more = few if mesh.of(axis) == 1 or (axis is Axis.DP_SHARD and left > 1) else 1
        if mesh.world_size * more <= MOST:
            mesh = replace(mesh, **{axis.value: mesh.of(axis) * more})
    return _over_batches(mesh, sizes)


def _over_batches(mesh: MeshSizes, sizes: MeshSizes) -> MeshSizes:
    """The mesh, whose experts get tokens of several batches if those of the requested one do: ep is above tp x cp."""
    inner, asked = mesh.of(Axis.TP) * mesh.cp, sizes.of(Axis.TP) * sizes.cp
    if not inner >= mesh.ep > 1 or sizes.ep <= asked or mesh.dp_shard == 1:
        return mesh
    over = _least(sizes.ep // asked)
    return replace(mesh, ep=inner * over, dp_shard=over if mesh.dp_shard % over else mesh.dp_shard)
