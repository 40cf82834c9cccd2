"""Context parallelism: every cp rank runs one chunk of the sequence, and all is as in the unsharded model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from processes import on_ranks
from small_models import VOCABULARY, batch, small_config, small_model, whole
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from transformers import AutoModelForTokenClassification, LlamaForCausalLM

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


def built(case: dict[str, Any]) -> nn.Module:
    model = small_model(case["model"], tied=case.get("tied", False))
    if "targets" in case:
        torch.manual_seed(1)
        config = LoraConfig(r=4, target_modules=case["targets"], init_lora_weights=False)
        model = get_peft_model(model, config)
    return model


def chunks(case: dict[str, Any]) -> None:
    """One model and mesh: the loss, this rank's logits, every gradient."""
    axes = case.get("axes", AXES)
    mesh = init_device_mesh("cpu", case["sizes"], mesh_dim_names=axes)
    sizes = dict(zip(axes, case["sizes"], strict=True))
    share, shares = mesh.get_local_rank(axes[0]), case["sizes"][0]
    model = built(case)
    shardplan.apply_plan(model, mesh, "auto", **case.get("options", {}), prove=False)
    ids = batch(share, length=LENGTH)
    with shardplan.context_parallel(model, input_ids=ids, labels=labels_of(ids), use_cache=False) as inputs:
        assert inputs["input_ids"].shape[1] == LENGTH // sizes["cp"]
        output = model(**inputs)
        output.loss.backward()

    reference = built(case)
    results = []
    for i in range(shares):
        other = batch(i, length=LENGTH)
        results.append(reference(input_ids=other, labels=labels_of(other), use_cache=False))
    (sum(result.loss for result in results) / shares).backward()

    limit = TOLERANCE[torch.float32]
    logits = whole(output.logits)
    expected = results[share].logits.chunk(sizes["cp"], 1)[mesh.get_local_rank("cp")]
    assert relative_error(logits, expected) <= limit
    loss = output.loss.detach().clone()
    torch.distributed.all_reduce(loss, group=mesh.get_group("cp"))
    assert relative_error(loss / sizes["cp"], results[share].loss) <= limit
    packed = packed_parameters(shardplan.applied(model).program)
    references = dict(reference.named_parameters())
    trained = {key: parameter for key, parameter in model.named_parameters() if parameter.requires_grad}
    assert len(trained) < len(references) if "targets" in case else len(trained) == len(references)
    for key, parameter in trained.items():
        gradient = whole(parameter.grad)
        if key in packed:
            gradient = unpack(gradient, packed[key].dim, packed[key].parts, sizes.get("tp", 1))
        assert relative_error(gradient, references[key].grad) <= limit, key


