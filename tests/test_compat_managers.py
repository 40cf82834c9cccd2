"""Managers and parallelizers of other projects: what reaches `apply_plan`, and what is refused."""

from __future__ import annotations

import inspect
import socket
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from small_models import small_model
from test_compat_configs import small_llava
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForImageTextToText

from shardplan import PlanError, applied, compat
from shardplan.compat import (
    DDPConfig,
    DDPManager,
    FSDP2Config,
    FSDP2Manager,
    MegatronFSDPConfig,
    MegatronFSDPManager,
    MeshContext,
    ModelParallelizer,
    MoEParallelizerConfig,
    ParallelismSizes,
    apply_fsdp_sharding_recursively,
    fsdp2_strategy_parallelize,
    get_logprobs_from_vocab_parallel_logits,
    managers,
    megatron_fsdp_strategy_parallelize,
    parallelize_model,
    unshard_fsdp2_model,
)
from shardplan.runtime.apply.plan_mesh import read_mesh
from shardplan.torchlib.private import private
from tests.foreign_plans import STYLES


@pytest.fixture
def world():
    """A process group of eight ranks, without other processes."""
    private("fake_pg")
    dist.init_process_group("fake", rank=0, world_size=8)
    yield
    dist.destroy_process_group()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[SimpleNamespace]:
    """What reaches `apply_plan`, which does nothing."""
    made: list[SimpleNamespace] = []

    def apply_plan(model: nn.Module, mesh: DeviceMesh, plan: Any, **given: Any) -> nn.Module:
        made.append(SimpleNamespace(model=model, mesh=mesh, plan=plan, **given))
        return model

    monkeypatch.setattr("shardplan.compat.parallelize.apply_plan", apply_plan)
    return made


def shape(mesh: DeviceMesh) -> dict[str, int]:
    return dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))


def mesh_of(**sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def llama() -> nn.Module:
    return small_model("llama", num_hidden_layers=1)


def styles() -> dict[str, Any]:
    return STYLES


# Managers


def test_a_manager_hands_on_what_its_config_says(world: None, calls: list[SimpleNamespace]) -> None:
    model, mesh, config = llama(), mesh_of(dp_shard=4, tp=2), FSDP2Config(sequence_parallel=True, enable_compile=True)
    assert FSDP2Manager(config, mesh).parallelize(model) is model
    (call,) = calls
    assert call.mesh is mesh and call.plan == "auto" and not call.axes
    expected = config.arguments(model)
    assert {name: getattr(call, name) for name in expected} == expected and call.sequence_parallel


def test_a_manager_takes_what_its_backend_has(world: None) -> None:
    mesh = mesh_of(dp_shard=4, tp=2)
    with pytest.raises(ValueError, match="moe_mesh must be None: the backend ddp has no expert parallelism"):
        DDPManager(DDPConfig(), mesh, moe_mesh=mesh)
    with pytest.raises(TypeError, match="FSDP2Manager takes a FSDP2Config, not DDPConfig"):
        FSDP2Manager(DDPConfig(), mesh)
    with pytest.raises(TypeError, match="needs a device_mesh: shardplan.build_mesh"):
        FSDP2Manager(FSDP2Config())
    with pytest.raises(TypeError, match="not both: tp_size"):
        FSDP2Manager(FSDP2Config(), mesh, tp_size=2)
    with pytest.raises(ValueError, match="no plan was applied to this model"):
        FSDP2Manager(FSDP2Config(), mesh).maybe_compile(llama())
    with pytest.raises(ValueError, match="create the optimizer afterwards"):
        MegatronFSDPManager(MegatronFSDPConfig(), mesh).parallelize(llama(), torch.optim.SGD(llama().parameters()))


def test_there_is_no_default_plan(world: None) -> None:
    with pytest.raises(PlanError, match="SP522"):  # a plan is derived, which needs inputs of the model
        FSDP2Manager(FSDP2Config(mp_policy=None), mesh_of(dp_shard=4, tp=2)).parallelize(nn.Sequential(nn.Linear(4, 4)))


def test_without_tensor_parallelism_no_plan_is_needed(world: None) -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
    FSDP2Manager(FSDP2Config(mp_policy=None), mesh_of(dp_shard=8)).parallelize(model)
    assert applied(model).program.resolved.dp_units == ("layers.0", "layers.1")
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())


