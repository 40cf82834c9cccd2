"""Meta-device models: memory, buffers and weights in the right order give what the unsharded model has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from processes import on_ranks
from sampling import sampled
from small_models import batch, meta_model, small_model, whole_state
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardplan
from shardplan.torchlib.local_parts import to_local_if_dtensor
from shardplan.weights import materialize

MODELS = [("gemma3_text", True), ("phi3", False), ("gpt2", True), ("qwen3_moe", False), ("qwen3", True)]
SEED = 7


def mesh_of(kind: str) -> DeviceMesh:
    if kind == "tp alone":
        return init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    if kind == "no tp":
        return init_device_mesh("cpu", (4,), mesh_dim_names=("dp_shard",))
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))


def own_initialisation(name: str, tied: bool) -> nn.Module:
    """The unsharded model, initialised by its own code after it was given memory, then tied, as its own constructor
    does it."""
    model = meta_model(name, tied=tied).to_empty(device="cpu")
    torch.manual_seed(SEED)
    with torch.no_grad():
        model.initialize_weights()
    model.tie_weights()
    return model


def planned(name: str, tied: bool, kind: str, **options: Any) -> nn.Module:
    return shardplan.apply_plan(
        meta_model(name, tied=tied), mesh_of(kind), "auto", sequence_parallel=True, **options, prove=False
    )


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


def loss_of(model: nn.Module) -> float:
    ids = batch(3)
    return model(input_ids=ids, labels=ids, use_cache=False).loss.item()


def differences(model: nn.Module, expected: nn.Module) -> list[str]:
    """What is not bit for bit as in the unsharded model, or computes another loss, or is tied otherwise."""
    state, buffers = whole_state(model), buffers_of(model)
    wanted = {**expected.state_dict(), **buffers_of(expected)}
    found = [name for name in wanted if not torch.equal({**state, **buffers}[name], wanted[name])]
    if list(state) != list(expected.state_dict()):
        found.append("names")
    if len(list(model.parameters())) != len(list(expected.parameters())):
        found.append("ties")
    if loss_of(model) != pytest.approx(loss_of(expected), rel=1e-5):
        found.append("loss")
    return found


def initialise(kind: str, models: list[tuple[str, bool]]) -> dict[str, list[str]]:
    found = {}
    for name, tied in models:
        model = planned(name, tied, kind)
        torch.manual_seed(SEED)
        assert materialize(model, "cpu") is model
        found[name] = differences(model, own_initialisation(name, tied))
    return found


@pytest.mark.slow
def test_random_weights_are_those_of_the_unsharded_model():
    for found in on_ranks(4, initialise, "two by two", MODELS):
        assert found == {name: [] for name, _ in MODELS}


@pytest.mark.slow
@pytest.mark.parametrize("kind", sampled(["no tp", "tp alone"], 1))
def test_random_weights_on_other_meshes(kind):
    for found in on_ranks(4, initialise, kind, MODELS):
        assert found == {name: [] for name, _ in MODELS}


def load(kind: str, models: list[tuple[str, bool]]) -> dict[str, list[str]]:
    """Weights given whole, and as another mesh has them; the random state does not matter."""
    found = {}
    for name, tied in models:
        weights = small_model(name, tied=tied)
        model = materialize(planned(name, tied, kind), "cpu", state_dict=weights.state_dict())
        found[name] = differences(model, weights)
        other = materialize(planned(name, tied, "tp alone"), "cpu", state_dict=model.state_dict())
        found[f"{name} again"] = differences(other, weights)
        model.train()
        loss_of(model)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", sampled(["no tp", "two by two"], 1))
def test_weights_given_whole_or_split(kind):
    for found in on_ranks(4, load, kind, MODELS[:3] if kind == "two by two" else MODELS):
        assert not any(found.values()), found


class Scale(nn.Module):
    """A module that does not say how it is initialised."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * x


