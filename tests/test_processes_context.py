"""Context parallelism: every cp rank runs one chunk of the sequence, and all is as in the unsharded model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from processes import on_ranks
from small_models import batch, small_model, whole
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import shardplan
from shardplan.proof.compare import TOLERANCE, relative_error
from shardplan.runtime.apply.state import packed_parameters
from shardplan.torchlib.packing import unpack

LENGTH = 32
AXES = ("dp_shard", "cp", "tp")


def labels_of(ids: Tensor) -> Tensor:
    """Some tokens do not count, more of them in the first half."""
    labels = ids.clone()
    labels[:, 3:11] = labels[:, -2:] = -100
    return labels


def chunks(case: dict[str, Any]) -> None:
    """One model and mesh: the loss, this rank's logits, every gradient."""
    sizes, name = case["sizes"], case["model"]
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=AXES)
    share, shares = mesh.get_local_rank("dp_shard"), sizes[0]
    model = small_model(name, tied=case.get("tied", False))
    shardplan.apply_plan(model, mesh, "auto", **case.get("options", {}), prove=False)
    ids = batch(share, length=LENGTH)
    with shardplan.context_parallel(model, input_ids=ids, labels=labels_of(ids), use_cache=False) as inputs:
        assert inputs["input_ids"].shape[1] == LENGTH // sizes[1]
        output = model(**inputs)
        output.loss.backward()

    reference = small_model(name, tied=case.get("tied", False))
    results = []
    for i in range(shares):
        other = batch(i, length=LENGTH)
        results.append(reference(input_ids=other, labels=labels_of(other), use_cache=False))
    (sum(result.loss for result in results) / shares).backward()

    limit = TOLERANCE[torch.float32]
    logits = whole(output.logits)
    expected = results[share].logits.chunk(sizes[1], 1)[mesh.get_local_rank("cp")]
    assert relative_error(logits, expected) <= limit
    loss = output.loss.detach().clone()
    torch.distributed.all_reduce(loss, group=mesh.get_group("cp"))
    assert relative_error(loss / sizes[1], results[share].loss) <= limit
    packed = packed_parameters(shardplan.applied(model).program)
    references = dict(reference.named_parameters())
    for key, parameter in model.named_parameters():
        gradient = whole(parameter.grad)
        if key in packed:
            gradient = unpack(gradient, packed[key].dim, packed[key].parts, sizes[2])
        assert relative_error(gradient, references[key].grad) <= limit, key


CASES = {
    "cp and tp": {"model": "qwen3", "sizes": (1, 2, 2), "tied": True, "options": {"sequence_parallel": True}},
    "without sequence parallelism": {"model": "phi3", "sizes": (1, 2, 2)},
    "cp alone": {"model": "llama", "sizes": (1, 4, 1)},
    "cp and dp": {"model": "llama", "sizes": (2, 2, 1), "options": {"activation_checkpointing": {"mode": "selective"}}},
    "split logits": {"model": "llama", "sizes": (1, 2, 2), "options": {"logits": "sharded"}},
    "compiled": {
        "model": "qwen3",
        "sizes": (1, 2, 2),
        "options": {"sequence_parallel": True, "compile": {"backend": "aot_eager"}, "activation_checkpointing": True},
    },
}


def all_chunks(names: list[str]) -> None:
    for name in names:
        try:
            chunks(CASES[name])
        except Exception as error:
            error.add_note(f"in the case {name!r}")
            raise


@pytest.mark.slow
@pytest.mark.proves("tp sp cp fsdp2", "cp fsdp2", "cp fsdp2 checkpointing")
def test_chunks_are_as_the_whole_sequence():
    on_ranks(4, all_chunks, ["cp and tp", "cp alone", "cp and dp"])


@pytest.mark.slow
@pytest.mark.proves("tp cp fsdp2", "tp sp cp fsdp2 checkpointing compile")
def test_more_chunks_are_as_the_whole_sequence():
    on_ranks(4, all_chunks, ["without sequence parallelism", "split logits", "compiled"], seconds=300)


def refusals() -> None:
    mesh = init_device_mesh("cpu", (1, 4, 1), mesh_dim_names=AXES)
    ids = batch(0, length=LENGTH)
    model = shardplan.apply_plan(small_model("llama"), mesh, "auto", prove=False)

    def refused(kind: type[Exception], words: str, **inputs: Any) -> None:
        with pytest.raises(kind, match=words), shardplan.context_parallel(model, **inputs) as own:
            model(**own)

    mask = torch.ones_like(ids)
    with shardplan.context_parallel(model, input_ids=ids, attention_mask=mask) as inputs:
        assert model(**inputs).logits.shape[1] == LENGTH // 4 and "attention_mask" not in inputs
    mask[:, 0] = 0
    refused(ValueError, "attention_mask has zeros", input_ids=ids, attention_mask=mask)
    refused(ValueError, "pad it to 32", input_ids=ids[:, :31])
    refused(TypeError, "pixel_values", input_ids=ids, pixel_values=torch.ones(2))
    refused(TypeError, "input_ids or inputs_embeds", labels=ids)
    refused(ValueError, "auxiliary loss", input_ids=ids, output_router_logits=True)
    refused(ValueError, "at least two tokens", input_ids=ids[:, :4])
    with pytest.raises(RuntimeError, match="no scaled_dot_product_attention ran"):
        with shardplan.context_parallel(model, input_ids=ids):
            pass
    with pytest.raises(shardplan.PlanError, match="SP411"):
        shardplan.apply_plan(small_model("gemma3_text"), mesh, "auto")


def test_what_cannot_be_cut_is_refused():
    on_ranks(4, refusals)


def test_without_a_cp_axis_inputs_are_passed_on():
    on_ranks(4, passed_on)


def passed_on() -> None:
    model = small_model("llama")
    shardplan.apply_plan(model, init_device_mesh("cpu", (4,), mesh_dim_names=("tp",)), "auto", prove=False)
    ids = batch(0)
    with shardplan.context_parallel(model, input_ids=ids, labels=ids, use_cache=False) as inputs:
        assert set(inputs) == {"input_ids", "labels", "use_cache"} and inputs["labels"] is ids