def test_axes_for_stages_and_experts_are_refused(world: None) -> None:
    with pytest.raises(ValueError, match="apply_plan cuts a model into stages"):
        FSDP2Manager(FSDP2Config(mp_policy=None), mesh_of(pp=2, dp_shard=2, tp=2)).parallelize(llama())
    with pytest.raises(ValueError, match="ep is no axis of its own"):
        FSDP2Manager(FSDP2Config(mp_policy=None), mesh_of(ep=2, dp_shard=2, tp=2)).parallelize(llama())


SIZES = {
    "the rest": ({"tp_size": 2}, {"dp_shard": 4, "tp": 2}),
    "below one": ({"dp_size": 0, "tp_size": -1, "cp_size": None}, {"dp_shard": 8, "tp": 1}),
    "replicas": ({"dp_size": 4, "dp_replicate_size": 2, "tp_size": 2}, {"dp_replicate": 2, "dp_shard": 2, "tp": 2}),
    "replicas of the rest": (
        {"dp_replicate_size": 2, "cp_size": 2},
        {"dp_replicate": 2, "dp_shard": 2, "cp": 2, "tp": 1},
    ),
}


def test_a_moe_mesh_is_a_size_of_ep(world: None, calls: list[SimpleNamespace]) -> None:
    mesh, moe_mesh = mesh_of(dp_shard=4, tp=2), mesh_of(ep_shard=2, ep=4)
    manager = FSDP2Manager(FSDP2Config(), mesh, moe_mesh)
    manager.parallelize(llama())
    fsdp2_strategy_parallelize(llama(), mesh, moe_mesh=moe_mesh)
    FSDP2Manager(FSDP2Config(), mesh).parallelize(llama())
    assert [call.ep for call in calls] == [4, 4, None] and manager.moe_mesh is moe_mesh


def test_another_moe_mesh_is_told(world: None) -> None:
    mesh = mesh_of(dp_shard=4, tp=2)
    groups = r"moe_mesh are \[0, 4\], \[1, 5\].* but those of the mesh are \[0, 1\], \[2, 3\]"
    strided = DeviceMesh("cpu", torch.arange(8).reshape(2, 4).T.contiguous(), mesh_dim_names=("ep_shard", "ep"))
    for moe_mesh, error, words in (
        (strided, ValueError, groups),
        (mesh, ValueError, r"moe_mesh must have the axes \(ep_shard, ep\)"),
        (2, TypeError, "moe_mesh must be a torch DeviceMesh, not int"),
    ):
        with pytest.raises(error, match=words):
            fsdp2_strategy_parallelize(llama(), mesh, moe_mesh=moe_mesh)


def test_experts_are_distributed_over_a_moe_mesh(world: None) -> None:
    model = small_model("mixtral", num_hidden_layers=1)
    manager = FSDP2Manager(FSDP2Config(mp_policy=None), mesh_of(dp_shard=4, tp=2), mesh_of(pp=1, ep_shard=2, ep=4))
    manager.parallelize(model)
    experts = model.get_submodule("model.layers.0.mlp.experts")
    assert {p.device_mesh.mesh_dim_names for p in experts.parameters()} == {("ep_shard", "ep")}
    assert applied(model).mesh.ep_size == 4
    with pytest.raises(ValueError, match="moe_mesh must have the axes"):
        FSDP2Manager(FSDP2Config(mp_policy=None), mesh_of(dp_shard=8), mesh_of(dp_shard=8)).parallelize(llama())


