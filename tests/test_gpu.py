"""On one CUDA device: a planned model is materialised there and trains as the unsharded one."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from shardplan import apply_plan, load_checkpoint, materialize, save_checkpoint
from shardplan.models import find_model
from shardplan.proof.compare import relative_error
from shardplan.twin import make_twin

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture
def mesh():
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cuda", (1, 1), mesh_dim_names=("dp_shard", "tp"))
    dist.destroy_process_group()


@pytest.mark.parametrize("name", ["qwen3", "phi3"])
def test_a_step_on_one_device(mesh, name):
    twin = make_twin(find_model(name), tp=1)
    unsharded = twin.build().cuda()
    with torch.device("meta"):
        model = type(unsharded)(copy.deepcopy(unsharded.config)).train()
    apply_plan(model, mesh, name, activation_checkpointing=True)
    materialize(model, "cuda", state_dict=unsharded.state_dict())
    inputs = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in twin.inputs().items()}
    expected, got = unsharded(**inputs), model(**inputs)
    expected.loss.backward()
    got.loss.backward()
    assert relative_error(got.loss, expected.loss) <= 1e-5
    references = dict(unsharded.named_parameters())
    for parameter_name, parameter in model.named_parameters():
        error = relative_error(parameter.grad.full_tensor(), references[parameter_name].grad)
        assert error <= 1e-5, (parameter_name, error)


def test_a_checkpoint_is_read_and_written(mesh, tmp_path):
    twin = make_twin(find_model("qwen3"), tp=1)
    unsharded = twin.build()
    unsharded.save_pretrained(tmp_path / "given")
    with torch.device("meta"):
        model = type(unsharded)(copy.deepcopy(unsharded.config))
    apply_plan(model, mesh, "qwen3")
    load_checkpoint(model, tmp_path / "given")
    assert {parameter.device.type for parameter in model.parameters()} == {"cuda"}
    save_checkpoint(model, tmp_path / "written")
    written = type(unsharded).from_pretrained(tmp_path / "written").state_dict()
    assert all(torch.equal(value, written[name]) for name, value in unsharded.state_dict().items())
