"""Prove the built-in plan of every class of diffusers that has one: `python -m tests.zoo.diffusion [class ...] [--table FILE.md]`."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field

warnings.filterwarnings("ignore")

import torch  # noqa: E402

from shardplan import Model, coverage, validate  # noqa: E402
from tests.diffusion_models import DIFFUSION  # noqa: E402
from tests.sampling import share_of  # noqa: E402

from .judged_with import releases  # noqa: E402
from .table import arguments, fill, read  # noqa: E402

SIZES = (2, 4)
VARIANTS = {"tp": "tensor_parallel", "sp": "sequence_parallel"}
COLUMNS = [f"{word}{tp}" for word in VARIANTS for tp in SIZES]
HEAD = """# Diffusion models

Made by `make zoo`; do not edit. The built-in plan that `auto` finds for a class of diffusers, and what was
proven on a reduced model of that class ([tests/diffusion_models.py](../tests/diffusion_models.py) has its sizes and inputs):
`validate` has no error, and over two training steps every floating-point output and every parameter's gradient on every rank is the unsharded
model's, without and with sequence parallelism, at two sizes of tp. "Compared" is how many tensors that are, at tp 2.
"In the layers" is the share of the parameters inside the blocks that is split, in the class's default configuration.
[Diffusion](../docs/diffusion.md) says how to use the plans.

{judged}

| class | plan | TP 2 | TP 4 | TP + SP 2 | TP + SP 4 | compared | in the layers |
|---|---|---|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Row:
    """What is found out about one class.

    Args:
        name: what is called: the class, and the options that its reduced model has, where that is not all.
        plan: the built-in plan.
        verdicts: as in `entry.Entry`: "right", "none" (no overlay), or what is wrong.
        compared: how many tensors were compared at the first size, in both variants.
        split: the share of the parameters inside the blocks that is split.
        whole: what is not: part of a block -> its share.
        judged: as in `entry.Entry`.
    """

    name: str
    plan: str | None = None
    verdicts: dict[str, str] = field(default_factory=dict)
    compared: int = 0
    split: float = 0.0
    whole: dict[str, float] = field(default_factory=dict)
    judged: dict[str, str] = field(default_factory=dict, compare=False)


def row(before: Row) -> Row:
    """Find out about a class."""
    torch.set_num_threads(1)
    one, verdicts, compared = DIFFUSION[before.name], {}, 0
    for tp in SIZES:
        report = validate(Model(one.build(), inputs=one.make), "auto", {"tp": tp}, derive=False)
        proofs = {proof.variant: proof for proof in report.proof.variants} if report.proof is not None else {}
        errors = "; ".join(dict.fromkeys(f"{d.code}: {d.message}" for d in report.errors))
        for word, variant in VARIANTS.items():
            proof = proofs.get(variant)
            good = not errors and proof is not None and proof.ok and proof.sharded > 0
            lacking = "none" if variant not in report.variants else "not proven"
            verdicts[f"{word}{tp}"] = "right" if good else errors or lacking
        if tp == SIZES[0] and report.proof is not None:
            compared = len(report.proof.rows)
    with torch.device("meta"):
        whole = one.whole()
    found = coverage(whole, "auto", derive=False)
    return Row(
        name=one.name,
        plan=found.plan,
        verdicts={name: verdicts[name] for name in COLUMNS},
        compared=compared,
        split=round(found.split, 3),
        whole={part: round(share, 3) for part, share in found.whole.items() if share >= 0.01},
    )


def page(found: Sequence[Row]) -> str:
    """The table as Markdown."""
    lines = []
    for one in found:
        said = " | ".join(one.verdicts[column].replace("|", "\\|") for column in COLUMNS)
        plan = f"[{one.plan}](../plans/{one.plan}.yaml)"
        lines.append(f"| {one.name} | {plan} | {said} | {one.compared} | {one.split:.1%} |")
    lines += ["", "## What stays whole", ""]
    lines += [
        f"- {one.name}: {', '.join(f'`{part}` {share:.1%}' for part, share in one.whole.items())}"
        for one in found
        if one.whole
    ]
    return HEAD.format(judged=releases(found, {"verdicts": "Judged"})) + "\n".join(lines) + "\n"


def main(argv: list[str]) -> int:
    args = arguments("python -m tests.zoo.diffusion").parse_args(argv)
    known = read(args.table, Row)
    rows = [known.get(name, Row(name)) for name in args.types or share_of(DIFFUSION, args)]
    found, same = fill(rows, row, page, lambda one: one, "verdicts", **vars(args))
    return int(not same or any(text not in ("right", "none") for one in found for text in one.verdicts.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