def test_the_older_manager_takes_a_size_of_ep(world: None) -> None:
    mesh = FSDP2Manager(tp_size=2, ep_size=4, backend="gloo").device_mesh
    assert shape(mesh) == {"dp_shard": 4, "tp": 2} and read_mesh(mesh).ep_size == 4


@pytest.mark.parametrize("name", SIZES)
def test_the_older_manager_builds_the_mesh(world: None, calls: list[SimpleNamespace], name: str) -> None:
    sizes, expected = SIZES[name]
    manager = FSDP2Manager(**sizes, backend="gloo", world_size=8, sequence_parallel=True, activation_checkpointing=True)
    assert shape(manager.device_mesh) == expected and manager.device_mesh.device_type == "cpu"
    manager.parallelize(llama())
    assert calls[0].sequence_parallel and calls[0].activation_checkpointing == {"mode": "full"}
    dtypes = calls[0].data_parallel["mixed_precision"]
    assert (dtypes["param"], dtypes["reduce"]) == ("bfloat16", "bfloat16")


def test_the_older_managers_of_other_backends(world: None, calls: list[SimpleNamespace]) -> None:
    manager = MegatronFSDPManager(tp_size=2, backend="gloo", zero_dp_strategy=2, custom_tp_plan="llama")
    assert shape(manager.device_mesh) == {"dp_shard": 4, "tp": 2}
    manager.parallelize(llama())
    assert calls[0].plan == "llama" and calls[0].data_parallel["megatron_fsdp"]["zero_dp_strategy"] == 2
    assert shape(DDPManager(DDPConfig()).device_mesh) == {"dp_replicate": 8, "dp_shard": 1, "tp": 1}
    assert shape(DDPManager(dp_size=8, backend="gloo").device_mesh) == {"dp_replicate": 8, "dp_shard": 1, "tp": 1}
    manager = FSDP2Manager(use_hf_tp_plan=True, backend="gloo")
    manager.parallelize(llama())
    assert shape(manager.device_mesh) == {"dp_shard": 8, "tp": 1} and calls[1].logits == "as_stored"
    assert calls[1].plan["tensor_parallel"]["model.layers.*.mlp.down_proj"] == "rowwise"
    assert calls[1].plan["data_parallel"]["units"] == ["model.layers.*"]


WRONG = {
    "replicas with megatron_fsdp": (
        MegatronFSDPManager,
        {"dp_replicate_size": 2},
        "dp_replicate_size is 2: .* no such axis",
    ),
    "replicas with ddp": (DDPManager, {"dp_replicate_size": 2}, "the backend ddp has no such axis"),
    "tp with ddp": (DDPManager, {"tp_size": 2}, "tp_size is 2: the backend ddp has no such axis"),
    "sequences with megatron_fsdp": (
        MegatronFSDPManager,
        {"sequence_parallel": True},
        "does not work with sequence parallel",
    ),
    "experts": (FSDP2Manager, {"ep_size": 3}, "ep 3 does not divide dp_shard x cp x tp = 8"),
    "no multiple": (FSDP2Manager, {"dp_size": 8, "dp_replicate_size": 3}, "dp_size 8 is not a multiple"),
    "another world": (FSDP2Manager, {"world_size": 4}, "world_size is 4, but the process group has 8 ranks"),
    "a misspelt name": (FSDP2Manager, {"tp_sise": 2}, "FSDP2Manager has no 'tp_sise': did you mean 'tp_size'?"),
    "two plans": (FSDP2Manager, {"use_hf_tp_plan": True, "tp_plan": "llama"}, "give one of them"),
    "async": (FSDP2Manager, {"enable_async_tensor_parallel": True}, "needs sequence_parallel=True"),
}


@pytest.mark.parametrize("name", WRONG)
def test_sizes_and_flags_that_cannot_be(world: None, name: str) -> None:
    manager, given, text = WRONG[name]
    with pytest.raises(ValueError, match=text):
        manager(**given, backend="gloo")