CASES = {
    "cp and tp": {"model": "qwen3", "sizes": (1, 2, 2), "tied": True, "options": {"sequence_parallel": True}},
    "without sequence parallelism": {"model": "phi3", "sizes": (1, 2, 2)},
    "cp alone": {"model": "llama", "sizes": (1, 4, 1)},
    "cp and dp": {"model": "llama", "sizes": (2, 2, 1), "options": {"activation_checkpointing": {"mode": "selective"}}},
    "cp and replicas": {"model": "llama", "axes": ("dp_replicate", "dp_shard", "cp"), "sizes": (2, 1, 2)},
    "cp and adapters": {"model": "llama", "sizes": (2, 2, 1), "targets": ["q_proj", "v_proj", "up_proj", "down_proj"]},
    "split logits": {"model": "llama", "sizes": (1, 2, 2), "options": {"logits": "sharded"}},
    "compiled": {
        "model": "qwen3",
        "sizes": (1, 2, 2),
        "options": {
            "sequence_parallel": True,
            "compile": {"backend": "aot_eager"},
            "activation_checkpointing": {"mode": "full"},
        },
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
@pytest.mark.proves("tp cp fsdp2", "tp sp cp fsdp2 checkpointing compile", "cp hsdp", "cp fsdp2 lora")
def test_more_chunks_are_as_the_whole_sequence():
    cases = ["cp and replicas", "cp and adapters", "without sequence parallelism", "split logits", "compiled"]
    on_ranks(4, all_chunks, cases, seconds=300)


def refused(model: nn.Module, kind: type[Exception], words: str, **inputs: Any) -> None:
    """The context is not entered: nothing has run, and nothing was sent."""
    entered = False
    with pytest.raises(kind, match=words), CommDebugMode() as sent:
        with shardplan.context_parallel(model, **inputs):
            entered = True
    assert not entered and sent.get_total_counts() == 0


def on_cp(model: nn.Module, ranks: int) -> nn.Module:
    mesh = init_device_mesh("cpu", (1, ranks, 1), mesh_dim_names=AXES)
    return shardplan.apply_plan(model, mesh, "auto", prove=False)


def refusals() -> None:
    ids = batch(0, length=LENGTH)
    model = on_cp(small_model("llama"), 2)
    ones = torch.ones_like(ids)
    with shardplan.context_parallel(model, input_ids=ids, attention_mask=ones) as inputs:
        assert model(**inputs).logits.shape[1] == LENGTH // 2 and "attention_mask" not in inputs
    padded = ones.clone()
    padded[:, 0] = 0
    refused(model, ValueError, "attention_mask has zeros", input_ids=ids, attention_mask=padded)
    for mask in (ones[0], ones[:, None, None], {"full_attention": ones}, ones[:, :8], ones.tolist()):
        refused(model, ValueError, r"attention_mask must be \[batch, seq", input_ids=ids, attention_mask=mask)
    refused(model, ValueError, "pad it to 32", input_ids=ids[:, :31])
    refused(model, TypeError, "pixel_values", input_ids=ids, pixel_values=torch.ones(2))
    refused(model, TypeError, "cu_seq_lens_q", input_ids=ids, cu_seq_lens_q=[0, 16, 32])
    refused(model, TypeError, "input_ids or inputs_embeds", labels=ids)
    refused(model, ValueError, "auxiliary loss", input_ids=ids, output_router_logits=True)
    refused(model, ValueError, "logits_to_keep", input_ids=ids, logits_to_keep=1)
    refused(model, ValueError, r"labels must be \[batch, sequence\]", input_ids=ids, labels=ids[:, 0])
    for positions in (
        torch.arange(LENGTH).expand(3, 2, LENGTH),  # of time, height and width
        torch.arange(LENGTH).expand(2, 1, LENGTH),
        torch.arange(LENGTH),
    ):
        refused(model, ValueError, r"position_ids must be \[batch, seq", input_ids=ids, position_ids=positions)
    with pytest.raises(ValueError, match="at least two tokens"):
        with shardplan.context_parallel(model, input_ids=ids[:, :2]) as inputs:
            model(**inputs)
    with pytest.raises(RuntimeError, match="no scaled_dot_product_attention ran"):
        with shardplan.context_parallel(model, input_ids=ids):
            pass
    with pytest.raises(shardplan.PlanError, match="SP411"):
        on_cp(small_model("gemma3_text"), 2)


def test_what_cannot_be_cut_is_refused():
    on_ranks(2, refusals)


def rows_of(*documents: tuple[int, ...]) -> Tensor:
    """The positions of documents of these lengths, a row for each."""
    return torch.stack([torch.cat([torch.arange(n) for n in row]) for row in documents])


def positions() -> None:
    """Where positions begin again, on the cut too, a document does; elsewhere all is as in the unsharded model."""
    ids = batch(0, length=LENGTH)
    model = on_cp(small_model("llama"), 2)
    padding_in_front = torch.ones_like(ids) * (torch.arange(LENGTH) - 3).clamp(min=0)
    for given in (
        rows_of((16, 16), (16, 16)),
        rows_of((32,), (16, 16)),  # of one row alone
        rows_of((16, 16)),  # one row of positions for all
        rows_of((8, 24), (32,)),
        rows_of((31, 1), (31, 1)),
        padding_in_front,
        rows_of((32,), (32,)) * 2,
        rows_of((32,), (32,)).flip(1),
    ):
        refused(model, ValueError, "position_ids begin anew", input_ids=ids, position_ids=given)
    later = torch.arange(LENGTH) + torch.tensor([[0], [7]])
    as_unsharded(model, "llama", ids, position_ids=later)


def as_unsharded(model: nn.Module, name: str, ids: Tensor, position_ids: Tensor | None = None, **settings: Any) -> None:
    """Logits and loss of this rank's half, gradients of all parameters."""
    given = {} if position_ids is None else {"position_ids": position_ids}
    model.zero_grad()
    with shardplan.context_parallel(model, input_ids=ids, labels=labels_of(ids), use_cache=False, **given) as inputs:
        output = model(**inputs)
        output.loss.backward()
    reference = small_model(name, **settings)
    expected = reference(input_ids=ids, labels=labels_of(ids), use_cache=False, **given)
    expected.loss.backward()
    limit = TOLERANCE[torch.float32]
    assert relative_error(output.logits, expected.logits.chunk(2, 1)[torch.distributed.get_rank()]) <= limit
    loss = output.loss.detach().clone()
    torch.distributed.all_reduce(loss)
    assert relative_error(loss / 2, expected.loss) <= limit
    references = dict(reference.named_parameters())
    for key, parameter in model.named_parameters():
        assert relative_error(whole(parameter.grad), references[key].grad) <= limit, key


LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
ROPES = {
    "llama": {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "dynamic", "factor": 2.0}},
    "phi3": {"rope_parameters": {"rope_theta": 10000.0, **LONG}, "original_max_position_embeddings": 16},
}


def rotary_tables() -> None:
    """Tables that depend on the largest position: at the lengths at which those of a chunk differ, and only there."""
    ids = batch(0, length=LENGTH)
    for name, rope in ROPES.items():
        settings = {**rope, "max_position_embeddings": 16}
        model = on_cp(small_model(name, **settings), 2)
        before = {key: x.clone() for key, x in model.named_buffers()}
        refused(model, ValueError, "rotary_emb makes other tables for chunk 0 of 2", input_ids=ids)
        refused(model, ValueError, "rotary_emb makes other tables", inputs_embeds=torch.ones(2, LENGTH, 64))
        after = dict(model.named_buffers())
        assert before.keys() == after.keys() and all(torch.equal(after[key], x) for key, x in before.items())
        as_unsharded(model, name, ids[:, :16], **settings)
    later = torch.arange(LENGTH).expand(2, LENGTH) + 20  # each chunk is beyond the original length
    as_unsharded(model, name, ids, position_ids=later, **settings)


def losses() -> None:
    """Labels need a loss of the model's that is the mean of those of chunks."""
    ids = batch(0, length=LENGTH)
    model = on_cp(AutoModelForTokenClassification.from_config(small_config("llama")), 2)
    refused(model, ValueError, "labels: the m.* of the losses of chunks is not the loss", input_ids=ids, labels=ids % 2)
    with shardplan.context_parallel(model, input_ids=ids) as inputs:
        assert model(**inputs).logits.shape == (2, LENGTH // 2, 2)
    model = on_cp(small_model("llama"), 2)
    own = model.loss_function

    def mean_of_its_own(logits: Tensor, labels: Tensor, vocab_size: int, **others: Any) -> Tensor:
        return own(logits, labels, vocab_size)

    def raising(logits: Tensor, labels: Tensor) -> Tensor:
        return own(logits, labels, VOCABULARY)

    for function in (mean_of_its_own, raising):
        model.loss_function = function
        refused(model, ValueError, "labels: the model's loss_function was replaced", input_ids=ids, labels=ids)
    model.loss_function = lambda *args, **kwargs: own(*args, **kwargs)
    as_unsharded(model, "llama", ids)


class OwnLoss(LlamaForCausalLM):
    """Its loss is none of its `loss_function`."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **others: Any) -> Any:
        output = super().forward(input_ids, **{k: x for k, x in others.items() if k not in LOSS_ARGUMENTS})
        if labels is not None:
            output.loss = nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return output


LOSS_ARGUMENTS = ("shift_labels", "num_items_in_batch")


def own_losses() -> None:
    ids = batch(0, length=LENGTH)
    model = on_cp(OwnLoss(small_config("llama")), 2)
    refused(model, ValueError, "labels: the mean of the losses of chunks", input_ids=ids, labels=ids)


@pytest.mark.parametrize("case", [positions, rotary_tables, losses, own_losses], ids=lambda case: case.__name__)
def test_what_a_chunk_would_get_wrong_is_refused_before_anything_is_sent(case):
    on_ranks(2, case)


def test_without_a_cp_axis_inputs_are_passed_on():
    on_ranks(4, passed_on)


def passed_on() -> None:
    model = small_model("llama")
    shardplan.apply_plan(model, init_device_mesh("cpu", (4,), mesh_dim_names=("tp",)), "auto", prove=False)
    ids = batch(0)
    with shardplan.context_parallel(model, input_ids=ids, labels=ids, use_cache=False) as inputs:
        assert set(inputs) == {"input_ids", "labels", "use_cache"} and inputs["labels"] is ids
