"""Configurations that nobody chose: `python -m tests.variants.drawn --seed S` draws them from switches and counts of all types."""

from __future__ import annotations

import argparse
import os
import random
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from typing import Any

warnings.filterwarnings("ignore")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from torch import nn  # noqa: E402
from transformers import PreTrainedConfig  # noqa: E402

import shardplan  # noqa: E402
from shardplan.compiler.lower import Program  # noqa: E402
from shardplan.core.diagnostics import PlanError  # noqa: E402
from shardplan.model import find_any  # noqa: E402
from shardplan.model.reduced.reduced_model import ReducedModel, make_reduced_model  # noqa: E402
from tests.proofs import Case, differing  # noqa: E402
from tests.sampling import add_share  # noqa: E402

from .__main__ import table  # noqa: E402
from .outcome import Outcome, configured, outcome  # noqa: E402
from .switches import BASES, IGNORED, candidates  # noqa: E402
from .trials import Trial, is_listed, planned  # noqa: E402

COUNT = re.compile(
    r".*(n_heads?|num_(key_value_|kv_|attention_|key_|value_)?heads|n_?groups|intermediate_size|ffn_dim|vocab_size)"
    r"|(ssm_)?state_size|mamba_d_state|conv_kernel|.*conv_kernel_dim|conv_L_cache|head_dim"
)
SIZE = re.compile(r"which tp=\d+ does not divide")
TIMES = (2, 4, 0.5, 0.25, 3)  # what a count is multiplied by
REFUTED = ("SP420", "SP422")  # the proof's findings
SEED = 91  # of weights and inputs, other than the proof's
TRIES = 20  # until transformers' configuration class accepts one


def draw(model_type: str, chosen: random.Random) -> Trial:
    """A configuration of a type: up to two of its switches, and one or two of its counts, other than the default's. One that the
    configuration class refuses is drawn again; whether the model can be built is for the trial."""
    base = BASES.get(model_type, {})
    single = sorted(candidates(model_type).items(), key=lambda one: one[0])
    counts = _counts(model_type, base)
    for _ in range(TRIES):
        switches = chosen.sample(single, min(len(single), chosen.randint(0 if counts else 1, 2)))
        changes = {field: value for _, change in switches for field, value in change.items()}
        others = [(field, now) for field, now in counts if field not in changes]
        sizes = {
            field: max(1, int(now * chosen.choice(TIMES)))
            for field, now in chosen.sample(others, min(len(others), chosen.randint(1, 2)))
        }
        names = [*(name for name, _ in switches), *(f"{field}={size}" for field, size in sizes.items())]
        changes |= sizes
        trial = Trial(model_type, ", ".join(names), {**base, **changes}, tuple(changes))
        if _accepted(trial):
            break
    return trial


def _accepted(trial: Trial) -> bool:
    try:
        configured(trial.model_type, trial.settings)
    except Exception:  # of the configuration class
        return False
    return True


def drawn(seed: int, count: int) -> Iterator[Trial]:
    """So many configurations, of types drawn with replacement. The same seed gives the same."""
    chosen, types = random.Random(seed), planned()
    for _ in range(count):
        yield draw(chosen.choice(types), chosen)


def judged(trial: Trial, tp: int) -> Outcome:
    """As `outcome`, and what is proven is judged once more, with other weights and inputs than the proof's: `auto` is applied to a reduced
    model, and loss, logits and every gradient on every rank are compared with the unsharded one's. "wrong" if they differ, and
    if the proof had to refute a plan that the checks let pass."""
    found = outcome(trial.model_type, trial.name, trial.settings, trial.switches, tp=tp)
    if found.about.startswith(REFUTED):
        return replace(found, verdict="wrong")
    if found.verdict != "proven":
        return found
    try:
        differs = _differing(configured(trial.model_type, trial.settings), tp, len(found.variants) > 1)
    except Exception as error:
        differs = f"raises {type(error).__name__}: {error}"
    return replace(found, verdict="wrong", about=differs) if differs else found


def _differing(config: PreTrainedConfig, tp: int, has_sequence: bool) -> str:
    for sequence_parallel in (False, True)[: 1 + has_sequence]:
        for small, kind in _reduced(config, tp):
            rows = Case(
                small.build,
                small.inputs(seed=SEED, kind=kind),
                "auto",
                tp,
                options={"sequence_parallel": sequence_parallel},
                compiled=_compiled,
            ).rows()
            if wrong := differing(rows):
                return f"{kind}{', sequence parallel' * sequence_parallel}: {wrong}"
    return ""


def _reduced(config: PreTrainedConfig, tp: int) -> Iterator[tuple[ReducedModel, str]]:
    """With each kind of input; with as many heads as the plan divides into groups."""
    for times in (1, 2, 4):
        small = make_reduced_model(
            find_any(config), tp=tp, seed=SEED, experts_implementation="eager", heads_times=times
        )
        try:
            _compiled(small.build(), "auto", tp)
        except PlanError:
            if times == 4:
                raise
        else:
            yield from ((small, kind) for kind in small.kinds)
            return


def _compiled(model: nn.Module, plan: str, tp: int, **options: Any) -> Program:
    return shardplan.compile_plan(model, {"tp": tp}, plan, **options)


def problems(found: Sequence[Outcome]) -> list[str]:
    """What is wrong, and what is refused by a finding that names no changed field, nor a number that tp does not divide, and is no
    listed gap."""
    return [
        f"{one.key}: {one.about}"
        for one in found
        if one.verdict == "wrong" or (one.verdict == "gap" and not is_listed(one) and not SIZE.search(one.about))
    ]


def _counts(model_type: str, base: Mapping[str, Any]) -> list[tuple[str, int]]:
    config = configured(model_type, base)
    found = sorted(vars(config).items())
    return [
        (field, now)
        for field, now in found
        if type(now) is int and now > 1 and COUNT.fullmatch(field) and not IGNORED.fullmatch(field)
    ]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.variants.drawn")
    add_share(parser)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    args = parser.parse_args(argv)
    found: list[Outcome] = []
    with get_context("spawn").Pool(args.jobs, maxtasksperchild=20) as pool:
        for one in pool.imap(partial(judged, tp=args.tp), drawn(args.seed, -(-args.count // args.share))):
            found.append(one)
            print(f"{one.verdict:16} {one.key} {one.about}", file=sys.stderr, flush=True)
    print(table(sorted(found, key=lambda one: one.model_type)))
    print("\n".join(problems(found)))
    return int(bool(problems(found)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
