"""Managers and parallelizers of other projects on real ranks, against the unsharded model: the loss and every gradient."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from processes import on_ranks
from small_models import batch, small_model, whole
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from shardplan import build_mesh
from shardplan.compat import (
    DDPConfig,
    DDPManager,
    FSDP2Config,
    FSDP2Manager,
    apply_fsdp_sharding_recursively,
    fsdp2_strategy_parallelize,
    get_logprobs_from_vocab_parallel_logits,
    parallelize_model,
)
from shardplan.compat.configs import default_policy
from shardplan.proof.compare import relative_error
from tests.foreign_plans import STYLES

LIMIT = 1e-5


def by_manager() -> tuple[nn.Module, nn.Module]:
    """Sequence parallelism on a model whose head norms have partial gradients."""
    model = small_model("qwen3")
    config = FSDP2Config(
        sequence_parallel=True, mp_policy=None, activation_checkpointing="selective", enable_fsdp2_prefetch=True
    )
    manager = FSDP2Manager(config, build_mesh(tp=2))
    assert manager.parallelize(model, logits="replicated") is model
    manager.maybe_compile(model)
    return model, model


def by_function() -> tuple[nn.Module, nn.Module]:
    """Styles of torch, and a flattened data-parallel axis."""
    model = small_model("llama")
    mesh = init_device_mesh("cpu", (1, 2, 1, 2), mesh_dim_names=("dp_replicate", "dp_shard", "cp", "tp"))
    mesh["dp_shard", "cp"]._flatten("dp_shard_cp")
    return model, fsdp2_strategy_parallelize(model, mesh, tp_shard_plan=STYLES)


def by_two_meshes() -> tuple[nn.Module, nn.Module]:
    model = small_model("qwen3")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return model, parallelize_model(model, mesh["dp"], mesh["tp"], torch.float32, True, True)


def by_first_manager() -> tuple[nn.Module, nn.Module]:
    """The first release's dataclass, positional, with split logits by default."""
    model = small_model("qwen3")
    policy = MixedPrecisionPolicy(torch.float32, torch.float32, torch.float32)
    manager = FSDP2Manager(None, 2, 1, True, policy, None, "gloo")
    assert manager.parallelize(model) is model and manager.device_mesh["data_parallel"].size() == manager.dp_size == 2
    assert_split(model)
    return model, model


def by_older_function() -> tuple[nn.Module, nn.Module]:
    model = small_model("llama")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data_parallel", "tensor_parallel"))
    fsdp2_strategy_parallelize(model, mesh, torch.float32, None, None, False, True)
    assert_split(model)
    return model, model


def assert_split(model: nn.Module) -> None:
    """The logits are the unsharded model's, split over the vocabulary."""
    with torch.no_grad():
        logits = model(input_ids=batch(7), use_cache=False).logits
        expected = small_model(model.config.model_type)(input_ids=batch(7), use_cache=False).logits
    assert isinstance(logits, DTensor) and logits.placements == (Shard(2),)
    assert relative_error(logits.full_tensor(), expected) <= LIMIT


def by_ddp() -> tuple[nn.Module, nn.Module]:
    model = small_model("llama")
    manager = DDPManager(DDPConfig(activation_checkpointing=True, gradient_as_bucket_view=True))
    called = manager.parallelize(model)
    manager.maybe_compile(called)
    assert called.gradient_as_bucket_view and not called.broadcast_buffers
    return model, called


def by_lists() -> tuple[nn.Module, nn.Module]:
    model, mesh = small_model("llama"), build_mesh()["dp_shard"]
    apply_fsdp_sharding_recursively(model, mesh, None)
    return model, fully_shard(model, mesh=mesh)


def step(model: nn.Module, called: nn.Module, parts: list[Tensor]) -> tuple[float, dict[str, Tensor]]:
    """The mean loss over the parts, and the gradients."""
    total = 0.0
    for ids in parts:
        loss = called(input_ids=ids, labels=ids, use_cache=False).loss / len(parts)
        loss.backward()
        total += loss.item()
    return total, {name: whole(p.grad) for name, p in model.named_parameters()}


