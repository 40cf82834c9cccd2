"""Proofs that this process has made, by a digest of what was proven."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
import transformers

from shardplan.compiler.layout import ModelLayouts
from shardplan.compiler.lower import Program
from shardplan.core.diagnostics import Diagnostic

from .prove import references

_KNOWN: dict[str, tuple[Diagnostic, ...]] = {}


def digest_of(reduced: ModelLayouts, program: Program, allow_unproven: bool) -> str:
    """What decides a proof's outcome: the program on the reduced model, and that model unsharded - every operation of its
    recorded run with its line of code, and every gradient of its steps - on each kind of input."""
    digest = hashlib.sha256()

    def add(*words: object) -> None:
        digest.update("\n".join(map(str, words)).encode())

    add(
        torch.__version__,
        transformers.__version__,
        reduced.tp,
        reduced.reduced_model.kinds,
        allow_unproven,
        program.describe(),
    )
    for name, parameter in reduced.benches[0].model.named_parameters(remove_duplicate=False):
        add(name, tuple(parameter.shape), parameter.dtype, parameter.requires_grad)
    for bench in reduced.benches:
        run = bench.reference
        for event in run.events:
            add(event.kind, event.name, event.place, event.source, [tuple(run.values[i].shape) for i in event.outputs])
    reference = references(reduced.reduced_model)
    for kind in reduced.reduced_model.kinds:
        _, steps = reference(kind, torch.float32)
        for name, gradient in steps.gradients.items():
            add(name, gradient.double().sum().item(), gradient.double().square().sum().item())
    return digest.hexdigest()


def known(digest: str) -> tuple[Diagnostic, ...] | None:
    """What the proof of a digest found; None where it was not made."""
    return _KNOWN.get(digest)


def remember(digest: str, findings: Iterable[Diagnostic]) -> None:
    """Keep what a proof found."""
    _KNOWN[digest] = tuple(findings)
