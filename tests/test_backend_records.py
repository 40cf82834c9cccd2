"""A backend is its record: one that exists in these tests alone, and every reader of a field follows it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer

from shardplan.compiler.bind import bind
from shardplan.compiler.check import check
from shardplan.compiler.lowering_stage import program_of
from shardplan.compiler.variants import bind_variants
from shardplan.core.mesh import MeshSizes
from shardplan.core.plan import NO_OVERLAYS, PlanFile, ResolvedPlan, overlays_of
from shardplan.cost.estimate import estimate_mesh
from shardplan.language import json_schema, parse_plan
from shardplan.language.inherit import effective_sections
from shardplan.model import tree_of
from shardplan.runtime.apply import applied, phases
from shardplan.runtime.apply.backends import FUNCTIONS, Functions
from shardplan.runtime.apply.plan_mesh import read_mesh
from shardplan.runtime.apply.wrapped import Wrapped
from shardplan.styles.backends import BACKENDS, Backend
from tests.proofs import fake_mesh

PACKAGE = Path(__file__).parent.parent / "shardplan"
ALL = frozenset({"dp_replicate", "dp_shard", "cp", "tp"})
PLAIN = Backend(name="made_up", summary="", fields=frozenset({"units", "frozen"}), splits=ALL)


class Scaled(nn.Module):
    """With a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.norm(self.first(x))) * self.scale


