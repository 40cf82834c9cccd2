"""Log-probabilities, entropy and top-k of logits that are split over the vocabulary, against torch on whole logits:
values and gradients, in four processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import on_ranks
from small_models import batch, share_of, small_model, whole
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.functional import cross_entropy

import shardplan
from shardplan.proof.compare import TOLERANCE, relative_error
from shardplan.runtime.training import causal_lm_loss, entropy, log_probabilities, top_k, vocabulary_parallel_nll
from shardplan.torchlib.private import private
from tests.collective_counter import CollectiveCounter

BATCH, TOKENS = 2, 7
IGNORED = -100


def whole_logits(vocabulary: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = 5 * torch.randn(BATCH, TOKENS, vocabulary, generator=generator) + 30  # far from 0, as biases make them
    logits[0, 1, vocabulary // 2 :] = -torch.inf  # tokens that cannot come, on some ranks all of them
    return logits.to(dtype)


def targets(vocabulary: int, *shape: int) -> Tensor:
    return torch.randint(vocabulary // 2, shape, generator=torch.Generator().manual_seed(7))


def forms(logits: Tensor, mesh: DeviceMesh) -> dict[str, tuple[Tensor, dict]]:
    """The logits as a plain tensor, as DTensors, and as this rank's columns with a mesh or a group; all leaves."""
    split = distribute_tensor(logits, mesh, [Shard(logits.ndim - 1)])
    own = {"vocab_size": logits.shape[-1]}
    found = {
        "whole": (logits.clone(), {}),
        "replicated": (distribute_tensor(logits, mesh, [Replicate()]), {}),
        "split": (split, {}),
        "columns, mesh": (split.to_local().clone(), {"group": mesh, **own}),
        "columns, group": (split.to_local().clone(), {"group": mesh.get_group(), **own}),
    }
    return {name: (leaf.detach().clone().requires_grad_(), kwargs) for name, (leaf, kwargs) in found.items()}


def gradient(name: str, leaf: Tensor, mesh: DeviceMesh, size: int) -> Tensor:
    """The whole gradient."""
    if name.startswith("columns"):
        shape = (*leaf.shape[:-1], size)
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            leaf.grad, mesh, [Shard(leaf.ndim - 1)], run_check=False, shape=torch.Size(shape), stride=stride
        ).full_tensor()
    return whole(leaf.grad)


def weights(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(5)).to(dtype)


def expected_logs(logits: Tensor, temperature: float) -> Tensor:
    return (logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature).log_softmax(-1)


def agree(value: Tensor, reference: Tensor, limit: float, *where: object) -> None:
    gathered = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, value.contiguous())
    assert all(torch.equal(value.nan_to_num(), other.nan_to_num()) for other in gathered), ("ranks differ", *where)
    assert relative_error(value, reference) <= limit, (relative_error(value, reference), *where)


def check_values_and_gradients(
    vocabulary: int, dtype: torch.dtype, temperature: float, chunk: int | None, mesh: DeviceMesh
) -> None:
    limit = TOLERANCE.get(dtype, 1e-2)  # a gradient in bfloat16 is rounded to it
    exact = limit if dtype != torch.bfloat16 else 1e-5
    reference = whole_logits(vocabulary, dtype)
    ids, several = targets(vocabulary, BATCH, TOKENS), targets(vocabulary, BATCH, TOKENS, 3)
    several[..., 2] = several[..., 0]  # one token twice
    ids[0, 2] = IGNORED
    mask = torch.ones(BATCH, TOKENS, dtype=torch.long)
    mask[1, 3:5] = 0
    dead = (ids == IGNORED) | (mask == 0)
    leaf = reference.clone().requires_grad_()
    logs = expected_logs(leaf, temperature)
    one = logs.gather(-1, ids.masked_fill(dead, 0)[..., None])[..., 0].masked_fill(dead, 0.0)
    many = logs.gather(-1, several)
    disorder = -(logs.exp() * logs.clamp_min(-1e30)).sum(-1).masked_fill(mask == 0, 0.0)
    results = {"one": one, "many": many, "entropy": disorder}
    options = {"temperature": temperature, "chunk_size": chunk}
    for key, result in results.items():
        (wanted,) = torch.autograd.grad((result * weights(result.shape, result.dtype)).sum(), leaf, retain_graph=True)
        for name, (own, kwargs) in forms(reference, mesh).items():
            where = (key, name, vocabulary, dtype, temperature)
            if key == "one":
                value = log_probabilities(own, ids, mask=mask, **options, **kwargs)
            elif key == "many":
                value = log_probabilities(own, several, **options, **kwargs)
            else:
                value = entropy(own, mask=mask, **options, **kwargs)
            assert type(value) is Tensor and value.dtype == torch.promote_types(dtype, torch.float32)
            agree(value.detach(), result.detach(), exact, *where)
            (value * weights(value.shape, value.dtype)).sum().backward()
            found = gradient(name, own, mesh, vocabulary)
            assert found.dtype == dtype
            assert relative_error(found, wanted) <= limit, where


