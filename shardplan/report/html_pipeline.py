"""The stages of a pipeline, and its schedule as a picture."""

from __future__ import annotations

from shardplan.core.schedules import SCHEDULES, ActionKind
from shardplan.core.stages import PlayedSchedule, Slot

from .html_parts import hue, table, text
from .short_names import fold_names

ROW, LEFT, WIDTH, SMALLEST = 26, 46, 1040, 14  # pixels; the last: of a box that has a number in it
WORDS: dict[ActionKind, str] = {
    "forward": "forward",
    "backward": "backward",
    "backward of inputs": "backward of inputs",
    "backward of weights": "backward of weights",
}
COLORS: dict[ActionKind, str] = {kind: hue(i) for i, kind in enumerate(WORDS)}


def pipeline_html(played: PlayedSchedule) -> str:
    """The table of stages, and a row for each rank with what it does when."""
    kinds = dict.fromkeys(slot.kind for row in played.ranks for slot in row)
    legend = "".join(f'<span><i style="background:{COLORS[kind]}"></i>{text(WORDS[kind])}</span>' for kind in kinds)
    waits = f"{played.schedule}, {played.micro_batches} micro-batches: ranks wait {played.bubble:.1%} of the step"
    return (
        f"<h2>Pipeline</h2>{_stages(played)}<h3>A step</h3><p>{text(waits)}</p>"
        f'<p class="legend">{legend}</p><p class=dim>A row is a pp rank, a number a micro-batch. A stage takes as long as its operations; a '
        f"backward twice as long as a forward.</p>{_picture(played)}"
    )


def _stages(played: PlayedSchedule) -> str:
    cut, schedule, pp = played.cut, SCHEDULES[played.schedule], len(played.ranks)
    rows = []
    for stage in range(cut.stages):
        blocks = cut.blocks_of(stage)
        beside = (*(cut.first if stage == 0 else ()), *(cut.last if stage == cut.stages - 1 else ()))
        rows.append(
            (
                str(stage),
                str(schedule.rank_of(stage, pp)),
                str(len(blocks)),
                text(", ".join(fold_names(blocks))),
                text(", ".join(beside)),
            )
        )
    return table(("stage", "pp rank", "blocks", "", "besides"), rows, frozenset({0, 1, 2}))


def _picture(played: PlayedSchedule) -> str:
    shortest = min((slot.end - slot.start for row in played.ranks for slot in row if slot.end > slot.start), default=1)
    width = max(WIDTH, min(6000, round(SMALLEST / shortest)))
    height = ROW * len(played.ranks) + 8
    rows = "".join(
        f'<text x="4" y="{4 + ROW * rank + 17}">rank {rank}</text>'
        + "".join(_box(slot, 4 + ROW * rank, width, len(played.ranks)) for slot in row)
        for rank, row in enumerate(played.ranks)
    )
    whole = width + LEFT + 8
    return (
        f'<div class="scroll"><svg viewBox="0 0 {whole} {height}" width="{whole}" height="{height}" role="img" '
        f'aria-label="schedule {text(played.schedule)}">{rows}</svg></div>'
    )


def _box(slot: Slot, y: int, width: int, pp: int) -> str:
    x, wide = LEFT + 4 + slot.start * width, (slot.end - slot.start) * width
    number = f'<text class="on" x="{x + wide / 2:.1f}" y="{y + 17}" text-anchor="middle">{slot.micro_batch}</text>'
    return (
        f"<g><title>{text(WORDS[slot.kind])} of micro-batch {slot.micro_batch}, stage {slot.stage}</title>"
        f'<rect x="{x:.1f}" y="{y}" width="{max(wide - 1, 1):.1f}" height="{ROW - 4}" rx="3" fill="{COLORS[slot.kind]}" '
        f'fill-opacity="{1 - 0.25 * (slot.stage // pp % 2)}"/>{number if wide >= 12 else ""}</g>'
    )
