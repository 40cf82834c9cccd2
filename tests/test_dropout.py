"""Dropout under tensor parallelism: who draws whose numbers, and sharded steps and unsharded ones with the same masks."""

from __future__ import annotations

import copy
import math
import pickle
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from case_models import Stack
from peft import LoraConfig, get_peft_model
from processes import on_ranks, raised
from small_models import batch, meta_model, small_model, whole
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardplan
from shardplan.core.diagnostics import PlanError
from shardplan.model.reduced.weights import Undropped
from shardplan.proof.rank import whole as in_original_order
from shardplan.runtime.apply.state import packed_parameters
from shardplan.runtime.parallel.random_streams import Streams
from tests.adversaries import mixtures, parts

GPT2 = {"resid_pdrop": 0.2, "embd_pdrop": 0.3, "attn_pdrop": 0.4}
FSDP2 = {"backend": "fsdp2", "units": ["transformer.h.*"]}
LAYERS = {"backend": "fsdp2", "units": ["model.layers.*"]}
AC = {"modules": ["transformer.h.*"]}


@dataclass(frozen=True)
class Case:
    """A model with dropout and how it is split.

    Args:
        lora: the probability of a LoRA adapter's dropout; 0 is no adapter.
        settings: of the configuration.
        options: keyword arguments of `apply_plan`.
    """

    model: str
    settings: Mapping[str, Any]
    lora: float = 0.0
    sequence_parallel: bool = False
    dp: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    attention: str = "eager"

    def build(self, make: Callable[..., nn.Module] | None = None) -> nn.Module:
        make = make or partial(small_model, dtype=torch.float64)
        model = make(self.model, **self.settings, attn_implementation=self.attention)
        if self.lora:
            torch.manual_seed(1)
            names = ["q_proj", "o_proj", "up_proj", "down_proj"]
            config = LoraConfig(r=4, target_modules=names, lora_dropout=self.lora, init_lora_weights=False)
            model = get_peft_model(model, config, autocast_adapter_dtype=False)
        return model.train()

    def apply(self) -> nn.Module:
        mesh = init_device_mesh("cpu", (self.dp, 2), mesh_dim_names=("dp_shard", "tp"))
        # As `from_pretrained` gives models: in evaluation mode.
        model = self.build().eval()
        options = dict(self.options)
        shardplan.apply_plan(model, mesh, "auto", sequence_parallel=self.sequence_parallel, **options, prove=False)
        return model.train()

    def data(self, step: int, share: int) -> Tensor:
        return batch(step, share)


PLAIN = Case("gpt2", GPT2)
SEQUENCE = replace(PLAIN, sequence_parallel=True)
LLAMA = Case("llama", {"attention_dropout": 0.4})
LORA = replace(LLAMA, lora=0.3)
CASES = {
    "gpt2": PLAIN,
    "gpt2, sequence": SEQUENCE,
    "gpt2, fsdp2": replace(SEQUENCE, dp=2, options={"data_parallel": FSDP2}),
    "llama, LoRA": LORA,
    "llama, LoRA, sequence": replace(LORA, sequence_parallel=True),
    "llama, LoRA, fsdp2": replace(LORA, sequence_parallel=True, dp=2, options={"data_parallel": LAYERS}),
}


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    return model(input_ids=ids, labels=ids, use_cache=False).loss


# The steps are those of the unsharded model, with its masks.


@contextmanager
def dropping(drop: Callable[[Tensor, float], Tensor]) -> Iterator[None]:
    """In place of torch's dropout."""

    def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return drop(input, p) if training and p > 0 else input

    before, F.dropout = F.dropout, dropout
    try:
        yield
    finally:
        F.dropout = before


class Recorded:
    """The masks of an unsharded run."""

    def __init__(self) -> None:
        self.masks: list[Tensor] = []

    def drop(self, x: Tensor, p: float) -> Tensor:
        generator = torch.Generator().manual_seed(len(self.masks))
        mask = (torch.rand(x.shape, generator=generator) >= p).to(x.dtype) / (1 - p)
        self.masks.append(mask)
        return x * mask

    def replay(self, rank: int) -> Callable[[Tensor, float], Tensor]:
        """This rank's slices of the masks, in the same order."""
        masks = iter(self.masks)

        def drop(x: Tensor, p: float) -> Tensor:
            mask = next(masks)
            for dim, (size, length) in enumerate(zip(mask.shape, x.shape, strict=True)):
                if size != length:
                    assert size == 2 * length
                    mask = mask.narrow(dim, rank * length, length)
            return x * mask

        return drop


