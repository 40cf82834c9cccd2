"""A step that an exception left half-way, and whose loop goes on (a batch is skipped when memory runs out): FSDP2's state is put right
at the next forward. Left as it is, no gradient is reduced any more, and no parameter moves."""

from __future__ import annotations

import torch
from torch.distributed.fsdp import FSDPModule

from shardplan.torchlib.private import private

from .fsdp_units import left_half_way, reset

_current_graph_task_id = private("current_graph_task_id")

LOST = (
    "an exception left a backward of this model half-way, and the loop caught it: gradients of this optimizer step are of some "
    "parameters alone, or hold a part of that batch. They are dropped now: begin the optimizer step again, with its first "
    "micro-batch (or call optimizer.zero_grad() where the exception is caught)"
)


def put_right(root: FSDPModule) -> None:
    """Make the state of FSDP2 what it is between two steps, if an exception left a forward or a backward half-way. Gradients of that
    backward which are not reduced are dropped.

    Args:
        root: the outermost unit.

    Raises:
        RuntimeError: there are other gradients, which cannot be told from those of that backward: they are dropped too. Or this torch
            cannot put its state right.
    """
    left = left_half_way(root)
    if not left or _current_graph_task_id() != -1:
        return
    if not hasattr(root, "reset_iter_state"):
        raise RuntimeError(
            f"an exception left a {left} of this model half-way, and torch {torch.__version__} cannot put FSDP2's state right (2.13 can): "
            "build the model again, and load the last save"
        )
    if reset(root, drop=left == "backward"):
        raise RuntimeError(LOST)
