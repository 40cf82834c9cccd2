"""Calls and mistakes that only real ranks show: generating, wrong batches, ranks that disagree, ranks that fail."""

from __future__ import annotations

import warnings
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import on_ranks, raised
from small_models import batch, small_model, whole, whole_state
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

import shardplan
from shardplan.core.diagnostics import PlanError
from shardplan.runtime.apply import without_sequence_parallel
from tests.compiling import look_for_no_repairs

NEW = 8  # tokens to generate
UNENDED = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 3}


def pair() -> DeviceMesh:
    """A tp mesh of two of the four ranks; both pairs do the same."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("pair", "tp"))["tp"]


# Generating


def generated(model: nn.Module, prompt: Tensor) -> Tensor:
    """Greedy tokens with a KV cache, the prompt of the second row padded on the left."""
    mask = torch.ones_like(prompt)
    mask[1, :5] = 0
    with torch.no_grad():
        return model.eval().generate(
            prompt, attention_mask=mask, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, pad_token_id=3
        )


def decoded(model: nn.Module, prompt: Tensor) -> Tensor:
    """The logits of one decode step after a prefill."""
    with torch.no_grad():
        first = model.eval()(input_ids=prompt, use_cache=True)
        return model(input_ids=prompt[:, -1:], past_key_values=first.past_key_values, use_cache=True).logits


def generate(names: list[str]) -> dict[str, tuple[Tensor, Tensor]]:
    results = {}
    for name in names:
        model = shardplan.apply_plan(small_model(name, noise=0.1), pair(), "auto")
        results[name] = generated(model, batch(1)), decoded(model, batch(2))
        model = shardplan.apply_plan(small_model(name, noise=0.1), pair(), "auto", sequence_parallel=True)
        with without_sequence_parallel(model):
            results[f"{name}, planned with sequence parallelism"] = generated(model, batch(1)), decoded(model, batch(2))
    return results


@pytest.mark.parametrize("names", [["phi3"], pytest.param(["qwen3", "gpt2", "gemma3_text"], marks=pytest.mark.slow)])
def test_generating_gives_the_unsharded_tokens(names):
    for results in on_ranks(4, generate, names):
        assert len(results) == 2 * len(names)
        for title, (tokens, logits) in results.items():
            name = title.partition(",")[0]
            model = small_model(name, noise=0.1)
            expected = generated(model, batch(1))
            assert expected.shape[1] == batch(1).shape[1] + NEW
            assert torch.equal(tokens, expected), title
            torch.testing.assert_close(logits, decoded(model, batch(2)), rtol=1e-4, atol=1e-5)


# Sampling with a seed for each rank


def sampled(model: nn.Module, how: str, seed: int) -> list[Tensor]:
    """Two texts that are drawn with a seed, one after the other."""
    ways: dict[str, dict[str, Any]] = {
        "plain": {},
        "beams": {"num_beams": 2},
        "assisted": {"assistant_model": small_model("qwen3", num_hidden_layers=1, noise=0.1).eval()},
    }
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": True, "pad_token_id": 3, **ways[how]}
    torch.manual_seed(seed)
    with torch.no_grad():
        return [model.eval().generate(batch(1)[:1, :8], **options) for _ in range(2)]


def sample(same_seed: bool) -> dict[str, list[Tensor]]:
    """What is sampled where each of the four ranks has its own seed, or each pair has one."""
    results = {}
    rank = dist.get_rank()
    model = shardplan.apply_plan(small_model("qwen3", noise=0.1), pair(), "auto", prove=False)
    for how in ("plain", "beams", "assisted"):
        results[how] = sampled(model, how, rank // 2 * 2 if same_seed else rank)
        moved = not torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(rank).get_state())
        assert same_seed or moved == (rank % 2 == 0), "a rank with another seed has its own state again"
    after = [torch.empty(1) for _ in range(4)]
    dist.all_gather(after, torch.rand(1))
    assert not same_seed or (after[0] == after[1] and after[2] == after[3]), "ranks with one seed keep one state"
    return results


@pytest.mark.parametrize("same_seed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_sampling_gives_the_text_of_the_first_tp_rank(same_seed):
    ranks = on_ranks(4, sample, same_seed)
    for how in ranks[0]:
        texts = [sampled(small_model("qwen3", noise=0.1), how, seed) for seed in (0, 2)]
        for rank, results in enumerate(ranks):
            for found, expected in zip(results[how], texts[rank // 2], strict=True):
                assert torch.equal(found, expected), (how, rank)
        assert not torch.equal(texts[0][0], texts[0][1]) and not torch.equal(texts[0][0], texts[1][0])


# Texts of data-parallel ranks that end at different lengths


def ended(model: nn.Module, share: int) -> Tensor:
    """Greedy tokens of a data-parallel rank's prompts. The text of the first rank ends with its second token, which that of the
    other does not have before its last."""
    prompt = batch(1)[:1, : 8 + share]
    with torch.no_grad():
        free = [
            small_model("qwen3", noise=0.1).eval().generate(batch(1)[:1, : 8 + i], **UNENDED)[0, 8 + i :]
            for i in (0, 1)
        ]
        [end] = [token for token in free[0][1:2].tolist() if token not in free[1][:-1].tolist()]
        return model.eval().generate(prompt, max_new_tokens=NEW, do_sample=False, pad_token_id=3, eos_token_id=end)


def generate_unequally() -> Tensor:
    mesh = shardplan.build_mesh(device_type="cpu")
    model = shardplan.apply_plan(small_model("qwen3", noise=0.1), mesh, "auto", prove=False)
    return ended(model, mesh["dp_shard"].get_local_rank())


@pytest.mark.slow
def test_data_parallel_ranks_generate_texts_of_their_own_lengths():
    ranks = on_ranks(2, generate_unequally, seconds=60)
    expected = [ended(small_model("qwen3", noise=0.1), share) for share in (0, 1)]
    assert expected[0].shape[1] < expected[1].shape[1]
    for rank, tokens in enumerate(ranks):
        assert torch.equal(tokens, expected[rank]), rank


# A vocabulary: the last rank has a single row of it


ROWS = 13  # 4, 4, 4 and 1


def few_rows(model: nn.Module) -> dict[str, Tensor]:
    """The model's own loss, and every gradient."""
    ids = torch.arange(2 * 16).reshape(2, 16).mul(5).remainder(ROWS)
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    gradients = {name: whole(p.grad) for name, p in model.named_parameters()}
    return {"loss": loss.detach(), **gradients}