def replayed(case: Case) -> dict[str, float]:
    """The largest relative differences from the unsharded model, by name."""
    model = case.apply()
    rank = torch.distributed.get_rank()
    share, tp = divmod(rank, 2)
    reference, losses = case.build(), []
    for part in range(case.dp):
        recorded = Recorded()
        with dropping(recorded.drop):
            loss = loss_of(reference, case.data(0, part))
        (loss / case.dp).backward()
        losses.append(loss)
        if part == share:
            mine = recorded
    with dropping(mine.replay(tp)):
        loss = loss_of(model, case.data(0, share))
    loss.backward()
    found = {"loss": abs(whole(loss) - losses[share]).item() / abs(losses[share]).item()}
    expected, packed = dict(reference.named_parameters()), packed_parameters(shardplan.applied(model).program)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            given, wanted = parameter.grad, expected[name].grad
            assert given is not None and wanted is not None, name
            given = in_original_order(given, packed.get(name), 2)
            found[name] = ((given - wanted).abs().max() / wanted.abs().max()).item()
    return found


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("gpt2, sequence", "llama, LoRA") else pytest.param(name, marks=pytest.mark.slow)
        for name in CASES
    ],
)
def test_with_the_same_masks_the_step_is_the_unsharded_models(name: str):
    case = CASES[name]
    for found in on_ranks(2 * case.dp, replayed, case, seconds=240.0):
        assert len(found) > 8 and max(found.values()) < 1e-9, max(found.items(), key=lambda one: one[1])


# The masks that are drawn.


@contextmanager
def masks_of_dropout(masks: list[Tensor]) -> Iterator[None]:
    """Notes what torch's dropout drops."""
    own = F.dropout

    def drop(x: Tensor, p: float) -> Tensor:
        state = torch.get_rng_state()
        masks.append(own(torch.ones_like(x), p, True).detach() != 0)
        torch.set_rng_state(state)
        return own(x, p, True)

    with dropping(drop):
        yield


def drawn(case: Case, steps: int = 2) -> tuple[list[list[Tensor]], list[list[Tensor]], bool]:
    """The masks of each step's forward, and those of its backward, and whether the caller's generator is left alone."""
    torch.manual_seed(100 + torch.distributed.get_rank())  # of its own on every rank
    model = case.apply()
    before = torch.get_rng_state()
    forwards, backwards = [], []
    for step in range(steps):
        forward, backward = list[Tensor](), list[Tensor]()
        with masks_of_dropout(forward):
            loss = loss_of(model, case.data(step, 0))
        with masks_of_dropout(backward):
            loss.backward()
        forwards.append(forward)
        backwards.append(backward)
    return forwards, backwards, torch.equal(before, torch.get_rng_state())


def alike(one: Tensor, other: Tensor) -> bool:
    """Whether masks are equal; if not, they must be as different as independent ones are."""
    assert one.shape == other.shape
    if torch.equal(one, other):
        return True
    keep = (one.double().mean() + other.double().mean()) / 2
    different = 2 * keep * (1 - keep)
    found = (one != other).double().mean()
    assert abs(found - different) < 6 * math.sqrt(different / one.numel()) + 0.02, (found, different)
    return False


# In the order of the run, for each of two layers.
GPT2_KINDS = ["whole", *["split", "whole", "whole"] * 2]
SEQUENCE_KINDS = ["whole", *["split", "split", "split"] * 2]
LORA_KINDS = ["whole", "split", "split", "whole", "split"] * 2  # q_proj, attention, o_proj, up_proj, down_proj


