"""torch's own attention, nn.MultiheadAttention, is split by heads; and models written as other packages write theirs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import other_packages as other
import own_structures as own
import pytest
import torch
import yaml
from derived_plans import against_overlay, meets
from processes import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardplan
from shardplan.compiler.bind import bind
from shardplan.compiler.layout import check_layout
from shardplan.compiler.layout.model import ModelLayouts
from shardplan.compiler.lower import lower
from shardplan.compiler.lower.expected_collectives import expected_collectives
from shardplan.core.mesh import MeshSizes
from shardplan.core.plan import overlays_of
from shardplan.language import parse_plan
from shardplan.model import find_any
from shardplan.runtime.apply.phases import apply_program
from shardplan.runtime.apply.plan_mesh import read_mesh
from shardplan.torchlib.heads_of_weights import HeadsOfWeights
from tests.collective_counter import CollectiveCounter
from tests.proofs import fake_mesh

PACKED = {"style": "packed_colwise", "packed": 3}
BATCH, QUERIES, KEYS = 3, 5, 7


def calls(features: tuple[int, int]) -> Mapping[str, tuple[Tensor, Tensor, Tensor]]:
    """Attention to itself, to another sequence, and to keys and values of two."""
    query = torch.randn(QUERIES, BATCH, own.WIDTH)
    key, value = (torch.randn(KEYS, BATCH, size) for size in features)
    if features != (own.WIDTH, own.WIDTH):
        return {"three": (query, key, value)}
    return {"itself": (query, query, query), "other": (query, key, key), "three": (query, key, value)}


def masks(keys: int) -> Mapping[str, dict[str, Tensor]]:
    padding = torch.zeros(BATCH, keys, dtype=torch.bool)
    padding[:, -1] = True
    each = torch.rand(QUERIES, keys) > 0.8
    each[:, 0] = False
    return {
        "none": {},
        "bool": {"attn_mask": each},
        "float": {"attn_mask": torch.randn(QUERIES, keys)},
        "of each head": {"attn_mask": torch.randn(BATCH * own.HEADS, QUERIES, keys)},
        "padding": {"key_padding_mask": padding},
        "both": {"attn_mask": each, "key_padding_mask": padding},
    }


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": False},
        {"add_bias_kv": True},
        {"add_zero_attn": True},
        {"kdim": 12, "vdim": 20},
        {"batch_first": True},
    ],
    ids=str,
)
def test_with_all_heads_it_is_torchs(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(own.WIDTH, own.HEADS, **options)
    turn = options.get("batch_first", False)
    for given in calls((module.kdim, module.vdim)).values():
        for mask in masks(len(given[1])).values():
            turned = {id(t): t.transpose(0, 1) for t in given}
            args = [turned[id(t)] if turn else t for t in given]
            for wanted in ({"need_weights": False}, {"need_weights": True}, {"average_attn_weights": False}):
                with warnings.catch_warnings():  # of torch: masks of two dtypes
                    warnings.simplefilter("ignore")
                    whole, weights = module(*args, **mask, **wanted)
                with HeadsOfWeights():
                    own_result, own_weights = module(*args, **mask, **wanted)
                torch.testing.assert_close(own_result, whole)
                torch.testing.assert_close(own_weights, weights)


def test_some_of_the_heads_give_a_summand() -> None:
    torch.manual_seed(0)
    whole = nn.MultiheadAttention(own.WIDTH, own.HEADS)
    x = torch.randn(QUERIES, BATCH, own.WIDTH)
    wanted, weights = whole(x, x, x)
    result, average = torch.zeros_like(wanted), torch.zeros_like(weights)
    for rank in range(2):
        part = nn.MultiheadAttention(own.WIDTH, own.HEADS)
        for name in ("in_proj_weight", "in_proj_bias"):
            thirds = getattr(whole, name).detach().chunk(3)
            setattr(part, name, nn.Parameter(torch.cat([third.chunk(2)[rank] for third in thirds])))
        part.out_proj.weight = nn.Parameter(whole.out_proj.weight.detach().chunk(2, 1)[rank])
        part.out_proj.bias = nn.Parameter(whole.out_proj.bias.detach() / 2)
        with HeadsOfWeights():
            one, own_weights = part(x, x, x)
        result, average = result + one, average + own_weights
    torch.testing.assert_close(result, wanted)
    torch.testing.assert_close(average, weights)


ATTENTION = {"in_proj_weight": PACKED, "in_proj_bias": PACKED, "out_proj.weight": "rowwise"}
Wanted = Mapping[str, Any]


def at(module: str, rules: Wanted = ATTENTION) -> Wanted:
    return {f"{module}.{name}": rule for name, rule in rules.items()}


# What builds a model, its inputs, rules of its plan, and whether it has sequence parallelism.
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], dict[str, Tensor]], Wanted, bool]] = {
    "standard": (partial(own.Tokens, own.block_of(own.Standard)), own.ids, at("blocks.*.attention.attn"), True),
    "encoder": (other.Encoder, own.ids, at("encoder.layers.*.self_attn"), True),
    "time first, norms first": (
        partial(other.Encoder, norm_first=True, batch_first=False),
        own.ids,
        at("encoder.layers.*.self_attn"),
        True,
    ),
    "encoder and decoder": (
        other.EncoderDecoder,
        own.ids,
        {
            **at("transformer.decoder.layers.*.multihead_attn"),
            **at("transformer.decoder.layers.*.self_attn"),
            **at("transformer.encoder.layers.*.self_attn"),
        },
        True,
    ),
    "fairseq": (
        other.TimeFirst,
        own.ids,
        {
            "layers.*.self_attn.q_proj": "colwise",
            "layers.*.self_attn": {
                "style": "input_with_grad_allreduce",
                "arguments": {"key": "input_with_grad_allreduce", "value": "input_with_grad_allreduce"},
                "shares": ["num_heads", "embed_dim"],
            },
        },
        False,
    ),
    "litgpt": (
        other.Configured,
        own.ids,
        {"transformer.h.*.attn": {"shares": ["config.n_head", "config.n_query_groups"]}},
        True,
    ),
    "open_clip": (
        other.Clip,
        other.image_and_text,
        {**at("transformer.resblocks.*.attn"), **at("visual.transformer.resblocks.*.attn")},
        True,
    ),
}
SAMPLE = ("standard",)


@pytest.mark.parametrize(
    ("name", "sequence_parallel"),
    [
        pytest.param(name, sp, marks=pytest.mark.slow if name in SAMPLE and not sp else pytest.mark.exhaustive)
        for name, (*_, overlay) in MODELS.items()
        for sp in (False, True)
        if overlay or not sp
    ],
)
def test_a_model_is_split_by_heads(name: str, sequence_parallel: bool) -> None:
    build, inputs, wanted, _ = MODELS[name]
    made = shardplan.init_plan(shardplan.Model(build(), inputs=inputs), sequence_parallel=sequence_parallel)
    rules = made.document["tensor_parallel"]
    found = {pattern: rules.get(pattern) for pattern in wanted}
    assert all(meets(found[pattern], rule) for pattern, rule in wanted.items()), found
    assert not made.diagnostics
    for tp in (2, 4):
        if tp == 2 or name != "litgpt":  # two heads of keys and values
            assert shardplan.verify(
                shardplan.Model(build(), inputs=inputs), made.document, {"tp": tp}, sequence_parallel=sequence_parallel
            ).ok


TIME_FIRST: dict[str, Any] = yaml.safe_load(
    """
