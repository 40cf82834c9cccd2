"""The built-in plans of model types, proven at tp 2 with the releases that are installed: `python -m tests.versions.types TYPE ...`."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import torch
from packaging.version import Version

from shardplan import validate
from shardplan.core.diagnostics import PlanError
from tests.zoo.experts import config_of

from .passed import RIGHT, Passed

SIZES = ("SP301", "SP302", "SP303", "SP304", "SP305")  # not at this size, with the numbers of the default configuration
# No built-in plan, a configuration that cannot be built or run, or a part that no run reaches.
NO_VERDICT = ("SP5", "SP421")
# Types whose code in older releases of transformers no plan fits yet -> since which release one does, and what `validate` says until then.
# Jamba's block computes weights from the router's logits, which the auxiliary loss reads: one value has a partial and a complete gradient.
# The first result of LongCat's router is the logits, which a plan says are read outside; it was the weights, with no sign of it in the structure.
REFUSED = {"jamba": ("5.21", "SP401"), "longcat_flash": ("5.19", "SP401")}


def judged(name: str) -> tuple[bool, str]:
    """Whether nothing is wrong with a type, and what is said of it."""
    try:
        config = config_of(name)  # of one expert no router has a gradient
        report = validate(config if config.model_type == name else name, "auto", {"tp": 2}, derive=False)
    except PlanError as error:
        found, proven = list(error.diagnostics), False
    else:
        found, proven = [one for one in report.diagnostics if one.is_error], report.ok and report.proven
    if not found:
        return proven, RIGHT if proven else "nothing was compared"
    first = next((one for one in found if one.code in SIZES), found[0])
    since, code = REFUSED.get(name, ("0", ""))
    if {one.code for one in found} == {code} and Version(version("transformers")) < Version(since):
        return True, f"refused: {code}"
    fits = first.code in SIZES or first.code.startswith(NO_VERDICT)
    return fits, f"{'' if fits else 'wrong: '}{first.code}: {' '.join(first.message.split())}"


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.versions.types")
    parser.add_argument("types", nargs="+")
    parser.add_argument("--passed", type=lambda text: Passed(Path(text)), help="a file of those that are left out")
    args = parser.parse_args(argv)
    warnings.filterwarnings("ignore")
    passed, wrong = args.passed, []
    for name in args.types:
        if passed and passed.said(name):
            continue
        try:
            fits, said = judged(name)
        except Exception as error:  # of the model's own code; the other types are still to be seen
            fits, said = False, f"wrong: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        wrong += [] if fits else [name]
        print(f"{name}: {said}", flush=True)
        if fits and passed:
            passed.note(name, said)
    if wrong:
        print(f"{len(wrong)} of {len(args.types)} types are wrong: {' '.join(wrong)}")
    return int(bool(wrong))


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main(sys.argv[1:]))