def made_up(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Backend:
    backend = replace(PLAIN, **changes)
    monkeypatch.setitem(BACKENDS, backend.name, backend)
    return backend


def plan_of(section: Mapping[str, Any], rules: Mapping[str, str] | None = None) -> PlanFile:
    document = {"version": "1", "name": "mine", "data_parallel": dict(section), "tensor_parallel": dict(rules or {})}
    plan = parse_plan(document).plan
    return replace(plan, data_parallel=replace(plan.data_parallel, backend="made_up"))


def resolved(section: Mapping[str, Any], model: nn.Module | None = None, **sizes: int) -> ResolvedPlan:
    rules = sizes.pop("rules", None)
    plan = plan_of(section, rules)
    bound, about = bind(plan, tree_of(model or Scaled()), MeshSizes(**{"tp": 1, **sizes}))
    assert not about
    return bound


def codes(plan: ResolvedPlan) -> set[str]:
    return {found.code for found in check(plan) if found.is_error}


def test_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    section = {"mixed_precision": {"param": "bfloat16"}}
    made_up(monkeypatch)
    assert codes(resolved(section, dp_shard=2)) == {"SP554"}
    for allowed in ("fields", "idle"):
        made_up(monkeypatch, **{allowed: frozenset({"mixed_precision"})})
        assert codes(resolved(section, dp_shard=2)) == set()


def test_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    for axis in ("dp_replicate", "dp_shard", "cp"):
        made_up(monkeypatch, splits=ALL - {axis})
        assert codes(resolved({}, **{axis: 2})) - {"SP372"} == {"SP552"}  # nor has it rules for cp
        assert codes(resolved({})) == set()


def test_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether parameters are replaced, which hooks on them do not outlive."""
    model = Scaled()
    model.scale.register_hook(lambda gradient: gradient)
    made_up(monkeypatch)
    assert codes(resolved({}, model, dp_replicate=2)) == {"SP525"}
    made_up(monkeypatch, splits=frozenset({"dp_replicate"}))
    assert codes(resolved({}, model, dp_replicate=2)) == set()


def test_package(monkeypatch: pytest.MonkeyPatch) -> None:
    made_up(monkeypatch, module="no_such_module", package="no-such-package")
    (found,) = check(resolved({}, dp_shard=2))
    assert found.code == "SP551" and "no-such-package" in found.message and "pip install" in found.help


@pytest.mark.parametrize("refused", ["sequence_parallel", "partial_gradients"])
def test_what_it_is_not_combined_with(monkeypatch: pytest.MonkeyPatch, refused: str) -> None:
    rules = {"norm": "replicated_with_grad_allreduce"} if refused == "partial_gradients" else {}
    for works in (True, False):
        made_up(monkeypatch, **{refused: works})
        plan = replace(
            resolved({}, rules=rules, dp_shard=2, tp=2), overlays=overlays_of(refused == "sequence_parallel")
        )
        assert ("SP555" in codes(plan)) == (not works)


def test_fully_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    for shards in (False, True):
        made_up(monkeypatch, fully_shard=shards, fields=frozenset({"reshard_after_forward"}))
        assert codes(resolved({"reshard_after_forward": 3}, dp_shard=8)) == ({"SP333"} if shards else set())


def test_units_by_class(monkeypatch: pytest.MonkeyPatch) -> None:
    for by_class in (False, True):
        made_up(monkeypatch, units_by_class=by_class)
        assert codes(resolved({"units": ["first"]}, dp_shard=2)) == ({"SP556"} if by_class else set())


def test_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Scaled()
    model.norm.requires_grad_(False)
    for parts in (False, True):
        made_up(monkeypatch, parts=parts)
        plan = resolved({"units": ["first", "second"], "frozen": "own"}, model, dp_shard=2)
        assert plan.dp_parts == (("norm",) if parts else ())


def test_traceable(monkeypatch: pytest.MonkeyPatch) -> None:
    made_up(monkeypatch)
    plan = resolved({}, dp_shard=2)
    program = replace(program_without_rules(plan), resolved=plan)
    with pytest.raises(ValueError, match="supports the data-parallel backend fsdp2, not made_up"):
        estimate_mesh(None, program, None, None)
    made_up(monkeypatch, traceable=True)
    with pytest.raises(AttributeError):  # of the model, which is not there: it is asked next
        estimate_mesh(None, program, None, None)


def program_without_rules(plan: ResolvedPlan) -> Any:
    variants = bind_variants(plan.plan, plan.tree, plan.sizes, {NO_OVERLAYS})
    return program_of(variants, NO_OVERLAYS, logits="plan", regather=None, sections={})


@pytest.fixture
def wrapping(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[tuple[str, ...], Wrapped]]]:
    """Calls of the backend's function: the names of its mesh's dims, and what it was told."""
    calls: list[tuple[tuple[str, ...], Wrapped]] = []

    def wrap(model: nn.Module, mesh: Any, section: Any, names: Wrapped) -> nn.Module:
        calls.append((mesh.mesh_dim_names, names))
        return nn.Sequential(model) if BACKENDS["made_up"].wraps else model

    monkeypatch.setitem(FUNCTIONS, "made_up", Functions(wrap, optimizer))
    yield calls


def optimizer(given: Optimizer) -> Optimizer:
    given.made_to_work = True
    return given


def applied_on(*axes: str) -> tuple[nn.Module, Any]:
    model = Scaled()
    with fake_mesh(*(2 for _ in axes), names=axes) as mesh:
        plan = resolved({"units": ["first"]}, model, **dict.fromkeys(axes, 2))
        program = replace(program_without_rules(plan), resolved=plan)
        return model, phases.apply_program(model, read_mesh(mesh), program, src_data_rank=None)


@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("joint", [False, True])
def test_the_mesh_that_its_function_gets(
    monkeypatch: pytest.MonkeyPatch, wrapping: list[Any], hybrid: bool, joint: bool
) -> None:
    made_up(monkeypatch, hybrid=hybrid, joint_group=joint)
    applied_on("dp_replicate", "dp_shard")
    ((dims, names),) = wrapping
    assert dims == (("dp_replicate", "dp_shard") if hybrid else ("dp_replicate_dp_shard",))
    assert (names.joint is not None) == (hybrid and joint) and names.units == ("first",)


def test_nothing_that_wraps_data_parallel_ranks_is_an_error(
    monkeypatch: pytest.MonkeyPatch, wrapping: list[Any]
) -> None:
    made_up(monkeypatch, splits=frozenset({"dp_replicate", "tp"}))
    with pytest.raises(
        RuntimeError, match="2 data-parallel ranks, but the backend made_up would wrap the model over none"
    ):
        applied_on("dp_shard")
    assert not wrapping


def test_device(monkeypatch: pytest.MonkeyPatch, wrapping: list[Any]) -> None:
    made_up(monkeypatch, device="cuda")
    with pytest.raises(RuntimeError, match="the backend made_up needs a mesh of cuda devices"):
        applied_on("dp_shard")
    assert not wrapping


@pytest.mark.parametrize("wraps", [False, True])
def test_wraps(monkeypatch: pytest.MonkeyPatch, wrapping: list[Any], wraps: bool) -> None:
    made_up(monkeypatch, wraps=wraps)
    model, result = applied_on("dp_shard")
    assert (result is not model) == wraps
    sgd = SGD(model.parameters())
    assert applied(result).wrap_optimizer(sgd) is sgd and sgd.made_to_work


def test_the_schema_names_every_backend() -> None:
    field = json_schema()["$defs"]["DataParallelFields"]["properties"]["backend"]
    assert field["enum"] == list(BACKENDS) == list(FUNCTIONS)
    assert all(f"`{name}`: {backend.summary}." in field["description"] for name, backend in BACKENDS.items())
    assert effective_sections(plan_of({})).data_parallel.backend == "made_up"


def asks_by_name(source: str) -> list[int]:
    """The lines that compare something with the name of a backend, or match it."""
    found = []
    for node in ast.walk(ast.parse(source)):
        compared = (node.left, *node.comparators) if isinstance(node, ast.Compare) else ()
        compared = (node.value,) if isinstance(node, ast.MatchValue) else compared
        constants = (one for part in compared for one in ast.walk(part) if isinstance(one, ast.Constant))
        found += [one.lineno for one in constants if one.value in BACKENDS]
    return found


def test_no_code_asks_for_a_backend_by_name() -> None:
    """Apart from the fields of `data_parallel` that are called like one: its options."""
    allowed = {"compiler/check/backend.py": 1}
    found = {str(path.relative_to(PACKAGE)): len(asks_by_name(path.read_text())) for path in PACKAGE.rglob("*.py")}
    assert {name: count for name, count in found.items() if count} == allowed
    assert asks_by_name('section.backend in ("fsdp2", "ddp")') == [1, 1]
    assert asks_by_name('match backend:\n    case "ddp":\n        pass') == [2]
