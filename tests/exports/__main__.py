"""`make judge WHAT=exports`: a line for each causal language model type with a built-in plan: crosses to transformers, or the first rule
that cannot. A drawn dozen of those that cross is run in transformers' own code and converted back; with `--all`, all are."""

from __future__ import annotations

import os
import random
import sys
import warnings

warnings.filterwarnings("ignore")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: E402

from tests.sampling import share_of  # noqa: E402
from tests.zoo.table import arguments, read, write  # noqa: E402

from .entry import Entry, entry  # noqa: E402
from .page import page  # noqa: E402

RUN = 12


def main(argv: list[str]) -> int:
    parser = arguments("python -m tests.exports")
    drawn = parser.add_mutually_exclusive_group()
    drawn.add_argument("--all", action="store_true", help="run all of those that cross")
    drawn.add_argument("--no-run", action="store_true", help="run none")
    args = parser.parse_args(argv)
    known = read(args.table, Entry)
    crossing, wrong = [], []
    for name in share_of(args.types or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, args):
        found = entry(name, run=False)
        print(f"| {name} | {found.refused or 'crosses'} |", flush=True)
        if found.refused:
            known[name] = found
        else:
            crossing.append(name)
            known.setdefault(name, found)
    print(f"{len(crossing)} of {len(args.types or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)} types cross", flush=True)
    few = random.Random(args.seed).sample(crossing, min(RUN, len(crossing)))
    for name in [] if args.no_run else crossing if args.all else few:
        before, known[name] = known[name], entry(name, run=True)
        wrong += [name] if before.right and not known[name].right else []
        print(f"{name}: {known[name].said}", flush=True)
        if args.table is not None:
            write(args.table, known, page)
    if args.table is not None:
        write(args.table, known, page)
    print(f"wrong by now: {', '.join(wrong)}" if wrong else "none is worse than before", flush=True)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