@pytest.mark.parametrize(
    ("case", "kinds"),
    [
        (PLAIN, GPT2_KINDS),
        (SEQUENCE, SEQUENCE_KINDS),
        (LORA, LORA_KINDS),
        (replace(LORA, sequence_parallel=True), LORA_KINDS),
    ],
    ids=["gpt2", "gpt2, sequence", "LoRA", "LoRA, sequence"],
)
def test_ranks_drop_alike_what_is_whole_and_nothing_else(case: Case, kinds: list[str]):
    (first, _, kept), (second, _, also_kept) = on_ranks(2, drawn, case, seconds=240.0)
    assert kept and also_kept, "the caller's generator is as without the model's forward"
    for mine, theirs in zip(first, second, strict=True):
        assert ["whole" if alike(a, b) else "split" for a, b in zip(mine, theirs, strict=True)] == kinds
    assert not any(alike(a, b) for a, b in zip(*first, strict=True)), "each call drops other elements"
    layer = (len(kinds) - 1) // 2 if len(kinds) % 2 else len(kinds) // 2
    assert not alike(first[0][-1], first[0][-1 - layer]), "so does each layer"


@pytest.mark.slow
def test_data_parallel_ranks_drop_other_elements():
    results = on_ranks(4, drawn, CASES["gpt2, fsdp2"], seconds=240.0)
    first, second = results[0][0], results[2][0]
    assert not any(alike(a, b) for a, b in zip(first[0], second[0], strict=True))
    assert all(alike(a[0], b[0]) for a, b in zip(results[0][0], results[1][0], strict=True))


CHECKPOINTED = {
    "plain": replace(PLAIN, options={"activation_checkpointing": AC}),
    "sequence": replace(SEQUENCE, options={"activation_checkpointing": AC}),
    "selective": replace(PLAIN, options={"activation_checkpointing": {**AC, "mode": "selective"}}),
    "inside": replace(
        PLAIN,
        options={"activation_checkpointing": {"modules": ["transformer.h.*.attn", "transformer.h.*.mlp.dropout"]}},
    ),
    "fsdp2": replace(CASES["gpt2, fsdp2"], options={"data_parallel": FSDP2, "activation_checkpointing": AC}),
}


@pytest.mark.parametrize(
    "name", [name if name == "inside" else pytest.param(name, marks=pytest.mark.slow) for name in CHECKPOINTED]
)
def test_recomputation_drops_what_forward_dropped(name: str):
    case = CHECKPOINTED[name]
    results = on_ranks(2 * case.dp, drawn, case, seconds=240.0)
    for forwards, backwards, kept in results:
        assert kept
        for forward, backward in zip(forwards, backwards, strict=True):
            assert len(backward) >= 2, "something was computed again"
            assert all(any(a.shape == b.shape and torch.equal(a, b) for b in forward) for a in backward)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(results[0][0], results[1][0], strict=True))


def checkpointed_gradients(case: Case) -> bool:
    """Whether the gradients with and without checkpoints are the same, bit by bit."""
    found = []
    for options in (case.options, {}):
        model = replace(case, options=options).apply()
        shardplan.applied(model).seed(5)
        loss_of(model, case.data(0, 0)).backward()
        found.append([whole(p.grad) for p in model.parameters()])
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_gradients_with_checkpoints_are_those_without():
    assert all(on_ranks(2, checkpointed_gradients, CHECKPOINTED["plain"], seconds=240.0))


# Resuming.


