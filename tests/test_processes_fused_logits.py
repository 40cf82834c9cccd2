"""Logits that are not made: what losses take of them, against torch on whole logits, values and gradients, alone and in processes."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pipeline_runs import Recipe, compare
from processes import on_ranks
from small_models import batch, share_of, small_model, whole
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional

import shardplan
from shardplan.proof.compare import TOLERANCE, relative_error
from shardplan.runtime.parallel import vocabulary_cross_entropy
from shardplan.runtime.training import causal_lm_loss, cross_entropy, entropy, fused_logits, log_probabilities
from tests.collective_counter import CollectiveCounter

TOKENS, FEATURES = (2, 7), 6
EXACT = TOLERANCE[torch.float64]
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"label_smoothing": 0.1},
    {"weight": True},
    {"weight": True, "label_smoothing": 0.3, "reduction": "none"},
    {"weight": True, "label_smoothing": 0.3},
    {"reduction": "sum"},
)


def tensors(vocabulary: int) -> list[Tensor]:
    """Hidden states, the head's weight and bias, and a scale."""
    generator = torch.Generator().manual_seed(0)
    shapes = (*TOKENS, FEATURES), (vocabulary, FEATURES), (vocabulary,), ()
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


def targets(vocabulary: int) -> Tensor:
    ids = torch.randint(vocabulary, TOKENS, generator=torch.Generator().manual_seed(1))
    ids[0, 2] = -100
    return ids


def capped(logits: Tensor, scale: Tensor) -> Tensor:
    """What models do after their heads."""
    logits = torch.tanh((logits * scale) / 3.0) * 3.0
    logits += 0.5
    return logits.to(torch.float64)


def scalar(value: Tensor) -> Tensor:
    """A number that depends on each token's by itself."""
    return (value * torch.linspace(-1, 1, value.numel(), dtype=value.dtype).view_as(value)).sum()


def torchs(logits: Tensor, ids: Tensor, options: dict[str, Any]) -> Tensor:
    return functional.cross_entropy(logits.view(-1, logits.shape[-1]), ids.view(-1), **options)


def check_losses(vocabulary: int, mesh: DeviceMesh | None) -> None:
    """Every loss, from fused logits and from logits that are there, split over the mesh: its value and all gradients."""
    ids = targets(vocabulary)
    for option in OPTIONS:
        options = dict(option)
        if "weight" in options:
            options["weight"] = torch.linspace(0.1, 2, vocabulary, dtype=torch.float64)
        leaves = tensors(vocabulary)
        hidden, weight, bias, scale = leaves
        wanted = scalar(torchs(capped(functional.linear(hidden, weight, bias), scale), ids, options))
        expected = [wanted, *torch.autograd.grad(wanted, leaves)]
        for call in (torchs, lambda *given: cross_entropy(*given[:2], chunk_size=2, **given[2])):
            split = [x if mesh is None else distribute_tensor(x.detach(), mesh, [Shard(0)]) for x in (weight, bias)]
            own = [x.to_local() if isinstance(x, DTensor) else x for x in split]
            own = [hidden, *(x.detach().clone().requires_grad_() for x in own), scale]
            rows = fused_logits(*own[:3], group=mesh, vocab_size=vocabulary)
            value = scalar(call(capped(rows, scale), ids, options))
            gradients = torch.autograd.grad(value, own)
            for name, found, given, reference in zip(
                "vhwbs", (value, *gradients), [None, *leaves], expected, strict=True
            ):
                if mesh is not None and name in "wb":
                    like = distribute_tensor(given.detach(), mesh, [Shard(0)])
                    found = DTensor.from_local(
                        found, mesh, [Shard(0)], run_check=False, shape=like.shape, stride=like.stride()
                    ).full_tensor()
                elif mesh is not None and name in "hs":  # partial sums
                    found = found.clone()
                    torch.distributed.all_reduce(found)
                assert relative_error(found.detach(), reference.detach()) <= EXACT, (name, vocabulary, option)
        made = capped(functional.linear(hidden, weight, bias), scale).detach().requires_grad_()
        columns = made if mesh is None else distribute_tensor(made.detach(), mesh, [Shard(2)]).requires_grad_()
        value = scalar(cross_entropy(columns, ids, chunk_size=3, **options))
        value.backward()
        (reference,) = torch.autograd.grad(scalar(torchs(made, ids, options)), made)
        assert relative_error(value.detach(), wanted.detach()) <= EXACT, (vocabulary, option)
        assert relative_error(whole(columns.grad), reference) <= EXACT, (vocabulary, option)


