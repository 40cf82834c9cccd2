"""Checks that all ranks are about to do the same thing."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import zip_longest
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardplan.compiler.lower.program import Program
from shardplan.core.diagnostics import PlanError
from shardplan.torchlib.gathering import of_all

Result = TypeVar("Result")
DIFFERENT = (
    "the ranks compiled different programs, or compiling failed on some ranks (another plan, model or version); "
    "compare compile_plan(...).describe() between the ranks"
)
FAILED = "failed: "
SHOWN = 160  # characters of a line


class DifferentRanks(RuntimeError):
    """The ranks are about to do different things; all of them know it."""


class Agreement:
    """The points on which a mesh's ranks agree while each prepares its work."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self.said: list[str] = []

    def say(self, text: str) -> None:
        """State what this rank is about to do. At the end the texts of all ranks are compared."""
        self.said.append(text)

    def share(self, make: Callable[[], Result]) -> Result:
        """Make a value on the mesh's first rank, and return it on all ranks. An error of the first rank is raised on all.

        Raises:
            RuntimeError: a rank does not take part: it failed before, or does something else.
        """
        if not _all_equal("shared", self._mesh):
            raise DifferentRanks(_difference("", self._mesh))
        return on_first_rank(make, self._mesh)


@contextmanager
def same_on_all_ranks(mesh: DeviceMesh) -> Iterator[Agreement]:
    """Compare over the mesh what each rank is about to do, before anything else is communicated.

    If a rank raises, the others raise here too, instead of waiting for it later. An error that all ranks have is whole on the
    mesh's first rank alone, which prints it.

    Raises:
        RuntimeError: the texts differ between ranks, or only some ranks failed.
    """
    agreement = Agreement(mesh)
    try:
        yield agreement
    except DifferentRanks:  # the other ranks know
        raise
    except Exception as error:
        said = f"{FAILED}{error}"
        if not _all_equal(said, mesh):
            _difference(said, mesh)
            raise
        if _is_first(mesh):
            raise
        raise _as_on_first_rank(error, mesh) from None
    said = "".join(agreement.said)
    if not _all_equal(said, mesh):
        raise DifferentRanks(_difference(said, mesh))


def on_first_rank(make: Callable[[], Result], mesh: DeviceMesh) -> Result:
    """Call a function on the mesh's first rank, and return the result on all ranks. Its error is raised on all."""
    box: list[tuple[bool, Any]] = [(False, None)]
    if _is_first(mesh):
        try:
            box = [(True, make())]
        except PlanError as error:
            box = [(False, error)]
        except Exception as error:  # exceptions of other code may not be picklable
            box = [(False, RuntimeError(f"{type(error).__name__} on the first rank: {error}"))]
    for axis in range(mesh.ndim):  # one axis after the other
        group = mesh.get_group(axis)
        dist.broadcast_object_list(box, src=dist.get_global_rank(group, 0), group=group)
    fine, result = box[0]
    if not fine:
        raise result
    return result


def _is_first(mesh: DeviceMesh) -> bool:
    return all(place == 0 for place in mesh.get_coordinate() or ())


def _as_on_first_rank(error: Exception, mesh: DeviceMesh) -> Exception:
    """An error that the mesh's first rank raises too, in one line. Its findings stay whole; errors of other code stay as they are."""
    text = f"{_shown(str(error).partition(chr(10))[0])} (rank {int(mesh.mesh.flatten()[0])} prints all of this error)"
    if isinstance(error, PlanError):
        short = PlanError(error.diagnostics, text)
        short.sources = error.sources
        return short
    return type(error)(text) if type(error) in (ValueError, TypeError) else error


def intention(program: Program) -> str:
    """A program, its parameters and the options for applying it, as text."""
    resolved = program.resolved
    parameters = [f"{name} {p.shape} {p.dtype} {p.requires_grad}" for name, (_, p) in resolved.tree.parameters.items()]
    sections = (resolved.data_parallel, resolved.activation_checkpointing, resolved.compile)
    options = [repr(replace(section, location=None)) for section in sections if section is not None]
    return "\n".join([program.describe(), *parameters, *options])


def _difference(text: str, mesh: DeviceMesh) -> str:
    """The first difference, in words: a rank that failed to compile, and why; else the first line in which a rank differs from
    the first rank. A collective of the mesh."""
    first = on_first_rank(lambda: text, mesh)
    found: dict[int, str] = {}
    if text.startswith(FAILED):
        found[dist.get_rank()] = (
            f"it failed on rank {dist.get_rank()}: {_shown(text.removeprefix(FAILED).partition(chr(10))[0])}"
        )
    elif text != first and not first.startswith(FAILED):
        mine, theirs = next(pair for pair in _pairs(text, first) if pair[0] != pair[1])
        found[dist.get_rank()] = f"rank {dist.get_rank()} has `{_shown(mine)}`, the first rank `{_shown(theirs)}`"
    for axis in range(mesh.ndim):
        found = {rank: words for box in of_all(found, mesh.get_group(axis)) for rank, words in box.items()}
    failed = [words for words in found.values() if words.startswith("it failed")]
    shown = next(iter(failed or (found[rank] for rank in sorted(found))), "")
    return f"{DIFFERENT}. {shown[:1].upper()}{shown[1:]}" if shown else DIFFERENT


def _pairs(text: str, other: str) -> Iterator[tuple[str, str]]:
    return zip_longest(text.splitlines(), other.splitlines(), fillvalue="nothing")


def _shown(line: str) -> str:
    line = line.strip()
    return line if len(line) <= SHOWN else f"{line[:SHOWN]}..."


def _all_equal(text: str, mesh: DeviceMesh) -> bool:
    """Whether every rank of the mesh has the same text."""
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    return least([number, -number], mesh) == [number, -number]


def least(numbers: Sequence[int], mesh: DeviceMesh) -> list[int]:
    """The minimum of each number over all ranks of a mesh. A collective on each axis."""
    smallest = torch.tensor(numbers, dtype=torch.int64, device=mesh.device_type)
    for axis in range(mesh.ndim):
        dist.all_reduce(smallest, op=dist.ReduceOp.MIN, group=mesh.get_group(axis))
    return smallest.tolist()
