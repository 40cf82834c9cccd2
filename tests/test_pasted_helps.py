"""Wrong plans that are repaired by pasting what their findings' help lines say, and nothing else: the judge of the helps. What is
reached must be proven, and split 95 % of what a plan by hand splits; a repair that gives the split up does not count."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardplan
from shardplan import Model
from shardplan.core.diagnostics import Diagnostic, Rewrite
from shardplan.core.report import Report
from shardplan.core.sources import SourceFile
from shardplan.language.plan_edits import edit_plan
from shardplan.language.plan_rewrites import rewrite_plan
from tests import own_structures as own
from tests.doc_blocks import ROOT, blocks
from tests.test_fix import SIZES as SMALL

MOST_PASTES = 4
ENOUGH = 0.95  # of what the plan by hand splits
PAGE = {b.file: b.text for b in blocks((ROOT / "docs" / "guides" / "by-hand.md").read_text("utf-8")) if b.file}
HEAD = 'version: "1"\nname: mine\n'


@pytest.fixture(scope="module")
def page_model(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The model of the page on plans by hand, in a file, so that findings can name its lines."""
    file = tmp_path_factory.mktemp("page") / "hand_model.py"
    file.write_text(PAGE["hand_model.py"])
    spec = importlib.util.spec_from_file_location("hand_model", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Biased(nn.Module):
    """A block that is called with a bias for each head."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(own.WIDTH), nn.LayerNorm(own.WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(own.WIDTH, own.WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(own.WIDTH, 4 * own.WIDTH), nn.Linear(4 * own.WIDTH, own.WIDTH)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (f(h).unflatten(-1, (-1, own.HEAD)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, bias).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class WithBias(own.Tokens):
    def forward(self, ids: Tensor) -> Tensor:
        x, places = self.embed(ids), torch.arange(ids.shape[1])
        slopes = 2.0 ** -torch.arange(1.0, own.HEADS + 1)
        bias = -(places - places[:, None]).abs() * slopes[None, :, None, None]
        for block in self.blocks:
            x = block(x, bias)
        return self.head(self.norm(x))


def _page(module: ModuleType) -> Model:
    return Model(
        module.build(),
        inputs=lambda n: {"ids": torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(n))},
    )


def _tokens(attention: type[nn.Module]) -> Callable[[ModuleType], Model]:
    return lambda module: Model(own.Tokens(own.block_of(attention)), inputs=own.ids)


def _built_in(name: str) -> Callable[[ModuleType], Model]:
    return lambda module: Model(name, settings=SMALL)


class Mistake(NamedTuple):
    """A plan by hand, and the change that makes it wrong."""

    model: Callable[[ModuleType], Model]
    hand: str
    change: dict[str, str]

    @property
    def wrong(self) -> str:
        text = self.hand
        for old, new in self.change.items():
            assert old in text, old
            text = text.replace(old, new)
        return text


HAND = PAGE["by-hand.yaml"]
PLAIN = HAND.split("sequence_parallel:")[0]
BLOCK, NORM = (
    "{style: replicate, shares: {slopes: {dim: 0}}, sum_outputs: [wo, down]}",
    "  blocks.*.norm: output_with_grad_allreduce\n",
)
LLAMA = (
    HEAD
    + """\
tensor_parallel:
  model.embed_tokens: embedding_rowwise
  model.layers.*.{self_attn,mlp}: input_with_grad_allreduce
  model.layers.*.self_attn.{q,k,v}_proj: colwise
  model.layers.*.self_attn.o_proj: rowwise
  model.layers.*.mlp.{gate,up}_proj: colwise
  model.layers.*.mlp.down_proj: rowwise
  lm_head: colwise_gather_output
"""
)
NORMS = "  model.layers.*.self_attn.{q,k}_norm: replicated_with_grad_allreduce\n"
TOKENS = (
    HEAD
    + "tensor_parallel:\n  blocks.*.mlp: input_with_grad_allreduce\n  blocks.*.mlp.up: colwise\n  blocks.*.mlp.down: rowwise\n"
)
GROUPED = (
    TOKENS
    + """\
  blocks.*.attention: {style: input_with_grad_allreduce, shares: [n_heads, n_kv]}
  blocks.*.attention.wqkv: {style: packed_colwise, packed: [32, 16, 16]}
  blocks.*.attention.wo: rowwise
"""
)
NORMED = (
    TOKENS
    + """\
  blocks.*.attention: input_with_grad_allreduce
  blocks.*.attention.qkv: {style: packed_colwise, packed: 3}
  blocks.*.attention.gate: colwise
  blocks.*.attention.temperature: headwise
  blocks.*.attention.{q,k}_norm: replicated_with_grad_allreduce
  blocks.*.attention.out: rowwise
"""
)
BIASED = (
    HEAD
    + """\
tensor_parallel:
  blocks.*: {style: replicate, shares: {bias: {dim: 1}}}
  blocks.*.{q,k,v,up}: colwise
  blocks.*.{o,down}: rowwise
"""
)
MISTAKES = {
    "one-head-of-keys": Mistake(
        _page,
        PLAIN,
        {NORM: "", "  blocks.*.wkv: replicated_with_grad_allreduce\n": "", ", sum_outputs: [wo, down]": ""},
    ),
    "block-input-with-a-residual": Mistake(
        _page, PLAIN, {NORM: "", "style: replicate,": "style: input_with_grad_allreduce,"}
    ),
    "norm-declared-partial": Mistake(
        _page, PLAIN, {"norm: output_with_grad_allreduce": "norm: replicated_with_grad_allreduce"}
    ),
    "buffer-of-all-heads": Mistake(_page, PLAIN, {BLOCK: "{style: replicate, sum_outputs: [wo, down]}"}),
    "shares-without-a-style": Mistake(_page, PLAIN, {BLOCK: "{shares: {slopes: {dim: 0}}}"}),
    "share-without-a-dim": Mistake(_page, PLAIN, {"shares: {slopes: {dim: 0}}": "shares: [slopes]"}),
    "tied-head-forgotten": Mistake(_page, PLAIN, {"  head: colwise_gather_output\n": ""}),
    "whole-results-in-an-overlay": Mistake(_page, HAND, {"  blocks.*.{wo,down}: rowwise_seq\n": ""}),
    "head-norms-forgotten": Mistake(_built_in("qwen3"), LLAMA + NORMS, {NORMS: ""}),
    "matrix-forgotten": Mistake(_built_in("llama"), LLAMA, {"{gate,up}_proj": "gate_proj"}),
    "fused-of-unequal-parts": Mistake(
        _tokens(own.GroupedFused), GROUPED, {"{style: packed_colwise, packed: [32, 16, 16]}": "colwise"}
    ),
    "gate-and-norms-of-heads": Mistake(
        _tokens(own.NormedHeads),
        NORMED,
        {
            "  blocks.*.attention.gate: colwise\n": "",
            "  blocks.*.attention.{q,k}_norm: replicated_with_grad_allreduce\n": "",
        },
    ),
    "bias-of-all-heads": Mistake(
        lambda module: Model(WithBias(Biased), inputs=own.ids),
        BIASED,
        {"  blocks.*: {style: replicate, shares: {bias: {dim: 1}}}\n": ""},
    ),
}


def _pasted(source: SourceFile, found: Diagnostic) -> str | None:
    """The plan with what the help of one finding says; None where it says no line."""
    if found.edits:
        text, made = edit_plan(source, found.edits)
        return text if made else None
    for one in found.proposals[:1]:
        if isinstance(one, Rewrite):
            return rewrite_plan(source, one)
        text, made = edit_plan(source, [one])
        return text if made else None
    return None


def _validated(model: Model, plan: Path, text: str, *, proof: bool) -> Report:
    plan.write_text(text)
    return shardplan.validate(model, str(plan), {"tp": 2}, proof=proof)


@pytest.mark.parametrize("name", MISTAKES)
def test_pasting_helps_leads_to_a_proven_plan_that_splits_as_much(
    name: str, tmp_path: Path, page_model: ModuleType
) -> None:
    mistake, plan = MISTAKES[name], tmp_path / "mine.yaml"
    text = mistake.wrong
    report = _validated(mistake.model(page_model), plan, text, proof=False)
    assert not report.ok
    for _ in range(MOST_PASTES):
        source = report.sources.files[str(plan)]
        pasted = next((new for one in report.diagnostics if (new := _pasted(source, one)) is not None), None)
        if pasted is None:
            break
        text = pasted
        report = _validated(mistake.model(page_model), plan, text, proof=False)
    assert _validated(mistake.model(page_model), plan, text, proof=True).ok, text
    split = shardplan.coverage(mistake.model(page_model), str(plan)).split
    plan.write_text(mistake.hand)
    assert split >= ENOUGH * shardplan.coverage(mistake.model(page_model), str(plan)).split


class LengthOfASlice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(own.WIDTH)
        self.qkv, self.o = nn.Linear(own.WIDTH, 3 * own.WIDTH), nn.Linear(own.WIDTH, own.WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        q, k, v = (one.reshape(B, T, -1, own.HEAD).transpose(1, 2) for one in self.qkv(self.norm(x)).chunk(3, -1))
        return x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_a_length_that_is_read_from_a_slice_is_named(tmp_path: Path) -> None:
    """No rule of a plan can help: the help is the line of the model to change."""
    plan = tmp_path / "mine.yaml"
    plan.write_text(
        HEAD
        + """\
tensor_parallel:
  blocks.*.norm: output_with_grad_allreduce
  blocks.*.qkv: {style: packed_colwise, packed: 3}
  blocks.*.o: rowwise
sequence_parallel:
  blocks.0: split_seq_input
  blocks.*.norm: {style: sequence_parallel, output: gather}
  blocks.*.o: rowwise_seq
  norm: {style: sequence_parallel, output: gather}
"""
    )
    report = shardplan.validate(
        Model(own.Tokens(LengthOfASlice), inputs=own.ids), str(plan), {"tp": 2}, sequence_parallel=True, proof=False
    )
    helps = [one.help or "" for one in report.errors]
    assert any("Read T from what is gathered" in help for help in helps), helps