def check_tokens(mesh: DeviceMesh | None) -> None:
    """Log-probabilities of given tokens, slices of the tokens, the squares that keep the sums of exponentials near 1."""
    ids, leaves = targets(8), tensors(8)
    hidden, weight, bias, scale = leaves
    rank = 0 if mesh is None else mesh.get_local_rank()
    own = slice(0, 8) if mesh is None else slice(rank * 8 // mesh.size(), (rank + 1) * 8 // mesh.size())
    fused = capped(fused_logits(hidden, weight[own], bias[own], group=mesh, vocab_size=8), scale)
    logits = capped(functional.linear(hidden, weight, bias), scale)
    several = torch.stack([ids.clamp_min(0), (ids + 3) % 8], -1)
    logs = (logits / 0.7).log_softmax(-1)
    asked: tuple[tuple[Callable[[], Tensor], Tensor], ...] = (
        (lambda: log_probabilities(fused, several, temperature=0.7, chunk_size=3), logs.gather(-1, several)),
        (
            lambda: log_probabilities(fused[:, 1:], several[:, 1:]),
            logits.log_softmax(-1)[:, 1:].gather(-1, several[:, 1:]),
        ),
        (
            lambda: causal_lm_loss(fused, ids, z_loss=0.1, num_items_in_batch=5, label_smoothing=0.2),
            (
                torchs(
                    logits[:, :-1].contiguous(), ids[:, 1:].contiguous(), {"reduction": "sum", "label_smoothing": 0.2}
                )
                + 0.1 * (logits.logsumexp(-1).square()[:, :-1] * (ids[:, 1:] != -100)).sum()
            )
            / 5,
        ),
        (lambda: cross_entropy(fused[ids > 3], ids[ids > 3]), torchs(logits[ids > 3], ids[ids > 3], {})),
        (lambda: entropy(fused, temperature=0.7, chunk_size=3), -(logs.exp() * logs).sum(-1)),
    )
    for call, wanted in asked:
        with CollectiveCounter() as counter:
            value = call()
            (gradient,) = torch.autograd.grad(scalar(value), scale, retain_graph=True)
        if mesh is not None:
            assert counter.counts == {"all_reduce": 2}, "one of the maximum, one of the sums"
            torch.distributed.all_reduce(gradient)
        (reference,) = torch.autograd.grad(scalar(wanted), scale, retain_graph=True)
        assert relative_error(value.detach(), wanted.detach()) <= EXACT
        assert relative_error(gradient, reference) <= EXACT
    assert relative_error(whole(fused.make().detach()), logits.detach()) <= EXACT


def in_processes() -> bool:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    for vocabulary in (8, 11, 5):  # of 5 a rank has no token
        check_losses(vocabulary, mesh)
    check_tokens(mesh)
    return True


def test_losses_of_fused_logits_are_those_of_whole_ones():
    check_losses(11, None)
    check_tokens(None)


def test_losses_of_fused_logits_that_are_split():
    assert on_ranks(4, in_processes) == [True] * 4


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.argmax(-1),
        lambda x: x.sum(),
        lambda x: x.softmax(-1),
        lambda x: x[..., 0],
        lambda x: x[..., :3],
        lambda x: x[0, 0],
        lambda x: x[:, :, torch.tensor([1, 2])],
        lambda x: x.view(-1, 22),
        lambda x: x.transpose(1, 2),
        lambda x: x + torch.ones(11),
        lambda x: torch.cat([x, x]),
        lambda x: functional.cross_entropy(x.unsqueeze(0), torch.zeros(1, 2, 7)),
    ],
)
def test_what_reads_the_logits_otherwise_is_refused(read: Callable[[Tensor], Any]):
    hidden, weight, bias, _ = tensors(11)
    logits = fused_logits(hidden, weight, bias)
    assert (logits.shape, logits.dtype, logits.ndim, logits.size(-1)) == ((*TOKENS, 11), torch.float64, 3, 11)
    with pytest.raises(RuntimeError, match=r"or call logits\.make\(\)"):
        read(logits)