def few_rows_model(tied: bool) -> nn.Module:
    return small_model("llama", tied=tied, vocab_size=ROWS)


def run_few_rows() -> dict[tuple[bool, str], dict[str, Tensor]]:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    results = {}
    for tied in (False, True):
        for logits in ("replicated", "sharded"):
            model = shardplan.apply_plan(few_rows_model(tied), mesh, "auto", sequence_parallel=tied, logits=logits)
            results[tied, logits] = few_rows(model)
    return results


@pytest.mark.slow
def test_a_last_rank_with_one_row():
    for results in on_ranks(4, run_few_rows):
        for (tied, logits), found in results.items():
            expected = few_rows(few_rows_model(tied))
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6, msg=f"{name}, {tied=}, {logits=}")


# Sequences that tp does not divide


def lengths() -> list[str]:
    model = shardplan.apply_plan(small_model("qwen3"), pair(), "auto", sequence_parallel=True)
    said = []
    for length in (15, 1):
        ids = batch(1, length=length)
        with pytest.raises(ValueError) as caught:
            model(input_ids=ids, labels=ids, use_cache=False)
        said.append(str(caught.value))
    with without_sequence_parallel(model):
        model(input_ids=batch(1, length=15), use_cache=False)
    dist.barrier()  # every rank is still there, and what was refused left nothing half-done
    ids = batch(1)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return said


def test_a_length_that_tp_does_not_divide_is_refused_with_the_padded_length():
    for odd, single in on_ranks(4, lengths):
        assert "15" in odd and "16" in odd and "tp=2" in odd
        assert "pad it to 2" in single


# Ranks that are fed different batches


