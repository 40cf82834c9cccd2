"""`make judge WHAT=versions PAIR=2.13.0/5.24.0`: private names, the tests of `make quick`, twelve runs in real processes, and the proof of each
model type whose plans, modules, fields or arguments are not those of the pinned transformers. README.md gets a row if what is asked for passes. What
passed is not run again while what it depends on is as it was, so a run that was ended goes on where it was."""

from __future__ import annotations

import argparse
import sys
from datetime import date

from tests.drift.changes import Drift
from tests.drift.facts import Facts
from tests.drift.sources import Release
from tests.sampling import add_share, share_of

from .environment import BUILD, ROOT, Pair, make, wheel
from .passed import ONCE, RIGHT, Passed, digest, plans
from .runs import RUNS
from .table import written

QUICK = ("-m", "pytest", "-p", "no:cacheprovider", "--quick", "-m", "not slow and not exhaustive and not torch")
# A private name may be there and do something else: FSDP2's state after a step that an exception left half-way, results without memory, and calls of
# functions with a backward of their own.
LEFT = (
    "processes_left_steps.py::test_gradients_of_earlier_micro_batches_are_kept",
    "processes_left_steps.py::test_a_batch_that_is_skipped_leaves_nothing_behind",
    "fit_search.py::test_results_without_memory_are_as_torch_makes_them",
    "layout_holes.py::test_a_function_of_what_it_is_given_is_one_operation",
)
NAMES = (*QUICK[:4], "tests/test_private_names.py", *(f"tests/test_{name}" for name in LEFT))
RUN = ("-m", "tests.versions.runs")
TYPES = ("-m", "tests.versions.types")
# Their plans have a rule for either release: they are in every share.
EITHER = ("codegen", "inkling2_text", "mamba2")
COMPARED = ("tests/drift",)  # says which types two releases have otherwise
SYSTEM = "Linux, CPU, gloo"
PARTS = ("names", "quick", "runs", "types")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.versions", description=__doc__)
    parser.add_argument("pair", type=Pair.read, help="TORCH/TRANSFORMERS; `installed` for either")
    parser.add_argument("--python", default=sys.executable, help="the interpreter of a new environment")
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, default=PARTS, help="some of the parts, which have a row of their own"
    )
    add_share(parser)
    args = parser.parse_args(argv)
    environment = make(args.pair, args.python)
    asked = "import sys, torch; print('%d.%d' % sys.version_info[:2], torch.__version__)"
    python, torch = environment.said("-c", asked).split()
    passed = Passed.of(f"python-{python}-torch-{torch}-transformers-{args.pair.transformers}")
    differ = _types(args.pair) if "types" in args.only else []
    drawn = {*share_of(differ, args), *EITHER} if differ else set()
    types = [name for name in differ if name in drawn]
    kept = str(passed.file)
    parts = {"names": NAMES, "quick": QUICK, "runs": (*RUN, kept), "types": (*TYPES, *types, "--passed", kept)}
    wrong = []
    for name in args.only:
        print(f"{name}:", flush=True)
        is_done = bool(passed.said(name)) or (name == "types" and all(map(passed.said, types)))
        failed = not is_done and environment.run(*parts[name]).returncode
        if name in ONCE and not is_done and not failed:
            passed.note(name, "passed")
        wrong += [name] if failed else []
        print(f"{name}: " + ("failed" if failed else "passed before" if is_done else "passed"), flush=True)
    if wrong:
        return 1
    said = {
        "names": "private names, steps left half-way",
        "quick": "`make quick`",
        "runs": f"{len(RUNS)} runs on processes",
        "types": f"{_of(types, differ)} that differ from the pinned release's{_without(types, passed)}",
    }
    command = "`make judge WHAT=versions`" if (*args.only,) == PARTS else f"`--only {' '.join(args.only)}`"
    what = f"{command}: {', '.join(said[name] for name in args.only)}"
    row = (date.today().isoformat(), python, torch, args.pair.transformers, SYSTEM, what)
    readme = ROOT / "README.md"
    readme.write_text(written(readme.read_text("utf-8"), row), "utf-8")
    return 0


def _of(types: list[str], differ: list[str]) -> str:
    """How many types were proven, and of how many they were drawn."""
    return f"{len(types)} types" if types == differ else f"{len(types)} of {len(differ)} types, drawn,"


def _without(types: list[str], passed: Passed) -> str:
    """Those that nothing is wrong with and that were not proven."""
    refused = [name for name in types if passed.said(name).startswith("refused")]
    names = [name for name in types if passed.said(name) != RIGHT and name not in refused]
    said = (("refused", refused), ("without a verdict on", names))
    return "".join(f", {words} {', '.join(found)}" for words, found in said if found)


def _types(pair: Pair) -> list[str]:
    """The model types with a built-in plan for which the pair's transformers is not the pinned one."""
    pinned = Pair.read("installed/installed").transformers
    if pinned == pair.transformers:
        return []
    noted = BUILD / "passed" / f"types-{pinned}-{pair.transformers}-{digest(ROOT, COMPARED)}.txt"
    if not noted.exists():
        drift = Drift(*(Facts(Release(wheel(name))) for name in (pinned, pair.transformers)))
        noted.parent.mkdir(parents=True, exist_ok=True)
        noted.write_text("".join(f"{name}\n" for name in drift.model_types), "utf-8")
    return [name for name in noted.read_text("utf-8").split() if name in plans()]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
