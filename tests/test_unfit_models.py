"""What `apply_plan` cannot work with is refused in one sentence, before the model is touched."""

from __future__ import annotations

import json
import struct

import pytest
import torch
from processes import on_ranks
from small_models import small_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import shardplan
from shardplan.model.stored_tensors import stored_tensors


def said_of(model: object, sizes: dict[str, int], **options: object) -> tuple[str, str]:
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    with pytest.raises((TypeError, ValueError)) as error:
        shardplan.apply_plan(model, mesh, "auto", prove=False, **options)
    if isinstance(model, nn.Module):
        assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    return type(error.value).__name__, str(error.value)


def tied_units() -> tuple[str, str]:
    """FSDP2 over one rank refuses what it refuses over several: one parameter in two units."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_shard", "tp"))
    model = small_model("llama", tied=True)
    section = {"backend": "fsdp2", "units": ["model.layers.*", "lm_head"]}
    with pytest.raises(ValueError, match="different FSDP units") as error:
        shardplan.apply_plan(model, mesh, "llama", data_parallel=section, prove=False)
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    return type(error.value).__name__, str(error.value).splitlines()[0]


def refused() -> dict[str, tuple[str, str]]:
    tp, dp = {"tp": 2}, {"dp_shard": 2}
    compiled_inside = small_model("llama")
    compiled_inside.model.layers[1] = torch.compile(compiled_inside.model.layers[1])
    quantized = small_model("llama")
    layer = quantized.model.layers[0].mlp.up_proj
    layer.weight = nn.Parameter(layer.weight.detach().to(torch.int8), requires_grad=False)
    loaded_quantized = small_model("llama")
    loaded_quantized.is_quantized = True
    scattered = small_model("llama")
    weight = scattered.model.layers[0].mlp.up_proj.weight
    weight.data = weight.data.t().contiguous().t()
    dropping = {}
    for name, probability in (("too often", 1.5), ("below zero", -0.5), ("not a number", float("nan"))):
        dropping[name] = small_model("gpt2")
        dropping[name].transformer.drop.p = probability
    return {
        **{name: said_of(model, tp) for name, model in dropping.items()},
        "tied units": tied_units(),
        "word": said_of("llama", tp),
        "nothing": said_of(None, tp),
        "no forward": said_of(torch.nn.ModuleList([torch.nn.Linear(4, 4)]), dp),
        "compiled": said_of(torch.compile(small_model("llama")), tp),
        "compiled inside": said_of(compiled_inside, tp),
        "ddp": said_of(DistributedDataParallel(small_model("llama")), tp),
        "int8": said_of(quantized, tp),
        "quantized": said_of(loaded_quantized, tp),
        "source": said_of(small_model("llama"), tp, src_data_rank=2),
        "below": said_of(small_model("llama"), tp, src_data_rank=-1),
        "no number": said_of(small_model("llama"), tp, src_data_rank="0"),
        "scattered": said_of(scattered, dp),
    }


SAID = {
    "too often": (
        "ValueError",
        "the module transformer.drop drops with the probability 1.5, which must be from 0 to 1",
    ),
    "below zero": ("ValueError", "the module transformer.drop drops with the probability -0.5"),
    "not a number": ("ValueError", "the module transformer.drop drops with the probability nan"),
    "tied units": ("PlanError", "error[SP341]: "),
    "word": ("TypeError", "model must be a torch Module, not the word 'llama': build the model first"),
    "nothing": ("TypeError", "model must be a torch Module, not a NoneType"),
    "no forward": ("ValueError", "the model is a ModuleList, which has no forward"),
    "compiled": ("ValueError", "the model is compiled: unwrap it (`_orig_mod`)"),
    "compiled inside": ("ValueError", "the module model.layers.1 is compiled: unwrap it"),
    "ddp": ("ValueError", "the model is in the wrapper DistributedDataParallel: unwrap it (`.module`)"),
    "int8": ("ValueError", "quantized (model.layers.0.mlp.up_proj.weight is torch.int8)"),
    "quantized": ("ValueError", "quantized (its `is_quantized` is True)"),
    "source": ("ValueError", "src_data_rank must be a rank of tp, 0 to 1, or None, not 2"),
    "below": ("ValueError", "src_data_rank must be a rank of tp, 0 to 1, or None, not -1"),
    "no number": ("TypeError", "src_data_rank must be a rank of tp or None, not '0'"),
    "scattered": ("ValueError", "model.layers.0.mlp.up_proj.weight is not contiguous"),
}


def test_what_apply_plan_cannot_work_with_is_refused_before_the_model_is_touched():
    for found in on_ranks(2, refused):
        assert found.keys() == SAID.keys()
        for name, (kind, text) in SAID.items():
            assert found[name][0] == kind and text in found[name][1], (name, found[name])


def test_an_index_of_5000_digits_is_no_checkpoint(tmp_path):
    """It has more digits than Python makes a number of."""
    tensor = {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]}
    header = json.dumps({f"model.layers.{'9' * 5000}.mlp.up_proj.weight": tensor}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(64))
    assert stored_tensors(tmp_path) is None