def resumed(case: Case, folder: str) -> bool:
    """Whether a step after loading is the step that would have followed, bit by bit."""

    def start(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = case.apply()
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> Tensor:
        loss = loss_of(model, case.data(number, 0))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return whole(loss).detach()

    model, optimizer = start(1)
    step(model, optimizer, 0)
    shardplan.save_training_state(model, optimizer, folder)
    expected = [step(model, optimizer, 1), step(model, optimizer, 2)]
    other, again = start(2)
    step(other, again, 5)
    shardplan.load_training_state(other, again, folder)
    return all(torch.equal(step(other, again, i + 1), loss) for i, loss in enumerate(expected))


@pytest.mark.slow
def test_resuming_goes_on_bit_by_bit(tmp_path):
    assert all(on_ranks(4, resumed, CASES["gpt2, fsdp2"], str(tmp_path / "state"), seconds=240.0))


# Compiled.


class Telling(nn.Module):
    """A layer whose output shows which elements were dropped: with the two halves of its weights alike, so are the halves of what
    is inside, and the second half is subtracted.

    Args:
        before: drop the split value, else the whole result.
    """

    def __init__(self, before: bool):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)
        self.dropout, self.before = 0.5, before
        with torch.no_grad():
            self.up.weight.copy_(torch.eye(16).repeat(2, 1))
            self.down.weight.copy_(torch.cat([torch.eye(16), -torch.eye(16) if before else torch.eye(16)], 1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        if self.before:
            y = F.dropout(y, self.dropout, self.training)
        y = self.down(y)
        return y if self.before else F.dropout(y, self.dropout, self.training)


class TellingNet(nn.Module):
    def __init__(self, before: bool):
        super().__init__()
        self.layers = nn.ModuleList([Telling(before)])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](x)


def compiled(before: bool, backend: str, checkpoint: bool) -> tuple[Tensor, Tensor, Tensor, float]:
    """Of a compiled layer: two results, another one from the first seed, and how far its gradient is from the slope of its loss."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch.manual_seed(100 + torch.distributed.get_rank())
    plan = net_plan(compile={"modules": ["layers.*"], "backend": backend})
    if checkpoint:
        plan["activation_checkpointing"] = {"modules": ["layers.*"]}
    # As with `from_pretrained`: in evaluation mode.
    model = TellingNet(before).double().eval()
    shardplan.apply_plan(shardplan.Model(model, inputs=double_inputs), mesh, plan, prove=False).train()
    x = torch.ones(2, 64, 16, dtype=torch.float64)
    first, second = model(x).detach(), model(x).detach()
    streams = shardplan.applied(model).streams
    assert isinstance(streams, Streams)

    def loss(x: Tensor) -> Tensor:
        streams.calls = 0
        return model(x).square().sum() / 2

    streams.calls = 0
    again = model(x).detach()
    direction = torch.randn(x.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    at = x.clone().requires_grad_()
    loss(at).backward()
    assert at.grad is not None
    slope = (loss(x + 1e-4 * direction) - loss(x - 1e-4 * direction)) / 2e-4  # exact: the loss is quadratic
    return first, second, again, float(abs(slope - (at.grad * direction).sum()) / abs(slope))


def double_inputs(seed: int) -> dict[str, Tensor]:
    return {"x": inputs(seed)["x"].double()}


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("before", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["split", "whole"])
@pytest.mark.parametrize(
    "checkpoint", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["checkpointed", "plain"]
)
def test_a_compiled_layer_drops_what_it_must(before: bool, checkpoint: bool, backend: str):
    results = on_ranks(2, compiled, before, backend, checkpoint, seconds=240.0)
    for first, second, again, error in results:
        assert torch.equal(first, results[0][0]) and torch.equal(second, results[0][1]), (
            "the sum is the same on all ranks"
        )
        assert torch.equal(first, again), "the numbers follow from the seed and the call"
        assert not torch.equal(first, second)
        assert error < 1e-9, "backward drops what forward dropped"
        # Two masks that differ: half of the elements cancel. With one mask all would.
        assert abs((first == 0).double().mean() - 0.5) < 0.06


# Evaluation, and parts of a model.


def evaluated(case: Case) -> tuple[int, str]:
    model = case.apply().eval()
    with torch.no_grad():
        loss_of(model, case.data(0, 0))
    streams = shardplan.applied(model).streams
    assert isinstance(streams, Streams)
    said = raised(model.train().transformer, input_ids=case.data(0, 0))
    return streams.calls, said


def test_evaluation_draws_nothing_and_a_part_of_the_model_does_not_train():
    for calls, message in on_ranks(2, evaluated, PLAIN, seconds=240.0):
        assert calls == 0
        assert message.startswith("transformer.drop drops elements outside of the model's own forward")


# What the program says.


def program_of(case: Case, **options: Any) -> shardplan.Program:
    model = case.build(meta_model)
    return shardplan.compile_plan(model, {"tp": 2}, "auto", sequence_parallel=case.sequence_parallel, **options)


def streams(case: Case, **options: Any) -> dict[str, str]:
    return {name: one.draws for name, one in program_of(case, **options).modules.items() if one.draws}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_the_program_says_whose_numbers_a_module_draws(attention: str):
    found = streams(replace(PLAIN, attention=attention))
    assert found["transformer.drop"] == found["transformer.h.1.mlp.dropout"] == "common"
    assert found["transformer.h.0.attn"] == "own", "it drops weights of its rank's own heads"
    assert found["transformer.h.0.attn.resid_dropout"] == "common"
    assert found["transformer.h.0.attn.attn_dropout"] == "unseen", "its module is never called"
    split = streams(replace(SEQUENCE, attention=attention))
    assert split["transformer.h.0.attn.resid_dropout"] == split["transformer.h.1.mlp.dropout"] == "own"
    assert split["transformer.drop"] == "common", "there the value is a partial sum"
    assert "  random numbers: each tp rank's own\n" in program_of(PLAIN).describe()


def test_a_model_without_dropout_has_no_streams():
    assert streams(Case("llama", {})) == {}


def test_adapters_are_found_inside_of_their_layers():
    found = streams(LORA)
    assert found["model.layers.0.self_attn.q_proj.lora_dropout.default"] == "common"
    assert found["model.layers.1.mlp.down_proj.lora_dropout.default"] == "own"
    assert found["model.layers.1.self_attn"] == "own"


# What is refused.


class Layer(nn.Module):
    def __init__(self, p: float):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.dropout = p

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Mixed(Layer):
    """Split and whole values in one forward."""

    def forward(self, x: Tensor) -> Tensor:
        y = F.dropout(torch.relu(self.up(x)), self.dropout, self.training)
        return x + F.dropout(self.down(y), self.dropout, self.training)


class Hidden(Layer):
    """Code that runs with dropout alone, by a condition on a number that is made of the probability."""

    def forward(self, x: Tensor) -> Tensor:
        y, p = self.down(torch.relu(self.up(x))), self.dropout
        return x + (F.dropout(y, p, self.training) if math.ceil(p) else y)


class Guarded(Layer):
    """The same by a condition on the probability."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(torch.relu(self.up(x)))
        return x + (F.dropout(y, self.dropout, self.training) if self.dropout > 0 else y)


class Kept(Layer):
    """By one on the probability of what is kept."""

    def forward(self, x: Tensor) -> Tensor:
        y, keep = self.down(torch.relu(self.up(x))), 1 - self.dropout
        return x + (F.dropout(y, 1 - keep, self.training) if keep < 0.95 else y)


class Passed(Layer):
    """A layer that is passed by, with numbers of Python's own generator."""

    def forward(self, x: Tensor) -> Tensor:
        return x if self.training and random.random() < float(self.dropout) else super().forward(x)


class DroppingExperts(mixtures.Experts):
    def between(self, h: Tensor) -> Tensor:
        return F.dropout(h, self.dropout, self.training)


class Drop(nn.Dropout):
    def forward(self, input: Tensor) -> Tensor:
        return input if self.p == 0.0 else super().forward(input)


class DropPath(nn.Module):
    """Stochastic depth: a row of the batch passes the layer by."""

    def __init__(self, p: float):
        super().__init__()
        self.drop_prob = p

    def forward(self, x: Tensor) -> Tensor:
        if self.drop_prob == 0.0 or not self.training:
            return x
        keep = 1 - self.drop_prob
        return x.div(keep) * (keep + torch.rand(x.shape[0], *(1,) * (x.ndim - 1), dtype=x.dtype)).floor()


class WithModules(Layer):
    """Modules that drop elements, or do nothing where their probability is 0."""

    def __init__(self, p: float):
        super().__init__(p)
        self.inside, self.after, self.path = nn.Dropout(p), Drop(p), DropPath(p)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.up(x))
        if self.training and self.inside.p > 0:
            y = self.inside(y)
        return x + self.path(self.after(self.down(y)))


