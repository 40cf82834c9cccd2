"""An image on one data-parallel rank and text alone on another, under FSDP2: all ranks raise before anything runs, and go on; with a
blank image in the place of none, losses and gradients are the unsharded model's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import on_ranks, raised
from small_models import whole
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardplan
from shardplan.proof.compare import relative_error
from tests.proofs import reduced_model

Batch = dict[str, Any]
# The tower's layers as units, as the plan has them; and the whole tower in the root, whose gradients do not match.
UNITS = {
    "units": ["model.language_model.layers.*", "model.vision_tower.**.layers.*"],
    "root": ["model.language_model.layers.*"],
}


def blank_image(text: Batch, image: Batch, token: int) -> Batch:
    """The line that the message says: zeros, and image tokens after the text that count for nothing."""
    count = int((image["input_ids"] == token).sum(1).max())
    rows = len(text["input_ids"])
    filled = {"input_ids": token, "labels": -100, "attention_mask": 0}
    text = {**text, "attention_mask": text.get("attention_mask", torch.ones_like(text["input_ids"]))}
    longer = {n: torch.cat([text[n], text[n].new_full((rows, count), value)], 1) for n, value in filled.items()}
    return {**longer, "pixel_values": torch.zeros_like(image["pixel_values"])}


def difference(model: nn.Module, reference: nn.Module, batches: tuple[Batch, Batch]) -> float:
    """The largest difference of a step on two ranks: of this rank's loss, and of the gradients from the mean of the batches'."""
    losses = [reference(**one, use_cache=False).loss for one in batches]
    (sum(losses) / 2).backward()
    loss = model(**batches[dist.get_rank()], use_cache=False).loss
    loss.backward()
    worst = relative_error(loss.detach(), losses[dist.get_rank()].detach())
    for name, parameter in reference.named_parameters():
        gradient = model.get_parameter(name).grad
        assert (gradient is None) == (parameter.grad is None), name
        if parameter.grad is not None:
            worst = max(worst, relative_error(whole(gradient), parameter.grad))
    for one in (model, reference):
        one.zero_grad()
    return worst


def steps(units: list[str], sizes: tuple[int, ...], axes: tuple[str, ...]) -> list[str]:
    mesh, reduced = init_device_mesh("cpu", sizes, mesh_dim_names=axes), reduced_model("llava", 2)
    reference, model = reduced.build(), reduced.build()
    images, texts = ([reduced.inputs(seed, kind=kind) for seed in (0, 1)] for kind in ("image", "text"))
    plan = {"version": "1", "name": "mine", "extends": "llava", "data_parallel": {"units": units}}
    shardplan.apply_plan(model, mesh, plan, prove=False)
    rank, said = mesh.get_local_rank(0), []

    def mixed(**more: Any) -> Any:
        return model(**(images[0] if rank == 0 else texts[1]), use_cache=False, **more).loss

    said.append(raised(mixed))
    if dist.get_world_size() > 2:
        return said
    model.eval()
    with torch.no_grad():
        said.append(raised(mixed))
    model.train()
    token = reduced.config.image_token_id
    allowed: list[tuple[Batch, Batch]] = [
        (images[0], images[1]),
        (texts[0], texts[1]),
        # A mask on one rank alone makes no other module run.
        ({**texts[0], "attention_mask": torch.ones_like(texts[0]["input_ids"])}, texts[1]),
        (images[0], blank_image(texts[1], images[0], token)),
    ]
    for i, batches in enumerate(allowed):
        assert difference(model, reference, batches) <= 1e-5, i
    # The same on the unsharded model: the blank image changes nothing.
    with torch.no_grad():
        plain, blank = reference(**texts[1]).loss, reference(**blank_image(texts[1], images[0], token)).loss
    assert relative_error(blank, plain) <= 1e-5
    return said


def check(results: list[list[str]], without: str) -> None:
    for one in (text for result in results for text in result):
        assert "given pixel_values" in one and f"{without} given none of them" in one, one
        assert "pass a blank one (zeros)" in one


@pytest.mark.parametrize("stored", UNITS)
def test_an_image_on_one_rank_alone(stored: str) -> None:
    check(on_ranks(2, steps, UNITS[stored], (2,), ("dp_shard",), seconds=120), "rank 1 was")


@pytest.mark.slow
@pytest.mark.parametrize("axes", [("dp_shard", "tp"), ("dp_replicate", "dp_shard")])
def test_on_a_mesh_of_two_axes(axes: tuple[str, ...]) -> None:
    check(on_ranks(4, steps, UNITS["units"], (2, 2), axes, seconds=120), "ranks 2 and 3 were")


class Optional(nn.Module):
    """A model of one's own, whose image part runs for some batches alone."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.image = nn.Linear(8, 8), nn.Linear(4, 8)

    def forward(self, x: Tensor, images: list[Tensor] | None = None) -> Tensor:
        x = self.text(x)
        return x if not images else x + sum(self.image(one) for one in images)


def own(keyword: bool) -> str:
    model = Optional()
    plan = {"version": "1", "name": "mine", "data_parallel": {"units": ["image"]}}
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    shardplan.apply_plan(model, mesh, plan, prove=False)
    images = [torch.randn(2, 4)] if dist.get_rank() else []
    return raised(lambda: model(torch.randn(2, 8), images=images) if keyword else model(torch.randn(2, 8), images))


def test_a_list_of_images_in_a_model_of_ones_own() -> None:
    for keyword, name in ((True, "images"), (False, "argument 1")):
        for said in on_ranks(2, own, keyword, seconds=60):
            assert f"rank 0 was given none of them; rank 1 was given {name}." in said
