"""The proof in real processes: gloo on the CPU, one process per rank of the mesh, FSDP2 included."""

from __future__ import annotations

import io
import logging
import pickle
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import pairwise
from multiprocessing import set_forkserver_preload
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import nn
from torch.multiprocessing import ProcessRaisedException

from shardplan.compiler.lower.program import Program
from shardplan.compiler.user_inputs import Model
from shardplan.core.mesh import APPLIED, MeshSizes
from shardplan.core.report import Comparison
from shardplan.model.reduced.precision import in_dtype
from shardplan.torchlib.gathering import of_all

from .compare import compare_steps, worst_of
from .rank import VIEWS, data_parallel_rank, mesh_of, rank_steps
from .steps import averaged, cast, reference_of

TIMEOUT = timedelta(seconds=120)  # a failed rank must not leave the others waiting
# Imported once, in an idle process from which the ranks are forked: importing torch and transformers takes seconds.
PRELOADED = ("torch.distributed.fsdp", "transformers.models.auto.modeling_auto", "shardplan.proof.processes")


class Recipe(Protocol):
    """Makes the cases in each process, one for each kind of input; it can be pickled."""

    @property
    def sizes(self) -> MeshSizes: ...

    def cases(self, dtype: torch.dtype) -> Iterable[AnyCase]: ...


class AnyCase(Protocol):
    """The data that one process needs to run a proof."""

    def rows(self) -> tuple[Comparison, ...]:
        """Run the proof on this rank, and compare. All ranks call it together."""
        ...


@dataclass(frozen=True)
class Case:
    """The data that one process needs to run a proof.

    Args:
        build: makes the unsharded model, the same in every process.
        batches: data-parallel rank -> the model's inputs of each step.
        program: the program to prove.
        sizes: the mesh.
        dtype: the precision.
    """

    build: Callable[[], nn.Module]
    batches: Callable[[int], list[dict[str, Any]]]
    program: Program
    sizes: MeshSizes
    dtype: torch.dtype = torch.float32

    def rows(self) -> tuple[Comparison, ...]:
        """Apply the program on this rank, run the steps, and compare."""
        mesh = mesh_of(self.sizes, APPLIED)
        index = data_parallel_rank(mesh)
        batches = [[cast(batch, self.dtype) for batch in self.batches(i)] for i in range(self.sizes.replicas)]
        runs = [reference_of(lambda: in_dtype(self.build(), self.dtype), own) for own in batches]
        reference = averaged(runs)[index]
        left = rank_steps(in_dtype(self.build(), self.dtype), mesh, self.program, batches[index], reference)
        return compare_steps(reference, {"": left})


class _NamesAlone(ForkingPickler):
    """Pickles everything except tensors, as their memory would be moved to shared memory."""

    def persistent_id(self, value: Any) -> str | None:
        return "tensor" if isinstance(value, torch.Tensor) else None


def check_sendable(source: Model) -> None:
    """Raise ValueError where other processes cannot find a model: the class of the model or of its inputs is not in a module under its name."""
    sent = io.BytesIO()
    try:
        _NamesAlone(sent).dump(source)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        why = str(error)
    else:
        main = sys.modules["__main__"]
        if b"__main__" not in sent.getvalue() or hasattr(main, "__file__"):
            return
        why = "its class is not in a file"
    raise ValueError(
        f"each process of the proof builds {source.shown} again, and cannot find it: {why}. Define the class, and the functions "
        "given as `inputs` and `reduced`, at the top level of a module that can be imported, or leave processes=True out"
    )


def run_processes(recipe: Recipe, dtype: torch.dtype) -> list[tuple[Comparison, ...]]:
    """Run the cases on one process for each rank of the mesh; each row is the worst over the ranks."""
    worst: list[tuple[Comparison, ...]] = run_on_ranks(recipe.sizes.world_size, _rows, recipe, dtype)[0]
    return worst


def run_on_ranks(count: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call a module's function on real processes, the ranks of a process group, and return all results.

    Raises:
        RuntimeError: the function raised on a rank.
    """
    with tempfile.TemporaryDirectory() as folder:
        set_forkserver_preload(list(PRELOADED))
        given = (count, folder, function, arguments)
        try:
            multiprocessing.start_processes(_worker, given, count, start_method="forkserver")
        except ProcessRaisedException as error:
            raise RuntimeError(f"rank {error.error_index} raised {_last_line(str(error))}") from None
        return [pickle.loads(_result(folder, rank).read_bytes()) for rank in range(count)]


def _result(folder: str, rank: int) -> Path:
    return Path(folder, f"result-{rank}.pickle")


def _last_line(trace: str) -> str:
    """The exception at the end of a trace (its message may have several lines), and the trace's last line of model code."""
    lines = trace.splitlines()
    named = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Failed)\b", line)]
    code = [(line, after) for line, after in pairwise(lines) if re.match(r'  File ".*/modeling_\w+\.py", line', line)]
    if not named or not code:
        return named[-1] if named else trace
    where = re.match(r'  File ".*/(modeling_\w+\.py)", line (\d+)', code[-1][0])
    assert where is not None
    return f"{named[-1]} ({where[1]}:{where[2]}: `{code[-1][1].strip()}`)"


def _worker(rank: int, count: int, folder: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", VIEWS)
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    dist.init_process_group(
        "gloo", init_method=f"file://{Path(folder, 'rendezvous')}", rank=rank, world_size=count, timeout=TIMEOUT
    )
    try:
        _result(folder, rank).write_bytes(pickle.dumps(function(*arguments)))
    finally:
        dist.destroy_process_group()


def _rows(recipe: Recipe, dtype: torch.dtype) -> list[tuple[Comparison, ...]]:
    return [_worst_of_all_ranks(dist.get_rank(), case.rows()) for case in recipe.cases(dtype)]


def _worst_of_all_ranks(rank: int, rows: tuple[Comparison, ...]) -> tuple[Comparison, ...]:
    gathered = of_all([replace(row, where=f"rank {rank}") for row in rows])
    return worst_of(row for rows in gathered for row in rows)  # by name: ranks may have different tensors
