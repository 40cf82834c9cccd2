"""The page of the classes that are no causal language models."""

from __future__ import annotations

from collections.abc import Sequence

from tests.model_settings import CLASSES

from .entry import DERIVED, SIZES
from .judged_with import releases
from .other_entry import OF_TRUNK, OtherEntry
from .other_names import FAMILIES, OTHER, family, is_trunk, names

COLUMNS = tuple(f"{word}{tp}" for word in ("tp", "sp") for tp in SIZES)
LONGEST = 220  # characters of a reason
HEAD = """# Encoders, encoder-decoders, vision, audio

Made by `python -m tests.zoo.other_types --table reports/other-types.md`; do not edit. Classes of transformers
that are neither causal language models ([model types](model-types.md)) nor [image-text models](image-text-types.md), and what was proven
for the plan that `auto` finds or derives, on a reduced model of the default configuration or the nearest that can be built: `validate`
has no finding, and the loss (of a trunk, a sum over its outputs), every floating-point output and every parameter's gradient on every
rank are the unsharded model's. A class counts as right only where something inside its layers is split too.

- "trunk" is a type's model without a head; other classes are heads: of a task, on a trunk.
- "plan": a built-in one; the one that `auto` derives; "trunk's": the one that was derived for the trunk.
- "inputs": the kinds of input that the reduced model was run with.
- "TP", "SP": without and with sequence parallelism, at these sizes. "none": no overlay was found, the reason is in the last column. A
  derived overlay is for each list of blocks for which one was found: CLIP's pictures have an odd number of positions, so its text alone is split.
  Where a lone vision model reads an odd number, the class's position among them, SP is of pictures one patch wider; the last column says so.
- "split": the share of the parameters inside the layers of the default configuration that is split.

{judged}

{done} of {all} classes were run.

| family | trunks | right | with SP | heads | right | with SP |
|---|---|---|---|---|---|---|
{summary}

"""


def page(found: Sequence[OtherEntry]) -> str:
    """The table as Markdown."""
    found = [e for e in found if e.name in CLASSES]
    families = [*dict.fromkeys(FAMILIES.values()), OTHER]
    rows, lines = [], []
    total = [0] * 6
    for name in families:
        group = [e for e in found if family(CLASSES[e.name]) == name]
        trunks = [e for e in group if is_trunk(e.name)]
        heads = [e for e in group if not is_trunk(e.name)]
        counts = [*_counts(trunks), *_counts(heads)]
        total = [a + b for a, b in zip(total, counts, strict=True)]
        rows.append(f"| {name} | {' | '.join(map(str, counts))} |")
        if group:
            lines += [f"## {name}", "", *_table([*trunks, *heads]), ""]
    rows.append(f"| all | {' | '.join(map(str, total))} |")
    head = HEAD.format(
        judged=releases(found, {"verdicts": "Judged"}), summary="\n".join(rows), done=len(found), all=len(list(names()))
    )
    return head + "\n".join(lines).rstrip() + "\n"


def _counts(entries: Sequence[OtherEntry]) -> list[int]:
    return [len(entries), sum(e.is_right for e in entries), sum(e.has_sequence for e in entries)]


def _table(entries: Sequence[OtherEntry]) -> list[str]:
    titles = [f"{'TP' if column[0] == 't' else 'SP'} {column[2:]}" for column in COLUMNS]
    head = ["class", "kind", "plan", "inputs", *titles, "split", "reason"]
    return [f"| {' | '.join(head)} |", "|---" * len(head) + "|", *map(_row, entries)]


def _row(e: OtherEntry) -> str:
    cells = [
        e.name,
        "trunk" if is_trunk(e.name) else "head",
        (e.plan if e.plan in (DERIVED, OF_TRUNK) else f"[{e.plan}](../plans/{e.plan}.yaml)") if e.plan else "-",
        ", ".join(e.inputs) or "-",
        *(_short(e.verdicts.get(column, "-")) for column in COLUMNS),
        f"{e.split:.1%}" if e.verdicts else "-",
        _short(e.reason or e.no_overlay),
    ]
    return f"| {' | '.join(cells)} |"


def _short(text: str) -> str:
    text = " ".join(text.split()).replace("|", "\\|").replace("<", "\\<")
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
