"""On one CUDA device: a planned model is materialised there and trains as the unsharded one."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from shardplan import Model, TrainingStep, apply_plan, estimate, load_checkpoint, materialize, save_checkpoint
from shardplan.model import find_any, find_model
from shardplan.model.reduced.reduced_model import make_reduced_model
from shardplan.proof.compare import relative_error
from shardplan.torchlib.private import private

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
    reduced_model = make_reduced_model(find_model(name), tp=1)
    unsharded = reduced_model.build().cuda()
    with torch.device("meta"):
        model = type(unsharded)(copy.deepcopy(unsharded.config)).train()
    apply_plan(model, mesh, name, activation_checkpointing={"mode": "full"})
    materialize(model, "cuda", state_dict=unsharded.state_dict())
    inputs = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in reduced_model.inputs().items()}
    expected, got = unsharded(**inputs), model(**inputs)
    expected.loss.backward()
    got.loss.backward()
    assert relative_error(got.loss, expected.loss) <= 1e-5
    references = dict(unsharded.named_parameters())
    for parameter_name, parameter in model.named_parameters():
        error = relative_error(parameter.grad.full_tensor(), references[parameter_name].grad)
        assert error <= 1e-5, (parameter_name, error)


def gradients_of(model, inputs):
    loss = model(**inputs).loss
    loss.backward()
    named = model.named_parameters()
    return loss.float(), {n: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for n, p in named}


@pytest.mark.parametrize("name", ["qwen3", "phi3"])
def test_bfloat16_is_as_exact_as_the_unsharded_model(mesh, name):
    """docs/precision.md, "What bfloat16 may differ by"."""
    reduced_model = make_reduced_model(find_model(name), tp=1)
    inputs = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in reduced_model.inputs().items()}
    exact_loss, exact = gradients_of(reduced_model.build().cuda(), inputs)
    plain = reduced_model.build().cuda()
    for parameter in plain.parameters():  # and nothing else, as FSDP2 does it
        parameter.data = parameter.data.bfloat16()
    plain_loss, plain = gradients_of(plain, inputs)
    sections = {"mixed_precision": {"param": "bfloat16", "reduce": "float32"}}
    model = apply_plan(reduced_model.build().cuda(), mesh, name, data_parallel=sections)
    loss, gradients = gradients_of(model, inputs)
    assert abs(loss - exact_loss) <= max(2 * abs(plain_loss - exact_loss), 2**-9 * exact_loss)
    assert gradients.keys() == exact.keys()
    for key, value in exact.items():
        assert relative_error(gradients[key], value) <= 2 * relative_error(plain[key], value), key


def test_a_checkpoint_is_read_and_written(mesh, tmp_path):
    reduced_model = make_reduced_model(find_model("qwen3"), tp=1)
    unsharded = reduced_model.build()
    unsharded.save_pretrained(tmp_path / "given")
    with torch.device("meta"):
        model = type(unsharded)(copy.deepcopy(unsharded.config))
    apply_plan(model, mesh, "qwen3")
    load_checkpoint(model, tmp_path / "given")
    assert {parameter.device.type for parameter in model.parameters()} == {"cuda"}
    save_checkpoint(model, tmp_path / "written")
    written = type(unsharded).from_pretrained(tmp_path / "written").state_dict()
    assert all(torch.equal(value, written[name]) for name, value in unsharded.state_dict().items())


SHAPES = {
    "llama": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "vocab_size": 128256},
    "qwen3_moe": {"hidden_size": 2048, "moe_intermediate_size": 768, "num_attention_heads": 32, "num_experts": 128},
}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_the_estimated_peak_is_that_of_the_allocator(name, checkpointing):
    """One of 8 ranks, dp_shard 2 x tp 4, at the layer sizes of Llama-3.1-8B and Qwen3-30B-A3B, in bfloat16."""
    sizes = SHAPES[name] | {"num_hidden_layers": 4, "num_key_value_heads": 4}
    options = {"sequence_parallel": True, "activation_checkpointing": {"mode": "full"} if checkpointing else False}
    expected = estimate(Model(name, settings=sizes), "auto", {"dp_shard": 2, "tp": 4}, TrainingStep(4096), **options)
    found = find_any(name, settings=sizes, trust_remote_code=False, inputs=None)
    private("fake_pg")
    dist.init_process_group("fake", rank=0, world_size=8)
    try:
        device_mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp_shard", "tp"))
        model = found.build("meta", torch.bfloat16).train()
        apply_plan(model, device_mesh, "auto", src_data_rank=None, **options)
        model.to_empty(device="cuda")
        with torch.no_grad():  # experts are to have about as many tokens each, as `estimate` says
            for tensor in local_tensors(model):
                tensor.normal_(std=0.02) if tensor.ndim > 1 else tensor.fill_(1)
        before = torch.cuda.memory_allocated() - sum(t.nbytes for t in local_tensors(model))
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            ids = torch.randint(1024, (1, 4096), device="cuda")
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        peak = torch.cuda.max_memory_allocated() - before
    finally:
        dist.destroy_process_group()
    assert 0.99 <= expected.memory.total / peak <= 1.01


def local_tensors(model):
    for tensor in (*model.parameters(), *model.buffers()):
        yield tensor.to_local() if isinstance(tensor, DTensor) else tensor
