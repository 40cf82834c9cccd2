"""Log-probabilities of tokens that were sampled from a part of the distribution, and of sequences that are split over ranks,
against torch on whole logits, and the gradients of a whole model: four processes."""

from __future__ import annotations

import pytest
import torch
from processes import on_ranks
from small_models import batch, small_model, whole
from test_processes_logits import BATCH, TOKENS, agree, forms, gradient, targets, weights, whole_logits
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import shardplan
from shardplan.compat import (
    TrainingSamplingParams,
    apply_temperature_scaling,
    get_logprobs_from_vocab_parallel_logits,
)
from shardplan.proof.compare import TOLERANCE, relative_error
from shardplan.runtime.parallel.vocabulary_logits import Split
from shardplan.runtime.parallel.vocabulary_probabilities import least_logits
from shardplan.runtime.training import log_probabilities

LENGTH = 16


def kept(row: list[float], top_k: int | None, top_p: float, temperature: float) -> list[bool]:
    """Which tokens count, one after the other from the largest: what equals the last one that counts does too."""
    order = sorted(set(row), reverse=True)
    if top_k is not None:
        least = sorted(row, reverse=True)[top_k - 1]
        row = [value if value >= least else -torch.inf for value in row]
    shares = (torch.tensor(row, dtype=torch.float64) / temperature).softmax(0).tolist()
    total, counting = 0.0, set()
    for value in order:
        alike = [share for own, share in zip(row, shares, strict=True) if own == value]
        if total < top_p or top_p == 1.0:
            counting.add(value)
        for share in alike:
            total += share
    return [value in counting and value != -torch.inf for value in row]


def cut(logits: Tensor, top_k: int | None, top_p: float, temperature: float) -> Tensor:
    """The log-probabilities of what is left, whole."""
    rows = [kept(row, top_k, top_p, temperature) for row in logits.detach().double().flatten(0, 1).tolist()]
    keep = torch.tensor(rows).view(logits.shape)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    return wide.masked_fill(~keep, -torch.inf).log_softmax(-1)


def check_filters(vocabulary: int, dtype: torch.dtype, options: dict, mesh: DeviceMesh) -> None:
    limit = TOLERANCE.get(dtype, 1e-2)
    reference = whole_logits(vocabulary, dtype, seed=3)
    reference[1, 4, :] = reference[1, 4, :1]  # all equal: all count
    ids = targets(vocabulary, BATCH, TOKENS)
    ids[0] = reference[0].argmax(-1)
    leaf = reference.clone().requires_grad_()
    logs = cut(leaf, options.get("top_k"), options.get("top_p", 1.0), options.get("temperature", 1.0))
    assert (logs == -torch.inf).any() and (logs[1, 4] > -torch.inf).all()
    result = logs.gather(-1, ids[..., None])[..., 0]
    (wanted,) = torch.autograd.grad((result * weights(result.shape, result.dtype)).sum(), leaf)
    assert (result == -torch.inf).any()
    for name, (own, kwargs) in forms(reference, mesh).items():
        value = log_probabilities(own, ids, **options, **kwargs)
        assert torch.equal(value == -torch.inf, result == -torch.inf), (name, options)
        left = value.detach().masked_fill(value == -torch.inf, 0.0)
        agree(left, result.detach().masked_fill(result == -torch.inf, 0.0), TOLERANCE.get(dtype, 1e-5), name, options)
        (value * weights(value.shape, value.dtype)).sum().backward()
        assert relative_error(gradient(name, own, mesh, vocabulary), wanted) <= limit, (name, options)
        if name == "split":
            parameters = TrainingSamplingParams(options.get("top_k"), options.get("top_p", 1.0))
            scaled = apply_temperature_scaling(
                own.detach(), TrainingSamplingParams(None, 1.0, options.get("temperature", 1.0))
            )
            theirs = get_logprobs_from_vocab_parallel_logits(scaled, ids, None, options.get("chunk_size"), parameters)
            expected = cut(whole(scaled), options.get("top_k"), options.get("top_p", 1.0), 1.0)[:, :-1]
            expected = expected.gather(-1, ids[:, 1:, None])[..., 0]
            assert torch.equal(theirs == -torch.inf, expected == -torch.inf)
            assert (
                relative_error(
                    theirs.masked_fill(theirs == -torch.inf, 0), expected.masked_fill(expected == -torch.inf, 0)
                )
                <= 1e-5
            )


