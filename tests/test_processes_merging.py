"""One reduction for all readers of a value and for all that is added up, in real processes, eager and compiled: every gradient
on every rank is the unsharded model's."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from merging_models import JOINT, SPLIT, SUMMED, Joint, Stack, document, inputs_of, made
from processes import on_ranks
from sampling import sampled
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import shardplan
from shardplan.proof.compare import relative_error
from tests.collective_counter import CollectiveCounter

BUILDS = {"joint": (Joint, JOINT), "reads": (Stack, SPLIT), "sums": (Stack, SUMMED)}


def trained(kind: str, mode: str, sections: dict[str, Any]) -> tuple[dict[str, float], Counter, Counter]:
    """On one rank: what differs, and the collectives of forward and backward."""
    torch._dynamo.reset()  # these processes serve many tests
    build, rules = BUILDS[kind]
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("tp",))
    model, reference = made(build, mode), made(build, mode)
    shardplan.apply_plan(
        shardplan.Model(model, inputs=lambda seed: inputs_of(build)),
        mesh,
        document(rules),
        allow_unproven=True,
        check_inputs=False,
        **sections,
    )
    with counting(sections) as forward:
        result = model(**inputs_of(build))
    with counting(sections) as backward:
        result.pow(2).mean().backward()
    whole = reference(**inputs_of(build))
    whole.pow(2).mean().backward()
    errors = {"result": relative_error(result.detach(), whole.detach())}
    for name, parameter in reference.named_parameters():
        mine = model.get_parameter(name).grad
        if parameter.grad is None or mine is None:
            errors[name] = 0.0 if parameter.grad is mine is None else float("inf")
        else:
            mine = mine.full_tensor() if isinstance(mine, DTensor) else mine
            errors[name] = relative_error(mine, parameter.grad)
    return {n: e for n, e in errors.items() if e > 1e-5}, forward.counts, backward.counts


def counting(sections: dict[str, Any]) -> Any:
    """torch.compile compiles nothing while somebody looks at operations."""
    return nullcontext(SimpleNamespace(counts=Counter())) if "compile" in sections else CollectiveCounter()


def run(kind: str, mode: str = "", **sections: Any) -> tuple[Counter, Counter]:
    """The collectives of the first rank's forward and backward."""
    results = on_ranks(2, trained, kind, mode, sections)
    assert [errors for errors, *_ in results] == [{}, {}]
    return results[0][1:]


@pytest.mark.slow
def test_joint_attention() -> None:
    forward, backward = run("joint")
    assert forward == Counter(all_reduce=4) and backward == Counter(all_reduce=4)


@pytest.mark.slow
@pytest.mark.parametrize("modules", sampled([["blocks.*"], ["blocks.*.attention"]], 1), ids=["blocks", "parts"])
def test_joint_attention_compiled(modules: list[str]) -> None:
    """The readers are in the graph of their block, or in one inside it, where the block's table is outside."""
    run("joint", compile={"modules": modules, "backend": "aot_eager"})


@pytest.mark.slow
@pytest.mark.parametrize("modules", [["blocks.*"], ["blocks.*.{first,second}"]], ids=["blocks", "parts"])
@pytest.mark.parametrize("kind", ["reads", "sums"])
def test_parts_compiled(kind: str, modules: list[str]) -> None:
    run(kind, compile={"modules": modules, "backend": "aot_eager"})


@pytest.mark.slow
@pytest.mark.parametrize(
    "modules", [["blocks.*"], ["blocks.*.first"], ["blocks.*.second"]], ids=["blocks", "first", "second"]
)
@pytest.mark.parametrize("kind", ["reads", "sums"])
def test_parts_recomputed(kind: str, modules: list[str]) -> None:
    run(kind, activation_checkpointing={"modules": modules})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        *(
            ("reads", mode)
            for mode in ("third", "skip first", "skip second", "checkpoint first", "checkpoint first reentrant")
        ),
        *(("sums", mode) for mode in ("third", "skip first")),
    ],
)
def test_branches_with_more_and_fewer_readers(kind: str, mode: str) -> None:
    run(kind, mode)
