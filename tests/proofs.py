"""A model sharded by a plan, all its ranks in this process, held against the same model unsharded."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoConfig

from shardplan import applied, compile_plan, load_plan
from shardplan.compiler.lower import Program
from shardplan.compiler.lowering_stage import program_of as lowered
from shardplan.compiler.overrides import overriding_document, with_parent
from shardplan.compiler.variants import bind_variants, check_variants
from shardplan.core.diagnostics import PlanError
from shardplan.core.mesh import MeshSizes
from shardplan.core.plan import NO_OVERLAYS, overlays_of
from shardplan.core.report import Comparison
from shardplan.model import find_any, tree_of
from shardplan.model.reduced.reduced_model import ReducedModel, make_reduced_model
from shardplan.proof.compare import NEGLIGIBLE, compare, magnitude
from shardplan.proof.exact import in_precision_of
from shardplan.proof.rank import whole
from shardplan.proof.steps import cast
from shardplan.proof.threads import on_threads
from shardplan.runtime.apply.phases import apply_program
from shardplan.runtime.apply.plan_mesh import read_mesh
from shardplan.runtime.apply.state import packed_parameters
from shardplan.torchlib.private import private
from tests.simulation import on_every_rank, simulated_mesh, whole_values

torch.set_num_threads(1)

# The plans that are proven in every corner; tests/zoo proves the whole collection. Each is named like a model type.
PLANS = (
    "gemma3",
    "gemma3_text",
    "gpt2",
    "llama",
    "mistral",
    "mixtral",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
)
# Not the model type's defaults: the auxiliary loss is part of the loss; dense and sparse layers are mixed.
SETTINGS: dict[str, dict[str, Any]] = {
    "mixtral": {"output_router_logits": True},
    "qwen3_moe": {"output_router_logits": True, "mlp_only_layers": [1], "num_hidden_layers": 4},
}

Call = Callable[[nn.Module, dict[str, Any]], dict[str, Tensor | None]]


@functools.cache
def reduced_model(
    name: str, tp: int, tied: bool | None = None, attn: str | None = None, classes: str | None = None
) -> ReducedModel:
    """The reduced model type, its experts run one by one; of its `classes` variant (`LlamaModel`) if that is said."""
    found = find_any(AutoConfig.for_model(name, **SETTINGS.get(name, {})))
    if classes is not None:
        found.config.classifier_dropout = 0.0
        with torch.device("meta"):
            found = getattr(transformers, classes)(found.config)
    return make_reduced_model(found, tp=tp, tied=tied, attn_implementation=attn, experts_implementation="eager")


def step(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """The usual call: the model's own loss."""
    output = model(**inputs)
    return {"loss": output.loss, "logits": output.logits}


@dataclass(frozen=True)
class Results:
    """What a call gave, and every gradient."""

    values: Mapping[str, Any]
    gradients: Mapping[str, Any]


def unsharded(model: nn.Module, inputs: dict[str, Any], call: Call = step) -> Results:
    """Run a call and the backward of its "loss"; in float64 all of it, as the proof does."""
    with in_precision_of(model):
        values = call(model, inputs)
        if values.get("loss") is not None and values["loss"].requires_grad:
            values["loss"].backward()
    grads = {n: p.grad for n, p in model.named_parameters(remove_duplicate=False) if p.grad is not None}
    return Results({name: value.detach() for name, value in values.items()}, grads)


def program_of(
    model: nn.Module,
    plan: Any,
    tp: int,
    *,
    sequence_parallel: bool = False,
    logits: str = "plan",
    regather: bool | None = None,
    **sections: Any,
) -> Program:
    """What `compile_plan` gives, without the layout check, which refuses the plans that are wrong on purpose (and
    without the optimiser, which has nothing to do in the hand-written built-in plans: tests/test_plans_matrix.py)."""
    read = load_plan(plan).file
    if (document := overriding_document(sections)) is not None:
        read = with_parent(load_plan(document).file, read)
    variants = check_variants(
        bind_variants(read, tree_of(model), MeshSizes(tp=tp), {NO_OVERLAYS, overlays_of(sequence_parallel)})
    )
    if variants.any_error:
        raise PlanError(variants.all_findings)
    return lowered(variants, overlays_of(sequence_parallel), logits=logits, regather=regather, sections=sections)


