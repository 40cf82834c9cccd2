"""Forwards of planned models that have no weights yet."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from shardplan import apply_plan, load_checkpoint, materialize
from shardplan.runtime.apply import guards
from tests.proofs import fake_mesh
from tests.small_models import meta_model, small_model

IDS = torch.ones(1, 8, dtype=torch.long)
MESHES = {"tp": (4,), "dp_shard and tp": (2, 2), "dp_shard": (4,)}


def asks_for_weights(model: nn.Module) -> bool:
    """Whether any module does, in front of its forward."""
    looks = [
        look
        for module in model.modules()
        for hook in module._forward_pre_hooks.values()
        if hook.__module__ == guards.__name__
        for _, look in inspect.getclosurevars(hook).nonlocals["others"]
    ]
    return any("weights_are_there" in look.__qualname__ for look in looks)


def planned(model: nn.Module, axes: str) -> Iterator[nn.Module]:
    names = tuple(axes.split(" and "))
    with fake_mesh(*MESHES[axes], names=names) as mesh:
        yield apply_plan(model, mesh, "llama", src_data_rank=None, prove=False)


@pytest.fixture(params=MESHES)
def model(request):
    yield from planned(meta_model("llama"), request.param)


def test_a_forward_names_what_gives_weights_and_the_model_can_then_be_loaded(model):
    for call in (model, model.generate):
        with pytest.raises(RuntimeError, match=r"no weights yet \(model.* is on the meta device\): call materialize"):
            call(IDS)
    assert asks_for_weights(model)
    materialize(model, "cpu")
    model(IDS, use_cache=False).logits.sum().backward()
    assert not asks_for_weights(model)


def test_a_checkpoint_can_be_loaded_after_it(model, tmp_path):
    small_model("llama").save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match=r"load_checkpoint\(model, folder\)"):
        model(IDS)
    load_checkpoint(model, tmp_path)
    model(IDS, use_cache=False)


@pytest.mark.parametrize("axes", ["dp_shard and tp"])
def test_a_unit_that_is_called_on_its_own(axes):
    for model in planned(meta_model("llama"), axes):
        with pytest.raises(RuntimeError, match="no weights yet"):
            model.model.layers[0](torch.ones(1, 8, 64))
        materialize(model, "cpu")
        model(IDS, use_cache=False)


def test_a_model_with_weights_has_no_such_hook():
    for model in planned(small_model("llama"), "dp_shard"):
        assert not asks_for_weights(model)


def test_one_hook_looks_in_front_of_each_watched_module():
    for model in planned(meta_model("llama"), "dp_shard and tp"):
        counts = [
            sum(hook.__module__ == guards.__name__ for hook in module._forward_pre_hooks.values())
            for module in model.modules()
        ]
        assert set(counts) == {0, 1} and counts[0] == 1
        first = next(iter(model._forward_pre_hooks.values()))
        assert first.__module__ == guards.__name__  # in front of FSDP2's
        looks = [look.__qualname__.partition(".")[0] for _, look in inspect.getclosurevars(first).nonlocals["others"]]
        assert " ".join(looks) == "weights_are_there no_later_float8 unchanged same_weights same_inputs _put_right"