def feed_differently(how: str, steps: int = 2) -> list[str]:
    """What the first steps say where tp rank 2 of four gets another batch."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    model = shardplan.apply_plan(small_model("llama"), mesh, "auto", check_inputs=how != "unchecked")
    inputs: dict[str, Any] = {"input_ids": batch(1), "attention_mask": torch.ones_like(batch(1))}
    if dist.get_rank() == 2 and how in ("ids", "unchecked"):
        inputs["input_ids"] = batch(2)
    if dist.get_rank() == 2 and how == "order":
        inputs["input_ids"] = batch(1).flip(0)
    if dist.get_rank() == 2 and how == "mask":
        inputs["attention_mask"][0, 0] = 0
    if dist.get_rank() == 2 and how == "length":
        inputs = {name: x[:, :12] for name, x in inputs.items()}
    if dist.get_rank() == 2 and how == "arguments":
        del inputs["attention_mask"]
    if how == "embeddings":
        inputs["inputs_embeds"] = torch.full((2, 16, 64), 1 + 1e-6 * (dist.get_rank() == 2))
        del inputs["input_ids"]
    return [raised(model, **inputs, use_cache=False) for _ in range(steps)]


@pytest.mark.parametrize(
    ("how", "argument"),
    [("ids", "input_ids"), ("order", "input_ids"), ("mask", "attention_mask"), ("embeddings", "inputs_embeds")],
)
def test_ranks_that_were_fed_another_batch_are_named(how, argument):
    for first, second in on_ranks(4, feed_differently, how):
        assert f"{argument} on rank 2." in first and first.count("on rank") == 1 and "those of rank 0: " in first
        assert second == ""


@pytest.mark.parametrize("how", ["length", "arguments"])
def test_other_shapes_and_other_arguments_end_with_the_message_not_with_the_time_out(how):
    for rank, (text,) in enumerate(on_ranks(4, feed_differently, how, 1, seconds=60)):
        assert "the names, shapes or dtypes of the inputs on rank 2 (" in text
        shape = (2, 12) if (how, rank) == ("length", 2) else (2, 16)
        assert (
            f"this rank has {'' if (how, rank) == ('arguments', 2) else f'attention_mask torch.int64 {shape}, '}"
            in text
        )


def test_equal_batches_pass_and_unequal_ones_where_nothing_is_checked():
    assert on_ranks(4, feed_differently, "not at all") == [["", ""]] * 4
    assert on_ranks(4, feed_differently, "unchecked") == [["", ""]] * 4


def feed_differently_later(wrong: int) -> list[str]:
    """What six training forwards say, each with an evaluation of other batches before it, where rank 1 trains on another batch
    in one of them."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    model = shardplan.apply_plan(small_model("llama"), mesh, "auto", prove=False)
    said = []
    for count in range(1, 7):
        ids = batch(2 if count == wrong and dist.get_rank() == 1 else 1)
        with torch.no_grad():
            evaluated = raised(model, input_ids=batch(1 + dist.get_rank()), use_cache=False)
        said.append(evaluated or raised(model, input_ids=ids, use_cache=False))
    return said


@pytest.mark.parametrize(("wrong", "reported"), [(2, 3), (3, None)])
def test_later_batches_are_compared_by_count_and_reported_by_the_next_forward(wrong, reported):
    for said in on_ranks(4, feed_differently_later, wrong):
        for count, text in enumerate(said, start=1):
            assert (f"in training forward {wrong} these inputs differ" in text) == (count == reported)
            assert ("input_ids on rank 1." in text) == bool(text)


# Ranks that were given different weights


def with_other_weights(name: str | None) -> list[str]:
    """What two forwards say where a parameter of rank 2 of dp_replicate 2 x tp 2 is another one, and a third after it is right; "" for
    nothing."""
    model = shardplan.apply_plan(small_model("llama"), shardplan.build_mesh(dp_replicate=2, tp=2), "auto", prove=False)
    own = model.get_parameter(name).to_local() if name is not None and dist.get_rank() == 2 else torch.zeros(1)
    right, said = own.detach().clone(), []
    for value in (right * 1.5, right * 1.5, right):
        with torch.no_grad():
            own.copy_(value)
        said.append(raised(model, input_ids=batch(1), use_cache=False))
    return said


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("model.norm.weight", ["over dp_replicate", "those of other ranks", "over dp_replicate", "over tp"]),
        ("lm_head.weight", ["over dp_replicate", "those of other ranks", "over dp_replicate", "those of other ranks"]),
    ],
)
def test_weights_that_should_be_the_same_are_compared(name, said):
    for (first, second, third), expected in zip(on_ranks(4, with_other_weights, name), said, strict=True):
        assert expected in first and (name in first) == expected.startswith("over")
        assert second == first and not third


def test_equal_weights_pass():
    assert on_ranks(4, with_other_weights, None) == [[""] * 3] * 4


# Ranks that are about to do different things


