"""A sample of the edits on which `validate` and the numeric proof must agree; `python -m tests.soundness` runs all."""

from __future__ import annotations

from typing import Any

import pytest
from sampling import sampled

from shardplan.language import parse_plan
from tests.soundness.edits import Document, edits, written_out
from tests.soundness.hf import own_plan
from tests.soundness.judge import judge, parse, subject
from tests.soundness.table import Row, row_of, table
from tests.soundness.tasks import Task

SAMPLED = (
    ("llama", 4),
    ("qwen3", 2),
    ("gpt2", 2),
    ("gpt2=gpt2:tied", 4),
    ("phi3", 2),
    ("gemma3_text", 2),
    ("mixtral", 2),
    ("llama=granite", 2),
)


# Refused, and right by accident: heads are taken for slices of the sequence (and gathered as if they were, when each rank takes its
# own again). What arrives is not what the style takes, so the check has no proof of it.
REFUSED = (
    "self_attn.q_norm: replicate_seq for replicated_with_grad_allreduce",
    "self_attn.k_norm: sequence_parallel for replicated_with_grad_allreduce",
    "self_attn.q_norm: sequence_parallel for replicated_with_grad_allreduce",
)


@pytest.mark.slow
@pytest.mark.parametrize(("word", "tp"), sampled(SAMPLED, 4, long=[("mixtral", 2)]))
def test_a_sample_of_edits(word: str, tp: int) -> None:
    judged = Task(word, tp, sample=10, seed=0, help=False, kinds=[]).run()
    disagreeing = [row.text for row in judged if row.disagrees]
    assert [any(known in text for known in REFUSED) for text in disagreeing] == [True] * len(disagreeing), disagreeing
    assert {row.truth for row in judged} & {"silent", "wrong"}


OWN_PLANS = ("apertus", "cohere2", "gemma2", "glm4", "qwen3_next", "olmo3", "phimoe", "gemma3n_text")


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(OWN_PLANS, 4, long=["gemma3n_text"]))
def test_a_sample_of_the_plans_that_transformers_has(name: str) -> None:
    own = own_plan(name, 2)
    assert own.verdict is not None, own.why
    assert not own.disagrees, own.truth


def test_both_judges_see_a_silent_mistake() -> None:
    model = subject("qwen3", 2)
    document = written_out(parse_plan("qwen3").plan, model.tree)
    edit = next(e for e in edits(document, sequence_parallel=False) if e.what.endswith("q_norm without a rule"))
    verdict = judge(model, parse(edit.document), sequence_parallel=False)
    assert verdict.silent and not verdict.right
    assert [d.code for d in verdict.layout.diagnostics] == ["SP401"] and verdict.fixed


@pytest.mark.slow
def test_an_embedding_that_runs_outside_the_module_around_the_door_completes_its_sum() -> None:
    """Image features are put into the embeddings before the language model runs."""
    model = subject("gemma3", 2)
    overlay = {"model.language_model.embed_tokens": "embedding_rowwise_seq"}
    plan = {"version": "1", "name": "mine", "extends": "gemma3", "sequence_parallel": overlay}
    verdict = judge(model, parse(plan), sequence_parallel=True)
    assert verdict.right and verdict.valid, verdict


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_written_out_plans_are_as_right_as_the_plans(name: str) -> None:
    """What is edited is right: a judge that refuses everything would be seen here."""
    model = subject(name, 2)
    document = written_out(parse_plan(name).plan, model.tree)
    for sequence_parallel in (False, True):
        verdict = judge(model, parse(document.plan()), sequence_parallel=sequence_parallel)
        assert verdict.valid and verdict.right


@pytest.mark.parametrize("shares", [["rows", {"columns": {"dim": 0}}], {"rows": "columns", "groups": {"dim": 0}}])
def test_each_share_but_the_first_is_left_out(shares: Any) -> None:
    rules = {"layers.*.mlp": {"style": "input_with_grad_allreduce", "shares": shares}}
    document = Document({"tensor_parallel": rules, "sequence_parallel": {}}, {"layers.*.mlp": "other"}, {})
    every = [edit.document for edit in edits(document, sequence_parallel=False) if edit.kind == "shares"]
    left = [plan["tensor_parallel"]["layers.*.mlp"].get("shares") for plan in every]
    first = next(iter(shares))
    assert left == [None, [first if isinstance(shares, list) else {first: shares[first]}]]
    assert all(parse(plan) is not None for plan in every)


def test_the_table_counts_what_is_missed() -> None:
    missed = Row("dropped", "silent", "valid", None, None, "")
    refused = Row("dropped", "right", "layout", None, None, "")
    assert missed.disagrees and refused.disagrees
    assert "| dropped | 2 | 0 | 0 | 0 | 1 | 1 | 1 | 1 |" in table([missed, refused])


@pytest.mark.slow
def test_a_module_that_nothing_reads_has_no_number_to_compare() -> None:
    """The head of Gemma 3's vision tower runs, and its result is dropped: what is refused there is not right by proof."""
    model = subject("gemma3", 2)
    document = written_out(parse_plan("gemma3").plan, model.tree)
    head = "model.vision_tower.head.mlp.fc2: replicated_with_grad_allreduce"
    edit = next(e for e in edits(document, sequence_parallel=True) if e.what == head)
    row = row_of("gemma3", model, True, edit, judge(model, parse(edit.document), sequence_parallel=True, help=False))
    assert (row.truth, row.verdict, row.disagrees) == ("unread", "layout", False)