class SplitPath(WithModules):
    """Stochastic depth of a split value: no rank knows the others' numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.path(torch.relu(self.up(x))))


class Features(Layer):
    """Whole features of a split value."""

    def forward(self, x: Tensor) -> Tensor:
        y = F.dropout1d(torch.relu(self.up(x)), self.dropout, self.training)
        return x + self.down(y)


class Jitter(Layer):
    """Numbers that are not dropout's."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.dropout > 0:
            x = x * torch.empty_like(x).uniform_(1 - self.dropout, 1 + self.dropout)
        return super().forward(x)


class Split(Layer):
    """A split value alone."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.dropout(torch.relu(self.up(x)), self.dropout, self.training))


def net(layer: type[nn.Module], p: float = 0.1) -> nn.Module:
    return Stack([layer(p), layer(p)])


def net_plan(**sections: Any) -> dict[str, Any]:
    rules = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}
    return {"version": "1", "name": "net", "tensor_parallel": rules, **sections}


def inputs(seed: int) -> dict[str, Tensor]:
    return {"x": torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(seed))}


def codes(layer: type[Layer], p: float = 0.1, train: bool = True, **sections: Any) -> list[tuple[str, str]]:
    report = shardplan.validate(
        shardplan.Model(net(layer, p).train(train), inputs=inputs), net_plan(**sections), {"tp": 2}
    )
    return [(one.code, one.message) for one in report.diagnostics if one.is_error]


def test_dropout_inside_distributed_experts_is_refused_for_what_is_not_known():
    model = parts.Stack(*(parts.MlpBlock(mixtures.Mixture("plain")) for _ in range(2)))
    for layer in model.layers:
        layer.mlp.experts.__class__, layer.mlp.experts.dropout = DroppingExperts, 0.1
    report = shardplan.validate(shardplan.Model(model, inputs=parts.features), mixtures.PLAN, {"tp": 2, "ep": 2})
    (found,) = (one for one in report.diagnostics if one.is_error)
    assert (found.code, found.message) == (
        "SP370",
        "layers.*.mlp.experts drops elements of a value whose layout is not known",
    )


@pytest.mark.parametrize("train", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (Mixed, "whole values and of split ones in one forward"),
        (Hidden, "does not run while its probability is 0"),
        (SplitPath, "random numbers that are not dropout's"),
        (Features, "drops whole features (dropout1d) of a split value"),
        (Jitter, "random numbers that are not dropout's"),
        (Passed, "random numbers that are not dropout's"),
    ],
)
def test_what_cannot_be_right_is_refused(layer: type[Layer], words: str, train: bool):
    ((code, message),) = codes(layer, train=train)
    assert code == "SP370" and words in message and message.startswith("layers.*")
    assert codes(layer, p=0.0, train=train) == []


def test_split_values_alone_are_right():
    assert codes(Split) == []
    found = shardplan.compile_plan(shardplan.Model(net(Split), inputs=inputs), {"tp": 2}, net_plan())
    assert {name: one.draws for name, one in found.modules.items() if one.draws} == {
        "layers.0": "own",
        "layers.1": "own",
    }


@pytest.mark.parametrize("p", [0, 1, 0.5])
def test_a_probability_is_zero_where_it_is_drawn_by_and_itself_in_comparisons(p: float):
    undropped = Undropped(0.0, p)
    assert F.dropout(torch.ones(100), undropped).equal(torch.ones(100))
    assert bool(undropped) is bool(p) and undropped == p and p == undropped
    assert (1.0 - undropped < 0.75) is (1.0 - p < 0.75) and (2 * undropped >= 1) is (2 * p >= 1)
    assert copy.deepcopy(undropped) == pickle.loads(pickle.dumps(undropped)) == p


@pytest.mark.parametrize(
    ("layer", "kinds"),
    [
        (Guarded, {"": "common"}),
        (Kept, {"": "common"}),
        (WithModules, {".inside": "own", ".after": "common", ".path": "common"}),
    ],
)
def test_code_may_ask_for_the_probability_first(layer: type[Layer], kinds: dict[str, str]):
    """In the reduced model nothing is dropped, and the code that drops elements runs."""
    found = shardplan.compile_plan(shardplan.Model(net(layer), inputs=inputs), {"tp": 2}, net_plan())
    draws = {name: one.draws for name, one in found.modules.items() if one.draws}
    assert draws == {f"layers.{i}{inside}": kind for i in range(2) for inside, kind in kinds.items()}


class Outer(nn.Module):
    """A compiled module with both kinds in modules of its own."""

    def __init__(self, p: float):
        super().__init__()
        self.inner, self.after = Split(p), nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.inner(x))


def nested_plan(compiled: str) -> dict[str, Any]:
    rules = {"layers.*.inner.up": "colwise", "layers.*.inner.down": "rowwise"}
    return {"version": "1", "name": "net", "tensor_parallel": rules, "compile": {"modules": [compiled]}}


@pytest.mark.parametrize("train", [True, False], ids=["training", "evaluation"])
def test_a_compiled_module_drops_elements_of_one_kind_of_values(train: bool):
    """`from_pretrained` gives models in evaluation mode, and they train later."""
    model = net(Outer).train(train)
    report = shardplan.validate(shardplan.Model(model, inputs=inputs), nested_plan("layers.*"), {"tp": 2})
    (finding,) = (one for one in report.diagnostics if one.is_error)
    assert finding.code == "SP370" and finding.message == (
        "the plan compiles layers.* as one, which drops elements of whole values and of split ones: layers.*.{inner,after}"
    )
    assert shardplan.validate(shardplan.Model(net(Outer), inputs=inputs), nested_plan("layers.*"), {"tp": 1}).ok
    found = shardplan.compile_plan(shardplan.Model(net(Outer), inputs=inputs), {"tp": 2}, nested_plan("layers.*.inner"))
    assert {name: one.draws for name, one in found.modules.items() if one.draws and name.startswith("layers.0")} == {
        "layers.0.inner": "own",
        "layers.0.after": "common",
    }


def test_the_compiled_module_is_where_the_numbers_change():
    model = Case("llama", {"attention_dropout": 0.4}).build(meta_model)
    found = shardplan.compile_plan(model, {"tp": 2}, "auto", compile={}).modules
    assert found["model.layers.0"].draws == "own" and found["model.layers.0.self_attn"].draws == "inside"


def test_sections_that_arguments_switch_are_checked():
    """The plan's own are not."""
    with pytest.raises(PlanError) as raised:
        shardplan.compile_plan(PLAIN.build(meta_model), {"tp": 2}, "auto", compile={})
    assert [one.code for one in raised.value.diagnostics if one.is_error] == ["SP370"]
    assert shardplan.compile_plan(
        shardplan.Model(net(Outer), inputs=inputs), {"tp": 2}, nested_plan("layers.*"), compile=False
    )


