"""Prove the built-in plan of every model type: `python -m tests.zoo [type ...] [--table docs/model-types.md]`."""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Sequence
from multiprocessing import get_context
from pathlib import Path

warnings.filterwarnings("ignore")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import transformers  # noqa: E402
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: E402

from .entry import SIZES, Entry, entry  # noqa: E402

HEAD = """# Model types

Made by `make zoo` with transformers {version}; do not edit. Every causal language model type, the built-in plan for it,
and what was proven on a small copy of its default configuration (where that cannot be built, the nearest that can):
`validate` has no finding, and the loss, the logits and every parameter's gradient on every rank are the unsharded
model's. "size" says that the default configuration does not allow the size. "In the layers" is the share of the
parameters inside the layers that is split over tensor-parallel ranks; what stays whole is said in the plan.

{types} types: {tp} right with tensor parallelism and something inside the layers split, {sp} of them with sequence
parallelism too, {wrong} wrong.

"""


def page(found: Sequence[Entry]) -> str:
    """The table as Markdown."""
    planned = [e for e in found if e.verdicts]
    columns = [f"{word}{tp}" for word in ("tp", "sp") for tp in SIZES]
    titles = [f"{'TP' if column[0] == 't' else 'TP + SP'} {column[2:]}" for column in columns]
    lines = [f"| model type | plan | {' | '.join(titles)} | in the layers |", "|---" * (len(columns) + 3) + "|"]
    for e in planned:
        said = " | ".join(e.verdicts[column].replace("|", "\\|") for column in columns)
        lines.append(f"| {e.name} | [{e.plan}](../plans/{e.plan}.yaml) | {said} | {e.sharded:.1%} |")
    lines += ["", "## Without a plan", ""]
    lines += [f"- {e.name}: {' '.join(e.reason.split())[:300]}" for e in found if not e.verdicts]
    good = [e for e in planned if e.has("tp") and e.sharded > 0]
    head = HEAD.format(
        version=transformers.__version__,
        types=len(found),
        tp=len(good),
        sp=sum(e.has("sp") for e in good),
        wrong=sum(any(not right(text) for text in e.verdicts.values()) for e in planned),
    )
    return head + "\n".join(lines) + "\n"


def right(text: str) -> bool:
    """Whether a verdict is no complaint."""
    return text in ("right", "none") or text.startswith("size ")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.zoo")
    parser.add_argument("types", nargs="*", help="model types (all)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--table", type=Path, help="write the page to this file, and its data beside it as JSON")
    args = parser.parse_args(argv)
    names = args.types or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    found = []
    with get_context("spawn").Pool(args.jobs, maxtasksperchild=8) as pool:
        for one in pool.imap(entry, names):
            found.append(one)
            print(one.name, one.plan, one.verdicts or one.reason, one.sharded, file=sys.stderr, flush=True)
    text = page(found)
    if args.table is None:
        print(text)
    else:
        args.table.write_text(text, "utf-8")
        rows = [json.dumps(e.data) for e in found]
        args.table.with_suffix(".json").write_text("[\n" + ",\n".join(rows) + "\n]\n", "utf-8")
    return int(any(not right(text) for e in found for text in e.verdicts.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
