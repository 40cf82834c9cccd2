"""`make judge WHAT=versions PAIR=2.13.0+cpu/5.24.0`: private names, the tests of `make quick`, twelve runs in real processes, and `validate` of each
model type whose plans, modules, fields or arguments are not those of the pinned transformers. README.md gets a row if all of them pass."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from datetime import date

from shardplan.language import builtin_plans, parse_plan
from tests.drift.changes import Drift
from tests.drift.facts import Facts
from tests.drift.sources import Release
from tests.sampling import add_share, share_of

from .environment import ROOT, Environment, Pair, make, wheel
from .runs import RUNS
from .table import written

QUICK = ("-m", "pytest", "-p", "no:cacheprovider", "--quick", "-m", "not slow and not exhaustive and not torch")
NAMES = ("-m", "pytest", "-p", "no:cacheprovider", "tests/test_private_names.py")
SYSTEM = "Linux, CPU, gloo"
PARTS = ("names", "quick", "runs", "types")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.versions", description=__doc__)
    parser.add_argument("pair", type=Pair.read, help="TORCH/TRANSFORMERS; `installed` for either")
    parser.add_argument("--python", default=sys.executable, help="the interpreter of a new environment")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="some of the parts, which write no row")
    add_share(parser)
    args = parser.parse_args(argv)
    environment = make(args.pair, args.python)
    parts: dict[str, Callable[[], list[str]]] = {
        "names": lambda: _said(environment, *NAMES),
        "quick": lambda: _said(environment, *QUICK),
        "runs": lambda: _said(environment, "-m", "tests.versions.runs"),
        "types": lambda: [wrong for name in types for wrong in _validated(environment, name)],
    }
    types = share_of(_types(args.pair), args) if "types" in args.only else []
    wrong = {name: parts[name]() for name in args.only}
    for name, lines in wrong.items():
        print(f"{name}: " + ("passed" if not lines else "\n".join(["failed", *lines])), flush=True)
    if any(wrong.values()):
        return 1
    if (*args.only,) == PARTS and args.share == 1:
        python = environment.run(
            "-c", "import platform; print('.'.join(platform.python_version_tuple()[:2]))"
        ).stdout.strip()
        passed = f"`make judge WHAT=versions`: private names, `make quick`, {len(RUNS)} runs on processes, {len(types)} types that differ from the pinned release's"
        row = (date.today().isoformat(), python, args.pair.torch, args.pair.transformers, SYSTEM, passed)
        readme = ROOT / "README.md"
        readme.write_text(written(readme.read_text("utf-8"), row), "utf-8")
    return 0


def _types(pair: Pair) -> list[str]:
    """The model types with a built-in plan for which the pair's transformers is not the pinned one."""
    pinned = Pair.read("installed/installed").transformers
    if pinned == pair.transformers:
        return []
    drift = Drift(*(Facts(Release(wheel(name))) for name in (pinned, pair.transformers)))
    planned = {model for name in builtin_plans() if (plan := parse_plan(name).plan) for model in plan.models}
    return [name for name in drift.model_types if name in planned]


def _said(environment: Environment, *words: str) -> list[str]:
    """The last lines of a command that failed."""
    done = environment.run(*words)
    return (done.stdout + done.stderr).splitlines()[-30:] if done.returncode else []


def _validated(environment: Environment, name: str) -> list[str]:
    done = environment.run("-m", "shardplan", "validate", name, "auto", "--tp", "2")
    return [f"{name}: {(done.stdout + done.stderr).strip()[:400]}"] if done.returncode else []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
