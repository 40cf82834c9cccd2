"""Fused q, k and v of a model of one's own: the help proposes what keeps the split, or names the line to change; a proposal that
gives up a split says so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig

import shardplan
from shardplan.compiler.layout import ModelLayouts
from shardplan.compiler.layout.layout_check import revised
from shardplan.compiler.layout.repairs import OURS, Repair
from shardplan.compiler.layout.solver import block_rules
from shardplan.core.plan import Rule
from shardplan.core.report import Report
from shardplan.core.search_bounds import BOUNDS
from shardplan.language import parse_plan
from shardplan.model import find_any

WIDTH, HEADS = 64, 4
PLAIN = {"h.*.attn.c_attn": "colwise", "h.*.attn.c_proj": "rowwise"}


class FromWhole(nn.Module):
    """As in nanoGPT: the size of a head comes from the width of the input, which every rank has whole."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.n_head, self.n_embd = HEADS, WIDTH

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return self.c_proj(y.contiguous().view(B, T, C))


class FromAttributes(FromWhole):
    """All sizes come from attributes."""

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:2], self.n_head, self.n_embd // self.n_head)
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.c_attn(x).split(self.n_embd, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return self.c_proj(y.reshape(*x.shape[:2], self.n_embd))


class Separate(FromWhole):
    """Three matrices; the heads and the width between them come from attributes."""

    def __init__(self) -> None:
        super().__init__()
        del self.c_attn
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:2], self.n_head, WIDTH // HEADS)
        q, k, v = (layer(x).view(shape).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return self.c_proj(y.reshape(*x.shape[:2], self.n_embd))


class Configured(Separate):
    """The number of heads comes from a configuration."""

    def __init__(self) -> None:
        super().__init__()
        self.config = LlamaConfig(num_attention_heads=HEADS)

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:2], self.config.num_attention_heads, -1)
        q, k, v = (layer(x).view(shape).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return self.c_proj(y.reshape(*x.shape[:2], -1))


class Open(FromWhole):
    """`FromWhole` with the lines changed as the help says."""

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q = q.view(B, T, -1, C // self.n_head).transpose(1, 2)
        k = k.view(B, T, -1, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, -1, C // self.n_head).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return self.c_proj(y.contiguous().view(B, T, -1))


class Block(nn.Module):
    """Attention next to a residual stream."""

    def __init__(self, attention: type[nn.Module]) -> None:
        super().__init__()
        self.ln, self.attn = nn.LayerNorm(WIDTH), attention()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(self.ln(x))


class Model(nn.Module):
    """Two blocks."""

    def __init__(self, attention: type[nn.Module]) -> None:
        super().__init__()
        self.wte, self.head = nn.Embedding(128, WIDTH), nn.Linear(WIDTH, 128)
        self.h = nn.ModuleList(Block(attention) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids)
        for block in self.h:
            x = block(x)
        return self.head(x)


def checked(attention: type[nn.Module], rules: dict) -> Report:
    plan = {"version": "1", "name": "mine", "tensor_parallel": rules}
    torch.manual_seed(0)
    return shardplan.validate(Model(attention), plan, {"tp": 2})


PACKED = {**PLAIN, "h.*.attn.c_attn": {"style": "packed_colwise", "packed": 3}}
PACKED_HELP = "write `h.*.attn.c_attn: {style: packed_colwise, packed: 3}` instead of `colwise`, and add "


@pytest.mark.parametrize(
    ("attention", "divided"), [(FromAttributes, ["n_head", "n_embd"]), (Open, ["n_embd"])], ids=lambda x: str(x)
)
def test_what_keeps_the_split_is_proposed_and_right(attention: type[nn.Module], divided: list[str]) -> None:
    added = {"h.*.attn": {"style": "replicate", "shares": divided}}
    line = f"`h.*.attn: {{style: replicate, shares: [{', '.join(divided)}]}}`"
    (found,) = checked(attention, PLAIN).diagnostics
    assert (found.code, found.help) == ("SP408", f"{PACKED_HELP}{line}")
    (found,) = checked(attention, PACKED).diagnostics
    assert (found.code, found.help) == ("SP408", f"add {line}")
    assert checked(attention, {**PACKED, **added}).ok
    plan = {"version": "1", "name": "mine", "tensor_parallel": {**PACKED, **added}}
    assert shardplan.verify(Model(attention), plan, {"tp": 2}).ok


SEPARATE = """\
version: "1"
tensor_parallel:
  h.*.attn: input_with_grad_allreduce  # the block's input
  h.*.attn.{q,k,v}: colwise
  h.*.attn.c_proj: rowwise
"""


def test_the_solver_searches_once_for_all_plans_of_a_model() -> None:
    layouts = ModelLayouts(find_any(Model(FromAttributes)), 2)
    left = []
    for rules in (PLAIN, PACKED):
        plan = parse_plan({"version": "1", "name": "mine", "tensor_parallel": rules}, name="mine").plan
        assert plan is not None and layouts.check(plan).diagnostics[0].help is not None
        left.append(layouts.block_rules.trials.search.tries)
    assert left[0] == left[1] < BOUNDS.help_drafts


def test_where_the_search_of_the_solver_is_over_changes_of_one_rule_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """They name no numbers of a module, and say that they give up a split."""
    monkeypatch.setattr(block_rules, "BOUNDS", replace(block_rules.BOUNDS, help_drafts=2))
    *_, last = checked(FromAttributes, PLAIN).diagnostics
    whole = "this leaves what reads h.*.attn.c_attn whole on every rank"
    assert last.help == f"write `h.*.attn.c_attn: colwise_gather_output` instead of `colwise`; {whole}"


@pytest.mark.parametrize(
    ("attention", "divided"),
    [(Separate, "n_head, n_embd"), (Configured, "config.num_attention_heads")],
    ids=["own", "configured"],
)
def test_a_missing_divide_is_proposed_and_written(attention: type[nn.Module], divided: str, tmp_path: Path) -> None:
    """The numbers by which the code reshapes: a plan that lacks them is repaired in its file, and proven."""
    written = f"h.*.attn: {{style: input_with_grad_allreduce, shares: [{divided}]}}"
    plan = tmp_path / "plan.yaml"
    plan.write_text(SEPARATE)
    torch.manual_seed(0)
    (found,) = shardplan.validate(Model(attention), str(plan), {"tp": 2}).diagnostics
    assert found.help == f"write `{written}` instead of `input_with_grad_allreduce`"
    made = shardplan.fix_plan(Model(attention), str(plan), mesh={"tp": 2})
    assert made.report.ok and made.changes == 1
    assert made.after.rstrip() == SEPARATE.rstrip().replace("h.*.attn: input_with_grad_allreduce", written)


def test_the_line_of_the_code_is_named_where_no_rule_suffices() -> None:
    first, second = checked(FromWhole, PLAIN).diagnostics
    assert first.help == f"{PACKED_HELP}`h.*.attn: {{style: replicate, shares: [n_embd]}}`"
    line = FromWhole.forward.__code__.co_firstlineno + 3
    assert second.help.startswith(f"change test_layout_fused.py:{line} in h.*.attn: ")
    assert "`.view(B, T, -1, C // self.n_head)`" in second.help


@pytest.mark.parametrize(
    ("before", "after", "cost"),
    [
        ("rowwise", None, "this leaves h.*.a whole on every rank"),
        ("rowwise", "replicate", "this leaves h.*.a whole on every rank"),
        ("colwise", "replicated_with_grad_allreduce", "this leaves h.*.a whole on every rank"),
        ("colwise", "colwise_gather_output", "this leaves what reads h.*.a whole on every rank"),
        ("colwise", "rowwise", None),
        ("replicate", None, None),
        (None, "colwise", None),
    ],
)
def test_a_proposal_that_gives_up_a_split_says_so(before: str | None, after: str | None, cost: str | None) -> None:
    old, new = (Rule("", style, OURS) if style else None for style in (before, after))
    help = Repair("h.*.a", ("h.0.a",), old, new, "tensor_parallel").help
    assert help.partition("; ")[2] == (cost or "")


def test_a_change_that_a_later_one_takes_back_is_none() -> None:
    """Of a rule that was added for one finding and removed for the next nothing is left to propose."""
    rule = Rule("", "colwise", OURS)
    added = Repair("h.*.a", ("h.0.a",), None, rule, "tensor_parallel")
    removed = Repair("h.*.a", ("h.0.a",), rule, None, "tensor_parallel")
    assert revised([added], removed) == (0, None)
    other = Repair("h.*.a", ("h.0.a",), rule, Rule("", "rowwise", OURS), "tensor_parallel")
    found = revised([added], other)
    assert found is not None and found[1] is not None and found[1].help == "add `h.*.a: rowwise`"
