"""Balancing experts by their routers' biases: equal to the unsharded model's, which has the batches of all data ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from expert_runs import Case, batch, build, of, planned
from processes import on_ranks
from small_models import share_of, whole_state
from torch import Tensor, nn
from training_runs import ADAMW

import shardplan
from shardplan.proof.compare import TOLERANCE, relative_error
from shardplan.runtime.apply.model_parts import Parted
from shardplan.runtime.training import expert_bias
from shardplan.runtime.training.expert_bias import _KEY, BIAS, _on_all_ranks

STEPS, RATE = 3, 0.05
WHOLE = (
    ("model.layers.0", "split_seq_input"),
    ("model.layers.*.self_attn", "replicate_seq"),
    ("model.norm", "gather_seq_output"),
)


def tokens_of(model: nn.Module) -> list[Tensor]:
    """Those of each expert since the last update, on all ranks together."""
    return _on_all_ranks([module.__dict__[_KEY] for module in model.modules() if _KEY in module.__dict__])


def as_given(model: nn.Module, **inputs: Any) -> Any:
    return nullcontext(inputs)


def trained(
    model: nn.Module, data_ranks: list[int], switched: Callable[[], Any] = nullcontext, inputs_of: Any = as_given
) -> list[dict[str, Tensor]]:
    """The tokens of the experts and the biases after each step on the mean loss of these batches.

    Args:
        switched: makes the context of the second micro-batch.
        inputs_of: makes that of the inputs.
    """
    optimizer, found = torch.optim.AdamW(model.parameters(), **ADAMW), []
    shardplan.count_expert_tokens(model)
    for number in range(STEPS):
        for micro, context in enumerate((nullcontext, switched)):
            with context():
                for data_rank in data_ranks:
                    ids = batch(number, micro, data_rank)
                    with inputs_of(model, input_ids=ids, labels=ids) as inputs:
                        (model(**inputs, use_cache=False).loss / (2 * len(data_ranks))).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(input_ids=batch(99))  # what is computed without gradients is no step
        tokens = tokens_of(model)
        shardplan.update_expert_bias(model, RATE)
        biases = {name: buffer.clone() for name, buffer in model.named_buffers() if name.endswith(BIAS)}
        found.append({**biases, "tokens": torch.cat(tokens)})
    return found


def balanced_as_the_unsharded(cases: list[Case]) -> None:
    for case in cases:
        model, mesh = planned(case)
        own, data_ranks = share_of(mesh)
        heads = (
            "cp" in dict(case.mesh) and not case.over_cp
        )  # exchanged by derived rules: every variant has a rank's tokens
        switched = nullcontext if heads else partial(shardplan.without_sequence_parallel, model)
        found = trained(model, [own], switched, shardplan.context_parallel)
        reference = build(case)
        expected = trained(reference, list(range(data_ranks)))
        for one, other in zip(found, expected, strict=True):
            assert one.keys() == other.keys() and len(one) == 2
            assert all(torch.equal(value, other[name]) for name, value in one.items()), (case, found, expected)
            assert one["tokens"].sum() == 2 * data_ranks * 2 * 12 * 3
        assert all(value.unique().numel() > 2 for value in found[-1].values()), "experts have other histories"
        sent = dict(shardplan.full_parameters(model))  # to an inference engine, which needs the biases too
        assert list(sent) == [*dict(reference.named_parameters()), *(name for name in expected[-1] if name != "tokens")]
        state = whole_state(model)
        for name, value in reference.state_dict().items():
            assert relative_error(state[name], value) <= TOLERANCE[case.dtype], (case, name)
            assert relative_error(sent[name], value) <= TOLERANCE[case.dtype], (case, name)


def double(mode: str | None = None, **given: object) -> Case:
    options = (("activation_checkpointing", {"mode": mode}),) if mode else ()
    return replace(of("deepseek_v3", **given), dtype=torch.float64, options=options)


def test_two_ranks() -> None:
    on_ranks(2, balanced_as_the_unsharded, [double("full", dp_shard=1, tp=2, ep=2, sequence_parallel=True)])


@pytest.mark.slow
def test_four_ranks() -> None:
    cases = [
        double("selective", dp_shard=2, tp=2, ep=4, sequence_parallel=True),
        double(dp_replicate=2, dp_shard=2, ep=2),
        double(dp_shard=2, tp=2, sequence_parallel=True),  # no experts are distributed
        double("full", dp_shard=4, ep=4),
        double(dp_shard=1, cp=2, tp=2, ep=4, sequence_parallel=True),
        replace(double(dp_shard=2, cp=2), over_cp=WHOLE),
    ]
    on_ranks(4, balanced_as_the_unsharded, cases)


def pipelined(first_dense: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The biases of this rank's stages after steps of a pipeline, and of the unsharded model's.

    Args:
        first_dense: how many of the first layers have no experts.
    """
    case = replace(double(), settings=(("num_hidden_layers", 2), ("first_k_dense_replace", first_dense)))
    mesh = shardplan.build_mesh(pp=2, dp_shard=1)
    pipeline = shardplan.apply_plan(
        build(case),
        mesh,
        "auto",
        pipeline=shardplan.PipelineOptions(micro_batches=2),
        prove=False,
        pipeline_parallel={"layers": "model.layers.*"},
    )
    reference = build(case)
    with pytest.raises(ValueError, match="not counted"):
        shardplan.update_expert_bias(pipeline, RATE)
    shardplan.count_expert_tokens(pipeline)
    shardplan.count_expert_tokens(reference)
    for number in range(STEPS):
        ids = torch.cat([batch(number, micro, 0) for micro in range(2)])
        pipeline.step(input_ids=ids, labels=ids)
        reference(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        for parameter in pipeline.parameters():
            parameter.grad = None
        for model in (pipeline, reference):
            shardplan.update_expert_bias(model, RATE)
    own = {n: b for part in pipeline.parts for n, b in pipeline.module_of(part).named_buffers() if n.endswith(BIAS)}
    return own, {n: b for n, b in reference.named_buffers() if n.endswith(BIAS)}


@pytest.mark.slow
@pytest.mark.parametrize("first_dense", [0, 1], ids=["experts in both stages", "in the last stage alone"])
def test_stages_of_a_pipeline(first_dense: int) -> None:
    found = on_ranks(2, pipelined, first_dense)
    expected = found[0][1]
    assert len(expected) == 2 - first_dense and all(bias.unique().numel() > 2 for bias in expected.values())
    own = [one for one, _ in found]
    assert [len(one) for one in own] == [1 - first_dense, 1]
    for name, bias in (own[0] | own[1]).items():
        assert torch.equal(bias, expected[name]), name


# Without ranks


def ids_seen(model: nn.Module) -> list[Tensor]:
    seen: list[Tensor] = []
    experts = model.get_submodule("model.layers.1.mlp.experts")
    experts.register_forward_pre_hook(lambda module, args: seen.append(args[1].clone()))
    return seen


def test_the_bias_follows_the_counts() -> None:
    model = build(of("deepseek_v3"))
    bias = model.get_buffer(f"model.layers.1.mlp.gate.{BIAS}")
    seen = ids_seen(model)
    shardplan.count_expert_tokens(model)
    shardplan.count_expert_tokens(model)  # changes nothing
    model(input_ids=batch(1))
    model(input_ids=batch(2))
    counts = torch.cat(seen).reshape(-1).bincount(minlength=8).double()
    shardplan.update_expert_bias(model, 1e-3)
    assert counts.unique().numel() > 1
    assert torch.equal(bias, (1e-3 * (counts.mean() - counts).sign()).float())


def half(model: nn.Module) -> nn.Module:
    return model.bfloat16()


def another(model: nn.Module) -> nn.Module:
    model.get_submodule("model.layers.1.mlp").register_buffer(BIAS, torch.zeros(8))
    return model


@pytest.mark.parametrize(
    ("model", "change", "words"),
    [
        ("mixtral", nn.Module.train, f"no module of experts has a router bias '{BIAS}'"),
        ("deepseek_v3", half, "is in torch.bfloat16, in which small steps are lost"),
        ("deepseek_v3", another, "and each buffer one module"),
    ],
    ids=["none", "half precision", "two"],
)
def test_models_without_such_a_bias(model: str, change: Callable[[nn.Module], nn.Module], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        shardplan.count_expert_tokens(change(build(of(model))))


def test_updates_without_counts_are_refused() -> None:
    model = build(of("deepseek_v3"))
    with pytest.raises(ValueError, match="call shardplan.count_expert_tokens"):
        shardplan.update_expert_bias(model, 1e-3)
    shardplan.count_expert_tokens(model)
    model.eval()(input_ids=batch(1))
    with pytest.raises(ValueError, match=r"no token reached model.layers.1.mlp.experts since the last update"):
        shardplan.update_expert_bias(model, 1e-3)
    for rate in (0.0, -1.0, float("nan"), "1e-3", True):
        with pytest.raises(ValueError, match="rate must be a number above 0"):
            shardplan.update_expert_bias(model, rate)


def test_every_part_of_a_model_knows_that_tokens_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    parted = Parted()
    parted.parts, parted.group = [build(of("deepseek_v3")), nn.Linear(2, 2)], "ranks"  # type: ignore[assignment]
    monkeypatch.setattr(expert_bias, "of_all", lambda found, group: [found])
    shardplan.count_expert_tokens(parted)
    assert all(part.__dict__[expert_bias._BEGUN] for part in parted.parts)
