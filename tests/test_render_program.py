"""The table of `shardplan show`."""

import re

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from shardplan import compile_plan, load_plan
from shardplan.report.program_text import Row, ShownParameter, byte_text, fold, module_rows, program_text
from shardplan.report.width import display_width

CONFIG = LlamaConfig(
    vocab_size=101,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=4,
    tie_word_embeddings=True,
)
PLAN = load_plan("llama")
ANSI = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture(scope="module")
def program():
    return compile_plan(CONFIG, {"tp": 2}, PLAN)


def test_the_numbers_are_those_of_the_model(program):
    model = LlamaForCausalLM(CONFIG)
    rows = tuple(module_rows(program, PLAN.sources))
    held = {f"{row.name}.{p.name}": p for row in rows for p in row.parameters}
    assert held.keys() == {name for name, _ in model.named_parameters(remove_duplicate=False)}
    assert sum(p.whole for p in held.values()) == sum(p.numel() for p in model.parameters())
    for name, parameter in model.named_parameters():
        replicated = held[name].text.startswith("Replicate")
        if name == "model.embed_tokens.weight":
            assert held[name].local == 51 * 64  # 101 rows in ceil-chunks
        else:
            assert held[name].local == parameter.numel() // (1 if replicated else 2)
        assert held[name].size == 4 * held[name].local


def test_the_table(program):
    lines = program_text(program, PLAN.sources, color=False, width=200).split("\n")
    shown = [" ".join(line.split()) for line in lines]
    held = shown[shown.index("model.layers.0-2.self_attn.q_proj colwise plans/llama.yaml:11") + 1]
    assert held == "weight Shard(0) [32, 64] 6,144 24.6 KB"
    (mlp,) = (i for i, line in enumerate(shown) if line.startswith("model.layers.0-2.mlp input_with_grad_allreduce"))
    assert "in I -> R" in shown[mlp + 1]
    assert "weight Shard(0) [51, 64], tied to model.embed_tokens.weight in I -> R 0 0 B" in shown
    assert "forward: 7 all-reduce, 1 all-gather" in shown
    assert len(program_text(program, PLAN.sources, color=False, all_rows=True, width=200).split("\n")) > len(lines)


@pytest.mark.parametrize("options", [{}, {"sequence_parallel": True, "regather": True}])
def test_no_line_is_wider_than_asked_for_and_nothing_is_cut(options):
    program = compile_plan(CONFIG, {"tp": 2}, PLAN, **options)
    widest = program_text(program, PLAN.sources, color=False, width=1000)
    for width in (30, 60, 120, 200):
        text = program_text(program, PLAN.sources, color=False, width=width)
        assert max(map(display_width, text.split("\n"))) <= width
        assert sorted("".join(text.split())) == sorted("".join(widest.split()))
        colored = program_text(program, PLAN.sources, color=True, width=width)
        assert colored != text
        assert [line.rstrip() for line in ANSI.sub("", colored).split("\n")] == text.split("\n")


def test_rows_that_differ_are_not_folded():
    def row(name: str, local: int) -> Row:
        return Row(name, ("colwise",), (), (ShownParameter("weight", "Shard(0)", local, local, local),), ())

    folded = fold([row("layers.0.q", 4), row("layers.1.q", 4), row("layers.2.q", 8)])
    assert [(r.name, r.parameters[0].local) for r in folded] == [("layers.0-1.q", 8), ("layers.2.q", 8)]


def test_bytes():
    assert [byte_text(n) for n in (0, 999, 1000, 262_100_000, 10**13, 10**16)] == [
        "0 B",
        "999 B",
        "1.0 KB",
        "262.1 MB",
        "10.0 TB",
        "10000.0 TB",
    ]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, None),
        ({"sequence_parallel": True}, "6 gathered values are kept for backward; with `regather` their shards are"),
        (
            {"sequence_parallel": True, "regather": True},
            "6 gathered values are gathered again in backward (`regather`)",
        ),
        (
            {"sequence_parallel": True, "compile": {"modules": ["model.layers.*"], "async_tensor_parallel": True}},
            "with gathers and scatters (`async_tensor_parallel`)",
        ),
    ],
)
def test_what_the_plan_could_have_otherwise_is_said(options, said):
    text = program_text(compile_plan(CONFIG, {"tp": 2}, PLAN, **options), PLAN.sources, color=False)
    if said is None:
        assert "gathered values" not in text
    else:
        assert said in " ".join(text.split())
