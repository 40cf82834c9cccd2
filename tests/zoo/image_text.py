"""Prove the built-in plan of every image-text type: `python -m tests.zoo.image_text [type ...] [--table FILE.md]`."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence

warnings.filterwarnings("ignore")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import transformers  # noqa: E402
from transformers.models.auto.modeling_auto import (  # noqa: E402
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from tests.sampling import share_of  # noqa: E402

from .__main__ import REASONS, right, why  # noqa: E402
from .entry import DERIVED, SIZES, Entry, made_or_derived  # noqa: E402
from .judged_with import releases  # noqa: E402
from .table import arguments, fill, read  # noqa: E402

LACKING = REASONS.with_name("image_text_reasons.json")
WHY = """
## What stands in the way

Types that are not right with images, and those without sequence parallelism, each with the line of transformers {version} that stands
in the way, where there is one (tests/data/image_text_reasons.json, which tests/test_zoo.py compares with the code):
"""
COLUMNS = [f"{word}{tp}" for word in ("tp", "sp") for tp in SIZES]
HEAD = """# Image-text models

Made by `make zoo`; do not edit. Every image-text type, the built-in plan for it or the one that
`auto` derives, and what was proven on a reduced model of its default configuration (where that cannot be built or sees no images, the
nearest that does), as in [model types](model-types.md): `validate` has no finding, and the loss, the logits and every parameter's
gradient on every rank are the unsharded model's, for text alone and for each kind of input in the column "with". A type that has a
causal class too is under the name of its image-text class. "No gradient" names what no input teaches in the unsharded model either,
such as the last layer of a tower that is read before it. Derived plans are proven at the first size. Types that need timm are not
built: timm imports torchvision, and PyPI's does not load with the CPU build of torch 2.13 (`operator torchvision::nms does not exist`).

{judged}

{types} types: {tp} right with tensor parallelism and images, {sp} of them with sequence parallelism too, {wrong} wrong.

"""


def names() -> list[str]:
    """Types; classes of types whose name means another class among the causal language models."""
    causal, image_text = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return sorted(name if causal.get(name, cls) == cls else cls for name, cls in image_text.items())


def page(found: Sequence[Entry]) -> str:
    """The table as Markdown."""
    planned = [e for e in found if e.verdicts]
    titles = [f"{'TP' if column[0] == 't' else 'TP + SP'} {column[2:]}" for column in COLUMNS]
    lines = [f"| type | plan | with | {' | '.join(titles)} | in the layers |", "|---" * (len(COLUMNS) + 4) + "|"]
    for e in planned:
        said = " | ".join(e.verdicts.get(column, "not run").replace("|", "\\|") for column in COLUMNS)
        seen = ", ".join(f"{kind}s" for kind in e.images) or "text alone"
        plan = e.plan if e.plan == DERIVED else f"[{e.plan}](../plans/{e.plan}.yaml)"
        lines.append(f"| {e.name} | {plan} | {seen} | {said} | {e.split:.1%} |")
    lines += ["", "## Without images", ""]
    lines += [f"- {e.name}: {' '.join(e.unseen.split())[:300]}" for e in planned if e.unseen]
    lines += ["", "## Without sequence parallelism", ""]
    lines += [f"- {e.name}: {' '.join(e.no_overlay.split())[:300]}" for e in planned if e.no_overlay]
    lines += ["", "## No gradient", ""]
    lines += [f"- {e.name}: {', '.join(f'`{name}`' for name in e.unlearned)}" for e in planned if e.unlearned]
    lines += ["", "## Without a plan", ""]
    lines += [f"- {e.name}: {' '.join(e.reason.split())[:300]}" for e in found if not e.verdicts]
    lines += [WHY.format(version=transformers.__version__).rstrip(), "", *why({e.name for e in found}, LACKING)]
    good = [e for e in planned if is_right(e)]
    head = HEAD.format(
        judged=releases(found, {"verdicts": "Judged"}),
        types=len(found),
        tp=len(good),
        sp=sum(e.has("sp") for e in good),
        wrong=sum(any(not right(text) for text in e.verdicts.values()) for e in planned),
    )
    return head + "\n".join(lines) + "\n"


def is_right(e: Entry) -> bool:
    """Whether a type is right with tensor parallelism and images, and something inside its layers is split."""
    return e.has("tp") and e.split > 0 and bool(e.images)


def lacks(e: Entry) -> str:
    """What a type has not: "right", or "sequence"; empty where it has both."""
    return ("" if e.has("sp") else "sequence") if is_right(e) else "right"


def main(argv: list[str]) -> int:
    args = arguments("python -m tests.zoo.image_text").parse_args(argv)
    known = read(args.table)
    rows = [known.get(name, Entry(name)) for name in args.types or share_of(names(), args)]
    found, same = fill(rows, made_or_derived, page, _said, "verdicts", **vars(args))
    return int(not same or any(not right(text) for e in found for text in e.verdicts.values()))


def _said(e: Entry) -> object:
    return e.plan, e.images, e.verdicts or e.reason, e.unseen


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
