"""Steps that an exception left half-way in a loop that continues, for example one that skips a batch when memory runs out. FSDP2's state
is reset at the next forward. Otherwise no gradient would be reduced any more, and no parameter would change."""

from __future__ import annotations

import torch
from torch.distributed.fsdp import FSDPModule

from shardplan.torchlib.private import private

from .fsdp_units import left_half_way, reset

_current_graph_task_id = private("current_graph_task_id")

LOST = (
    "an exception ended a backward of this model half-way, and the loop caught it: only some parameters have a gradient, or "
    "gradients hold a part of that batch. The gradients of this optimizer step are dropped now: begin it again, with its first "
    "micro-batch (or call optimizer.zero_grad() where the exception is caught)"
)


def put_right(root: FSDPModule) -> None:
    """If an exception left a forward or a backward half-way, reset FSDP2's state to that between two steps. Gradients of that
    backward that are not reduced yet are dropped.

    Args:
        root: the outermost unit.

    Raises:
        RuntimeError: there are other gradients, which cannot be told from those of that backward: they are dropped too. Or FSDP2's
            state cannot be reset with this torch.
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