class Rotated(nn.Module):
    """A table that `reset_parameters` alone computes, and what nothing computes."""

    def __init__(self, *unknown: str) -> None:
        super().__init__()
        self.register_buffer("table", torch.empty(8), persistent=False)
        self.factor = nn.Parameter(torch.empty(8))
        if "buffer" in unknown:
            self.register_buffer("mask", torch.ones(8, dtype=torch.bool), persistent=False)
        if "parameter" in unknown:
            self.bias = nn.Parameter(torch.zeros(8))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.factor)
        self.table.copy_(torch.arange(8.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * x + self.table


class Around(nn.Module):
    """A model whose `_init_weights` knows of Linears alone, as those of transformers know of their own modules."""

    def __init__(self, *unknown: str) -> None:
        super().__init__()
        self.up, self.rotated = nn.Linear(8, 8), Rotated(*unknown)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight)
            nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.rotated(self.up(x))


def left_by_the_model() -> tuple[list[Tensor], list[str]]:
    """Values of what `_init_weights` does not know of, and what is said where nothing else does."""
    plan = {"version": "1", "name": "around", "tensor_parallel": {"up": "colwise_gather_output"}}
    values, said = [], []
    for unknown in ((), ("parameter",), ("buffer",), ("parameter", "buffer")):
        with torch.device("meta"):
            model = Around(*unknown)
        shardplan.apply_plan(model, mesh_of("tp alone"), plan, allow_unproven=True)
        if "buffer" not in unknown:  # a state dict has no buffer that is not persistent
            state = {name: torch.full(x.shape, 3.0) for name, x in Around(*unknown).state_dict().items()}
            values += [*materialize(model, "cpu", state_dict=state).rotated.state_dict().values(), model.rotated.table]
            continue
        with pytest.raises(ValueError) as caught:
            materialize(model, "cpu", state_dict=Around(*unknown).state_dict())
        said.append(str(caught.value))
    for unknown in ((), ("parameter",)):
        with torch.device("meta"):
            model = Around(*unknown)
        shardplan.apply_plan(model, mesh_of("tp alone"), plan, allow_unproven=True)
        if unknown == ():
            values += [materialize(model, "cpu").rotated.factor.detach(), model.rotated.table]
            continue
        with pytest.warns(UserWarning, match="NaN until weights are loaded") as caught:
            materialize(model, "cpu")
        said.append(str(caught[0].message))
        assert to_local_if_dtensor(model.rotated.bias).isnan().all()
    return [*map(to_local_if_dtensor, values)], said  # replicated


def test_what_init_weights_does_not_know_of_is_reset_by_its_module_or_named():
    threes, ones, table = torch.full((8,), 3.0), torch.ones(8), torch.arange(8.0)
    for values, said in on_ranks(4, left_by_the_model):
        expected = [threes, table, threes, threes, table, ones, table]
        assert all(map(torch.equal, values, expected)) and len(values) == len(expected)
        assert [text.partition(": no ")[0] for text in said] == [*2 * ("rotated.mask of Rotated",), "rotated.bias"]


def refusals() -> list[str]:
    """What materialize raises for a model with memory, and for one that has no initialisation."""
    said = []
    full = shardplan.apply_plan(small_model("qwen3"), mesh_of("two by two"), "auto", prove=False)
    before = whole_state(full)
    with torch.device("meta"):
        unknown = nn.Sequential(nn.Linear(8, 8), Scale())
    plan = {"version": "1", "name": "scaled", "tensor_parallel": {"0": "colwise_gather_output"}}
    shardplan.apply_plan(unknown, mesh_of("tp alone"), plan, allow_unproven=True)
    for model in (full, unknown, meta_model("llama")):
        with pytest.raises(ValueError) as caught:
            materialize(model, "cpu")
        said.append(str(caught.value))
    assert all(torch.equal(value, before[name]) for name, value in whole_state(full).items())
    return said


def test_refusals():
    for with_memory, unknown, unplanned in on_ranks(4, refusals):
        assert "model.embed_tokens.weight is not on the meta device" in with_memory
        assert "Scale" in unknown and "reset_parameters" in unknown
        assert "no plan was applied" in unplanned
