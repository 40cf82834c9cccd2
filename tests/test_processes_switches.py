"""What people do to a model after a plan was applied: each works as on the unsharded model, or says what to call instead."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from processes import on_ranks
from small_models import batch, small_model, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardplan
from shardplan.proof.compare import TOLERANCE, relative_error


def planned(name: str, sizes: dict[str, int]) -> tuple[nn.Module, nn.Module]:
    """The unsharded model, and the same with its plan."""
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    reference = small_model(name, dtype=torch.float64)
    model = shardplan.apply_plan(copy.deepcopy(reference), mesh, "auto", sequence_parallel=True, prove=False)
    return reference.train(), model.train()


def assert_same_step(reference: nn.Module, model: nn.Module) -> None:
    """Loss, and every parameter after a step of plain SGD, which is as wrong as any gradient is."""
    losses = []
    for one in (reference, model):
        optimizer = torch.optim.SGD([p for p in one.parameters() if p.requires_grad], lr=0.1)
        ids = batch(3)
        losses.append(one(input_ids=ids, labels=ids, use_cache=False).loss)
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert relative_error(whole(losses[1].detach()), losses[0].detach()) < TOLERANCE[torch.float64]
    after = model.state_dict()
    for key, value in reference.state_dict().items():
        assert relative_error(whole(after[key]), value) < TOLERANCE[torch.float64], key


def checkpointing(model: nn.Module) -> None:
    model.gradient_checkpointing_enable()


def checkpointing_off(model: nn.Module) -> None:
    model.gradient_checkpointing_enable()
    model.gradient_checkpointing_disable()


def tied(model: nn.Module) -> None:
    model.tie_weights()


def moved(model: nn.Module) -> None:
    model.to("cpu")


def narrowed(model: nn.Module) -> None:
    model.to(torch.float32).to(torch.float64)


def loaded(model: nn.Module) -> None:
    other = small_model("phi3", dtype=torch.float64)
    for parameter in other.parameters():
        parameter.data += 0.1
    assert not any(model.load_state_dict(other.state_dict()))


def frozen(model: nn.Module) -> None:
    model.requires_grad_(False)
    model.get_output_embeddings().requires_grad_(True)


def inputs_that_require_grad(model: nn.Module) -> None:
    model.enable_input_require_grads()


def resized_to_what_it_is(model: nn.Module) -> None:
    assert model.resize_token_embeddings() is model.get_input_embeddings()
    assert model.resize_token_embeddings(model.config.vocab_size) is model.get_input_embeddings()


WORKING: tuple[Callable[[nn.Module], None], ...] = (
    checkpointing,
    checkpointing_off,
    tied,
    moved,
    narrowed,
    loaded,
    inputs_that_require_grad,
    resized_to_what_it_is,
    frozen,
)


def work() -> None:
    """One after the other, on one model: each finds what the others left."""
    reference, model = planned("phi3", {"dp_shard": 2, "tp": 2})
    for change in WORKING:
        change(reference)
        change(model)
        assert_same_step(reference, model)


def test_they_work():
    on_ranks(4, work)


REFUSED: dict[str, Callable[[nn.Module], object]] = {
    "resize_token_embeddings: .* resize the embeddings before": lambda m: m.resize_token_embeddings(140),
    "resize_token_embeddings: .* before apply_plan": lambda m: m.resize_token_embeddings(pad_to_multiple_of=64),
    "set_input_embeddings: .* before": lambda m: m.set_input_embeddings(nn.Embedding(132, 64)),
    "set_output_embeddings: .* before": lambda m: m.set_output_embeddings(nn.Linear(64, 132)),
    "save_pretrained: .* call shardplan.save_checkpoint": lambda m: m.save_pretrained("never-made"),
    "under FSDP2 cannot be copied: copy it before": copy.deepcopy,
    r"under FSDP2 cannot be pickled .* shardplan.save_checkpoint\(": pickle.dumps,
    r"cannot be pickled \(pickle, torch.save\)": lambda m: torch.save(m, io.BytesIO()),
}


def refuse() -> None:
    reference, model = planned("phi3", {"dp_shard": 2, "tp": 2})
    for words, call in REFUSED.items():
        with pytest.raises(RuntimeError, match=words):
            call(model)
    assert_same_step(reference, model)  # untouched


def test_they_are_refused():
    on_ranks(4, refuse)


def copies() -> None:
    """Without FSDP2 a copy is a model of its own."""
    reference, model = planned("qwen3", {"tp": 4})
    before = {key: whole(value).clone() for key, value in model.state_dict().items()}
    assert_same_step(reference, copy.deepcopy(model))
    assert all(torch.equal(whole(value), before[key]) for key, value in model.state_dict().items())


@pytest.mark.slow
def test_a_copy_is_a_model_of_its_own():
    on_ranks(4, copies)


def saved(folder: str) -> list[str]:
    reference, model = planned("qwen3", {"dp_shard": 2, "tp": 2})
    state = {key: whole(value).clone() for key, value in model.state_dict().items()}
    if torch.distributed.get_rank() == 0:
        model.save_pretrained(folder, state_dict=state)
        again = type(reference).from_pretrained(folder).state_dict()
        return [key for key, value in reference.state_dict().items() if not torch.equal(value, again[key].double())]
    return []


def test_a_whole_state_is_saved_as_ever(tmp_path):
    assert on_ranks(4, saved, str(tmp_path)) == [[]] * 4