def test_findings_come_before_a_section_that_has_no_modules():
    rules = {"version": "1", "name": "net", "tensor_parallel": {"layers.*.upp": "colwise"}}
    with pytest.raises(PlanError, match="SP201"):
        shardplan.compile_plan(
            shardplan.Model(net(Split), inputs=inputs), {"tp": 2}, rules, activation_checkpointing={"mode": "full"}
        )
    with pytest.raises(ValueError, match="names no modules"):
        shardplan.compile_plan(
            shardplan.Model(net(Split), inputs=inputs), {"tp": 2}, net_plan(), activation_checkpointing={"mode": "full"}
        )


def test_a_plan_that_is_not_proven_has_no_dropout():
    with pytest.raises(PlanError) as raised:
        shardplan.compile_plan(net(Split), {"tp": 2}, net_plan(), allow_unproven=True)
    assert "SP370" in [one.code for one in raised.value.diagnostics]


class Module:
    """A device module of torch's, such as torch.xpu."""

    default_generators = (torch.Generator(), torch.Generator())

    @staticmethod
    def current_device() -> int:
        return 1


def test_numbers_come_from_the_generator_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {"xpu": Module, "mps": object}
    monkeypatch.setattr(torch, "get_device_module", lambda device: modules[device])
    assert Streams(0, (), 0, "cpu").generator is torch.default_generator
    assert Streams(0, (), 0, "xpu").generator is Module.default_generators[1]
    with pytest.raises(ValueError, match=r"torch\.mps has no default_generators.* set the model's dropout to 0"):
        Streams(0, (), 0, "mps")