def test_a_process_group_is_destroyed_by_who_made_it(world: None, monkeypatch: pytest.MonkeyPatch) -> None:
    at_exit: list[Any] = []
    monkeypatch.setattr(managers.atexit, "register", at_exit.append)
    FSDP2Manager(backend="gloo")
    assert at_exit == [], "the group was there before"
    dist.destroy_process_group()
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "localhost", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    one = {"data_parallel": 1, "context_parallel": 1, "tensor_parallel": 1}
    assert shape(FSDP2Manager(backend="gloo").device_mesh) == one
    (destroy,) = at_exit
    destroy()
    assert not dist.is_initialized()
    destroy()  # a script that destroyed it itself
    dist.init_process_group("fake", rank=0, world_size=8)


@pytest.mark.parametrize("defer", [True, False])
def test_deferring_the_reduction_is_a_flag(world: None, monkeypatch: pytest.MonkeyPatch, defer: bool) -> None:
    monkeypatch.setattr(managers, "micro_batches", lambda *args, **how: (args, how))
    manager = FSDP2Manager(FSDP2Config(defer_fsdp_grad_sync=defer), mesh_of(dp_shard=4, tp=2))
    assert manager.micro_batches("model", ["a"], loss="sum") == (("model", ["a"]), {"defer": defer, "loss": "sum"})


# Parallelizers


def test_fsdp2_strategy_parallelize(world: None, calls: list[SimpleNamespace]) -> None:
    mesh = mesh_of(dp_replicate=2, dp_shard_cp=2, tp=2)
    policy = MixedPrecisionPolicy(torch.bfloat16)
    model = llama()
    done = fsdp2_strategy_parallelize(
        model, mesh, policy, CPUOffloadPolicy(), True, "selective", "qwen3", reshard_after_forward=True
    )
    (call,) = calls
    assert done is call.model is model and call.mesh is mesh and call.plan == "qwen3" and call.sequence_parallel
    assert call.axes == {"dp_replicate": "dp_replicate", "dp_shard": "dp_shard_cp", "tp": "tp"}
    assert call.activation_checkpointing == {"mode": "selective"} and call.compile is None
    assert call.data_parallel == {
        "backend": "fsdp2",
        "mixed_precision": {"param": "bfloat16", "cast_forward_inputs": True},
        "cpu_offload": "pinned",
        "reshard_after_forward": True,
        "prefetch": {"forward": 1, "backward": 2},
    }
    other = mesh_of(replicas=2, shards=2, ranks=2)
    names = {"dp_replicate_mesh_name": "replicas", "dp_shard_cp_mesh_name": "shards", "tp_mesh_name": "ranks"}
    fsdp2_strategy_parallelize(
        model, other, **names, enable_fsdp2_prefetch=False, frozen_multimodal_sharding="replicate"
    )
    assert calls[1].axes == {"dp_replicate": "replicas", "dp_shard": "shards", "tp": "ranks"}
    assert calls[1].data_parallel == {"backend": "fsdp2", "frozen": "replicated"} and calls[1].plan == "auto"
    flattened = mesh_of(pp=1, dp_replicate=1, dp_shard=2, cp=2, tp=2)
    flattened["dp_shard", "cp"]._flatten("dp_shard_cp")
    fsdp2_strategy_parallelize(model, flattened, cpu_offload=True)
    assert calls[2].axes == {"dp_replicate": "dp_replicate", "tp": "tp"}
    assert calls[2].data_parallel["cpu_offload"] is True and "mixed_precision" not in calls[2].data_parallel
    with pytest.raises(ValueError, match="cpu_offload and offload_policy were given"):
        fsdp2_strategy_parallelize(model, mesh, None, CPUOffloadPolicy(), cpu_offload=True)
    with pytest.raises(ValueError, match="frozen_multimodal_sharding must be"):
        fsdp2_strategy_parallelize(model, mesh, frozen_multimodal_sharding="some")
    with pytest.raises(ValueError, match="the mesh has no axis 'heads'"):
        fsdp2_strategy_parallelize(model, mesh, tp_mesh_name="heads")


