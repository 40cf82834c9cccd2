"""The axis cp: every rank is called with the whole batch, and all is as in the unsharded model, by rules that a plan has or that are derived."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from processes import on_ranks
from small_models import VOCABULARY, batch, small_model, whole
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardplan
from shardplan.proof.compare import TOLERANCE, relative_error
from shardplan.proof.exact import in_precision_of
from shardplan.runtime.apply.state import packed_parameters
from shardplan.styles.boundary import returns_tokens
from shardplan.torchlib.packing import unpack

LENGTH = 32
AXES = ("dp_shard", "cp", "tp")
ENDS = {"model.layers.0": "split_seq_input", "model.norm": "gather_seq_output"}


def plan_of(name: str, mixers: dict[str, Any], ends: dict[str, str] = ENDS) -> dict[str, Any]:
    return {"version": "1", "name": f"{name}-cp", "extends": name, "context_parallel": {**ends, **mixers}}


START = {"model.layers.0": "split_seq_input"}  # and each rank returns its own tokens
HEADS = {"model.layers.*.self_attn": "exchange_heads"}
ATTENTION = {"model.layers.*.self_attn": "replicate_seq"}
EXPERTS = {
    **ATTENTION,
    "model.layers.*.mlp.gate": {"style": "token_wise", "read_outside": [0], "optional": True},
    "model.layers.*.mlp.experts": {"style": "token_wise", "optional": True},
}


DOCUMENTS = ((11, 13, 8), (16, 16))  # their lengths in each row: they end next to the cut and at it


def inputs_of(case: dict[str, Any], share: int) -> dict[str, Tensor]:
    """Some tokens do not count, more of them in the first half. Rows are padded on the left, or are documents, whose
    first tokens do not count."""
    ids = batch(share, length=LENGTH)
    labels = ids.clone()
    labels[:, 3:11] = labels[:, -2:] = -100
    given = {"input_ids": ids, "labels": labels}
    if documents := case.get("documents"):
        positions = torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in documents])
        labels[positions == 0] = -100
        if case.get("positions", True):
            given["position_ids"] = positions
    if case.get("padded"):
        given["attention_mask"] = torch.ones_like(ids)
        given["attention_mask"][1, :5] = 0
    return given


def built(case: dict[str, Any]) -> nn.Module:
    """The model, with adapters on `targets`; the same on all ranks."""
    dtype, tied = case.get("dtype", torch.float32), case.get("tied", False)
    model = small_model(case["model"], tied=tied, dtype=dtype, **case.get("settings", {}))
    if "targets" in case:
        torch.manual_seed(1)
        model = get_peft_model(model, LoraConfig(r=4, target_modules=case["targets"], init_lora_weights=False))
    return model


def applied(case: dict[str, Any]) -> tuple[nn.Module, DeviceMesh]:
    axes = case.get("axes", AXES)
    sizes = {**dict(zip(axes, case["sizes"], strict=True)), "ep": case.get("ep", 1)}
    mesh = shardplan.build_mesh(device_type="cpu", **sizes)
    name = case.get("plan", case["model"])
    plan = plan_of(name, case["mixers"], case.get("ends", ENDS)) if "mixers" in case else name  # without: derived
    return shardplan.apply_plan(built(case), mesh, plan, **case.get("options", {}), prove=False), mesh


def compared(case: dict[str, Any]) -> None:
    """One model and mesh: the loss, the logits, every gradient; of each packing of documents, where there are several."""
    model, mesh = applied(case)
    for documents in case.get("packings", [case.get("documents")]):
        reference = built(case)
        with in_precision_of(model):  # the model's own casts of float64 to float32 are left out
            compared_step({**case, "documents": documents}, model, reference, mesh)
        model.zero_grad()


def compared_step(case: dict[str, Any], model: nn.Module, reference: nn.Module, mesh: DeviceMesh) -> None:
    share, shares = mesh.get_local_rank(0), case["sizes"][0]
    with shardplan.context_parallel(model, **inputs_of(case, share)) as given:
        output = model(**given, use_cache=False)
        output.loss.backward()
    logits, loss = whole(output.logits), output.loss.detach()
    if returns_tokens(shardplan.applied(model).program.resolved.on_cp):  # the loss is the mean of the ranks' losses
        logits = torch.cat(all_gather(logits.detach().contiguous(), mesh["cp"].get_group()), 1)
        loss = torch.stack(all_gather(loss, mesh["cp"].get_group())).mean()

    results = [reference(**inputs_of(case, i), use_cache=False) for i in range(shares)]
    (sum(result.loss for result in results) / shares).backward()

    limit = TOLERANCE[case.get("dtype", torch.float32)]
    assert logits.shape[:2] == (2, LENGTH)
    assert relative_error(logits, results[share].logits) <= limit
    assert relative_error(loss, results[share].loss) <= limit
    equal_gradients(model, reference, limit, mesh)


def all_gather(x: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    found = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(found, x, group=group)
    return found


def equal_gradients(model: nn.Module, reference: nn.Module, limit: float, mesh: DeviceMesh) -> None:
    """Of every trained parameter."""
    packed = packed_parameters(shardplan.applied(model).program)
    references = {key: parameter for key, parameter in reference.named_parameters() if parameter.requires_grad}
    trained = {key: parameter for key, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained.keys() == references.keys()
    for key, parameter in trained.items():
        gradient = whole(parameter.grad)
        if key in packed:
            gradient = unpack(gradient, packed[key].dim, packed[key].parts, mesh["tp"].size())
        assert relative_error(gradient, references[key].grad) <= limit, key


def refused() -> None:
    """Ranks of cp need the same batch, of a length that cp divides."""
    mesh = init_device_mesh("cpu", (1, 2, 1), mesh_dim_names=AXES)
    model = shardplan.apply_plan(small_model("llama"), mesh, plan_of("llama", ATTENTION), prove=False)
    ids = batch(0, length=LENGTH)
    with pytest.raises(RuntimeError, match=r"context-parallel ranks need the same batch.*input_ids on rank 1\."):
        model(input_ids=batch(mesh.get_local_rank("cp"), length=LENGTH))
    with pytest.raises(ValueError, match="31"):
        model(input_ids=ids[:, :31])
    own = shardplan.apply_plan(small_model("llama"), mesh, plan_of("llama", ATTENTION, START), prove=False)
    with pytest.raises(
        ValueError, match=r"labels: a rank of cp has.*with context_parallel\(model, input_ids=ids, labels"
    ):
        own(input_ids=ids, labels=ids)
    with pytest.raises(ValueError, match="logits_to_keep: each rank of cp"):
        own(input_ids=ids, logits_to_keep=1)
    with pytest.raises(ValueError, match="which cp=2 does not divide: pad it to 32"):
        with shardplan.context_parallel(own, input_ids=ids[:, :31], labels=ids[:, :31]):
            raise AssertionError("not reached")
    with shardplan.context_parallel(own, input_ids=ids, labels=ids) as given:
        logits = own(**given, use_cache=False).logits
        with pytest.raises(ValueError, match="shifting them would lose the token at its end"):
            shardplan.causal_lm_loss(logits, given["labels"])
    assert logits.shape[1] == LENGTH // 2
    loss = own.loss_function

    def mean_of_its_own(logits: Tensor, labels: Tensor, vocab_size: int, **others: Any) -> Tensor:
        return loss(logits, labels, vocab_size)

    def raising(logits: Tensor, labels: Tensor) -> Tensor:
        return loss(logits, labels, VOCABULARY)

    for function in (mean_of_its_own, raising):
        own.loss_function = function
        with pytest.raises(ValueError, match="labels: the model's loss_function was replaced"):
            with shardplan.context_parallel(own, input_ids=ids, labels=ids):
                raise AssertionError("not reached")


def passed_on() -> None:
    """Without a cp axis."""
    model = small_model("llama")
    shardplan.apply_plan(model, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), "auto", prove=False)
    ids = batch(0)
    with shardplan.context_parallel(model, input_ids=ids, labels=ids, use_cache=False) as inputs:
        assert set(inputs) == {"input_ids", "labels", "use_cache"} and inputs["labels"] is ids


def parts_alone() -> None:
    """A part that is called by itself has whole values, and so has the model without the split."""
    mesh = init_device_mesh("cpu", (1, 2, 1), mesh_dim_names=AXES)
    model = shardplan.apply_plan(small_model("llama"), mesh, plan_of("llama", ATTENTION), prove=False)
    reference, ids = small_model("llama"), torch.randint(10, VOCABULARY, (2, 15))
    torch.distributed.broadcast(ids, 0)
    expected = reference(input_ids=ids, use_cache=False)
    assert relative_error(model.model(input_ids=ids, use_cache=False)[0], reference.model(ids)[0]) <= 1e-5
    with shardplan.without_sequence_parallel(model):
        output = model(input_ids=ids, labels=ids, use_cache=False)
    assert relative_error(output.logits, expected.logits) <= 1e-5
    states = model(input_ids=batch(0, length=LENGTH), output_hidden_states=True, use_cache=False).hidden_states
    wanted = reference(input_ids=batch(0, length=LENGTH), output_hidden_states=True, use_cache=False).hidden_states
    assert all(relative_error(*pair) <= 1e-5 for pair in zip(states, wanted, strict=True))


def on_two(cases: list[dict[str, Any]]) -> None:
    for case in cases:
        compared(case)
    refused()
    passed_on()
    parts_alone()


def on_four(cases: list[dict[str, Any]]) -> None:
    for case in cases:
        compared(case)


# Tables that read the largest position, at a length beyond the original one.
ROPE = {"rope_theta": 10000.0, "rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
LONG = {"rope_parameters": ROPE, "max_position_embeddings": 16, "original_max_position_embeddings": 16}
DYNAMIC = {
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "dynamic", "factor": 2.0},
    "max_position_embeddings": 16,
}
TWO = [
    {"model": "llama", "sizes": (1, 2, 1), "mixers": ATTENTION, "tied": True},
    {
        "model": "llama",
        "sizes": (1, 2, 1),
        "mixers": ATTENTION,
        "documents": DOCUMENTS,
        "settings": {"attn_implementation": "eager"},
    },
    {"model": "gemma3_text", "sizes": (1, 2, 1), "mixers": ATTENTION, "documents": DOCUMENTS},
    {"model": "qwen3", "sizes": (1, 2, 1), "mixers": ATTENTION, "ends": START, "padded": True},
    {"model": "qwen3_moe", "sizes": (1, 2, 1), "mixers": EXPERTS, "settings": {"output_router_logits": True}},
    {"model": "llama", "plan": "auto", "sizes": (1, 2, 1), "settings": DYNAMIC},
    {"model": "phi3", "sizes": (1, 2, 1), "documents": DOCUMENTS, "settings": LONG},
    {"model": "gpt2", "plan": "auto", "sizes": (1, 2, 1)},
    {"model": "gemma3_text", "plan": "auto", "sizes": (1, 2, 1), "documents": DOCUMENTS},
]
FOUR = [
    {"model": "llama", "sizes": (2, 2, 1), "mixers": ATTENTION, "ends": START, "documents": DOCUMENTS},
    {
        "model": "qwen3",
        "sizes": (1, 2, 2),
        "mixers": HEADS,
        "ends": START,
        "tied": True,
        "options": {"sequence_parallel": True},
    },
    {"model": "qwen3", "sizes": (1, 2, 2), "mixers": ATTENTION, "tied": True, "options": {"sequence_parallel": True}},
    {"model": "phi3", "sizes": (1, 2, 2), "mixers": ATTENTION, "documents": DOCUMENTS},
    {
        "model": "qwen3",
        "sizes": (1, 4, 1),
        "mixers": ATTENTION,
        "options": {"activation_checkpointing": {"mode": "full"}, "compile": {"backend": "aot_eager"}},
    },
    {
        "model": "qwen3",
        "plan": "auto",
        "sizes": (1, 2, 2),
        "tied": True,
        "options": {
            "sequence_parallel": True,
            "logits": "sharded",
            "activation_checkpointing": {"mode": "full"},
            "compile": {"backend": "aot_eager"},
        },
    },
]


@pytest.mark.slow
@pytest.mark.proves("cp fsdp2", "cp tokens fsdp2")
def test_whole_batches_on_two_ranks():
    on_ranks(2, on_two, TWO, seconds=240)


@pytest.mark.slow
@pytest.mark.proves(
    "cp tokens fsdp2",
    "tp sp cp fsdp2",
    "tp sp cp tokens fsdp2",
    "tp cp fsdp2",
    "cp fsdp2 checkpointing compile",
    "tp sp cp tokens fsdp2 checkpointing compile",
)
def test_whole_batches_on_four_ranks():
    on_ranks(4, on_four, FOUR, seconds=300)