def untouched(model: nn.Module, before: dict[str, Tensor]) -> bool:
    with pytest.raises(ValueError, match="no plan was applied"):
        shardplan.applied(model)
    plain = not any(isinstance(p, DTensor) for p in model.parameters())
    return plain and all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def disagree(how: str) -> tuple[str, str]:
    """What apply_plan raises where the last rank is about to do something else, and that it can be done again."""
    other = dist.get_rank() == 3
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    plan: Any = "qwen3"
    options: dict[str, Any] = {"sequence_parallel": not (other and how == "no sequence parallelism")}
    model = small_model("qwen3")
    if other and how == "another plan":
        plan = {"version": "1", "extends": "qwen3", "tensor_parallel": {"lm_head": "colwise_vocab"}}
    if other and how == "a wrong plan":
        plan = {"version": "1", "tensor_parallel": {"model.layers.*.self_attn.q_prj": "colwise"}}
    if how == "another precision":
        options["data_parallel"] = {
            "mixed_precision": {"param": "bfloat16", "reduce": "bfloat16" if other else "float32"}
        }
    if how == "no checkpointing":
        options["activation_checkpointing"] = False if other else {"mode": "full"}
    before = whole_state(model)
    with pytest.raises((RuntimeError, PlanError)) as caught:
        shardplan.apply_plan(model, mesh, plan, **options)
    assert untouched(model, before)
    shardplan.apply_plan(model, mesh, "qwen3", sequence_parallel=True)
    return type(caught.value).__name__, str(caught.value)


# What all ranks say of the rank that differs: the failure, or the first line that differs.
FIRST_DIFFERENCE = {
    "another plan": "Rank 3 has `",
    "a wrong plan": "It failed on rank 3: error[SP201]",
    "no sequence parallelism": "Rank 3 has `",
    "no checkpointing": "Rank 3 has `",
    "another precision": "Rank 3 has `",
}


@pytest.mark.parametrize(
    "how", ["another plan", "a wrong plan", "no sequence parallelism", "no checkpointing", "another precision"]
)
def test_ranks_that_disagree_all_say_so_before_anything_is_done(how):
    results = on_ranks(4, disagree, how)
    for rank, (kind, text) in enumerate(results):
        if how == "a wrong plan" and rank == 3:
            assert kind == "PlanError" and "q_prj" in text
        else:
            assert kind == "DifferentRanks" and "different programs" in text
            assert FIRST_DIFFERENCE[how] in text


# One error of all ranks


def refuse(how: str) -> tuple[str, str, tuple[str, ...]]:
    """What apply_plan raises where all ranks ask for the same wrong thing: the kind, the text, the codes of the findings."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp_shard", "tp"))
    rules = {"model.layers.*.self_attn.q_prj": "colwise", "model.layers.*.mlp.up_prj": "colwise"}
    plan: Any = {"version": "1", "tensor_parallel": rules} if how == "a plan" else "qwen3"
    model = small_model("qwen3")
    if how == "a proof":
        up = model.model.layers[-1].mlp.up_proj
        up.register_forward_hook(lambda module, args, output: output - output.mean(-1, keepdim=True))
    elif how == "two plans" and dist.get_rank() == 3:
        plan = {"version": "1", "tensor_parallel": dict(list(rules.items())[:1])}
    elif how == "two plans":
        plan = {"version": "1", "tensor_parallel": rules}
    options: Any = {"autocast_dtype": "float64"} if how == "an argument" else {}
    before = whole_state(model)
    with pytest.raises(ValueError) as caught, pytest.MonkeyPatch.context() as patch:
        look_for_no_repairs(patch)
        shardplan.apply_plan(model, mesh, plan, **options)
    assert untouched(model, before)
    return (
        type(caught.value).__name__,
        str(caught.value),
        tuple(d.code for d in getattr(caught.value, "diagnostics", ())),
    )


@pytest.mark.parametrize(("how", "ranks"), [("a proof", 2), ("a plan", 4), ("an argument", 4)])
def test_an_error_of_all_ranks_is_printed_by_the_first_one(how, ranks):
    (kind, text, codes), *others = on_ranks(ranks, refuse, how)
    assert kind == ("ValueError" if how == "an argument" else "PlanError") and "rank 0" not in text
    first = text.partition("\n")[0]
    for other in others:
        said = f"{first if len(first) <= 160 else f'{first[:160]}...'} (rank 0 prints all of this error)"
        assert other == (kind, said, codes)


def test_errors_that_differ_are_each_whole():
    results = on_ranks(4, refuse, "two plans")
    assert {kind for kind, _, _ in results} == {"PlanError"}
    assert ["up_prj" in text for _, text, _ in results] == [True, True, True, False]
    assert all("help:" in text and "prints all" not in text for _, text, _ in results)


def other_model() -> str:
    """What apply_plan raises where the last rank has a wider model, which the same plan fits."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    model = small_model("qwen3", intermediate_size=128 if dist.get_rank() == 3 else 96)
    before = whole_state(model)
    with pytest.raises(RuntimeError) as caught:
        shardplan.apply_plan(model, mesh, "qwen3", sequence_parallel=True)
    assert untouched(model, before)
    return str(caught.value)