layers.0: {style: split_seq_input, seq_dim: 0}
layers.*.self_attn:
  style: gather_seq_input
  seq_dim: 0
  arguments: {key: gather_seq_input, value: gather_seq_input}
  shares: [num_heads, embed_dim]
layers.*.self_attn.out_proj: {style: rowwise_seq, seq_dim: 0}
layers.*.{self_attn,final}_layer_norm: {style: sequence_parallel, seq_dim: 0}
layers.*.fc1: {style: colwise_seq, seq_dim: 0}
layers.*.fc2: {style: rowwise_seq, seq_dim: 0}
output_projection: colwise_seq_gather_output
"""
)


def test_init_does_not_split_the_batch_for_the_sequence() -> None:
    """fairseq's blocks read [time, batch, features]."""
    assert "layers.0 reads [sequence, batch, ...]: rules with `seq_dim" in against_overlay(other.TimeFirst(), own.ids)


@pytest.mark.exhaustive
def test_a_sequence_in_dim_0_has_an_overlay_that_is_written_by_hand() -> None:
    plan = {
        **shardplan.init_plan(shardplan.Model(other.TimeFirst(), inputs=own.ids)).document,
        "sequence_parallel": TIME_FIRST,
    }
    assert shardplan.verify(
        shardplan.Model(other.TimeFirst(), inputs=own.ids), plan, {"tp": 2}, sequence_parallel=True, processes=True
    ).ok


