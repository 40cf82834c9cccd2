"""What to write where torch says that a script mixes a model's sharded parameters with plain tensors, or with those of another mesh."""

from __future__ import annotations

import sys
from types import TracebackType

_HELP = (
    "parameters are DTensors, and do not combine with a plain loss or tensor: add the gradient of a term of the parameters to theirs "
    "after backward, `p.grad.add_(p, alpha=2 * weight)` for a sum of squares; `full_tensor()` returns a whole parameter"
)
_SAID_BY_TORCH = ("mixed torch.Tensor and DTensor", "different mesh", "cross-mesh")


def help_for(error: BaseException) -> str | None:
    """What to write; None for other errors."""
    return _HELP if any(said in str(error) for said in _SAID_BY_TORCH) else None


def explain_uncaught() -> None:
    """Add the help as a note, below torch's message, to an error that ends the script. The error is raised in the script's own code, where
    no code of ours runs; so `sys.excepthook` is wrapped, as torch's process groups also do."""
    before = sys.excepthook
    if getattr(before, "explains", False):
        return

    def explained(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        help = help_for(error)
        if help is not None and f"help: {help}" not in getattr(error, "__notes__", ()):
            error.add_note(f"help: {help}")
        before(kind, error, traceback)

    explained.explains = True  # type: ignore[attr-defined]
    sys.excepthook = explained