def test_plans_of_their_own_are_converted(world: None, calls: list[SimpleNamespace]) -> None:
    mesh = mesh_of(dp_shard=4, tp=2)
    here = f"{__name__}."
    for plan in (STYLES, here + "STYLES", here + "styles"):
        fsdp2_strategy_parallelize(llama(), mesh, tp_shard_plan=plan)
    first, *others = (call.plan for call in calls)
    assert first["tensor_parallel"]["model.layers.*.self_attn.o_proj"] == "rowwise"
    assert first["data_parallel"]["units"] == ["model.layers.*"]
    assert all(plan["tensor_parallel"] == first["tensor_parallel"] for plan in others)
    own = {"version": "1", "tensor_parallel": {"lm_head": "colwise_gather_output"}}
    for plan in (own, "plans/llama.yaml", "qwen3"):
        fsdp2_strategy_parallelize(llama(), mesh, tp_shard_plan=plan)
    assert [call.plan for call in calls[3:]] == [own, "plans/llama.yaml", "qwen3"]
    with pytest.raises(PlanError, match="SP547"):
        fsdp2_strategy_parallelize(llama(), mesh, tp_shard_plan=here + "nothing")


def freeze_embedding(model: nn.Module) -> None:
    model.get_input_embeddings().requires_grad_(False)


def test_a_context_of_meshes_is_as_a_manager(world: None, calls: list[SimpleNamespace]) -> None:
    """NeMo Automodel 0.7's contract, and the fourth argument of its manager."""
    config = FSDP2Config(sequence_parallel=True, tp_plan="llama")
    context = MeshContext.build(config, ParallelismSizes(tp_size=2), activation_checkpointing="selective")
    assert (context.dp_size, context.tp_size, context.cp_size, context.ep_size, context.pp_enabled) == (
        4,
        2,
        1,
        1,
        False,
    )
    model, context.reapply_trainability = llama(), freeze_embedding
    assert parallelize_model(model, context) is model is parallelize_model(model, mesh_context=context)
    assert not model.get_input_embeddings().weight.requires_grad and model.lm_head.weight.requires_grad
    assert calls[0].mesh is context.device_mesh and calls[0].plan == "llama" and calls[0].sequence_parallel
    assert calls[0].activation_checkpointing == {"mode": "selective"} and not config.activation_checkpointing
    experts = MoEParallelizerConfig(mp_policy=MixedPrecisionPolicy(torch.float16))
    mesh, moe_mesh = mesh_of(dp_shard=4, tp=2), mesh_of(ep_shard=2, ep=4)
    FSDP2Manager(FSDP2Config(), mesh, moe_mesh, experts).parallelize(llama(), freeze_embedding)
    said = MeshContext.from_meshes(mesh, moe_mesh, strategy_config=FSDP2Config(), moe_parallel_config=experts)
    assert (said.ep_size, MeshContext.build(FSDP2Config(), ParallelismSizes(ep_size=4)).ep_size) == (4, 4)
    parallelize_model(llama(), said)
    for call in calls[2:]:
        assert call.ep == 4 and call.data_parallel["reshard_after_forward"] is False
        assert call.data_parallel["mixed_precision"]["param"] == "float16"
    parallelize_model(llama(), MeshContext.build(DDPConfig()))
    assert shape(calls[4].mesh)["dp_replicate"] == 8
    assert not calls[2].model.get_input_embeddings().weight.requires_grad


class Scaled(ModelParallelizer):
    def parallelize(self, model: nn.Module, context: MeshContext, /, **how: Any) -> nn.Module:
        model.lm_head.requires_grad_(False)
        return super().parallelize(model, context, **how)


