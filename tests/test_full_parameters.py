"""`full_parameters`: every parameter of a planned model as the unsharded one has it, and no other way that is wrong unnoticed."""

from __future__ import annotations

import logging
from math import prod
from typing import Any

import pytest
import torch
from processes import on_ranks
from small_models import batch, small_model
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, _redistribute

import shardplan

NAMES = ("phi3", "gpt2", "mixtral")
PACKED = ("qkv_proj", "gate_up_proj", "c_attn")


def planned(name: str, sizes: dict[str, int], **options: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    return shardplan.apply_plan(small_model(name, tied=name == "gpt2"), mesh, "auto", prove=False, **options)


def packed_of(model: nn.Module) -> dict[str, nn.Parameter]:
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if any(f"{word}.weight" in name or name.endswith(word) for word in PACKED)
    }


def refusals(model: nn.Module) -> int:
    """How many packed parameters refuse `full_tensor()`, which is all of them."""
    packed = packed_of(model)
    for name, parameter in packed.items():
        assert isinstance(parameter, DTensor)
        with pytest.raises(RuntimeError, match=r"shardplan\.full_parameters\(model, gradients=False\)") as error:
            parameter.full_tensor()
        assert name in str(error.value)
    return len(packed)


def run(sizes: dict[str, int]) -> list[tuple[dict[str, Tensor], dict[str, Tensor | None]]]:
    results = []
    for name in NAMES:
        model = planned(name, sizes)
        assert refusals(model) >= 2
        values = dict(shardplan.full_parameters(model))
        ids = batch(3)
        with torch.no_grad():
            model(input_ids=ids, labels=ids, use_cache=False)
        refusals(model)  # FSDP2 leaves parameters gathered
        again = dict(shardplan.full_parameters(model))
        assert all(torch.equal(again[key], value) for key, value in values.items())
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        gradients = {key: gradient for key, _, gradient in shardplan.full_parameters(model, gradients=True)}
        refusals(model.to(torch.float64))
        model.load_state_dict(model.state_dict(), assign=True)
        refusals(model)
        results.append((values, gradients))
    return results


@pytest.mark.parametrize(
    "sizes",
    [
        {"tp": 2},
        pytest.param({"dp_shard": 2, "tp": 2}, marks=pytest.mark.slow),
        pytest.param({"dp_replicate": 2, "dp_shard": 1, "tp": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_parameters_and_gradients_are_those_of_the_unsharded_model(sizes):
    for ranks in on_ranks(prod(sizes.values()), run, sizes):
        for name, (values, gradients) in zip(NAMES, ranks, strict=True):
            model = small_model(name, tied=name == "gpt2")
            ids = batch(3)
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            expected = dict(model.named_parameters())
            assert list(values) == list(gradients) == list(expected)
            for key, parameter in expected.items():
                assert torch.equal(values[key], parameter), (name, key)
                assert parameter.grad is not None
                torch.testing.assert_close(gradients[key], parameter.grad, rtol=1e-4, atol=1e-5)


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def said_by_torch(folder: str) -> tuple[list[str], list[str]]:
    """What torch warns of when shardplan clips and saves, and when a parameter is gathered without it."""
    handler = Heard()
    logger = logging.getLogger(_redistribute.__name__)
    logger.setLevel(logging.WARNING)  # tests/processes.py asks for errors alone
    logger.addHandler(handler)
    _redistribute._warned_flatten_issues.clear()  # it warns once of each mesh
    model = planned("llama", {"dp_shard": 2, "tp": 2})
    optimizer = torch.optim.AdamW(model.parameters())
    ids = batch(3)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    shardplan.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    shardplan.save_training_state(model, optimizer, f"{folder}/state")
    shardplan.load_training_state(model, optimizer, f"{folder}/state")
    shardplan.save_checkpoint(model, f"{folder}/checkpoint")
    dict(shardplan.full_parameters(model))
    ours = handler.messages.copy()
    split_twice = model.get_parameter("model.layers.0.self_attn.q_proj.weight")
    assert isinstance(split_twice, DTensor)
    _redistribute._warned_flatten_issues.clear()
    split_twice.full_tensor()
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)
    return ours, handler.messages[len(ours) :]


@pytest.mark.slow
def test_torch_gives_no_advice_about_our_own_calls(tmp_path):
    for ours, theirs in on_ranks(4, said_by_torch, str(tmp_path)):
        assert ours == []
        assert len(theirs) == 1 and "sequential" in theirs[0], "this test would hear it"


def gathered_ones() -> str:
    model = planned("phi3", {"dp_shard": 2, "tp": 2})
    with shardplan.unshard(model):
        refusals(model)
    on_meta = small_model("phi3").to("meta")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    try:
        shardplan.full_parameters(shardplan.apply_plan(on_meta, mesh, "auto", prove=False))
    except ValueError as error:
        refusals(shardplan.materialize(on_meta, "cpu"))
        return str(error)
    return ""


def test_parameters_that_are_gathered_and_those_that_got_memory_refuse_too():
    for said in on_ranks(4, gathered_ones):
        assert "is on the meta device: it has no values" in said


def test_a_model_without_a_plan_has_none():
    with pytest.raises(ValueError, match="no plan was applied"):
        shardplan.full_parameters(nn.Linear(2, 2))
