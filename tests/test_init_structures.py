"""`init` on models of `own_structures`, written in the ways in which people write them: what it splits, that the plan is right,
and which line it names where the code forbids a split."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import other_packages as other
import own_structures as own
import pytest
from derived_plans import against_overlay, meets
from torch import Tensor, nn

import shardplan

Inputs = Callable[[int], dict[str, Tensor]]


def tokens(attention: type[nn.Module], mlp: type[nn.Module] = own.MLP) -> Callable[[], nn.Module]:
    return partial(own.Tokens, own.block_of(attention, mlp))


PACKED = {"style": "packed_colwise", "packed": 3}
FLAT = {"attention.qkv": PACKED, "attention.out": "rowwise", "attention": {"shares": ["heads"]}}
# What builds a model, its inputs, and rules below `blocks.*` that its plan has, of mappings some of the options.
STRUCTURES: dict[str, tuple[Callable[[], nn.Module], Inputs, Mapping[str, Any]]] = {
    "einsum": (tokens(own.EinsumAttention), own.ids, {"attention.q": "colwise", "attention.o": "headwise"}),
    "flat_einsum": (tokens(own.FlatEinsumAttention, own.FusedGate), own.ids, {**FLAT, "mlp.w12": "packed_colwise"}),
    "fused_key_values": (
        tokens(own.FusedKeyValues),
        own.ids,
        {"attention.q": "colwise", "attention.kv": "packed_colwise", "attention": {"shares": ["num_heads"]}},
    ),
    "grouped_fused": (
        tokens(own.GroupedFused),
        own.ids,
        {"attention.wqkv": {"packed": ["32", "16", "16"]}, "attention": {"shares": ["n_heads", "n_kv"]}},
    ),
    "interleaved": (tokens(own.Interleaved), own.ids, {"attention.query_key_value": "colwise"}),
    "normed_heads": (
        tokens(own.NormedHeads),
        own.ids,
        {"attention.temperature": "headwise", "attention.qkv": PACKED, "attention.gate": "colwise"},
    ),
}

STRUCTURES |= {
    "multi_query": (
        tokens(own.MultiQuery),
        own.ids,
        {"attention.q": "colwise", "attention.kv": "replicated_with_grad_allreduce", "attention.out": "rowwise"},
    ),
    "parallel": (partial(own.Tokens, own.GptJ), own.ids, {**FLAT, "mlp.w12": "packed_colwise", "mlp.w3": "rowwise"}),
    "post_norm": (
        partial(own.Tokens, own.PostNorm),
        own.ids,
        {"query": "colwise", "dense": "rowwise", "output": "rowwise"},
    ),
    "soft_experts": (tokens(own.FlatEinsumAttention, own.SoftExperts), own.ids, {"mlp.experts.a.up": "colwise"}),
    "slopes": (tokens(own.Slopes), own.ids, {"attention": {"shares": [{"slopes": {"dim": 0}}]}}),
    "windows": (
        own.Windows,
        own.pictures,
        {"attn.relative_position_bias_table": "rowwise", "attn.qkv": PACKED, "attn": {"shares": ["num_heads"]}},
    ),
}


SAMPLE = ("einsum", "normed_heads")  # what `make test` runs
DRAWN = {*random.Random(0).sample(sorted(STRUCTURES), 6)}  # and `make test-all`; the rest is exhaustive


def mark(name: str, sequence_parallel: bool) -> tuple[pytest.MarkDecorator, ...]:
    if not sequence_parallel and name in SAMPLE:
        return ()
    return (pytest.mark.slow if name in DRAWN else pytest.mark.exhaustive,)


EACH = [
    pytest.param(n, sp, marks=mark(n, sp)) for sp in (False, True) for n in STRUCTURES if not (sp and n == "windows")
]


@pytest.mark.parametrize(("name", "sequence_parallel"), EACH)
def test_it_is_split_through(name: str, sequence_parallel: bool) -> None:
    build, inputs, wanted = STRUCTURES[name]
    made = shardplan.init_plan(shardplan.Model(build(), inputs=inputs), sequence_parallel=sequence_parallel)
    rules = made.document["tensor_parallel"]
    found = {pattern: rules.get(f"blocks.*.{pattern}") for pattern in wanted}
    assert all(meets(found[pattern], rule) for pattern, rule in wanted.items()), found
    assert not made.diagnostics
    assert shardplan.verify(
        shardplan.Model(build(), inputs=inputs), made.document, {"tp": 2}, sequence_parallel=sequence_parallel
    ).ok


@pytest.mark.slow
def test_windows_of_a_picture_have_no_sequence_to_split() -> None:
    """Attention takes each window as a row, so a slice of the rows of a picture is none of positions."""
    assert "the input of blocks.*.attn is split in dim 0" in against_overlay(own.Windows(), own.pictures)


# The same with names that do not begin with `blocks.*`.
NAMED: dict[str, tuple[Callable[[], nn.Module], Inputs, Mapping[str, Any]]] = {
    "titan": (own.Titan, own.ids, {"layers.*.attention.wq": "colwise", "layers.*.feed_forward.w2": "rowwise"}),
    "nano_gpt": (own.NanoGPT, own.ids, {"transformer.h.*.attention": {"shares": ["n_embd", "n_head"]}}),
    "vision": (
        own.Vision,
        own.pictures,
        {"layers.*.0.to_qkv": PACKED, "layers.*.0.to_out.0": "rowwise", "layers.*.1.net.4": "rowwise"},
    ),
    "crossing": (
        own.Crossing,
        own.ids,
        {"decoder.*.cross.to_kv": "packed_colwise", "encoder.*.attention.kv": "packed_colwise"},
    ),
    "latents": (
        other.Latents,
        own.ids,
        {
            "layers.*.cross.fn": {"shares": ["heads"]},
            "layers.*.own.*.0.fn.distances": "replicated_with_grad_allreduce",
            "layers.*.own.*.0.fn.to_kv": "packed_colwise",
            "layers.*.own.*.1.fn.up": "packed_colwise",
        },
    ),
    "mixer": (own.Mixer, own.ids, {"model.blocks.*.up": "colwise", "model.blocks.*.down": "rowwise"}),
    "shared_block": (own.SharedBlock, own.ids, {"block.attention.qkv": PACKED, "block.mlp.w3": "rowwise"}),
    "plain": (own.Plain, lambda seed: own.features("x", seed), {"net1": "colwise", "net2": "rowwise"}),
    "sequential": (
        partial(nn.Sequential, nn.Linear(own.WIDTH, 64), nn.ReLU(), nn.Linear(64, own.WIDTH)),
        lambda seed: own.features("input", seed),
        {"0": "colwise", "2": "rowwise"},
    ),
}


@pytest.mark.parametrize(
    "name", [n if n in ("plain", "vision") else pytest.param(n, marks=pytest.mark.slow) for n in NAMED]
)
def test_models_of_other_names_are_split_through(name: str) -> None:
    build, inputs, wanted = NAMED[name]
    made = shardplan.init_plan(shardplan.Model(build(), inputs=inputs))
    rules = made.document["tensor_parallel"]
    assert all(meets(rules.get(pattern), rule) for pattern, rule in wanted.items()), rules
    assert not made.diagnostics
    assert shardplan.verify(shardplan.Model(build(), inputs=inputs), made.document, {"tp": 2}).ok


def test_parts_of_a_matrix_are_told_apart_where_they_share_numbers() -> None:
    """Two of several thousand random numbers are often equal too: the plan must not depend on which."""
    build = tokens(own.Clamped)
    made = shardplan.init_plan(shardplan.Model(build(), inputs=own.ids))
    assert meets(made.document["tensor_parallel"]["blocks.*.attention.c_attn"], PACKED)
    assert not made.diagnostics
    assert shardplan.verify(shardplan.Model(build(), inputs=own.ids), made.document, {"tp": 2}).ok


@pytest.mark.slow
@pytest.mark.parametrize("name", ["titan", "nano_gpt"])
def test_on_processes_with_a_slice_of_the_sequence(name: str) -> None:
    build, inputs, _ = NAMED[name]
    made = shardplan.init_plan(shardplan.Model(build(), inputs=inputs), sequence_parallel=True)
    report = shardplan.verify(shardplan.Model(build(), inputs=inputs), made.document, {"tp": 2}, processes=True)
    assert report.ok


def test_the_line_that_forbids_is_named() -> None:
    made = shardplan.init_plan(shardplan.Model(tokens(own.NormGPT)(), inputs=own.ids))
    (found,) = made.diagnostics
    assert found.code == "SP534" and "blocks.*.attention.c_{attn,proj} are split, but what is between" in found.message
    assert "k = k.view(B, T, self.n_head, C // self.n_head)" in found.notes[0]
    assert found.help is not None and found.help.startswith("change own_structures.py:") and "with -1" in found.help
    assert "# blocks.*.attention.c_{attn,proj} are split, but" in made.text
    assert made.document["tensor_parallel"]["blocks.*.attention.c_attn"] == "colwise_gather_output"


@pytest.mark.parametrize(
    ("attention", "code", "line"),
    [
        (own.ComputedSlopes, "SP534", "name it in `shares` of the rule for blocks.*.attention"),
        pytest.param(own.SeparateHeads, "SP534", "", marks=pytest.mark.slow),
    ],
)
def test_what_to_change_is_said(attention: type[nn.Module], code: str, line: str) -> None:
    build = tokens(attention)
    made = shardplan.init_plan(shardplan.Model(build(), inputs=own.ids))
    assert {d.code for d in made.diagnostics} == {code}
    assert all(line in (d.help or "") and ".py:" in d.notes[0] for d in made.diagnostics)
    assert made.document["tensor_parallel"]["blocks.*.mlp.up"] == "colwise"
    assert shardplan.verify(shardplan.Model(build(), inputs=own.ids), made.document, {"tp": 2}).ok


@pytest.mark.slow
def test_an_embedding_of_biases_that_other_blocks_read_is_split_by_heads() -> None:
    made = shardplan.init_plan(shardplan.Model(own.Buckets(), inputs=own.ids))
    rules = made.document["tensor_parallel"]
    assert (rules["blocks.*.bias"], rules["blocks.*.bias.weight"]) == ("local_params", "colwise")
    assert rules["blocks.*.o"] == "rowwise" and not made.diagnostics
    assert shardplan.verify(shardplan.Model(own.Buckets(), inputs=own.ids), made.document, {"tp": 2}).ok


class Stages(nn.Module):
    """Lists of blocks in a list, as pyramids have them: the lists are not called."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.ModuleList(own.MLP() for _ in range(2)) for _ in range(2))
        self.out = nn.Linear(own.WIDTH, own.WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            for block in stage:  # type: ignore[union-attr]
                x = x + block(x)
        return self.out(x)


def test_a_list_that_is_not_called_is_no_block() -> None:
    said = against_overlay(Stages(), lambda seed: own.features("x", seed))
    assert "there is no list of blocks that run one after the other" in said


class Sublayer(nn.Module):
    """A norm, a part and the residual around both."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.part = nn.LayerNorm(own.WIDTH), own.MLP()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.part(self.norm(x))


class InLists(nn.Module):
    """A block that has its sublayers in a list, as T5's."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ModuleList(Sublayer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for one in self.layer:
            x = one(x)
        return x


def test_sublayers_in_a_list_read_slices_of_the_sequence() -> None:
    build = partial(own.Tokens, InLists)
    made = shardplan.init_plan(shardplan.Model(build(), inputs=own.ids), sequence_parallel=True)
    assert made.document["sequence_parallel"]["blocks.*.layer.*.norm"] == "sequence_parallel"
    assert shardplan.verify(
        shardplan.Model(build(), inputs=own.ids), made.document, {"tp": 2}, sequence_parallel=True
    ).ok