def test_a_model_class_has_a_parallelizer_of_its_own(world: None, calls: list[SimpleNamespace]) -> None:
    model = llama()
    own = type("Own", (type(model),), {"parallelizer": Scaled()})
    model.__class__ = own
    parallelize_model(model, MeshContext(mesh_of(dp_shard=4, tp=2)), logits="plan")
    assert not model.lm_head.weight.requires_grad and calls[0].logits == "plan"
    with pytest.raises(TypeError, match="Units defines _fully_shard_module, which nothing here calls: .* are a plan"):
        type("Units", (ModelParallelizer,), {"_fully_shard_module": None})
    own.parallelizer = 3
    with pytest.raises(TypeError, match=r"Own.parallelizer must have parallelize\(model, mesh_context\), not be 3"):
        parallelize_model(model, MeshContext(mesh_of(dp_shard=4, tp=2)))


def test_contexts_that_cannot_be(world: None) -> None:
    mesh = mesh_of(dp_shard=4, tp=2)
    for error, words, made in (
        (
            ValueError,
            "cp_ring_degree must be 1 .* `context_parallel` of a plan",
            lambda: MeshContext(mesh, cp_ring_degree=2),
        ),
        (TypeError, "device_mesh must be a torch DeviceMesh", lambda: MeshContext(FSDP2Config())),
        (TypeError, "strategy_config must be a config", lambda: MeshContext(mesh, strategy_config="fsdp2")),
        (ValueError, "has no device_mesh", lambda: parallelize_model(llama(), MeshContext())),
        (TypeError, "mesh_context must be a MeshContext", lambda: parallelize_model(llama(), FSDP2Config())),
        (TypeError, r"takes \(model, mesh_context\) or", lambda: parallelize_model(llama(), MeshContext(mesh), 3)),
        (ValueError, "over all 8 ranks", lambda: MeshContext.build(FSDP2Config(), world_size=4)),
        (ValueError, "timeout_minutes must be None", lambda: MeshContext.build(FSDP2Config(), timeout_minutes=1)),
        (
            ValueError,
            "dp_size alone, not tp_size 2",
            lambda: MeshContext.build(DDPConfig(), ParallelismSizes(tp_size=2)),
        ),
        (ValueError, "lm_head_precision must be None", lambda: MoEParallelizerConfig(lm_head_precision="float32")),
        (TypeError, "moe_config must be a MoEParallelizerConfig", lambda: FSDP2Manager(FSDP2Config(), mesh, None, 3)),
        (
            ValueError,
            "moe_config must be None: the backend ddp",
            lambda: DDPManager(DDPConfig(), mesh, moe_config=MoEParallelizerConfig()),
        ),
    ):
        with pytest.raises(error, match=words):
            made()


def test_separate_meshes(world: None, calls: list[SimpleNamespace]) -> None:
    mesh = mesh_of(dp=4, tp=2)
    parallelize_model(llama(), mesh["dp"], mesh["tp"], torch.bfloat16, True, True, True, "llama")
    (call,) = calls
    assert call.mesh is mesh and call.axes == {"dp_shard": "dp", "tp": "tp"} and call.plan == "llama"
    assert call.sequence_parallel and call.activation_checkpointing == {"mode": "full"}
    assert call.data_parallel["cpu_offload"] is True and "prefetch" not in call.data_parallel
    assert call.data_parallel["mixed_precision"]["output"] == "float32"
    with_cp = mesh_of(dp=2, cp=2, tp=2)
    compat._parallelize_model(llama(), with_cp["dp", "cp"]._flatten("dp_cp"), with_cp["tp"], torch.float32)
    assert calls[1].mesh is with_cp and calls[1].axes == {"tp": "tp"}
    with pytest.raises(ValueError, match="must be slices of one mesh"):
        parallelize_model(llama(), with_cp["dp"], with_cp["tp"], torch.float32)
    with pytest.raises(ValueError, match="must be slices of one mesh"):
        parallelize_model(llama(), mesh["dp"], with_cp["tp"], torch.float32)


