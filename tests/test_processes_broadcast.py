"""torch.distributed.checkpoint's state dicts of planned models with packed parameters: whole on rank 0, and sent from there."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import on_ranks
from small_models import batch, meta_model, small_model
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from training_runs import ADAMW

import shardplan
from shardplan.proof.compare import TOLERANCE, relative_error

NAMES = ("phi3", "gpt2")
SEND = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
SOME = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def unsharded(name: str) -> nn.Module:
    return small_model(name, tied=name == "gpt2", dtype=torch.float64)


def trained(model: nn.Module) -> torch.optim.Optimizer:
    """Two steps."""
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    step(model, optimizer)
    step(model, optimizer)
    return optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    ids = batch(3)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=batch(4), use_cache=False).logits


def on_first(state: dict[str, Any]) -> dict[str, Any]:
    return dict(state) if dist.get_rank() == 0 else {}  # torch puts what it made into it


def near(found: Tensor, wanted: Tensor, about: object) -> None:
    assert relative_error(found, wanted) <= TOLERANCE[torch.float64], about


def as_the_unsharded(found: nn.Module, wanted: nn.Module, about: object) -> None:
    expected = dict(wanted.named_parameters())
    near(logits(found), logits(wanted), about)
    for name, value in shardplan.full_parameters(found):
        near(value, expected[name], (about, name))


def sent_and_read(sizes: dict[str, int], options: dict[str, Any]) -> None:
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    for name in NAMES:
        wanted = unsharded(name)
        of_wanted = trained(wanted)
        state, moments = get_model_state_dict(wanted), get_optimizer_state_dict(wanted, of_wanted)
        state, moments = copy.deepcopy(state), copy.deepcopy(moments)  # both are the memory of what is trained on

        model = shardplan.apply_plan(unsharded(name), mesh, "auto", prove=False, **options)
        step(model, torch.optim.SGD(model.parameters(), lr=1.0))
        set_model_state_dict(model, on_first(state), options=SEND)
        as_the_unsharded(model, wanted, name)

        optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
        shardplan.applied(model).keep_checkpoints_portable(optimizer)
        set_optimizer_state_dict(model, optimizer, on_first(moments), options=SEND)
        step(wanted, of_wanted)
        step(model, optimizer)
        as_the_unsharded(model, wanted, name)

        read = get_model_state_dict(model, options=WHOLE)
        of_read = get_optimizer_state_dict(model, optimizer, options=WHOLE)
        if dist.get_rank() == 0:
            for key, value in get_model_state_dict(wanted).items():
                near(read[key], value, key)
            for key, entries in get_optimizer_state_dict(wanted, of_wanted)["state"].items():
                near(of_read["state"][key]["exp_avg"], entries["exp_avg"], key)
        else:
            assert read == {}

        # What rank 0 does not have stays as it is.
        norms = {key: value for key, value in state.items() if value.ndim == 1 and "bias" not in key}
        set_model_state_dict(model, on_first(norms), options=SOME)
        set_model_state_dict(wanted, norms, options=StateDictOptions(strict=False))
        as_the_unsharded(model, wanted, name)
        with pytest.raises(RuntimeError, match="is packed"):  # in the stored order, which nothing could tell
            model.load_state_dict(dict(model.named_parameters()), strict=False)

        on_meta = shardplan.apply_plan(
            meta_model(name, tied=name == "gpt2").double(), mesh, "auto", prove=False, **options
        )
        set_model_state_dict(on_meta, on_first(state), options=SEND)
        for key, value in shardplan.full_parameters(on_meta):
            near(value, state[key], key)


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"tp": 2}, {"sequence_parallel": True}),
        pytest.param({"dp_shard": 1, "tp": 2}, {}, marks=pytest.mark.slow),
        pytest.param({"dp_shard": 2, "tp": 2}, {"sequence_parallel": True}, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_states_that_are_sent_from_rank_0(sizes: dict[str, int], options: dict[str, Any]) -> None:
    ranks = sizes["tp"] * sizes.get("dp_shard", 1)
    on_ranks(ranks, sent_and_read, sizes, options)
