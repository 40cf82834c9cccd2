"""Prove the built-in plan of every class of diffusers that has one: `python -m tests.zoo.diffusion [class ...] [--table FILE.md]`."""

from __future__ import annotations

import json
import sys
import warnings
from argparse import ArgumentParser
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

warnings.filterwarnings("ignore")

import torch  # noqa: E402

from shardplan import Model, coverage, validate  # noqa: E402
from tests.diffusion_models import DIFFUSION, Diffusion  # noqa: E402
from tests.sampling import add_share, share_of  # noqa: E402

from .judged_with import is_current, key, releases  # noqa: E402

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
    plan: str
    verdicts: dict[str, str]
    compared: int
    split: float
    whole: dict[str, float] = field(default_factory=dict)
    judged: dict[str, str] = field(default_factory=dict, compare=False)


def row(one: Diffusion) -> Row:
    """Find out about a class."""
    verdicts, compared = {}, 0
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
        judged={"verdicts": key(found.plan)},
    )


def page(found: Mapping[str, Row]) -> str:
    """The table as Markdown."""
    lines = []
    for one in found.values():
        said = " | ".join(one.verdicts[column].replace("|", "\\|") for column in COLUMNS)
        plan = f"[{one.plan}](../plans/{one.plan}.yaml)"
        lines.append(f"| {one.name} | {plan} | {said} | {one.compared} | {one.split:.1%} |")
    lines += ["", "## What stays whole", ""]
    lines += [
        f"- {one.name}: {', '.join(f'`{part}` {share:.1%}' for part, share in one.whole.items())}"
        for one in found.values()
        if one.whole
    ]
    return HEAD.format(judged=releases(found.values(), {"verdicts": "Judged"})) + "\n".join(lines) + "\n"


def read(file: Path) -> dict[str, Row]:
    """The rows of a table; none where there is no file."""
    data = file.with_suffix(".json")
    return {one["name"]: Row(**one) for one in json.loads(data.read_text("utf-8"))} if data.exists() else {}


def main(argv: list[str]) -> int:
    parser = ArgumentParser(prog="python -m tests.zoo.diffusion")
    parser.add_argument("classes", nargs="*", help="classes (all)")
    add_share(parser)
    parser.add_argument("--table", type=Path, help="write the page to this file, and its data next to it as JSON")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    known = read(args.table) if args.table is not None else {}
    wanted = args.classes or share_of(DIFFUSION, args)
    for name in wanted:
        if not args.classes and name in known and is_current(known[name], "verdicts"):
            continue
        known[name] = row(DIFFUSION[name])
        print(known[name], file=sys.stderr, flush=True)
        if args.table is not None:
            rows = {name: known[name] for name in DIFFUSION if name in known}
            args.table.write_text(page(rows), "utf-8")
            data = ",\n".join(json.dumps(asdict(one)) for one in rows.values())
            args.table.with_suffix(".json").write_text(f"[\n{data}\n]\n", "utf-8")
    return int(any(text not in ("right", "none") for one in known.values() for text in one.verdicts.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