def planned(
    model: nn.Module, mesh: DeviceMesh, plan: Any, *, src_data_rank: int | None = None, **options: Any
) -> nn.Module:
    """What `apply_plan` does, with `program_of`."""
    program = program_of(model, plan, mesh.size(), **options)
    apply_program(model, read_mesh(mesh), program, src_data_rank=src_data_rank)
    return model


def optimised(model: nn.Module, mesh: DeviceMesh, plan: Any, **options: Any) -> nn.Module:
    """What `apply_plan` does with ranks that all live here: with the layout check and the optimiser."""
    program = compile_plan(model, {"tp": mesh.size()}, plan, **options)
    apply_program(model, read_mesh(mesh), program, src_data_rank=None)
    return model


@contextmanager
def on_ranks(model: nn.Module, plan: Any, tp: int, **options: Any) -> Iterator[nn.Module]:
    """The model sharded over simulated ranks, while the context lasts."""
    program = program_of(model, plan, tp, **options)
    with simulated_mesh(tp) as mesh:
        apply_program(model, read_mesh(mesh), program, src_data_rank=0)
        yield model


def ranked(inputs: Mapping[str, Any], tp: int) -> dict[str, Any]:
    """Inputs as every rank's own copy. Make them before the simulation starts, in which random numbers differ by rank."""
    return {name: on_every_rank(value, tp) for name, value in inputs.items()}


def collect(model: nn.Module, values: Mapping[str, Tensor]) -> Results:
    """Each rank's values and gradients; those of packed parameters in the original order."""
    packed = packed_parameters(applied(model).program)
    grads = {
        n: whole_values(p.grad, packed.get(n))
        for n, p in model.named_parameters(remove_duplicate=False)
        if p.grad is not None
    }
    return Results({name: list(whole_values(value)) for name, value in values.items()}, grads)


def sharded(
    build: Callable[[], nn.Module],
    inputs: dict[str, Any],
    plan: Any,
    tp: int,
    call: Call = step,
    compiled: Callable[..., Program] = program_of,
    **options: Any,
) -> Results:
    """`unsharded` on ranks that are threads; each rank's results, whole."""
    models = [build() for _ in range(tp)]
    program = compiled(models[0], plan, tp, **options)
    packed = packed_parameters(program)

    def of_rank(rank: int) -> Results:
        mesh, model = init_device_mesh("cpu", (tp,), mesh_dim_names=("tp",)), models[rank]
        apply_program(model, read_mesh(mesh), program, src_data_rank=0)
        found = unsharded(model, copy.deepcopy(inputs), call)
        return Results(
            {name: whole(value) for name, value in found.values.items()},
            {name: whole(value, packed.get(name), tp) for name, value in found.gradients.items()},
        )

    with in_precision_of(models[0]):  # the default dtype is no thread's own
        found = on_threads(tp, of_rank)
    return Results(_by_name([one.values for one in found]), _by_name([one.gradients for one in found]))


def _by_name(ranks: list[Mapping[str, Tensor]]) -> dict[str, list[tuple[str, Tensor]]]:
    """What each rank has. A rank that has not what others have differs from them."""
    names = {name: None for one in ranks for name in one}
    missing = torch.full((), float("nan"))
    return {name: [(f"rank {i}", one.get(name, missing)) for i, one in enumerate(ranks)] for name in names}


def compare_results(reference: Results, result: Results) -> tuple[Comparison, ...]:
    """By the one definition of equal. A gradient that only one of the two has differs."""
    assert reference.values.keys() == result.values.keys()
    rows = [compare(n, "output", result.values[n], reference.values[n]) for n in reference.values]
    floor = NEGLIGIBLE * max((magnitude(g) for g in reference.gradients.values()), default=0.0)
    for name in sorted(reference.gradients.keys() | result.gradients.keys()):
        if name in reference.gradients and name in result.gradients:
            rows.append(compare(name, "gradient", result.gradients[name], reference.gradients[name], floor))
        else:
            rows.append(Comparison(name, "gradient", float("inf"), "every rank", "differs"))
    return tuple(rows)


