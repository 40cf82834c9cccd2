"""Steps of optimizers, and calls with other parameters, of a model whose units FSDP2 left gathered (the numbers: test_processes_unshard)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardplan import applied, apply_plan
from tests.proofs import fake_mesh
from tests.small_models import small_model

IDS = torch.ones(2, 8, dtype=torch.long)


@pytest.fixture(params=("dp_shard", "dp_shard and tp"))
def model(request: pytest.FixtureRequest) -> Iterator[nn.Module]:
    sizes, names = ((2, 2), ("dp_shard", "tp")) if "tp" in request.param else ((2,), ("dp_shard",))
    with fake_mesh(*sizes, names=names) as mesh:
        yield apply_plan(small_model("llama"), mesh, "llama", src_data_rank=None, prove=False)


def evaluate(model: nn.Module) -> None:
    with torch.no_grad():
        model(input_ids=IDS, use_cache=False)


def is_sharded(model: nn.Module) -> bool:
    return all(isinstance(p, DTensor) and "dp_shard" in p.device_mesh.mesh_dim_names for p in model.parameters())


def test_a_step_frees_what_an_evaluation_left_gathered(model: nn.Module) -> None:
    optimizer, other = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, nn.Linear(2, 2)))
    evaluate(model)
    other.step()
    assert not is_sharded(model)
    optimizer.step()
    assert is_sharded(model)


def test_an_optimizer_of_gathered_parameters_is_refused(model: nn.Module) -> None:
    evaluate(model)
    late = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(
        ValueError, match=r"after a forward without gradients, .* \(model\.embed_tokens\.weight, .*reshard\(\)"
    ):
        late.step()
    applied(model).reshard()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    with pytest.raises(ValueError, match="gathered"):
        late.step()


def test_other_tensors_in_the_place_of_parameters_are_refused(model: nn.Module) -> None:
    def run(values: dict[str, torch.Tensor]) -> None:
        torch.func.functional_call(model, values, (), {"input_ids": IDS, "use_cache": False})

    run(dict(model.named_parameters()))
    applied(model).reshard()
    name = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(RuntimeError, match=f"the place of the parameter {name} \\(1 in all\\)"):
        run({name: model.get_parameter(name).detach()})
    run({})
    model.get_submodule("model.norm").weight = nn.Parameter(model.get_parameter("model.norm.weight").detach())
    with pytest.raises(RuntimeError, match=r"the place of the parameter model\.norm\.weight"):
        run({})