def test_megatron_fsdp_strategy_parallelize(world: None, calls: list[SimpleNamespace]) -> None:
    mesh, model = mesh_of(dp=4, tp=2), llama()
    done = megatron_fsdp_strategy_parallelize(
        model, mesh, None, ["LlamaDecoderLayer"], "llama", 2, grad_reduce_in_fp32=True
    )
    assert done is model and calls[0].plan == "llama" and calls[0].axes == {"dp_shard": "dp", "tp": "tp"}
    assert calls[0].data_parallel["backend"] == "megatron_fsdp" and calls[0].data_parallel["units"] == [
        "model.layers.0"
    ]
    older = {
        "fsdp_unit_modules": ["LlamaDecoderLayer"],
        "data_parallel_sharding_strategy": "optim_grads",
        "init_nvfsdp_with_meta_device": True,
        "keep_fp8_transpose_cache_when_using_custom_fsdp": True,
        "dp_mesh_name": "dp",
        "cp_mesh_name": "cp",
        "tp_mesh_name": "tp",
    }
    megatron_fsdp_strategy_parallelize(model, mesh, **older)
    options = calls[1].data_parallel["megatron_fsdp"]
    assert calls[1].data_parallel["units"] == ["model.layers.0"] and options["zero_dp_strategy"] == "optim_grads"
    assert options["init_model_with_meta_device"] and options["keep_fp8_transpose_cache"]
    with pytest.raises(ValueError, match="create the optimizer afterwards"):
        megatron_fsdp_strategy_parallelize(model, mesh, torch.optim.SGD(model.parameters()))
    with pytest.raises(TypeError, match="no argument 'fsdp_units'"):
        megatron_fsdp_strategy_parallelize(model, mesh, fsdp_units=[])


def test_arguments_have_their_names_and_defaults() -> None:
    """Those that people's scripts use, in their order."""
    names = list(inspect.signature(fsdp2_strategy_parallelize).parameters)
    assert names[:7] == [
        "model",
        "device_mesh",
        "mp_policy",
        "offload_policy",
        "sequence_parallel",
        "activation_checkpointing",
        "tp_shard_plan",
    ]
    fields = inspect.signature(MegatronFSDPConfig).parameters
    given = inspect.signature(megatron_fsdp_strategy_parallelize).parameters
    elsewhere = ("activation_checkpointing", "sequence_parallel", "tp_plan", "backend")
    assert {n: p.default for n, p in given.items() if n in fields} == {
        n: p.default for n, p in fields.items() if n not in elsewhere
    }
    assert list(inspect.signature(get_logprobs_from_vocab_parallel_logits).parameters)[:5] == [
        "vocab_parallel_logits",
        "input_ids",
        "seq_index",
        "chunk_size",
        "sampling_params",
    ]
    assert names[17:19] == ["frozen_multimodal_sharding", "reapply_trainability"]
    assert list(inspect.signature(compat._parallelize_model).parameters) == [
        "model",
        "dp_mesh",
        "tp_mesh",
        "param_dtype",
        "sequence_parallel",
        "activation_checkpointing",
        "cpu_offload",
        "custom_parallel_plan",
        "logits",
    ]


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)]), nn.Sequential(nn.Linear(8, 8))])
        self.named = nn.ModuleDict({"one": nn.Linear(8, 8), "more": nn.ModuleList([nn.Linear(8, 8)])})
        self.head = nn.Linear(8, 8)


def units_of(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]


def test_units_of_lists_and_their_unsharding(world: None) -> None:
    model, mesh = Nested(), mesh_of(dp=8)
    apply_fsdp_sharding_recursively(model, mesh, MixedPrecisionPolicy(torch.bfloat16), reshard_after_forward=None)
    assert units_of(model) == ["blocks.0.0", "blocks.0.1", "blocks.1", "named.one", "named.more.0"]
    whole = model.blocks[0][0].weight
    with unshard_fsdp2_model(model) as nothing:
        assert nothing is None and model.blocks[0][0].weight.shape == (8, 8) and model.blocks[0][0].weight is not whole
    assert model.blocks[0][0].weight is whole


