"""What built-in plans send at real dimensions, against the least, as reports/communication.json has it."""

from __future__ import annotations

import json

import pytest
from sampling import sampled

from benchmarks.plans import DATA, VARIANTS, of_type
from shardplan.compiler.bind import bind
from shardplan.core.mesh import MeshSizes
from shardplan.core.plan import overlays_of
from shardplan.language import parse_plan
from tests.model_settings import find
from tests.soundness.judge import subject
from tests.zoo.block_inputs import Size
from tests.zoo.least import least

FOUND = json.loads(DATA.read_text("utf-8"))
COUNTED = {name: one for name, one in FOUND.items() if "reason" not in one}
SIZES = [
    (name, word, tp, Size(*sizes["sent"]), Size(*sizes["least"]))
    for name, one in COUNTED.items()
    for word in VARIANTS
    for tp, sizes in one.get(word, {}).items()
]


def test_nothing_sends_less_than_the_least() -> None:
    """Or it would not be the least. For each token: whole parameters on shards of the sequence may cost more or less."""
    assert [(name, word, tp) for name, word, tp, sent, least in SIZES if sent.token < least.token] == []


def test_most_plans_send_the_least() -> None:
    good = {name for name in COUNTED if all(sent <= least for n, *_, sent, least in SIZES if n == name)}
    assert {"llama", "mixtral", "gpt2", "gemma3_text"} <= good
    assert len(good) > len(COUNTED) / 2


@pytest.mark.parametrize("on", [False, True], ids=["tp", "sp"])
def test_the_least_of_llama_is_what_the_papers_say(on: bool) -> None:
    """Two sums for each layer and direction, one of the table's rows and one in front of the head (arXiv 1909.08053), half of an
    all-reduce for the logits; with the sequence split the gradients of two norms for each layer and of the last."""
    small = subject("llama", 2)
    tree = find("llama").tree
    resolved, _ = bind(parse_plan("llama").plan, small.tree, MeshSizes(tp=2), overlays_of(on))
    layers, hidden, vocabulary = 2, tree.numbers["hidden_size"], tree.numbers["vocab_size"]
    expected = Size((4 * layers + 2) * hidden + vocabulary / 2, (2 * layers + 1) * hidden if on else 0)
    assert least(resolved, small.recorded, tree, 2) == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(sorted(COUNTED), 1))
def test_what_a_plan_sends_is_what_the_table_says(name: str) -> None:
    row = COUNTED[name]
    words = [word for word in VARIANTS if word in row]
    made = of_type(name, parse_plan(row["plan"]).plan, words)
    assert json.loads(json.dumps(made)) == {word: row[word] for word in words}