def run(build: Callable[[], tuple[nn.Module, nn.Module]], name: str, tp: int) -> float:
    """The largest relative error on this rank, of the mean loss and of every gradient."""
    model, called = build()
    shares = dist.get_world_size() // tp
    loss, gradients = step(model, called, [batch(dist.get_rank() // tp)])
    losses = torch.tensor(loss, dtype=torch.float64)
    dist.all_reduce(losses)
    reference = small_model(name)
    expected, wanted = step(reference, reference, [batch(share) for share in range(shares)])
    assert gradients.keys() == wanted.keys() and len(wanted) > 10
    errors = {key: relative_error(gradients[key], value) for key, value in wanted.items()}
    return max(*errors.values(), abs(losses.item() / dist.get_world_size() - expected) / expected)


@pytest.mark.parametrize(
    ("build", "name", "tp"),
    [
        (by_manager, "qwen3", 2),
        (by_function, "llama", 2),
        (by_first_manager, "qwen3", 2),
        pytest.param(by_older_function, "llama", 2, marks=pytest.mark.slow),
        pytest.param(by_two_meshes, "qwen3", 2, marks=pytest.mark.slow),
        pytest.param(by_ddp, "llama", 1, marks=pytest.mark.slow),
        pytest.param(by_lists, "llama", 1, marks=pytest.mark.slow),
    ],
)
def test_it_trains_as_the_unsharded_model(build: Callable, name: str, tp: int) -> None:
    assert max(on_ranks(4, run, build, name, tp, seconds=400.0)) <= LIMIT


def dtypes_and_probabilities() -> float:
    """The config's default policy computes in bfloat16 on weights in float32. The error of log-probabilities from split logits."""
    model = FSDP2Manager(FSDP2Config(), build_mesh(tp=2)).parallelize(small_model("llama", num_hidden_layers=1))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model(input_ids=batch(0), use_cache=False).logits.dtype == torch.bfloat16
    torch.manual_seed(0)
    ids, whole_logits = batch(1), torch.randn(2, 16, 132)
    split = distribute_tensor(whole_logits, build_mesh(tp=2)["tp"], [Shard(-1)])
    found = get_logprobs_from_vocab_parallel_logits(split, ids, inference_only=True)
    expected = whole_logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
    return relative_error(found, expected)


@pytest.mark.slow
def test_dtypes_and_probabilities() -> None:
    assert max(on_ranks(4, dtypes_and_probabilities, seconds=400.0)) <= LIMIT


def on_one_rank() -> None:
    """Units are wrapped and computed in the policy's dtype, as on several ranks; without a policy all is the unsharded model's."""
    for policy, dtype in ((default_policy(), torch.bfloat16), (None, torch.float32)):
        for manager in (FSDP2Manager(FSDP2Config(mp_policy=policy), build_mesh()), DDPManager(DDPConfig())):
            model = small_model("llama")
            called = manager.parallelize(model)
            fsdp = isinstance(manager, FSDP2Manager)
            units = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
            assert units == (["", "model.layers.0", "model.layers.1"] if fsdp else []) and called is model
            assert {p.dtype for p in model.parameters()} == {torch.float32}, "the optimizer's weights"
            seen = []
            model.model.layers[1].mlp.register_forward_hook(lambda module, args, result: seen.append(result.dtype))
            ids = batch(0)
            result = called(input_ids=ids, labels=ids, use_cache=False)
            assert seen == [dtype if fsdp else torch.float32] and result.logits.dtype == seen[0]
            result.loss.backward()
            reference = small_model("llama")
            expected = reference(input_ids=ids, labels=ids, use_cache=False)
            expected.loss.backward()
            limit = LIMIT if seen[0] == torch.float32 else 0.05
            assert relative_error(result.logits.float(), expected.logits) <= limit
            for name, parameter in reference.named_parameters():
                gradient = whole(model.get_parameter(name).grad)
                assert gradient.dtype == torch.float32 and relative_error(gradient, parameter.grad) <= limit, name


def test_one_rank_is_as_several_are() -> None:
    on_ranks(1, on_one_rank)
