"""The proofs that this process has made, by a digest of their subject."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import transformers

from shardplan.compiler.layout import ModelLayouts
from shardplan.compiler.lower import Program
from shardplan.core.diagnostics import Diagnostic
from shardplan.core.mesh import MeshSizes

from .calls import Checkpointed, checkpointed_by
from .fingerprints import Fingerprint, NotStable
from .prove import steps_of
from .section_dtype import LowerDtypes

_KNOWN: dict[str, tuple[Diagnostic, ...]] = {}


class ModelNow:
    """A reduced model as it is now. Its digest is made once for all programs whose checkpoints allow the same calls."""

    def __init__(self, reduced: ModelLayouts):
        self.reduced = reduced
        self._digests: dict[Checkpointed, str | None] = {}

    def digest(self, under: Checkpointed) -> str | None:
        """Of the model: the values of parameters and buffers, all attributes of modules, hooks, and the code of forwards and classes with the
        values that it captured and names (`Fingerprint`). Of its runs: every operation with its line of code, and on each kind of input the
        inputs, outputs, gradients and buffers. None where some part cannot be read, so that nothing shows that another model is the same."""
        if under not in self._digests:
            try:
                self._digests[under] = self._made(under)
            except NotStable:
                self._digests[under] = None
        return self._digests[under]

    def _made(self, under: Checkpointed) -> str:
        digest, model = Fingerprint(), self.reduced.reduced_model
        everywhere = vars(torch.nn.modules.module)  # hooks of all modules
        digest.add(
            [list(everywhere[n].values()) for n in everywhere if n.startswith("_global") and n.endswith("hooks")]
        )
        digest.add(model.build())
        for recorded in self.reduced.recorded_models:
            run = recorded.reference
            for event in run.events:
                shapes = [tuple(run.values[i].shape) for i in event.outputs]
                digest.add(f"{event.kind} {event.name} {event.place} {event.source} {shapes}")
        for kind in model.kinds:
            batches, steps = steps_of(model, kind, torch.float32, under=under)
            digest.add(kind, batches, steps.outputs, steps.gradients, steps.buffers)
        return digest.hexdigest()


def digest_of(
    model: ModelNow,
    program: Program,
    allow_unproven: bool,
    meshes: Iterable[MeshSizes] = (),
    lower: LowerDtypes | None = None,
) -> str | None:
    """A digest of what determines a proof's outcome: the program, its meshes, the reduced model, and its unsharded runs.

    Args:
        lower: the dtypes in which the proof runs too.

    None where the model has none; the proof is then not remembered.
    """
    if (of_model := model.digest(checkpointed_by(program))) is None:
        return None
    digest = Fingerprint()
    digest.add(of_model, torch.__version__, transformers.__version__, torch.get_default_dtype())
    digest.add(
        model.reduced.tp,
        model.reduced.reduced_model.kinds,
        allow_unproven,
        *map(str, meshes),
        program.describe(),
        "" if lower is None else f"{lower.precision} {lower.autocast}",
    )
    return digest.hexdigest()


def known(digest: str | None) -> tuple[Diagnostic, ...] | None:
    """The findings of the proof with this digest; None if it was not made."""
    return None if digest is None else _KNOWN.get(digest)


def remember(digest: str | None, findings: Iterable[Diagnostic]) -> None:
    """Keep the findings of a proof."""
    if digest is not None:
        _KNOWN[digest] = tuple(findings)
