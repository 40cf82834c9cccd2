"""`make judge WHAT=exports`: a line for each causal language model type with a built-in plan: crosses to transformers, or the first rule
that cannot; then a drawn sample of those that cross, run in its own code."""

from __future__ import annotations

import argparse
import os
import random
import sys
import warnings

warnings.filterwarnings("ignore")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: E402

from shardplan import export_plan  # noqa: E402
from tests.sampling import add_share, share_of  # noqa: E402

RUN = 12


def crosses(name: str) -> str | None:
    """The first rule of the built-in plan that cannot cross, or why there is no program; None where it crosses."""
    made = export_plan(name, "auto", "transformers", run=False, derive=False)
    if made.text is not None:
        return None
    found = next(d for d in made.report.diagnostics if d.is_error)
    where = f" ({found.primary.location.path[-1]})" if found.primary is not None and found.primary.location.path else ""
    return f"{found.code}: {found.message}{where}"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.exports", description=__doc__)
    parser.add_argument("--no-run", action="store_true", help="the lines alone")
    add_share(parser)
    args = parser.parse_args(argv)
    said = {}
    for name in share_of(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, args):
        said[name] = crosses(name)
        print(f"| {name} | {said[name] or 'crosses'} |", flush=True)
    crossing = [name for name, why in said.items() if why is None]
    print(f"{len(crossing)} of {len(said)} types cross", flush=True)
    drawn = random.Random(args.seed).sample(crossing, min(0 if args.no_run else RUN, len(crossing)))
    wrong = 0
    for name in drawn:
        made = export_plan(name, "auto", "transformers", derive=False)
        wrong += not made.ok
        print(f"{name}: {made.shown if made.ok else made.report}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
