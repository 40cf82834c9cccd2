"""The order in which the modules of a repeated block run."""

from __future__ import annotations

from shardplan.model.repeated_blocks import repeated_blocks

from .model import ModelLayouts


def block_calls(model: ModelLayouts) -> tuple[str, tuple[tuple[str, int], ...]]:
    """The last repeated block of the reduced model that runs, and the modules below it in the order of their first calls.
    Each has its name within the block, and the number of modules between it and the block. ("", ()) where nothing repeats.
    """
    recorded = model.recorded_models[0]
    blocks = repeated_blocks(recorded.tree)
    calls: dict[str, dict[str, int]] = {}
    for event, running in recorded.reference.with_running():
        around = next((one for one in blocks if f"{event.module}.".startswith(f"{one}.")), None)
        if event.kind == "enter" and around is not None:
            inside = calls.setdefault(around, {})
            if below := event.module[len(around) + 1 :]:
                inside.setdefault(below, sum(one.startswith(f"{around}.") for one in running[:-1]))
    ran = [block for block in blocks if block in calls]
    return (ran[-1], tuple(calls[ran[-1]].items())) if ran else ("", ())
