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
    running: list[str] = []
    for event in recorded.reference.events:
        if event.kind == "enter":
            for block in (one for one in blocks if f"{event.module}.".startswith(f"{one}.")):
                inside = calls.setdefault(block, {})
                if below := event.module[len(block) + 1 :]:
                    inside.setdefault(below, sum(one.startswith(f"{block}.") for one in running))
            running.append(event.module)
        elif event.kind == "leave":
            running.pop()
    ran = [block for block in blocks if block in calls]
    return (ran[-1], tuple(calls[ran[-1]].items())) if ran else ("", ())