SAME = "{key: input_with_grad_allreduce, value: input_with_grad_allreduce}"
PLAN: dict[str, Any] = yaml.safe_load(
    """
version: "1"
name: encoder
models: [Encoder]
tensor_parallel:
  encoder.layers.*.self_attn: {style: input_with_grad_allreduce, arguments: SAME, output: all_reduce}
  encoder.layers.*.self_attn.in_proj_{bias,weight}: {style: packed_colwise, packed: 3}
  encoder.layers.*.self_attn.out_proj.weight: rowwise
  encoder.layers.*.self_attn.out_proj.bias: replicated_divided
  encoder.layers.*.linear1: colwise
  encoder.layers.*.linear2: rowwise
  head: colwise_gather_output
sequence_parallel:
  encoder.layers.0: split_seq_input
  encoder.layers.*.self_attn:
    style: gather_seq_input
    arguments: {key: gather_seq_input, value: gather_seq_input}
    output: reduce_scatter
  encoder.layers.*.norm{1,2}: sequence_parallel
  encoder.layers.*.linear1: colwise_seq
  encoder.layers.*.linear2: rowwise_seq
  head: colwise_seq_gather_output
""".replace("SAME", SAME)
)


def evaluated(sizes: tuple[int, ...]) -> list[float]:
    """How far the results of a split encoder are from the unsharded one's, without and with padding."""
    model = Padded()
    expected = results_of(model)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("tp",))
    rules = {"version": "1", "name": "encoder", "models": ["Padded"], "tensor_parallel": PLAN["tensor_parallel"]}
    found = results_of(shardplan.apply_plan(shardplan.Model(model, inputs=own.ids), mesh, rules))
    return [(a - b).abs().max().item() for a, b in zip(found, expected, strict=True)]


class Padded(other.Encoder):
    """Its encoder makes nested tensors of padded sequences."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.encoder = nn.TransformerEncoder(self.encoder.layers[0], own.DEPTH)

    def forward(self, ids: Tensor, padding: Tensor | None = None) -> Tensor:
        return self.head(self.encoder(self.embed(ids), src_key_padding_mask=padding))


@torch.no_grad()
def results_of(model: nn.Module) -> tuple[Tensor, Tensor]:
    ids = own.ids(0)["ids"]
    padding = torch.arange(ids.shape[1]).expand_as(ids) >= ids.shape[1] - 2
    model.eval()
    return model(ids), model(ids, padding)[~padding]


@pytest.mark.slow
def test_evaluation_gives_the_results_of_the_unsharded_model() -> None:
    for apart in on_ranks(2, evaluated, (2,)):
        assert max(apart) < 1e-5, apart


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_queries_keys_and_values_of_one_tensor_are_moved_once(sequence_parallel: bool) -> None:
    model = other.Encoder()
    found = find_any(model, inputs=own.ids)
    plan = parse_plan(PLAN).plan
    assert plan is not None
    resolved = bind(plan, found.tree, MeshSizes(tp=2), overlays_of(sequence_parallel))[0]
    report = check_layout(resolved, ModelLayouts(found, 2).recorded_models)
    assert report.ok
    program = lower(report.onto(resolved))
    expected = expected_collectives(program.modules)
    with fake_mesh(2) as mesh:
        apply_program(model, read_mesh(mesh), program, src_data_rank=None)
        with CollectiveCounter() as forward:
            result = model(**own.ids(0))
        with CollectiveCounter() as backward:
            result.sum().backward()
        model.eval()  # torch has code of its own for it
        with CollectiveCounter() as evaluation, torch.no_grad():
            model(**own.ids(0))
    assert evaluation.counts == forward.counts
    assert (forward.counts, backward.counts) == (expected["forward"], expected["backward"])
    gathered = forward.counts["all_gather"] - 1 if sequence_parallel else backward.counts["all_reduce"]
    assert gathered == 2 * own.DEPTH + 1  # attention and MLP of each layer, and the head's input


@pytest.mark.slow
def test_it_is_proven_on_processes() -> None:
    report = shardplan.verify(
        shardplan.Model(other.Encoder(), inputs=own.ids), PLAN, {"tp": 2}, sequence_parallel=True, processes=True
    )
    assert report.ok
