"""Runs an export in the target's own code: the reduced model on several processes, compared with the unsharded one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardplan.compiler.layout import ModelLayouts
from shardplan.compiler.user_inputs import Model
from shardplan.core.mesh import MeshSizes
from shardplan.core.report import Comparison
from shardplan.model.reduced.precision import in_dtype
from shardplan.proof.calls import calls_of
from shardplan.proof.compare import compare_steps, worst_of
from shardplan.proof.processes import check_sendable, run_processes
from shardplan.proof.rank import Left, whole
from shardplan.proof.steps import cast, reference_of, run_steps

from .targets import TARGETS


@dataclass(frozen=True)
class Exported:
    """One or more steps whose gradients accumulate, for one kind of input, on this rank."""

    build: Callable[[], nn.Module]
    batches: tuple[dict[str, Any], ...]
    target: str
    entries: tuple[tuple[str, str], ...]
    tp: int
    dtype: torch.dtype

    def rows(self) -> tuple[Comparison, ...]:
        batches = [cast(batch, self.dtype) for batch in self.batches]
        reference = reference_of(lambda: in_dtype(self.build(), self.dtype), batches)
        model = TARGETS[self.target].apply(in_dtype(self.build(), self.dtype), self._matching(), self.tp)
        given = iter(reference.directions)
        outputs = run_steps(model, batches, lambda results: next(given))
        parameters = dict(model.named_parameters(remove_duplicate=False))
        gradients = {name: whole(p.grad) for name, p in parameters.items() if p.grad is not None}
        buffers = {name: buffer.detach() for name, buffer in model.named_buffers(remove_duplicate=False)}
        left = Left([{name: whole(value) for name, value in step.items()} for step in outputs], gradients, buffers, {})
        return compare_steps(reference, {"": left})

    def _matching(self) -> dict[str, str]:
        """The entries that match something in the reduced model, which has fewer blocks."""
        model = self.build()
        names = {name for name, _ in (*model.named_modules(), *model.named_parameters(remove_duplicate=False))}
        stars = {".".join("*" if part.isdecimal() else part for part in name.split(".")) for name in names}
        return {name: word for name, word in self.entries if name in stars | names}


@dataclass(frozen=True)
class ExportRecipe:
    """Makes the cases in each process: for each kind of input one step, and two steps."""

    source: Model
    sizes: MeshSizes
    target: str
    entries: tuple[tuple[str, str], ...]

    def cases(self, dtype: torch.dtype) -> Iterator[Exported]:
        tp = self.sizes.tp
        assert tp is not None
        reduced = ModelLayouts(self.source.find(), tp).reduced_model
        for kind in reduced.kinds:
            batches = tuple(dict(batch) for batch in calls_of(reduced, kind, only=()).batches(0))
            for given in (batches[:1], batches[:2]):
                yield Exported(reduced.build, given, self.target, self.entries, tp, dtype)


Rows = tuple[Comparison, ...]


def run_target(source: Model, target: str, entries: dict[str, str], tp: int) -> tuple[Rows, Rows]:
    """Run an export on `tp` processes. Compares the loss, the outputs, every gradient and every buffer; a row is the worst of all ranks and
    kinds of input. Returns the rows of one step, and of two steps whose gradients accumulate.

    Raises:
        ValueError: processes cannot find the model. RuntimeError: the target's code raises on a rank. PlanError: there is no reduced model.
    """
    check_sendable(source)
    recipe = ExportRecipe(source, MeshSizes(tp=tp), target, tuple(entries.items()))
    cases = run_processes(recipe, torch.float32)
    if any(row.verdict == "differs" for case in cases for row in case):  # perhaps float32 is not exact enough
        cases = run_processes(recipe, torch.float64)
    return worst_of(row for case in cases[::2] for row in case), worst_of(row for case in cases[1::2] for row in case)