def test_what_does_not_fit_is_refused():
    hidden, weight, bias, _ = tensors(11)
    logits, ids = fused_logits(hidden, weight, bias), targets(11)
    for call, error, text in (
        (lambda: cross_entropy(logits, ids[:, :3]), ValueError, "the target's shape is"),
        (lambda: cross_entropy(logits, ids.double()), TypeError, "not probabilities"),
        (lambda: cross_entropy(logits, ids, torch.ones(3)), ValueError, "one number for each of 11 tokens"),
        (lambda: cross_entropy(logits, ids, label_smoothing=2), ValueError, "from 0 to 1"),
        (lambda: cross_entropy(logits, ids, reduction="all"), ValueError, "reduction must be"),
        (lambda: log_probabilities(logits, ids, top_k=3), TypeError, "top_k"),
        (lambda: fused_logits(hidden, weight.T), ValueError, "features"),
        (lambda: fused_logits(hidden, weight, vocab_size=22), ValueError, "pass group= too"),
    ):
        with pytest.raises(error, match=text):
            call()
    ids[0, 0] = 11
    assert cross_entropy(logits, ids, reduction="none").isnan().sum() == 1


def check_kernel(called: list[dict[str, Any]]) -> None:
    """Losses that a kernel takes, against torch on whole logits.

    Args:
        called: the options of its calls.
    """
    ids = targets(11)
    hidden, weight, bias, _ = leaves = [x.detach().float().requires_grad_() for x in tensors(11)]
    cases = [{}, {"label_smoothing": 0.1}, {"reduction": "sum"}, {"z_loss": 0.01}]
    for number, options in enumerate(cases, 1):
        value = cross_entropy(fused_logits(hidden, weight, bias).float(), ids, **options) * 0.3
        assert len(called) == number
        logits, z_loss = functional.linear(hidden, weight, bias), options.get("z_loss", 0.0)
        wanted = torchs(logits, ids, {k: v for k, v in options.items() if k != "z_loss"})
        squares = logits.logsumexp(-1).square()[ids != -100]
        wanted = 0.3 * (wanted + z_loss * squares.mean())
        assert relative_error(value.detach(), wanted.detach()) <= TOLERANCE[torch.float32], options
        found, expected = (torch.autograd.grad(x, leaves[:3], retain_graph=True) for x in (value, wanted))
        for one, reference in zip(found, expected, strict=True):
            assert relative_error(one, reference) <= TOLERANCE[torch.float32], options
    rows = fused_logits(hidden, weight, bias)
    assert cross_entropy(rows, torch.full_like(ids, -100)).isnan()
    assert cross_entropy(rows, ids.masked_fill(ids == ids[0, 0], 11)).isnan()
    count = len(called)
    cross_entropy(rows, ids, reduction="none")
    cross_entropy(rows, ids, torch.ones(11))
    cross_entropy(rows, ids, chunk_size=2)
    cross_entropy(torch.tanh(rows), ids)
    cross_entropy(fused_logits(*(x.double() for x in (hidden, weight, bias))), ids)
    cross_entropy(functional.linear(hidden, weight, bias), ids)
    log_probabilities(rows, ids)
    assert len(called) == count, "what it cannot do stays ours"


def test_a_kernel_of_another_package_takes_what_it_can(monkeypatch):
    """Liger's, which runs on CUDA alone: its place here has torch, with its arguments."""
    called: list[dict[str, Any]] = []

    def kernel(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, **options: Any) -> Tensor:
        called.append(options)
        logits = functional.linear(hidden, weight, bias)
        squares = logits.logsumexp(-1).square()[target != options["ignore_index"]].sum()
        names = ("ignore_index", "label_smoothing", "reduction")
        loss = functional.cross_entropy(logits, target, **{name: options[name] for name in names})
        return loss + options["lse_square_scale"] * squares

    monkeypatch.setattr(vocabulary_cross_entropy, "_liger", lambda: kernel)
    hidden, weight, bias, _ = (x.float() for x in tensors(11))
    cross_entropy(fused_logits(hidden, weight, bias), targets(11))
    assert not called, "not on a CPU"
    monkeypatch.setattr(vocabulary_cross_entropy, "DEVICES", ("cpu",))
    check_kernel(called)


def test_ligers_kernel_in_tritons_interpreter(monkeypatch):
    """Where both are installed: `TRITON_INTERPRET=1 python -m pytest tests/test_processes_fused_logits.py -k liger`."""
    if os.environ.get("TRITON_INTERPRET") != "1" or (liger := vocabulary_cross_entropy._liger()) is None:
        pytest.skip("needs Liger, Triton and TRITON_INTERPRET=1")
    called: list[dict[str, Any]] = []
    monkeypatch.setattr(vocabulary_cross_entropy, "DEVICES", ("cpu",))
    monkeypatch.setattr(vocabulary_cross_entropy, "_liger", lambda: lambda *x, **y: called.append(y) or liger(*x, **y))
    check_kernel(called)


