"""Functions of a DeviceMesh without a public name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from shardplan.core.first_few import in_a_row

Group = DeviceMesh | ProcessGroup  # the ranks of a collective; a mesh has one dimension
_OF_GROUP = "_shardplan_of_group"  # on a mesh: `of_group`
SHOWN = 8  # ranks that a message lists


def ranks_of(group: Group) -> int:
    """The number of its ranks, also in a graph that is being compiled."""
    return group.size() if torch.compiler.is_compiling() else of_group(group)[1]


def of_group(group: Group) -> tuple[str, int]:
    """The name of the process group, and how many ranks it has. A mesh computes both anew for each question, which costs the host more than
    the call of a collective; so they are kept on it."""
    if not isinstance(group, DeviceMesh):  # the other question runs Python code of torch's
        return group.group_name, group.size()
    known = group.__dict__.get(_OF_GROUP)
    if known is None:
        known = group.__dict__[_OF_GROUP] = group.get_group().group_name, group.size()
    return known


def named_ranks(ranks: Iterable[int], verbs: tuple[str, str] | None = None) -> str:
    """Ranks in words: "rank 3", "ranks 1 and 3", and of many the first and how many more there are.

    Args:
        verbs: what follows one rank, and several: ("is", "are").
    """
    every = sorted(ranks)
    *first, last = map(str, every)
    listed = f"{', '.join(first)} and {last}" if first and len(every) <= SHOWN else in_a_row(every, SHOWN)
    named = f"rank{'s' if first else ''} {listed}"
    return f"{named} {verbs[bool(first)]}" if verbs else named


def root_of(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that this one is a slice of; the mesh itself where it is no slice."""
    return mesh._get_root_mesh()


def flatten(mesh: DeviceMesh, axes: tuple[str, ...], name: str) -> DeviceMesh:
    """Make several axes of a mesh available as one, under a new name. Returns that axis.

    torchtitan calls `DeviceMesh._flatten` for dp_shard x cp (torch 2.11 to 2.13 have no public name for it).
    """
    return mesh[axes]._flatten(name)


def unflatten(mesh: DeviceMesh, sizes: Mapping[str, int]) -> DeviceMesh:
    """Turn a one-dimensional mesh into one of several axes, the outermost first. Makes process groups.

    torchtitan calls `DeviceMesh._unflatten` for the axes of experts (torch 2.11 to 2.13 have no public name for it).
    """
    return mesh._unflatten(0, tuple(sizes.values()), tuple(sizes))
