"""`build_mesh`: sizes in, a mesh out."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from shardplan import build_mesh
from shardplan.torchlib.private import private


@pytest.fixture
def world(request):
    """A process group of that many ranks, without other processes."""
    private("fake_pg")
    dist.init_process_group("fake", rank=0, world_size=request.param)
    yield
    dist.destroy_process_group()


GOOD = {
    "the rest is dp_shard": ({"tp": 4}, {"dp_shard": 6, "tp": 4}),
    "nothing said": ({}, {"dp_shard": 24, "tp": 1}),
    "every axis": ({"tp": 2, "cp": 3, "dp_replicate": 2}, {"dp_replicate": 2, "dp_shard": 2, "cp": 3, "tp": 2}),
    "another one is open": ({"dp_shard": 3, "tp": None}, {"dp_shard": 3, "tp": 8}),
    "open as zero": ({"dp_shard": 6, "tp": 4, "cp": 0}, {"dp_shard": 6, "tp": 4}),
    "open as below zero": ({"dp_shard": 6, "dp_replicate": -1}, {"dp_replicate": 4, "dp_shard": 6, "tp": 1}),
    "stages": ({"pp": 3, "tp": 2}, {"pp": 3, "dp_shard": 4, "tp": 2}),
    "all said": ({"dp_shard": 12, "tp": 2, "ep": 4, "pp": None}, {"dp_shard": 12, "tp": 2}),
}


@pytest.mark.parametrize("world", [24], indirect=True)
@pytest.mark.parametrize("name", GOOD)
def test_sizes_are_inferred(world, name):
    given, axes = GOOD[name]
    mesh = build_mesh(**given)
    assert dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True)) == axes
    assert mesh.device_type == "cpu"


BAD = {
    "no divisor": (
        {"tp": 5},
        "dp_shard cannot be inferred: pp 1 x dp_replicate 1 x cp 1 x tp 5 = 5 does not divide the world size 24",
    ),
    "another product": ({"dp_shard": 2, "tp": 4}, "= 8, but the world size is 24"),
    "two are open": ({"tp": None}, "the sizes of dp_shard and tp are not given"),
    "stages": ({"pp": 5}, "pp 5 x dp_replicate 1 x cp 1 x tp 1 = 5 does not divide the world size 24"),
}


@pytest.mark.parametrize("world", [24], indirect=True)
@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_told(world, name):
    given, text = BAD[name]
    with pytest.raises(ValueError) as told:
        build_mesh(**given)
    assert text in str(told.value)


@pytest.mark.parametrize("world", [24], indirect=True)
@pytest.mark.parametrize("size", [True, 2.0, "2"])
def test_a_size_is_a_whole_number(world, size):
    with pytest.raises(TypeError, match="the size of tp must be a whole number or None"):
        build_mesh(tp=size)


def test_a_process_group_is_needed():
    with pytest.raises(ValueError, match="there is no process group"):
        build_mesh(tp=2)