def check_what_is_wrong(mesh: DeviceMesh) -> None:
    split = distribute_tensor(whole_logits(10, torch.float32), mesh, [Shard(2)])
    ids = targets(10, BATCH, TOKENS)
    for options, words in (
        ({"top_k": 0}, "top_k must be from 1 to the 10 tokens"),
        ({"top_k": 11}, "top_k must be from 1 to the 10 tokens"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1"),
        ({"top_p": 1.5}, "top_p must be above 0 and at most 1"),
    ):
        with pytest.raises(ValueError, match=words):
            log_probabilities(split, ids, **options)
    every = log_probabilities(split, ids)
    assert torch.equal(log_probabilities(split, ids, top_k=10), every)
    assert torch.equal(
        get_logprobs_from_vocab_parallel_logits(split, ids, sampling_params=TrainingSamplingParams(-1)),
        every[:, :-1] * 0 + get_logprobs_from_vocab_parallel_logits(split, ids),
    )


def filters_on_all_ranks() -> bool:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    for vocabulary, dtype, options in (
        (12, torch.float32, {"top_k": 3}),
        (12, torch.float32, {"top_p": 0.6, "chunk_size": 2}),
        (10, torch.float64, {"top_k": 4, "top_p": 0.8, "temperature": 0.7, "chunk_size": 3}),
        (10, torch.bfloat16, {"top_p": 0.9, "chunk_size": 5}),
        (5, torch.float32, {"top_k": 2, "top_p": 0.95}),  # a rank has no column
        (9, torch.float32, {"top_p": 1e-9, "temperature": 2.0}),
    ):
        check_filters(vocabulary, dtype, options, mesh)
    check_what_is_wrong(mesh)
    return True


def test_a_part_of_the_distribution_counts_as_in_whole_logits() -> None:
    assert on_ranks(4, filters_on_all_ranks) == [True] * 4


def chunks_of_logits(order: list[int] | None, options: dict) -> None:
    """Split tokens and a vocabulary that tp does not divide, in an order of balanced chunks or as they come."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    generator = torch.Generator().manual_seed(2)
    reference = torch.randn(2, 8, 11, generator=generator).requires_grad_()
    ids = torch.randint(11, (2, 8), generator=generator)
    places = torch.tensor(order) if order is not None else torch.arange(8)
    expected = cut(reference, options.get("top_k"), options.get("top_p", 1.0), 1.0)[:, :-1]
    expected = expected.gather(-1, ids[:, 1:, None])[..., 0]
    factors = torch.randn(expected.shape, generator=generator).masked_fill(expected == -torch.inf, 0.0)
    (wanted,) = torch.autograd.grad((expected.masked_fill(factors == 0, 0.0) * factors).sum(), reference)
    part = distribute_tensor(reference.detach()[:, places], mesh, [Shard(1), Shard(2)]).to_local()
    own = part.clone().requires_grad_()
    split = DTensor.from_local(own, mesh, [Shard(1), Shard(-1)], run_check=False)  # its shape is guessed
    given = distribute_tensor(ids[:, places], mesh["cp"], [Shard(1)]) if order is not None else ids
    parameters = TrainingSamplingParams(**{k: v for k, v in options.items() if k.startswith("top")})
    found = get_logprobs_from_vocab_parallel_logits(
        split, given, None if order is None else places, options.get("chunk_size"), parameters
    )
    assert torch.equal(found == -torch.inf, expected == -torch.inf)
    agree(found.detach().masked_fill(factors == 0, 0.0), expected.detach().masked_fill(factors == 0, 0.0), 1e-5, order)
    (found.masked_fill(factors == 0, 0.0) * factors).sum().backward()
    mine = distribute_tensor(wanted[:, places], mesh, [Shard(1), Shard(2)]).to_local()
    assert relative_error(own.grad, mine) <= 1e-5
    with pytest.raises(ValueError, match="each of the 8 positions once"):
        get_logprobs_from_vocab_parallel_logits(split, ids, torch.zeros(8, dtype=torch.long))
    with pytest.raises(ValueError, match="for logits of \\(2, 8\\) tokens in all"):
        get_logprobs_from_vocab_parallel_logits(split, ids[:, :5])


@pytest.mark.parametrize("options", [{}, {"top_k": 5, "top_p": 0.9, "chunk_size": 3}], ids=["all", "some"])
def test_tokens_that_are_split_give_the_whole_sequence(options: dict) -> None:
    on_ranks(4, chunks_of_logits, [0, 1, 6, 7, 2, 3, 4, 5], options)
    on_ranks(4, chunks_of_logits, None, options)


def policy_loss(logs: Tensor, ids: Tensor) -> Tensor:
    old = torch.sin(ids[:, 1:].float()) - 4
    return (logs.clamp_min(-20) - old).exp().clamp_max(5).mean() - 0.01 * logs.clamp_min(-20).mean()


def planned(sizes: tuple[int, int, int], parameters: TrainingSamplingParams) -> None:
    """A whole step: temperature in place on what the model returned, split tokens, split logits, a cut distribution."""
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp_shard", "cp", "tp"))
    share, shares, cp = mesh.get_local_rank("dp_shard"), sizes[0], sizes[1]
    model = small_model("qwen3", tied=True)
    shardplan.apply_plan(model, mesh, "auto", sequence_parallel=True, logits="sharded", prove=False)
    ids = batch(share, length=LENGTH)
    with shardplan.context_parallel(model, input_ids=ids, use_cache=False) as inputs:
        logits = apply_temperature_scaling(model(**inputs).logits, parameters)
        if cp > 1:
            local = logits.to_local() if isinstance(logits, DTensor) else logits
            logits = DTensor.from_local(local, mesh["cp", "tp"], [Shard(1), Shard(-1)], run_check=False)
        logs = get_logprobs_from_vocab_parallel_logits(logits, ids, None, 5, parameters)
        loss = policy_loss(logs, ids)
        (loss * cp).backward()  # FSDP2 takes the mean over cp too
    reference = small_model("qwen3", tied=True)
    for other in range(shares):
        tokens = batch(other, length=LENGTH)
        scaled = reference(input_ids=tokens, use_cache=False).logits / parameters.temperature
        expected = cut(scaled, parameters.top_k, parameters.top_p, 1.0)[:, :-1].gather(-1, tokens[:, 1:, None])[..., 0]
        wanted = policy_loss(expected, tokens)
        (wanted / shares).backward()
        if other == share:
            assert relative_error(loss.detach(), wanted.detach()) <= 1e-5
    for name, parameter in reference.named_parameters():
        error = relative_error(whole(model.get_parameter(name).grad), parameter.grad)
        assert error <= TOLERANCE[torch.float32], (name, error)


@pytest.mark.parametrize(
    "sizes",
    [(1, 2, 2), pytest.param((2, 1, 2), marks=pytest.mark.slow), pytest.param((1, 4, 1), marks=pytest.mark.slow)],
)
def test_a_step_of_a_policy_is_that_of_the_unsharded_model(sizes: tuple[int, int, int]) -> None:
    on_ranks(4, planned, sizes, TrainingSamplingParams(top_k=100, top_p=0.95, temperature=0.8))


def across_the_cut() -> None:
    """The last token of a chunk is judged by the first of the next one, which another rank has."""
    mesh = init_device_mesh("cpu", (1, 2, 1), mesh_dim_names=("dp_shard", "cp", "tp"))
    model = shardplan.apply_plan(small_model("llama", dtype=torch.float64), mesh, "auto", prove=False)
    ids, rank = batch(0), mesh.get_local_rank("cp")
    with shardplan.context_parallel(model, input_ids=ids, labels=ids, use_cache=False) as inputs:
        targets = inputs["shift_labels"]
        logits = model(**{name: value for name, value in inputs.items() if "labels" not in name}).logits
        with pytest.raises(ValueError, match=r"log_probabilities\(logits, inputs\['shift_labels'\]\)"):
            log_probabilities(logits, inputs["input_ids"], shift=True)
        with pytest.raises(ValueError, match=r"causal_lm_loss\(logits, None, shift_labels=inputs\['shift_labels'\]\)"):
            shardplan.causal_lm_loss(logits, inputs["labels"])
        logs = log_probabilities(logits, targets)
        (-2 * logs.mean()).backward()
        count = targets.new_tensor(ids[:, 1:].numel()) / 2
        loss = shardplan.causal_lm_loss(logits, None, num_items_in_batch=count, shift_labels=targets)
    reference = small_model("llama", dtype=torch.float64)
    expected = log_probabilities(reference(input_ids=ids, use_cache=False).logits, ids, shift=True)
    padded = torch.nn.functional.pad(expected, (0, 1)).chunk(2, 1)[rank]
    (-expected.sum() / ids.numel() * 2).backward()
    assert relative_error(logs, padded) <= TOLERANCE[torch.float64]
    assert relative_error(loss, -padded.sum() / count) <= TOLERANCE[torch.float64]
    for (name, one), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert relative_error(whole(one.grad), other.grad) <= TOLERANCE[torch.float64], name


def test_no_token_is_lost_at_the_cut_of_a_chunk():
    on_ranks(2, across_the_cut)


def test_the_least_of_the_k_largest_is_a_logit() -> None:
    logits = torch.tensor([[3.0, 9.0, 7.0, 1.0], [8.0, 2.0, 4.0, 6.0]])
    assert torch.equal(least_logits(logits, Split(4, 0, None), 2, 1.0, 1.0, 1), torch.tensor([[7.0], [6.0]]))