def test_ranks_with_models_of_other_sizes_all_say_so():
    assert all("different programs" in text for text in on_ranks(4, other_model))


# Weights of several seeds


def drawn(seeds: str) -> list[str]:
    """The warnings of a training forward."""
    torch.manual_seed(dist.get_rank() if seeds != "one" else 7)
    model = nn.Sequential(nn.Linear(16, 32, bias=False), nn.GELU(), nn.Linear(32, 16, bias=False))
    weights = {name: torch.ones_like(value) for name, value in model.state_dict().items()}
    rules = {"0": "colwise", "2": "rowwise"}
    plan = {"version": "1", "tensor_parallel": rules}
    named = shardplan.Model(model, inputs=lambda seed: {"input": torch.ones(2, 4, 16)})
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    model = shardplan.apply_plan(named, mesh, plan | {"data_parallel": {"backend": "fsdp2"}})
    if seeds == "several, and loaded":
        for name, parameter in model.state_dict().items():
            parameter.copy_(distribute_tensor(weights[name], parameter.device_mesh, parameter.placements))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model(torch.ones(2, 4, 16)).sum().backward()
    return [str(one.message) for one in caught if "different seeds" in str(one.message)]


@pytest.mark.parametrize("seeds", ["one", "several", "several, and loaded"])
def test_weights_of_several_seeds_are_told_once_where_they_are_trained(seeds: str) -> None:
    told = on_ranks(4, drawn, seeds)
    assert [len(one) for one in told] == [int(seeds == "several"), 0, 0, 0]


# A rank that fails half-way


class Refusing(nn.Linear):
    """A module that cannot be hooked on one rank, as a machine that fails in the middle of applying."""

    def register_parameter(self, name: str, param: Any) -> None:
        if isinstance(param, DTensor):
            raise MemoryError("no memory left on this rank")
        super().register_parameter(name, param)


def fail(src_data_rank: int | None) -> tuple[str, str]:
    group = dist.new_group(timeout=timedelta(seconds=60))
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    model = small_model("qwen3")
    if dist.get_rank() == 1:
        model.model.layers[1].mlp.up_proj.__class__ = Refusing
    with pytest.raises(RuntimeError) as failed:
        shardplan.apply_plan(model, mesh, "qwen3", src_data_rank=src_data_rank)
    for module, value in ((model, batch(1)), (model.model.layers[0], torch.ones(1, 16, 64))):
        with pytest.raises(
            RuntimeError, match="unusable: applying a plan failed in the step 'tensor parallel'; build it again"
        ):
            module(value)
    with pytest.raises(ValueError, match="unusable|applied to this model before"):
        shardplan.apply_plan(model, mesh, "qwen3")
    with pytest.raises(ValueError) as caught:
        shardplan.applied(model)
    return str(failed.value), str(caught.value)


@pytest.mark.parametrize("src_data_rank", [pytest.param(None, id="nothing sent"), pytest.param(0, id="weights sent")])
def test_a_rank_that_fails_names_step_and_module_and_the_others_do_not_hang(src_data_rank):
    results = on_ranks(4, fail, src_data_rank, seconds=50)  # before the time-out of the group
    error, state = results[1]
    assert "tensor parallel" in error and "model.layers.1.mlp.up_proj" in error and "no memory left" in error
    assert "unusable" in state and "tensor parallel" in state
    for rank in (0, 2, 3):
        error, state = results[rank]
        assert error.endswith("failed in the step 'tensor parallel': rank 1 failed, and its error says why")
        assert "unusable" in state
