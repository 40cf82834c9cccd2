"""The layout check against another engine for the same types, `spmd_types`, driven by the same style records."""

from __future__ import annotations

import random

import pytest
from sampling import sampled

from shardplan.compiler.bind import bind
from shardplan.compiler.check import check
from shardplan.compiler.layout.run import prove
from shardplan.core.mesh import MeshSizes
from shardplan.core.plan import overlays_of
from shardplan.language import parse_plan
from tests.proofs import PLANS
from tests.soundness.edits import edits, written_out
from tests.soundness.judge import parse, subject
from tests.spmd import reason

GRADIENTS = ("partial", "meeting")  # the mistakes that both must see
DRAWN = 40  # edits at least, and as many as it takes to see both kinds


@pytest.mark.parametrize("name", PLANS)
def test_right_plans_have_no_objection(name: str) -> None:
    plan = parse_plan(name).plan
    model = subject(plan.models[0], 2)
    for on in (False, True):
        resolved, _ = bind(plan, model.tree, MeshSizes(tp=2), overlays_of(on))
        proof = prove(resolved, model.recorded)
        assert proof.findings == ()
        assert reason(model.recorded, resolved, proof.incoming) == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(["llama", "qwen3", "phi3", "gpt2", "gemma3_text", "mixtral"], 3))
def test_edited_plans(name: str) -> None:
    """What the layout check lets pass the other engine lets pass, and wrong gradients both refuse."""
    model = subject(parse_plan(name).plan.models[0], 2)
    document = written_out(parse_plan(name).plan, model.tree)
    seen = {"passed": 0, "refused": 0}
    for on in (False, True):
        every = list(edits(document, sequence_parallel=on))
        for number, edit in enumerate(random.Random(name).sample(every, len(every))):
            if number >= DRAWN and all(seen.values()):
                break
            plan = parse(edit.document)
            if plan is None:
                continue
            resolved, about = bind(plan, model.tree, MeshSizes(tp=2), overlays_of(on))
            if any(d.is_error for d in (*about, *check(resolved, seq_len=None))):
                continue
            proof = prove(resolved, model.recorded)
            kinds = [finding.kind for finding in proof.findings]
            if not kinds:
                assert reason(model.recorded, resolved, proof.incoming) == "", edit
                seen["passed"] += 1
            elif kinds[0] in GRADIENTS:
                assert reason(model.recorded, resolved, proof.incoming) != "", edit
                seen["refused"] += 1
    assert all(seen.values()), seen
