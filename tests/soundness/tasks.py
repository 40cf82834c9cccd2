"""Judging many edits of one plan."""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import torch

warnings.filterwarnings("ignore")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from shardplan.language import parse_plan  # noqa: E402
from tests.proofs import PLANS as STUDIED  # noqa: E402

from .edits import Edit, edits, written_out  # noqa: E402
from .judge import Subject, judge, parse, subject  # noqa: E402
from .table import Row, row_of  # noqa: E402

# Every built-in plan, and more architectures that these plans fit (or nearly): `plan=architecture`, tied where said.
PLANS = (
    *STUDIED,
    "llama=llama:tied",
    "gpt2=gpt2:tied",
    "llama=arcee",
    "llama=cohere",
    "llama=cwm",
    "llama=ernie4_5",
    "llama=gemma",
    "llama=granite",
    "llama=helium",
    "llama=olmo",
    "llama=seed_oss",
    "llama=smollm3",
    "mistral=ministral3",
    "mixtral=mixtral:ep",
    "qwen3_moe=qwen3_moe:ep",
    "qwen2_moe=qwen2_moe:ep",
    "deepseek_v3=deepseek_v3:ep",
    "gpt_oss=gpt_oss:ep",
)


def subject_of(word: str, tp: int) -> tuple[str, Subject]:
    """The plan and the model of a word, as `Task.word`."""
    plan, _, architecture = word.partition("=")
    name, _, how = architecture.partition(":")
    ep = tp if how == "ep" else 1
    return plan, subject(name or parse_plan(plan).plan.models[0], tp, True if how == "tied" else None, ep)


def rows(plan: str, model: Subject, *, sample: int | None, seed: int, help: bool, kinds: list[str]) -> Iterator[Row]:
    """Judge the edits of a plan, or a sample of them."""
    experts = model.ep > 1
    document = written_out(parse_plan(plan).plan, model.tree, experts=experts)
    for sequence_parallel in (False, True):
        todo: list[Edit] = [
            edit
            for edit in edits(document, sequence_parallel=sequence_parallel, experts=experts)
            if not kinds or edit.kind in kinds
        ]
        if sample is not None and sample < len(todo):
            todo = random.Random(f"{seed} {plan} {model.name} {model.tp} {sequence_parallel}").sample(todo, sample)
        for edit in todo:
            edited = parse(edit.document)
            if edited is not None:
                verdict = judge(model, edited, sequence_parallel=sequence_parallel, help=help)
                yield row_of(plan, model, sequence_parallel, edit, verdict)


@dataclass(frozen=True)
class Task:
    """The edits of one plan for one architecture at one size, judged in a process of its own.

    Args:
        word: `plan`, `plan=architecture`, `plan=architecture:tied` or `plan=architecture:ep`, whose experts are distributed.
        tp: the size of the axis.
        sample, seed, help, kinds: as for `rows`.
    """

    word: str
    tp: int
    sample: int | None
    seed: int
    help: bool
    kinds: list[str]

    def run(self) -> list[Row]:
        warnings.filterwarnings("ignore")
        torch.set_num_threads(1)
        plan, model = subject_of(self.word, self.tp)
        return list(rows(plan, model, sample=self.sample, seed=self.seed, help=self.help, kinds=self.kinds))