class Own(nn.Module):
    """A model that computes its loss by torch's function."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layers = nn.Embedding(12, 8), nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.head = nn.Linear(8, 12)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        x, labels = self.table(input_ids), input_ids if labels is None else labels
        for layer in self.layers:
            x = x + layer(x).tanh()
        return functional.cross_entropy(self.head(x).flatten(0, 1) * 0.5, labels.flatten(), label_smoothing=0.1)


OWN_PLAN = {
    "version": "1",
    "name": "own",
    "tensor_parallel": {"table": "embedding_rowwise", "layers.*": "colwise_gather_output", "head": "colwise_fused"},
    # A unit that would be freed before the loss reads the head.
    "data_parallel": {"backend": "fsdp2", "units": ["layers.*", "head"], "reshard_after_forward": True},
}


def own_model() -> Own:
    torch.manual_seed(0)
    return Own().double()


def own_batch(share: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(share)
    return torch.randint(12, (2, 5), generator=generator), torch.randint(12, (2, 5), generator=generator)


def own_ranks(sizes: dict[str, int]) -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    model = shardplan.apply_plan(own_model(), mesh, OWN_PLAN, prove=False)
    for _ in range(2):  # gradients accumulate
        model(*own_batch(share_of(mesh)[0])).backward()
    return {name: whole(p.grad) for name, p in model.named_parameters()}


def trained(sizes: dict[str, int], loss: str) -> tuple[float, dict[str, Tensor]]:
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    model = small_model("qwen3", tied=True, dtype=torch.float64)
    model = shardplan.apply_plan(model, mesh, "auto", sequence_parallel=True, logits="fused", prove=False)
    value = LOSSES[loss](model, batch(0, share_of(mesh)[0]))
    value.backward()
    return value.item(), {name: whole(p.grad) for name, p in model.named_parameters()}


def by_labels(model: nn.Module, ids: Tensor) -> Tensor:
    return model(input_ids=ids, labels=ids, num_items_in_batch=torch.tensor(40), use_cache=False).loss


def by_policy(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids, use_cache=False).logits
    return (log_probabilities(logits, ids, shift=True, temperature=0.8) + 5).exp().mean()


def by_head(model: nn.Module, ids: Tensor) -> Tensor:
    """The head is called by itself, outside of the model's forward."""
    hidden = model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states[-1]
    return causal_lm_loss(model.lm_head(hidden), ids, label_smoothing=0.1)


LOSSES: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {"labels": by_labels, "policy": by_policy, "head": by_head}


@pytest.mark.parametrize("sizes", [{"dp_shard": 2, "tp": 2}, {"dp_shard": 4, "tp": 1}], ids=["tp 2", "tp 1"])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_planned_model_trains_like_the_unsharded_one(sizes: dict[str, int], loss: str):
    reference, shares = small_model("qwen3", tied=True, dtype=torch.float64), sizes["dp_shard"]
    losses = {}
    for share in range(shares):
        value = LOSSES[loss](reference, batch(0, share))
        (value / shares).backward()
        losses[share] = value.item()
    for rank, (value, gradients) in enumerate(on_ranks(4, trained, sizes, loss)):
        assert value == pytest.approx(losses[rank // sizes["tp"]], rel=EXACT)
        for name, parameter in reference.named_parameters():
            assert relative_error(gradients[name], parameter.grad) <= EXACT, name


@pytest.mark.parametrize("sizes", [{"dp_shard": 2, "tp": 1}, {"dp_shard": 1, "tp": 2}], ids=["dp", "tp"])
def test_a_model_of_ones_own_with_a_head_that_is_a_unit(sizes: dict[str, int]):
    reference, shares = own_model(), sizes["dp_shard"]
    for share in (0, 0, 1, 1)[: 2 * shares]:
        (reference(*own_batch(share)) / shares).backward()
    for gradients in on_ranks(2, own_ranks, sizes):
        for name, parameter in reference.named_parameters():
            assert relative_error(gradients[name], parameter.grad) <= EXACT, name


@pytest.mark.slow
def test_over_cp():
    """The loss, the logits and every gradient, in float64 where float32 is not enough."""
    report = shardplan.verify("qwen3", "auto", {"cp": 2, "tp": 2}, logits="fused", processes=True)
    assert report.proven, report
    assert report.proof is not None and report.proof.processes


@pytest.mark.slow
def test_in_the_last_stage():
    """Three clipped steps of AdamW in float64."""
    compare(Recipe("qwen3", {"pp": 2, "tp": 2}, options={"logits": "fused"}, sequence_parallel=True))