def check_top_k(vocabulary: int, dtype: torch.dtype, mesh: DeviceMesh) -> None:
    reference = whole_logits(vocabulary, dtype)
    for k in sorted({1, 3, vocabulary}):
        leaf = reference.clone().requires_grad_()
        values, _ids = leaf.topk(k, -1)
        (values.masked_fill(values == -torch.inf, 0.0) * weights(values.shape, dtype)).sum().backward()
        for name, (own, kwargs) in forms(reference, mesh).items():
            found, tokens = top_k(own, k, **kwargs)
            assert torch.equal(found, values.detach()), (k, name)
            assert torch.equal(whole(reference).gather(-1, tokens), found), "ids are those of the values"
            assert all(len(set(row)) == k for row in tokens.flatten(0, 1).tolist()), "each token once"
            (found.masked_fill(found == -torch.inf, 0.0) * weights(found.shape, dtype)).sum().backward()
            assert torch.equal(gradient(name, own, mesh, vocabulary), leaf.grad) or dtype == torch.bfloat16, (k, name)


def check_shift_and_losses(mesh: DeviceMesh) -> None:
    reference, ids = whole_logits(10, torch.float32, seed=2), targets(10, BATCH, TOKENS)
    reference = reference.clamp_min(-1e4)
    logs = expected_logs(reference, 1.0)
    following = logs[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    mean = cross_entropy(reference[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    mask = torch.ones(BATCH, TOKENS, dtype=torch.bool)
    mask[:, 4] = False
    for name, (own, kwargs) in forms(reference, mesh).items():
        value = log_probabilities(own, ids, shift=True, chunk_size=2, **kwargs).detach()
        agree(value, following, 1e-5, name)
        masked = log_probabilities(own, ids, shift=True, mask=mask, **kwargs).detach()
        agree(masked, following.masked_fill(~mask[:, 1:], 0.0), 1e-5, name)
        if not kwargs:
            agree(causal_lm_loss(own, ids).detach(), mean, 1e-5, name)
    nll = vocabulary_parallel_nll(forms(reference, mesh)["split"][0], ids).detach()
    agree(nll, -logs.gather(-1, ids[..., None])[..., 0], 1e-5)


def check_what_is_wrong(mesh: DeviceMesh) -> None:
    reference, ids = whole_logits(10, torch.float32), targets(10, BATCH, TOKENS)
    split = distribute_tensor(reference, mesh, [Shard(2)])
    ids[0, 0], ids[1, 1] = 10, -1
    value = log_probabilities(split, ids)
    assert value[0, 0].isnan() and value[1, 1].isnan() and value.isnan().sum() == 2
    with pytest.raises(ValueError, match="pass group= too"):
        causal_lm_loss(split.to_local(), ids, vocab_size=10)
    with pytest.raises(ValueError, match="pass group= too"):
        log_probabilities(split.to_local(), ids, vocab_size=10)
    with pytest.raises(ValueError, match="group= needs vocab_size="):
        entropy(split.to_local(), group=mesh)
    with pytest.raises(ValueError, match="must have . columns of a vocabulary of 17"):
        entropy(split.to_local(), group=mesh, vocab_size=17)
    with pytest.raises(TypeError, match="remove group="):
        top_k(split, 2, group=mesh)
    with pytest.raises(TypeError, match="or whole, not"):
        entropy(distribute_tensor(reference, mesh, [Shard(0)]))
    with pytest.raises(TypeError, match="log_probabilities accepts whole ones too"):
        vocabulary_parallel_nll(reference, ids)
    with pytest.raises(ValueError, match="temperature must be above 0"):
        log_probabilities(split, ids, temperature=0.0)
    with pytest.raises(ValueError, match="chunk_size must be at least 1"):
        entropy(split, chunk_size=0)
    with pytest.raises(ValueError, match="k must be from 1 to the 10 tokens"):
        top_k(split, 11)
    with pytest.raises(ValueError, match="the target's shape is"):
        log_probabilities(split, ids[:, :3])
    leaf = split.detach().requires_grad_()
    for loss in (entropy(leaf).square().sum(), top_k(leaf, 2)[0].square().sum()):
        # torch 2.11 loses the graph of a DTensor's gradient, and with it the second derivative, without a word.
        with pytest.raises(RuntimeError, match="cannot be differentiated again"):
            torch.autograd.grad(loss, leaf, create_graph=True)


def check_cost(mesh: DeviceMesh) -> None:
    """Collectives do not depend on the chunks, and carry numbers per token; inference keeps nothing."""
    vocabulary = 12  # where ranks have unlike parts, DTensor of torch 2.11 gathers the parts' shapes in the backward of `to_local`
    split = distribute_tensor(whole_logits(vocabulary, torch.float32), mesh, [Shard(2)]).requires_grad_()
    ids = targets(vocabulary, BATCH, TOKENS)
    for call in (lambda: log_probabilities(split, ids, chunk_size=2), lambda: entropy(split, chunk_size=2)):
        with CollectiveCounter() as counter:
            result = call()
            result.sum().backward()
        assert counter.counts == {"all_reduce": 2}
        with torch.inference_mode():
            inferred = call()
        assert torch.equal(inferred, result.detach()) and inferred.is_inference()
        with torch.no_grad():
            assert call().grad_fn is None


class Largest(private("TorchDispatchMode")):
    """Notes the largest float32 tensor that is made."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in private("tree_leaves")(result):
            if isinstance(tensor, Tensor) and tensor.dtype == torch.float32:
                self.elements = max(self.elements, tensor.numel())
        return result


def check_memory() -> None:
    """In float32 there is a chunk at a time; for backward there are the logits themselves and a few numbers per token."""
    vocabulary, chunk = 200, 2
    logits = whole_logits(vocabulary, torch.bfloat16).requires_grad_()
    ids = targets(vocabulary, BATCH, TOKENS)
    for call in (lambda: log_probabilities(logits, ids, chunk_size=chunk), lambda: entropy(logits, chunk_size=chunk)):
        kept: list[Tensor] = []
        with Largest() as largest:
            with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
                result = call()
            result.sum().backward()
        assert largest.elements == BATCH * chunk * vocabulary
        others = [t for t in kept if t.data_ptr() != logits.data_ptr()]
        assert len(others) < len(kept) and all(t.numel() <= BATCH * TOKENS for t in others)


def on_all_ranks() -> bool:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    uneven, empty = 10, 5  # with 5 a rank has no column
    cases = [
        (12, torch.float32, 1.0, None),
        (uneven, torch.float64, 0.7, 3),
        (uneven, torch.bfloat16, 1.0, 2),
        (empty, torch.float32, 0.7, 3),
    ]
    for vocabulary, dtype, temperature, chunk in cases:
        check_values_and_gradients(vocabulary, dtype, temperature, chunk, mesh)
        check_top_k(vocabulary, dtype, mesh)
    check_shift_and_losses(mesh)
    check_what_is_wrong(mesh)
    check_cost(mesh)
    check_memory()
    return True


def test_split_logits_give_what_whole_ones_do():
    assert on_ranks(4, on_all_ranks) == [True] * 4


def policy_loss(model: torch.nn.Module, ids: Tensor, old: Tensor) -> Tensor:
    """As in reinforcement learning: a ratio of probabilities, and a bonus for entropy."""
    logits = model(input_ids=ids, use_cache=False).logits
    logs = log_probabilities(logits, ids, shift=True, temperature=0.8, chunk_size=5)
    ratio = (logs - old[:, :-1]).exp()
    _, best = top_k(logits, 4)
    likely = log_probabilities(logits, best, chunk_size=5).exp().sum(-1)
    return ratio.mean() - 0.1 * entropy(logits, temperature=0.8, chunk_size=5).mean() + likely.mean()


def old_logs(ids: Tensor) -> Tensor:
    return torch.sin(ids.double()) - 5


def planned(sizes: dict[str, int]) -> tuple[float, int, dict[str, Tensor]]:
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    model = small_model("qwen3", tied=True, dtype=torch.float64)
    shardplan.apply_plan(model, mesh, "auto", sequence_parallel=True, logits="sharded", prove=False)
    ids = batch(0, share_of(mesh)[0])
    loss = policy_loss(model, ids, old_logs(ids))
    loss.backward()
    return loss.item(), share_of(mesh)[0], {name: whole(p.grad) for name, p in model.named_parameters()}


@pytest.mark.parametrize("sizes", [{"dp_shard": 2, "tp": 2}, {"dp_shard": 4, "tp": 1}], ids=["tp 2", "tp 1"])
def test_a_loss_of_all_of_them_trains_like_the_unsharded_model(sizes: dict[str, int]):
    reference = small_model("qwen3", tied=True, dtype=torch.float64)
    shares = sizes["dp_shard"]
    losses = {}
    for share in range(shares):
        ids = batch(0, share)
        loss = policy_loss(reference, ids, old_logs(ids))
        (loss / shares).backward()
        losses[share] = loss.item()
    limit = TOLERANCE[torch.float64]
    for loss, share, gradients in on_ranks(4, planned, sizes):
        assert loss == pytest.approx(losses[share], rel=limit)
        for name, parameter in reference.named_parameters():
            assert relative_error(gradients[name], parameter.grad) <= limit, name
