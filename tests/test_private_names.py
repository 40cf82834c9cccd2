"""Private names of torch: all are there, and a missing one is named with the version."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
import torch

from shardplan.runtime.parallel.fsdp_units import groups_of
from shardplan.torchlib import private as room
from shardplan.torchlib.private import NAMES, Private, private


@pytest.mark.parametrize("name", NAMES)
def test_this_torch_has_it(name):
    assert private(name) is not None


@pytest.mark.parametrize("name", NAMES)
def test_its_purpose_and_place_are_said(name):
    entry = NAMES[name]
    assert entry.purpose and entry.places
    assert all(module.startswith("torch") for module, _ in entry.places)
    module, attribute = entry.places[0]
    newest = importlib.import_module(module)
    assert not attribute or hasattr(newest, attribute), "the first place is the pinned torch's"


@pytest.mark.parametrize("place", [("torch.distributed", "no_such_name"), ("torch.no_such_module", "name")])
def test_a_missing_one_fails_with_its_name_and_the_version(place, monkeypatch):
    monkeypatch.setitem(room.NAMES, "gone", Private((place,), "a test"))
    with pytest.raises(RuntimeError) as error:
        private("gone")
    assert str(error.value) == f"torch {torch.__version__} has no {'.'.join(place)}, and shardplan needs it for: a test"


def test_an_older_place_is_found_where_the_newest_is_missing(monkeypatch):
    places = (("torch.distributed", "no_such_name"), ("torch.distributed", "is_available"))
    monkeypatch.setitem(room.NAMES, "moved", Private(places, "a test"))
    assert private("moved") is torch.distributed.is_available


@pytest.mark.parametrize(
    ("state", "groups"),
    [
        (SimpleNamespace(_fsdp_param_groups=["a", "b"]), ["a", "b"]),  # torch 2.12 and later
        (SimpleNamespace(_fsdp_param_group="a"), ["a"]),  # torch 2.11
        (SimpleNamespace(_fsdp_param_group=None), []),
    ],
)
def test_parameter_groups_of_fsdp2_are_found_in_the_state_of_each_release(state, groups):
    assert groups_of(state) == groups
