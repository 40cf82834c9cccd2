"""The layouts of a rank's run, typed by another engine: Meta's `spmd_types` in its local mode.

The run is ours (a rank's shards, the moves' results put in its place), the types of parameters and moves are those of the
style records; how types go through operations is decided by `spmd_types` alone. Its V has no dim, and it does not compare
values, so it sees mistakes of gradients (I against R) and of unreduced sums, not of slices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import spmd_types as spmd
import torch
import torch.distributed as dist
from spmd_types import checker
from spmd_types._type_attr import set_local_type
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardplan.compiler.layout import RecordedModel
from shardplan.compiler.layout.rank_run import RankRecorder, chosen_arguments, rank_model
from shardplan.compiler.layout.typed_modules import boundaries, outside_in
from shardplan.core.layout import Layout, R
from shardplan.core.plan import ResolvedPlan
from shardplan.core.tree import full_name
from shardplan.model.reduced.nests import tensors_in
from shardplan.styles.bound import BoundModule
from shardplan.torchlib.private import private

TYPES = {"I": spmd.I, "R": spmd.R, "V": spmd.V, "P": spmd.P}


# Linear, in reduced models, in what may be a summand (copies have no dropout and one dtype; a look-up is linear in its
# table); the engine has no rule for them.
LINEAR = ("to", "dropout", "embedding")


class Misfit(Exception):
    """What arrives at a boundary is of another type than its style takes."""


class Typed(RankRecorder):
    """A rank's run under the other engine. Set `axis` before it runs."""

    axis: spmd.MeshAxis

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.misfits: dict[int, tuple[Tensor, str]] = {}  # told where they are read: some arguments never are

    def type_of(self, tensor: Tensor) -> Any:
        return next(iter((spmd.get_local_type(tensor) or {}).values()), None)

    def give(self, tensor: Tensor, kind: Any) -> None:
        set_local_type(tensor, {self.axis: kind})

    def _new(self, tensor: Tensor, *made_from: Any, **options: Any) -> int:
        with spmd.no_typecheck():
            return super()._new(tensor, *made_from, **options)

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        operands = [*tensors_in(args), *tensors_in(kwargs or {})]
        self._type_constants(operands)
        partial = [t for t in operands if self.type_of(t) is spmd.P]
        if partial and getattr(func, "__name__", "") in LINEAR:
            with spmd.no_typecheck():
                result = super().__torch_function__(func, types, args, kwargs)
            self.give(result, spmd.P)
            return result
        result = super().__torch_function__(func, types, args, kwargs)
        for tensor in operands:
            if id(tensor) in self.misfits and any(one.requires_grad for one in tensors_in(result)):
                raise Misfit(self.misfits[id(tensor)][1])
        return result

    def _type_constants(self, operands: list[Tensor]) -> None:
        """What needs no gradient (ids, masks, tables) fits in anywhere: R, or I among what is I."""
        grads = {self.type_of(t) for t in operands if t.requires_grad and torch.is_grad_enabled()}
        free = spmd.I if grads == {spmd.I} else spmd.R
        for tensor in operands:
            kind, base = self.type_of(tensor), tensor._base
            if kind is None and tensor.requires_grad and base is not None:
                self.give(tensor, self.type_of(base) or free)
            elif kind is None or (not tensor.requires_grad and kind in (spmd.I, spmd.R)):
                self.give(tensor, free)

    def moved_arguments(self, scope: tuple[str, int], module: nn.Module, named: dict[str, Any]) -> dict[str, Tensor]:
        bound = self.plan[scope[0]]
        with spmd.no_typecheck():
            moved = super().moved_arguments(scope, module, named)
        for one in bound.boundary.inputs:
            for name in chosen_arguments(bound, one, module, named):
                inside = moved.get(name, named[name])
                if (misfit := self._misfit(named[name], one.sources, f"{bound.name} takes")) is not None:
                    self.misfits[id(inside)] = inside, misfit
                if named[name].requires_grad:  # ids have no type
                    self.give(inside, TYPES[one.destination.kind])
        return moved

    def settle_choice(self, *about: Any) -> None:
        with spmd.no_typecheck():
            super().settle_choice(*about)

    def moved_results(
        self, scope: tuple[str, int], module: nn.Module, results: list[tuple[str, Tensor]]
    ) -> dict[int, Tensor]:
        bound = self.plan[scope[0]]
        output = bound.boundary.output
        with spmd.no_typecheck():
            moved = super().moved_results(scope, module, results)
        if output is not None:
            if (misfit := self._misfit(results[0][1], (output.source,), f"{bound.name} computes")) is not None:
                raise Misfit(misfit)
        if output is not None and output.moves:
            waits = bound.scope is not None and self.runs_inside(bound.scope)
            self.give(moved.get(0, results[0][1]), TYPES["P" if waits else output.destination.kind])
        for position in outside_in(bound, [name for name, _ in results]):
            self.give(moved[position], spmd.I)
        return moved

    def _misfit(self, tensor: Tensor, layouts: tuple, what: str) -> str | None:
        """A local product over split features is V to the engine; a style says that it is a partial sum."""
        wanted, kind = {layout.kind for layout in layouts}, self.type_of(tensor)
        fits = kind in {TYPES[one] for one in wanted} or (kind is spmd.V and "P" in wanted)
        return None if fits or not tensor.requires_grad else f"{what} {' or '.join(sorted(wanted))}, not {kind}"


@contextmanager
def _mesh(ranks: int) -> Iterator[DeviceMesh]:
    private("fake_pg")
    dist.init_process_group("fake", rank=0, world_size=ranks)
    try:
        yield init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
    finally:
        dist.destroy_process_group()


def _decided(one: BoundModule, found: Layout) -> BoundModule:
    """The module with what is handed on where its readers decide on that."""
    output = one.boundary.output
    if output is None or not output.unresolved_gradient:
        return one
    return replace(one, boundary=replace(one.boundary, output=replace(output, destination=found)))


def reason(recorded: RecordedModel, plan: ResolvedPlan, incoming: Mapping[str, Layout]) -> str:
    """What the other engine says against a plan; empty where nothing.

    Args:
        incoming: of the layout check, which has chosen what a gathered value is, where its readers decide on that.
    """
    ranks, plan = plan.sizes.tp, replace(plan, incoming=incoming)  # some gradients follow what comes in
    bound = {name: _decided(one, incoming.get(name, R)) for name, one in boundaries(plan).items()}
    with _mesh(ranks) as mesh:
        model = rank_model(recorded.model, bound, ranks, 0)
        run = Typed(model, recorded.atoms, bound, recorded.reference, ranks, 0)
        run.axis = spmd.MeshAxis.of(mesh.get_group("tp"))
        held = {full_name(b.name, p.name): p for b in bound.values() for p in b.parameters}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            run.give(parameter, getattr(spmd, held[name].computed.kind))
        with spmd.set_current_mesh(mesh), checker.typecheck():
            output = run.run(recorded.inputs)
        if run.trace.crash is not None:
            return run.trace.crash.message
        split = any(one.style is not None and one.style.features.dtensor for one in bound.values())
        results = {"loss": output.loss} if split else {"loss": output.loss, "logits": output.logits}
        kinds = {name: run.type_of(value) for name, value in results.items()}
        return "".join(f"the {name} would be {kind}" for name, kind in kinds.items() if kind is not spmd.I)
