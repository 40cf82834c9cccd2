"""What there is to say about a data-parallel backend."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backend:
    """A data-parallel backend.

    Args:
        name: its word in a plan.
        fields: the fields of `DataParallel` that it carries out.
        idle: fields that mean nothing to it, and change no number if they are skipped: how and when FSDP2 gathers.
        splits: the mesh axes that it works with, above size 1.
        wraps: whether it puts a wrapper around the model, with which names begin with `module.`.
        device: the type of device that it needs; None is any.
        module, package: what must be installed, as Python and as pip call it; empty where it is torch's own.
        sequence_parallel: whether it can be combined with sequence parallelism.
        partial_gradients: whether parameters may be summed over tp where they are read. Not where the backend reads
            them as plain tensors.
    """

    name: str
    fields: frozenset[str] = frozenset()
    idle: frozenset[str] = frozenset()
    splits: frozenset[str] = frozenset()
    wraps: bool = False
    device: str | None = None
    module: str = ""
    package: str = ""
    sequence_parallel: bool = True
    partial_gradients: bool = True