def test_units_by_another_function_and_without_some_parameters(world: None) -> None:
    model, seen = Nested(), []
    left = {model.blocks[1][0].weight}

    def shard(unit: nn.Module, **options: Any) -> nn.Module:
        seen.append((unit, options["ignored_params"], options["reshard_after_forward"]))
        return fully_shard(unit, **options)

    apply_fsdp_sharding_recursively(model, mesh_of(dp=8), None, fully_shard_fn=shard, ignored_multimodal_params=left)
    assert {unit for unit, _, _ in seen} == {model.get_submodule(name) for name in units_of(model)}
    assert all(ignored == left for _, ignored, _ in seen) and len(seen) == 5
    assert not isinstance(model.blocks[1][0].weight, DTensor) and isinstance(model.blocks[1][0].bias, DTensor)
    with pytest.raises(ValueError, match='must be "root", "per_layer" or "replicate"'):
        apply_fsdp_sharding_recursively(Nested(), mesh_of(dp=8), None, frozen_multimodal_sharding="own")


@pytest.mark.parametrize(("word", "units"), [("root", 2), ("per_layer", 4), ("replicate", 2)])
def test_units_of_frozen_towers(world: None, word: str, units: int) -> None:
    model = AutoModelForImageTextToText.from_config(small_llava())
    tower = model.model.vision_tower.requires_grad_(False)
    apply_fsdp_sharding_recursively(model, mesh_of(dp=8), None, frozen_multimodal_sharding=word)
    assert len(units_of(model)) == units
    kept = {parameter for parameter in tower.encoder.parameters() if not isinstance(parameter, DTensor)}
    assert len(kept) == (0 if word == "per_layer" else len(list(tower.encoder.parameters())))
    fully_shard(model, mesh=mesh_of(dp=8), ignored_params=kept if word == "replicate" else None)
    assert all(isinstance(parameter, DTensor) for parameter in tower.encoder.parameters()) == (word != "replicate")


# Norms and log-probabilities


def test_norms_and_clipping() -> None:
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))]
    parameters[0].grad, parameters[1].grad = torch.tensor([3.0, 0.0]), torch.tensor([-4.0])
    assert compat.get_grad_norm(parameters, None, None, norm_type=2, dtype=torch.float32) == 5.0
    assert compat.get_grad_norm(parameters, norm_type=float("inf")) == 4.0
    compat.clip_grad_by_total_norm_(parameters, max_grad_norm=2.5, total_norm=5.0)
    assert parameters[1].grad.item() == pytest.approx(-2.0)
    assert compat.to_local_if_dtensor(parameters[0]) is parameters[0]
    with pytest.raises(ValueError, match="dtype must be torch.float32"):
        compat.get_grad_norm(parameters, dtype=torch.bfloat16)


def test_log_probabilities_of_the_next_tokens() -> None:
    torch.manual_seed(0)
    logits, ids = torch.randn(2, 5, 11, requires_grad=True), torch.randint(11, (2, 5))
    expected = logits.detach().log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
    found = get_logprobs_from_vocab_parallel_logits(logits, ids, chunk_size=2)
    assert found.requires_grad and torch.allclose(found, expected, atol=1e-6)
    assert not get_logprobs_from_vocab_parallel_logits(logits, ids, inference_only=True).requires_grad
    with torch.no_grad():
        assert not get_logprobs_from_vocab_parallel_logits(logits, ids).requires_grad
    with pytest.raises(ValueError, match="seq_index is for logits whose tokens are split"):
        get_logprobs_from_vocab_parallel_logits(logits, ids, ids[0])
    with pytest.raises(TypeError, match="inference_only is given by keyword"):
        get_logprobs_from_vocab_parallel_logits(logits, ids, None, 2, True)
