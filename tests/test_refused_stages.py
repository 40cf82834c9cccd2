"""What `apply_plan` with stages and a step refuse, each with its message; no ranks are needed. docs/pipelines-refused.md lists them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

import shardplan
from shardplan.core.schedules import SCHEDULES
from shardplan.runtime.pipeline import layout_of_stages
from shardplan.runtime.pipeline.layout_of_stages import stage_sizes
from shardplan.runtime.pipeline.micro_batch_inputs import REFUSED, read_inputs
from shardplan.runtime.pipeline.pipeline_options import PipelineOptions
from shardplan.runtime.pipeline.refused_plans import for_stages

SETTINGS = {"num_hidden_layers": 4}


def program(**sections: Any) -> Any:
    plan = {"version": "1", "name": "mine", "extends": "llama", **sections}
    return shardplan.compile_plan(shardplan.Model("llama", settings=SETTINGS), {"tp": 2, "dp_shard": 2}, plan)


def with_backend(name: str) -> Any:
    """As compiled where that backend is installed, and on a mesh that it works on."""
    made = program()
    section = replace(made.resolved.data_parallel, backend=name)
    return replace(made, resolved=replace(made.resolved, data_parallel=section))


NO_SECTION = {"pipeline_parallel": {"layers": "none"}}


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (lambda: program(**NO_SECTION), "plan 'mine' has no section pipeline_parallel: add one, or pass"),
        (lambda: with_backend("megatron_fsdp"), "stages do not work with the backend megatron_fsdp"),
    ],
    ids=["no section", "megatron_fsdp"],
)
def test_plans_that_stages_cannot_run(made: Callable[[], Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        for_stages(made(), wrapped=True)


@pytest.mark.parametrize(
    ("schedule", "options", "text"),
    [
        ("1f1b", {"pp": 8}, "the model has 4 blocks, too few for 8 stages (pp 8, schedule 1f1b)"),
        ("interleaved", {"pp": 4}, "the model has 4 blocks, too few for 8 stages (pp 4, schedule interleaved)"),
        ("1f1b", {"stages_per_rank": 2}, "1f1b has 1 stage on each rank, not 2"),
        ("gpipe", {"stages_per_rank": 3}, "gpipe has 1 stage on each rank, not 3"),
        ("1f1b", {"micro_batches": 1}, "1f1b needs a micro-batch for each of its 2 stages, there are 1"),
        (
            "interleaved",
            {"micro_batches": 5},
            "interleaved runs micro-batches in rounds of at least pp = 2: 5 of them are not 2 rounds of one size",
        ),
        ("gpipe", {"sizes": [1, 1, 1, 1]}, "gpipe has 1 stage on each rank, not 2"),
        (
            "gpipe",
            {"pp": 2, "sizes": [1, 1, 2]},
            "pipeline_parallel has sizes for 3 stages, but the schedule gpipe has 2",
        ),
    ],
)
def test_numbers_that_do_not_fit(schedule: str, options: dict[str, Any], text: str) -> None:
    pp, sizes = options.pop("pp", 2), options.pop("sizes", None)
    given = {"stages_per_rank": None, "micro_batches": 8} | options
    section = {"layers": "model.layers.*"} | ({"sizes": sizes} if sizes else {})
    resolved = program(pipeline_parallel=section).resolved
    with pytest.raises(ValueError) as told:
        stage_sizes(resolved, SCHEDULES[schedule], pp, **given)
    assert str(told.value).startswith(text)


def test_sizes_by_the_section() -> None:
    """As the plan says, or even: what is left over goes to stages that have neither the embedding nor the head."""
    resolved = replace(program().resolved, pp_blocks=tuple(f"model.layers.{i}" for i in range(11)))
    one, two = SCHEDULES["1f1b"], SCHEDULES["interleaved"]
    assert stage_sizes(resolved, one, 4, None, 8) == (3, 3, 3, 2)
    assert stage_sizes(resolved, one, 3, None, 8) == (4, 4, 3)
    assert stage_sizes(resolved, two, 4, None, 8) == (1, 2, 2, 2, 1, 1, 1, 1)
    assert len(stage_sizes(resolved, two, 2, 3, 8)) == 6
    own = replace(resolved, pipeline_parallel=replace(resolved.pipeline_parallel, sizes=(4, 4, 1, 2)))
    assert stage_sizes(own, one, 4, None, 8) == stage_sizes(own, two, 2, None, 8) == (4, 4, 1, 2)


def test_fewer_micro_batches_than_stages_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout_of_stages, "layout_on", lambda mesh, cut, schedule: cut)
    mesh: Any = SimpleNamespace(pp=SimpleNamespace(size=lambda: 4))
    resolved = program(pipeline_parallel={"layers": "model.layers.*"}).resolved
    with pytest.warns(UserWarning, match="2 micro-batches for 4 stages: some stages wait all the time; use at least 4"):
        cut: Any = layout_of_stages.lay_out(mesh, resolved, SCHEDULES["gpipe"], None, 2)
    assert cut.stages == 4


@pytest.mark.parametrize(
    ("schedule", "micro_batches", "error", "text"),
    [
        ("2f2b", 4, ValueError, "there is no pipeline schedule '2f2b'"),
        (3, 4, TypeError, "schedule must be a name, not 3"),
        ("1f1b", 0, ValueError, "micro_batches must be at least 1, not 0"),
        ("1f1b", 2.0, TypeError, "micro_batches must be a whole number, not 2.0"),
        ("1f1b", True, TypeError, "micro_batches must be a whole number, not True"),
    ],
)
def test_schedules_and_micro_batches_that_are_none(
    schedule: Any, micro_batches: Any, error: type[Exception], text: str
) -> None:
    with pytest.raises(error) as told:
        PipelineOptions(schedule, micro_batches)
    assert str(told.value).startswith(text)


IDS = torch.zeros(8, 4, dtype=torch.long)
BOUNDS = torch.tensor([0, 4, 9, 12, 16, 20, 27, 32])


@pytest.mark.parametrize("name", REFUSED)
def test_arguments_without_a_meaning_for_a_stage(name: str) -> None:
    with pytest.raises(ValueError) as told:
        read_inputs({"input_ids": IDS, name: True}, 4)
    assert str(told.value) == f"{name} in a pipeline step: {REFUSED[name]}"
    assert name not in read_inputs({"input_ids": IDS, name: None}, 4).tensors


@pytest.mark.parametrize("cache", [DynamicCache(), {"of": [EncoderDecoderCache(DynamicCache(), DynamicCache())]}])
def test_a_cache_is_refused_under_any_name(cache: Any) -> None:
    """transformers 5.24 renames `past_key_values`, and models of one's own have names of their own."""
    with pytest.raises(ValueError) as told:
        read_inputs({"input_ids": IDS, "memory": cache}, 4)
    assert str(told.value) == f"memory in a pipeline step: {REFUSED['past_key_values']}"


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        ({}, "a pipeline step needs the batch by keywords: input_ids=..., labels=..."),
        ({"input_ids": IDS[:6]}, "input_ids has 6 rows, which 4 micro-batches do not divide"),
        ({"input_ids": IDS[0, 0]}, "input_ids has 0 rows, which 4 micro-batches do not divide"),
        (
            {"input_ids": IDS, "position_ids": torch.zeros(3, 8, 4)},
            "position_ids has the shape (3, 8, 4): its first dim must be the batch of 8 rows, or 1",
        ),
        ({"input_ids": IDS, "cu_seq_lens_q": BOUNDS}, "cu_seq_lens_q (8,) has the bounds of packed sequences"),
        ({"input_ids": IDS, "bounds": BOUNDS}, "bounds (8,) has the bounds of packed sequences"),
        ({"input_ids": IDS, "mask": IDS[:, :2] < 1, "lengths": BOUNDS // 2}, "lengths (8,) has the bounds of packed"),
    ],
)
def test_batches_that_cannot_be_divided(inputs: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError) as told:
        read_inputs(inputs, 4)
    assert str(told.value).startswith(text)


def test_numbers_of_a_row_each_are_cut_and_one_micro_batch_gets_all() -> None:
    """Ids of examples ascend from 0 too."""
    given = {"input_ids": IDS, "example": torch.arange(8), "advantages": torch.arange(8.0)}
    assert [part["example"].tolist() for part in read_inputs(given, 4).split(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    packed = {"input_ids": IDS, "cu_seq_lens_q": torch.tensor([0, 30, 32])}
    (whole,) = read_inputs(packed, 1).split(1)
    assert whole["cu_seq_lens_q"].tolist() == [0, 30, 32]


def test_bounds_within_each_row_are_those_of_every_micro_batch() -> None:
    given = read_inputs({"input_ids": IDS, "cu_seq_lens_q": torch.tensor([0, 1, 2, 2, 3, 3, 4, 4])}, 4)
    assert given.constants["cu_seq_lens_q"].tolist() == [0, 1, 2, 2, 3, 3, 4, 4] and [*given.tensors] == ["input_ids"]