@dataclass(frozen=True)
class Case:
    """A model, what it is called with, and a plan.

    Args:
        build: makes the model, each time with the same weights.
        inputs: keyword arguments.
        plan: anything that `load_plan` takes.
        tp: the number of ranks.
        call: what is done with the model; the entry "loss" of its result is run backward.
        options: further arguments of `program_of`.
        prepare: is done to a fresh model before anything else (freezing, ...).
        compiled: makes the program, of (model, plan, tp, options).
    """

    build: Callable[[], nn.Module]
    inputs: Mapping[str, Any]
    plan: Any
    tp: int
    call: Call = step
    options: Mapping[str, Any] = field(default_factory=dict)
    prepare: Callable[[nn.Module], Any] = lambda model: None
    compiled: Callable[..., Program] = program_of

    def model(self, dtype: torch.dtype) -> nn.Module:
        model = self.build().to(dtype)
        self.prepare(model)
        return model

    def rows_in(self, dtype: torch.dtype) -> tuple[Comparison, ...]:
        inputs = cast(self.inputs, dtype)
        reference = unsharded(self.model(dtype), copy.deepcopy(inputs), self.call)
        build = functools.partial(self.model, dtype)
        result = sharded(build, inputs, self.plan, self.tp, self.call, self.compiled, **self.options)
        return compare_results(reference, result)

    def rows(self) -> tuple[Comparison, ...]:
        """In float32; what differs there is decided in float64."""
        rows = self.rows_in(torch.float32)
        if all(row.verdict != "differs" for row in rows):
            return rows
        exact = {row.name: row for row in self.rows_in(torch.float64)}
        return tuple(exact[row.name] if row.verdict == "differs" else row for row in rows)

    def wrong(self) -> dict[str, float]:
        """What differs by more than rounding in float32: for a case that is meant to be wrong."""
        return {name: error for name, error in differing(self.rows_in(torch.float32)).items() if error > 1e-4}


def case(
    name: str,
    tp: int = 2,
    *,
    sp: bool = False,
    tied: bool | None = None,
    logits: str = "plan",
    attn: str | None = None,
    plan: Any = None,
    classes: str | None = None,
    kind: str | None = None,
    padding: str | None = None,
    inputs: Mapping[str, Any] | None = None,
    call: Call = step,
    prepare: Callable[[nn.Module], Any] = lambda model: None,
    **options: Any,
) -> Case:
    """A built-in plan (or another one) on the reduced model of the model type of that name."""
    small = reduced_model(name, tp, tied, attn, classes)
    feed = small.inputs(kind=kind, padding=padding) if inputs is None else inputs
    options = {"sequence_parallel": sp, "logits": logits, **options}
    return Case(small.build, feed, plan or name, tp, call, options, prepare)


def differing(rows: tuple[Comparison, ...]) -> dict[str, float]:
    """The names of what differs, with the errors."""
    return {row.name: row.error for row in rows if row.verdict == "differs"}


def assert_equal(rows: tuple[Comparison, ...]) -> None:
    """Nothing differs, and the loss, or else some value, and a gradient are proven."""
    assert differing(rows) == {}
    assert any(row.verdict == "equal" for row in rows)


def plan_like(name: str, tensor_parallel: Mapping[str, Any] = {}, sequence_parallel: Mapping[str, Any] = {}) -> dict:
    """A child of a built-in plan with other rules."""
    document = {"version": "1", "name": f"edited-{name}", "models": [name], "extends": name}
    sections = {"tensor_parallel": dict(tensor_parallel), "sequence_parallel": dict(sequence_parallel)}
    return {**document, **{section: rules for section, rules in sections.items() if rules}}


@contextmanager
def fake_mesh(*shape: int, names: tuple[str, ...] = ("tp",)) -> Iterator[DeviceMesh]:
    """A mesh on the process group `fake`. This process is rank 0; collectives return at once, and their results
    mean nothing."""
    private("fake_pg")
    world = functools.reduce(int.__mul__, shape)
    dist.init_process_group("fake", rank=0, world_size=world)
    try:
        yield init_device_mesh("cpu", shape, mesh_dim_names=names)
    finally:
        dist.destroy_process_group()


def dtensors(model: nn.Module) -> dict[str, DTensor]:
    """The parameters by name, all DTensors."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    assert all(isinstance(p, DTensor) for p in parameters.values())
    return parameters
