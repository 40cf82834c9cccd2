"""The rules for the axis cp: what they follow from, in which order moves run, and what the proof refuses."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from sampling import sampled
from small_models import CONFIGS, meta_model
from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaForCausalLM

import shardplan
from shardplan import language
from shardplan.authoring.context_section import context_section
from shardplan.compiler.bind import decided
from shardplan.compiler.check.exchanged_heads import heads_shared_over_cp
from shardplan.compiler.user_inputs import Model, find_model, read_plan
from shardplan.compiler.variants import bind_variants
from shardplan.core import moves, nesting
from shardplan.core.mesh import MeshSizes
from shardplan.core.module_program import HeadShare
from shardplan.core.moves import MoveOps, Ranges
from shardplan.core.plan import overlays_of, variant_name, variant_words, without_sequence
from shardplan.core.proof_meshes import proof_meshes, ranks_over_cp
from shardplan.model.labels_over_cp import own_labels_of
from shardplan.runtime.parallel import boundaries
from shardplan.runtime.parallel.dim_exchange import Cut
from shardplan.styles.boundary import returns_tokens
from tests.model_settings import without_dropout
from tests.zoo.context import every_rank
from tests.zoo.experts import config_of

ENDS = {"model.layers.0": "split_seq_input", "model.norm": "gather_seq_output"}
HEADS = {"model.layers.0": "split_seq_input", "model.layers.*.self_attn": "exchange_heads"}
PLAN = {
    "version": "1",
    "name": "llama-cp",
    "extends": "llama",
    "context_parallel": {**ENDS, "model.layers.*.self_attn": "replicate_seq"},
}


def derived(name: str) -> Any:
    found, _ = find_model(Model(meta_model(name) if name in CONFIGS else name))
    assert found is not None
    plan = read_plan("auto", found).plan
    assert plan is not None
    return context_section(found, decided(plan, found.tree)[0])


def test_what_mixes_tokens_exchanges_its_heads_and_all_else_has_no_rule():
    assert derived("llama") == HEADS
    assert derived("mamba2") == {
        "backbone.layers.0": "split_seq_input",
        "backbone.layers.*.mixer": "exchange_heads",
    }


def test_a_mixer_that_adds_to_its_result_what_the_block_hands_it_has_its_own_tokens_of_both():
    assert derived("bloom")["transformer.h.*.self_attention"] == "exchange_heads"


def test_a_mixer_that_reads_the_values_of_its_argument_is_whole(monkeypatch: pytest.MonkeyPatch):
    forward = LlamaAttention.forward
    monkeypatch.setattr(
        LlamaAttention, "forward", lambda self, hidden_states, **kw: forward(self, hidden_states + 0, **kw)
    )
    assert derived("llama") == {**HEADS, "model.layers.*.self_attn": "replicate_seq"}


def test_the_sequence_is_whole_after_the_blocks_where_code_or_loss_need_all_tokens(monkeypatch: pytest.MonkeyPatch):
    assert derived("gpt2")["transformer.ln_f"] == "gather_seq_output"  # its code gives the result the shape of the ids
    own = staticmethod(lambda logits, labels, vocab_size, **given: ForCausalLMLoss(logits, labels, vocab_size) * 1.0)
    monkeypatch.setattr(LlamaForCausalLM, "loss_function", own, raising=False)
    assert derived("llama") == {**HEADS, "model.norm": "gather_seq_output"}


def test_projections_that_read_a_width_of_their_own_keep_it():
    plan = {"version": "1", "name": "gpt2-cp", "extends": "gpt2", "context_parallel": derived("gpt2")}
    assert plan["context_parallel"]["transformer.h.*.attn"] == "exchange_heads"
    report = shardplan.validate(meta_model("gpt2"), plan, {"cp": 2, "tp": 1})
    assert report.ok and report.proven, report


def test_heads_whose_sums_are_scattered_are_whole():
    assert derived("doge") == {"model.layers.0": "split_seq_input", "model.layers.*.self_attn": "replicate_seq"}
    plan = {"version": "1", "name": "doge-cp", "extends": "doge", "context_parallel": HEADS}
    report = shardplan.validate("doge", plan, {"cp": 2, "tp": 1}, layouts=False)
    assert [one.code for one in report.diagnostics] == ["SP367"], report
    assert "`model.layers.*.self_attn.dt_proj` below it scatters its sums" in report.diagnostics[0].message


def test_experts_work_token_by_token_and_hand_their_router_logits_out():
    assert derived("mixtral") == {
        **HEADS,
        "model.layers.*.mlp.gate": {"style": "token_wise", "read_outside": [0]},
        "model.layers.*.mlp.experts": "token_wise",
    }


def test_a_variant_without_the_split_of_either_axis_is_the_plain_one():
    both = overlays_of(True, MeshSizes(tp=2, cp=2), context=True)
    assert variant_name(both) == "context_parallel.sequence_parallel"
    assert variant_words(variant_name(both)) == "context and sequence parallel"
    assert without_sequence(both) == frozenset()
    assert overlays_of(True, MeshSizes(tp=2, cp=2)) == {"sequence_parallel"}


def test_cp_has_ranks_of_its_own_in_the_proof():
    assert proof_meshes(MeshSizes(tp=1, cp=8)) == (MeshSizes(tp=1, cp=2),)
    assert proof_meshes(MeshSizes(tp=2, cp=4, dp_shard=16)) == (MeshSizes(tp=2, cp=2, dp_shard=2),)


def test_rules_are_derived_for_built_in_plans_and_by_no_one_else():
    report = shardplan.validate("llama", "auto", {"cp": 2, "tp": 1})
    assert report.proven and report.derived is not None and report.derived.extends == "llama"
    first, second = report.derived.lines
    assert (
        "model.layers.0: split_seq_input, model.layers.*.self_attn: exchange_heads" in first
        and "extends llama" in second
    )
    kept = shardplan.validate("llama", yaml.safe_load(report.derived.text), {"cp": 2, "tp": 1}, proof=False)
    assert kept.ok and kept.derived is None
    for plan, derive in (({"version": "1", "name": "mine", "extends": "llama"}, True), ("llama", False)):
        refused = shardplan.validate("llama", plan, {"cp": 2, "tp": 1}, derive=derive, layouts=False)
        assert [one.code for one in refused.diagnostics] == ["SP372"] and refused.derived is None
    (finding, *_) = shardplan.validate("mixtral", "auto", {"cp": 2, "tp": 1, "pp": 2}, layouts=False).diagnostics
    assert finding.code == "SP389"


def test_heads_that_ranks_do_not_divide_and_compiled_modules_are_whole():
    many = shardplan.validate("llama", "llama", {"cp": 64, "tp": 1}, layouts=False)
    assert many.ok and "self_attn: replicate_seq" in many.derived.text
    program = shardplan.compile_plan("llama", {"cp": 2, "tp": 1}, "auto", compile={})
    styles = {one.on_cp.style for name, one in program.modules.items() if name.endswith("self_attn") and one.on_cp}
    assert styles == {"replicate_seq"}


@pytest.mark.slow
def test_attention_that_is_called_with_one_value_three_times_gathers_it_in_each_place():
    report = shardplan.validate("ctrl", "auto", {"cp": 2, "tp": 1})
    assert report.proven and report.derived is None, report


@pytest.mark.slow
def test_rules_are_derived_with_a_plan(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(language, "builtin_plans", dict)
    report = shardplan.validate(meta_model("llama"), "auto", {"cp": 2, "tp": 1})
    assert report.proven and report.derived.extends is None and "self_attn: exchange_heads" in report.derived.text


@pytest.mark.parametrize(
    ("heads", "asked", "exact", "shared", "over_cp"),
    [
        (8, {"cp": 4}, False, {}, 2),
        (8, {"cp": 2, "tp": 8}, False, {8: 1}, 2),  # of each rank of tp
        (8, {"cp": 16}, False, {8: 2}, 4),
        (8, {"cp": 16}, True, {8: 8}, 16),
        (8, {"cp": 4, "tp": 4}, False, {8: 2}, 4),
        (2, {"cp": 2, "tp": 4}, False, {}, 2),  # by the ranks of tp already
    ],
)
def test_as_many_ranks_of_cp_as_tell_which_of_them_share_key_value_heads(
    heads: int, asked: dict[str, int], exact: bool, shared: dict[int, int], over_cp: int
):
    found, _ = find_model(
        Model(meta_model("llama", hidden_size=256, num_attention_heads=32, num_key_value_heads=heads))
    )
    plan = read_plan({**PLAN, "context_parallel": HEADS}, found).plan
    assert found is not None and plan is not None
    sizes = MeshSizes(**{"tp": 1, **asked})
    on = overlays_of(False, sizes, context=True)
    resolved = bind_variants(plan, found.tree, sizes, (on,)).resolved[on]
    assert heads_shared_over_cp([resolved], sizes, exact=exact) == shared
    assert ranks_over_cp(shared) == over_cp


T5: dict[str, Any] = {
    "version": "1",
    "name": "t5-cp",
    "extends": "t5",
    "context_parallel": {
        "transformer.encoder.block.0": "split_seq_input",
        "transformer.encoder.final_layer_norm": "gather_seq_output",
        "transformer.decoder.block.0": "split_seq_input",
        "transformer.*.block.*.layer.0.SelfAttention": "replicate_seq",
        "transformer.decoder.block.*.layer.1.EncDecAttention": "replicate_seq",
    },
}


@pytest.mark.parametrize(
    ("exits", "open_at_the_exit"),
    [
        ({}, True),  # of the decoder; the encoder's sequence is whole again
        ({"transformer.decoder.final_layer_norm": "gather_seq_output"}, False),
        ({"transformer.encoder.final_layer_norm": "token_wise"}, True),
        ({"transformer.encoder": "gather_seq_output", "transformer.decoder": "gather_seq_output"}, False),
    ],
)
def test_a_rule_that_gathers_makes_the_sequence_whole_that_was_split_nearest_to_it(
    exits: dict[str, str], open_at_the_exit: bool
):
    found, _ = find_model(Model("t5"))
    plan = read_plan({**T5, "context_parallel": {**T5["context_parallel"], **exits}}, found).plan
    assert found is not None and plan is not None
    sizes = MeshSizes(tp=1, cp=2)
    on = overlays_of(False, sizes, context=True)
    assert returns_tokens(bind_variants(plan, found.tree, sizes, (on,)).resolved[on].on_cp) == open_at_the_exit


@pytest.mark.slow
def test_a_decoder_that_is_open_at_the_exit_next_to_an_encoder_is_proven():
    report = shardplan.validate("t5", T5, {"cp": 2, "tp": 1})
    assert report.ok and report.proven, report


@pytest.mark.slow
def test_a_projection_of_one_row_of_zeros_keeps_its_module_whole():
    rules = derived("zaya")
    assert rules["model.layers.*.self_attn"] == "replicate_seq"
    # Its whole block is gathered over tp. Over cp it works token by token, and hands out what a recorder of router logits reads.
    assert rules["model.layers.*.mlp.gate"] == {"style": "token_wise", "read_outside": [0]}


@pytest.mark.slow
def test_what_is_gathered_after_a_norm_or_for_one_matrix_is_gathered_for_the_module_that_mixes_tokens():
    assert derived("cohere") == HEADS  # attention and MLP side by side
    assert derived("biogpt") == {
        "biogpt.layers.0": HEADS["model.layers.0"],
        "biogpt.layers.*.self_attn": "exchange_heads",
    }
    # A module that reads vectors of all tokens, and scatters nothing; another splits its product with them, in each layer.
    assert {
        "model.layers.*.act_fn": "gather_seq_input",
        "model.layers.*.per_layer_projection": "split_seq_input",
    }.items() <= derived("gemma4_text").items()


MUTANTS = {
    "the embedding's gradient is gathered": (moves.MOVES, ("R", "V"), MoveOps("slice", "all_gather"), {"tp": 1}),
    "a gathered input's gradients are not summed": (moves.MOVES, ("V", "R"), MoveOps("all_gather", "slice"), {"tp": 1}),
    "cp is left after tp's exit": (nesting.NESTING, ("R", "V"), "after", {"tp": 2}),
    "cp is entered in front of tp": (nesting.NESTING, ("V", "R"), "before", {"tp": 2}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_the_proof_refuses(name: str, monkeypatch: pytest.MonkeyPatch):
    table, pair, instead, sizes = MUTANTS[name]
    on = None if sizes["tp"] == 1 else True
    assert shardplan.validate("llama", PLAN, {"cp": 2, **sizes}, sequence_parallel=on).ok
    monkeypatch.setitem(table, pair, instead)
    report = shardplan.validate("llama", PLAN, {"cp": 2, **sizes}, sequence_parallel=on)
    assert [one.code for one in report.diagnostics] == ["SP420"], report


def _in_turn(self: HeadShare, tp_rank: int, of_ranks: Any = HeadShare.of_ranks) -> tuple[Ranges, ...]:
    heads = of_ranks(self, tp_rank)[:: self.over_both.computed.copies]
    return tuple(heads[rank % len(heads)] for rank in range(self.cp))


def _last(self: Cut, parts: Sequence[Tensor]) -> Tensor:
    whole = parts[0].new_zeros([self.size if dim == self.dim else size for dim, size in enumerate(parts[0].shape)])
    for ranges, part in zip(self.shares, parts, strict=True):
        for (start, length), piece in zip(ranges, part.split([n for _, n in ranges], self.dim), strict=True):
            whole.narrow(self.dim, start, length).copy_(piece)
    return whole


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cls", "method", "instead"),
    [(HeadShare, "of_ranks", _in_turn), (Cut, "whole", _last)],
    ids=["heads are dealt out in turn", "gradients of copies are not added up"],
)
def test_the_proof_refuses_other_copies_of_key_value_heads(
    cls: type, method: str, instead: Any, monkeypatch: pytest.MonkeyPatch
):
    model = meta_model("llama", num_key_value_heads=2)
    plan, sizes = {**PLAN, "context_parallel": HEADS}, {"cp": 4, "tp": 1}
    report = shardplan.validate(model, plan, sizes)
    assert report.ok and report.proof is not None and report.proof.meshes == (MeshSizes(tp=1, cp=4),)
    monkeypatch.setattr(cls, method, instead)
    report = shardplan.validate(model, plan, sizes)
    assert [one.code for one in report.diagnostics] == ["SP420"], report


@pytest.mark.slow
def test_a_mesh_with_room_for_tp_alone_is_proven_without_the_rules_for_cp():
    report = shardplan.validate("llama", {**PLAN, "context_parallel": HEADS}, {"cp": 2, "tp": 8})
    assert report.ok and report.proof is not None
    assert report.proof.meshes == (MeshSizes(tp=8), MeshSizes(tp=2, cp=2))


def _before_the_shift(labels: Tensor, ranks: int, rank: int, num_items: Any = None) -> dict[str, Any]:
    own = labels.chunk(ranks, 1)[rank].contiguous()
    shifted = nn.functional.pad(own, (0, 1), value=-100)[:, 1:].contiguous()
    return {"labels": own, "shift_labels": shifted, "num_items_in_batch": (labels[:, 1:] != -100).sum() / ranks}


def _means(labels: Tensor, ranks: int, rank: int, num_items: Any = None) -> dict[str, Any]:
    own = own_labels_of(labels, ranks, rank)
    return {**own, "num_items_in_batch": (own["shift_labels"] != -100).sum()}


@pytest.mark.slow
@pytest.mark.parametrize("instead", [_before_the_shift, _means], ids=lambda one: one.__name__)
def test_the_proof_refuses_other_labels_of_own_tokens(instead: Any, monkeypatch: pytest.MonkeyPatch):
    plan = {**PLAN, "context_parallel": HEADS}
    report = shardplan.validate("llama", plan, {"cp": 2, "tp": 1})
    assert report.ok and report.proven
    monkeypatch.setattr(sys.modules["shardplan.runtime.training.context_parallel"], "own_labels_of", instead)
    report = shardplan.validate("llama", plan, {"cp": 2, "tp": 1})
    assert [one.code for one in report.diagnostics] == ["SP420"], report


SINKS = {
    "version": "1",
    "name": "gpt_oss-cp",
    "extends": "gpt_oss",
    "context_parallel": {
        **ENDS,
        "model.layers.*.self_attn": "exchange_heads",
        "model.layers.*.mlp.router": {"style": "token_wise", "read_outside": [0]},
    },
}


@pytest.mark.slow
def test_the_proof_refuses_sinks_of_other_heads(monkeypatch: pytest.MonkeyPatch):
    """The loss moves by 7e-5 alone."""
    right = HeadShare.of_ranks

    def of_others(share: HeadShare, tp_rank: int) -> tuple[Ranges, ...]:
        ranges = right(share, tp_rank)
        return ranges[::-1] if share.over_both.name == "sinks" else ranges

    monkeypatch.setattr(HeadShare, "of_ranks", of_others)
    report = shardplan.validate("gpt_oss", SINKS, {"cp": 2, "tp": 1})
    assert [one.code for one in report.diagnostics] == ["SP420"], report


@pytest.mark.slow
@pytest.mark.parametrize("known", [True, False])
def test_the_proof_refuses_the_length_of_a_chunk_in_place_of_the_whole(known: bool, monkeypatch: pytest.MonkeyPatch):
    """Where projections look at what they read, and where they do not: `view` then mixes tokens with heads."""
    hollow = boundaries.hollow_of
    monkeypatch.setattr(boundaries, "hollow_of", lambda x, **words: hollow(x, **words).kept)
    if not known:
        monkeypatch.setattr(boundaries, "taken", lambda x, *_: x)
        monkeypatch.setattr(boundaries, "has_all_tokens", lambda *_: False)
    report = shardplan.validate("llama", {**PLAN, "context_parallel": HEADS}, {"cp": 2, "tp": 1})
    assert [one.code for one in report.diagnostics] == ["SP422"], report


def test_verify_proves_rules_for_cp_alone():
    report = shardplan.verify("llama", PLAN, {"cp": 2})
    assert report.ok and report.proven and report.proof.sizes.cp == 2


@pytest.mark.slow
def test_hidden_states_that_own_code_collects_are_whole_over_both_axes():
    """FSDP2 hands blocks views of them: the first is a partial sum over tp, of all tokens."""
    section = {"transformer.blocks.0": "split_seq_input", "transformer.blocks.*.attn": "exchange_heads"}
    plan = {"version": "1", "name": "mpt-cp", "extends": "mpt", "context_parallel": section}
    report = shardplan.validate(meta_model("mpt"), plan, {"cp": 2, "tp": 2}, sequence_parallel=True)
    assert report.ok and report.proven, report


# What was wrong or refused on both axes; most of these types are right on each axis alone.
BOTH = {
    "falcon_h1": "a buffer of the mixer has a share on each rank of both",
    "minimax": "so have three buffers of decays",
    "mvp": "its own code returns what its blocks read first, with the hidden states",
    "gemma3n_text": "hidden states have the sequence in dim 2",
    "longcat_flash": "a rule inside of experts that are one operation over cp",
    "llama4_text": "its router hands its logits out, and not the module around it too",
    "axk1": "a norm inside of the experts' block splits the sequence that tp gathered for the block",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(BOTH, 2))
def test_types_on_both_axes(name: str):
    with every_rank():
        report = shardplan.validate(
            without_dropout(config_of(name)), "auto", {"cp": 2, "tp": 2}, sequence_parallel=True
        )
    assert report.ok and report.proven, (BOTH[name], report)
    assert report.proof is not None and report.proof.sizes.cp == 2 and report.proof.sizes.tp == 2


@pytest.mark.slow
@pytest.mark.parametrize("tp", sampled([1, 2], 1))
def test_a_result_in_one_row_leaves_with_the_tokens_of_its_rank(tp: int):
    """Llama 4's experts return [batch * sequence, hidden] for [batch, sequence, hidden]."""
    section = {**HEADS, "model.layers.*.feed_forward": "replicate_seq"}
    plan = {"version": "1", "name": "rows", "extends": "llama4", "context_parallel": section}
    report = shardplan.validate("llama4_text", plan, {"cp": 2, "tp": tp}, sequence_parallel=True if tp > 1 else None)
    assert report.ok and report.proven, report
