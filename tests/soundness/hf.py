"""transformers' own tensor-parallel plans, judged by both: `python -m tests.soundness.hf [model type ...]`."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch

warnings.filterwarnings("ignore")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: E402

from shardplan.compiler.user_inputs import read_plan  # noqa: E402
from shardplan.core.diagnostics import PlanError  # noqa: E402
from tests.model_settings import find  # noqa: E402

from .judge import Verdict, judge, subject  # noqa: E402

HEAD = """# The plans that transformers has

Made by `{command}` with transformers {version}; do not edit. Each causal language model type with a tensor-parallel plan
of its own, judged as `PLAN hf` by `validate` and by the numeric proof (loss, logits and every gradient of the sharded
reduced model) at tp={tp}. What is judged is the plan; how transformers itself loads and runs it is another matter. A plan
that is refused though the numbers are right has a value that is wrong on some rank and that this input, token ids alone,
masks out. Types whose default configuration cannot be built, or does not run, are named with what is said.

"""


@dataclass(frozen=True)
class Own:
    """What was said of a model type's own plan.

    Args:
        name: the model type.
        has: whether it has one; None where that could not be found out.
        verdict: of both judges; None where it was not judged.
        why: what kept it from being judged.
    """

    name: str
    has: bool | None
    verdict: Verdict | None = None
    why: str = ""

    @property
    def disagrees(self) -> bool:
        return self.verdict is not None and self.verdict.right != self.verdict.valid

    @property
    def truth(self) -> str:
        v = self.verdict
        return "right" if v.right else f"wrong gradients: {v.worst}" if v.silent else f"wrong: {v.worst}"


def own_plan(name: str, tp: int) -> Own:
    """Judge the plan of a model type, if it has one."""
    torch.set_num_threads(1)
    try:
        found = find(name)
    except PlanError as error:
        return Own(name, None, why=error.diagnostics[0].message)
    given = read_plan("hf", found)
    plan, about = given.plan, given.findings
    if plan is None:
        return Own(name, about[0].code != "SP514", why=about[0].message)
    try:
        model = subject(name, tp)
    except PlanError as error:
        return Own(name, True, why=error.diagnostics[0].message)
    except Exception as error:  # of the unsharded model
        return Own(name, True, why=f"the reduced model raises {type(error).__name__}: {error}")
    return Own(name, True, judge(model, plan, sequence_parallel=False))


def page(found: Sequence[Own]) -> str:
    """Markdown: the wrong plans with their findings, the right ones by name, and what could not be judged."""
    judged = [own for own in found if own.verdict is not None]
    right = [own for own in judged if own.verdict.right]
    wrong = [own for own in judged if not own.verdict.right]
    disagree = [own for own in judged if own.disagrees]
    unjudged = [own for own in found if own.has and own.verdict is None]
    unknown = [own for own in found if own.has is None]
    lines = [
        (
            f"{len(judged)} plans: {len(right)} right, {len(wrong)} wrong; `validate` and the numeric proof disagree on "
            f"{len(disagree)}."
        ),
        "",
        "## Wrong",
        "",
        "| model type | numeric proof | `validate` | help |",
        "|---|---|---|---|",
    ]
    for own in wrong:
        said = own.verdict.structure or own.verdict.layout.diagnostics
        text = f"{said[0].code}: {said[0].message}" if said else "valid"
        helps = (said[0].help or "-") if said else "-"
        lines.append(f"| {own.name} | {_cell(own.truth)} | {_cell(text)} | {_cell(helps)} |")
    lines += ["", "## Right", "", ", ".join(own.name for own in right) + "."]
    refused = [own for own in right if own.disagrees]
    if refused:
        lines += ["", "Right, and refused:", ""]
        for own in refused:
            said = own.verdict.structure or own.verdict.layout.diagnostics
            lines.append(f"- {own.name}: {said[0].code}: {said[0].message}")
    for title, owns in (("Not judged", unjudged), ("Cannot be built offline", unknown)):
        if owns:
            lines += ["", f"## {title}", ""] + [f"- {own.name}: {own.why}" for own in owns]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soundness.hf")
    parser.add_argument("names", nargs="*", help="model types (all)")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--table", type=Path, help="write the page to this file")
    args = parser.parse_args(argv)
    names = args.names or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    found = []
    with get_context("spawn").Pool(args.jobs, maxtasksperchild=20) as pool:
        for own in pool.imap(partial(own_plan, tp=args.tp), names):
            found.append(own)
            if own.has is not False:
                state = own.why if own.verdict is None else own.truth + (" DISAGREE" if own.disagrees else "")
                print(f"{own.name}: {state}", file=sys.stderr, flush=True)
    text = page(found)
    print(text)
    if args.table is not None:
        import transformers

        command = f"python -m tests.soundness.hf {' '.join(argv)}"
        head = HEAD.format(command=command, version=transformers.__version__, tp=args.tp)
        args.table.write_text(head + text + "\n", "utf-8")
    return int(any(own.disagrees for own in found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
