"""What peft's functions do to adapters of a model that a plan was applied to: as to the unsharded model, or an error that says what
to do instead."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, inject_adapter_in_model
from processes import on_ranks
from small_models import batch, small_model
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import shardplan
from shardplan.proof.compare import TOLERANCE, relative_error

Call = Callable[[nn.Module, str], object]
FIRST = {"r": 4, "target_modules": ["q_proj", "down_proj", "lm_head"]}
SECOND = {"r": 2, "target_modules": ["q_proj", "k_proj", "o_proj"]}
THIRD = {"r": 2, "target_modules": ["v_proj"]}


def drawn(model: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


def base() -> nn.Module:
    return small_model("llama", dtype=torch.float64)


def adapted() -> PeftModel:
    model = get_peft_model(base(), LoraConfig(**FIRST))
    model.add_adapter("second", LoraConfig(**SECOND))
    return drawn(model.double())


def step(model: nn.Module) -> None:
    ids = batch(3)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    model.zero_grad()


def chosen_after_a_step(model: nn.Module, folder: str) -> None:
    step(model)
    model.set_adapter("second")


def switched(model: nn.Module, folder: str) -> None:
    model.base_model.disable_adapter_layers()
    model.base_model.enable_adapter_layers()


# What gives what it gives of the unsharded model, afterwards.
RIGHT: dict[str, tuple[Callable[[], nn.Module], Call]] = {
    "nothing": (adapted, lambda model, folder: None),
    "set_adapter": (adapted, lambda model, folder: model.set_adapter("second")),
    "set_adapter after a step": (adapted, chosen_after_a_step),
    "disabled and enabled": (adapted, switched),
    "weights of an adapter": (adapted, lambda model, folder: model.load_adapter(folder, "default", is_trainable=True)),
}
# What raises, with the words of what to do, before it changes anything.
MERGE, ADD, DELETE = (
    "merge before apply_plan",
    "add all adapters before apply_plan",
    "delete the adapter before apply_plan",
)
REFUSED: dict[str, tuple[Call, str]] = {
    "merge_and_unload": (lambda model, folder: model.merge_and_unload(), MERGE),
    "merge_and_unload of the tuner": (lambda model, folder: model.base_model.merge_and_unload(), MERGE),
    "unload": (lambda model, folder: model.unload(), MERGE),
    "merge_adapter": (lambda model, folder: model.merge_adapter(), MERGE),
    "unmerge_adapter": (lambda model, folder: model.unmerge_adapter(), MERGE),
    "merge of a layer": (lambda model, folder: model.get_submodule("base_model.model.lm_head").merge(), MERGE),
    "delete_adapter": (lambda model, folder: model.delete_adapter("second"), DELETE),
    "delete_adapter of transformers": (lambda model, folder: model.get_base_model().delete_adapter("second"), DELETE),
    "add_adapter": (lambda model, folder: model.add_adapter("third", LoraConfig(**THIRD)), ADD),
    "inject_adapter": (lambda model, folder: model.base_model.inject_adapter(model, "default"), ADD),
    "load_adapter": (lambda model, folder: model.load_adapter(folder, "third"), ADD),
    "add_weighted_adapter": (
        lambda model, folder: model.add_weighted_adapter(["default", "second"], [0.5, 0.5], "third", "cat"),
        ADD,
    ),
}
REFUSED_OF_TRANSFORMERS: dict[str, tuple[Call, str]] = {
    "add_adapter": (lambda model, folder: model.add_adapter(LoraConfig(**FIRST)), ADD),
    "load_adapter": (lambda model, folder: model.load_adapter(folder), ADD),
}
WAYS = {
    "tp": (2, {"data_parallel": False}),
    "tp, sp": (2, {"data_parallel": False, "sequence_parallel": True}),
    "tp, sp, fsdp2": (2, {"sequence_parallel": True}),
    "fsdp2": (1, {}),
}


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def results(model: nn.Module) -> dict[str, Tensor]:
    """Logits, and the gradients of all that has one."""
    ids = batch(3)
    output = model(input_ids=ids, labels=ids, use_cache=False)
    output.loss.backward()
    gradients = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": output.logits.detach(), **gradients}


def planned(build: Callable[[], nn.Module], way: str) -> nn.Module:
    tp, options = WAYS[way]
    mesh = init_device_mesh("cpu", (2 // tp, tp), mesh_dim_names=("dp_shard", "tp"))
    return shardplan.apply_plan(build(), mesh, "auto", prove=False, **options)


def right(way: str, folder: str) -> None:
    for name, (build, call) in RIGHT.items():
        wanted, found = build(), planned(build, way)
        call(wanted, folder)
        call(found, folder)
        expected, got = results(wanted), results(found)
        assert got.keys() == expected.keys(), name
        for key, value in expected.items():
            assert relative_error(got[key], value) <= TOLERANCE[torch.float64], (name, key)


def refused(way: str, folder: str) -> None:
    # A function of peft sees a model as any other: then the next forward raises.
    later = {
        adapted: lambda model: get_peft_model(model.get_base_model(), LoraConfig(**THIRD), "third"),
        base: lambda model: inject_adapter_in_model(LoraConfig(**FIRST), model),
    }
    for build, calls in ((adapted, REFUSED), (base, REFUSED_OF_TRANSFORMERS)):
        model = planned(build, way)
        for name, (call, words) in calls.items():
            with pytest.raises(RuntimeError, match=words):
                call(model, folder)
                pytest.fail(name)
        expected, got = results(build()), results(model)
        assert got.keys() == expected.keys(), "something was changed"
        for key, value in expected.items():
            assert relative_error(got[key], value) <= TOLERANCE[torch.float64], key
        other = later[build](model)
        with pytest.raises(
            RuntimeError, match="was added after a plan was applied to this model; add all adapters before"
        ):
            step(other)


@pytest.mark.parametrize(
    "way", ["tp, sp, fsdp2", *(pytest.param(way, marks=pytest.mark.slow) for way in ("tp", "tp, sp", "fsdp2"))]
)
@pytest.mark.parametrize("check", [right, refused])
def test_calls_on_adapters_are_right_or_refused(check: Callable[[str, str], None], way: str, tmp_path: Path) -> None:
    get_peft_model(base(), LoraConfig(**FIRST)).save_pretrained(tmp_path)
    on_ranks(2, check, way, str(tmp_path))
