"""The older forms of other projects' functions and managers, which published scripts use: what reaches `apply_plan`."""

from __future__ import annotations

import inspect
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from small_models import small_model
from test_compat_managers import calls, llama, mesh_of, shape, world  # noqa: F401  # fixtures
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from transformers import AutoConfig, AutoModelForSequenceClassification

from shardplan import PlanError, apply_plan, compat
from shardplan.compat import (
    DDPConfig,
    FSDP2Config,
    FSDP2Manager,
    MegatronFSDPConfig,
    fsdp2_strategy_parallelize,
    get_grad_norm,
    megatron_fsdp_strategy_parallelize,
    nvfsdp_strategy_parallelize,
    parallelize_model,
)
from shardplan.compat.parallelize import plan_for

POLICY = MixedPrecisionPolicy(torch.float16)
BF16 = {"param": "bfloat16", "reduce": "float32", "output": "float32", "cast_forward_inputs": True}


@pytest.mark.usefixtures("world")
def test_the_dtype_in_the_third_place(calls: list[SimpleNamespace]) -> None:  # noqa: F811
    mesh, model = mesh_of(data_parallel=4, tensor_parallel=2), llama()
    names = ("data_parallel", "tensor_parallel", "dp_cp")
    fsdp2_strategy_parallelize(model, mesh, torch.bfloat16, None, None, True, True, True, "qwen3", *names)
    (call,) = calls
    assert call.model is model and call.mesh is mesh and call.plan == "qwen3" and call.sequence_parallel
    assert call.axes == {"dp_shard": "data_parallel", "tp": "tensor_parallel"}
    assert call.activation_checkpointing == {"mode": "full"}
    assert call.data_parallel == {"backend": "fsdp2", "mixed_precision": BF16, "cpu_offload": True}
    given = (  # a policy that is given wins
        (torch.bfloat16, POLICY, CPUOffloadPolicy()),
        (torch.bfloat16, POLICY, CPUOffloadPolicy(), False, False, True),
    )
    for places in given:
        fsdp2_strategy_parallelize(model, mesh, *places)
        section = calls[-1].data_parallel
        assert section["mixed_precision"] == {"param": "float16", "cast_forward_inputs": True}
        assert section["cpu_offload"] == "pinned"
    fsdp2_strategy_parallelize(model, mesh, mp_policy=POLICY, param_dtype=torch.bfloat16)
    assert calls[-1].data_parallel["mixed_precision"]["param"] == "float16"


@pytest.mark.usefixtures("world")
def test_the_form_is_read_off_what_is_given(calls: list[SimpleNamespace]) -> None:  # noqa: F811
    older, newer, model = mesh_of(data_parallel=4, tensor_parallel=2), mesh_of(dp_shard=4, tp=2), llama()
    with_cp = mesh_of(data_parallel=2, context_parallel=2, tensor_parallel=2)
    with_cp["data_parallel", "context_parallel"]._flatten("dp_cp")
    for mesh, named, policy in (
        (older, {}, BF16),  # today's default is no policy
        (older, {"sequence_parallel": True}, BF16),
        (with_cp, {"dp_cp_mesh_name": "dp_cp"}, BF16),
        (with_cp, {"dp_mesh_name": "data_parallel", "tp_mesh_name": "tensor_parallel"}, BF16),
        (newer, {"param_dtype": torch.bfloat16}, BF16),
        (newer, {"dp_mesh_name": "dp_shard"}, BF16),
        (newer, {}, None),
        (newer, {"mp_policy": None, "tp_mesh_name": "tp"}, None),
        (older, {"dp_shard_cp_mesh_name": "data_parallel"}, None),
    ):
        fsdp2_strategy_parallelize(model, mesh, **named)
        assert calls[-1].data_parallel.get("mixed_precision") == policy, named
        assert ("prefetch" in calls[-1].data_parallel) == (policy is None), named
    fsdp2_strategy_parallelize(model, newer, None, None, True)  # today's fifth place
    assert calls[-1].sequence_parallel
    fsdp2_strategy_parallelize(model, newer, None, None, CPUOffloadPolicy())  # the older one's
    assert calls[-1].data_parallel["cpu_offload"] == "pinned"
    for places, named, kind, words in (
        ((None, None), {}, ValueError, "and None fits both"),
        ((POLICY,), {"param_dtype": torch.bfloat16}, ValueError, "use one form, with keyword arguments"),
        ((torch.bfloat16,), {"enable_compile": True}, ValueError, "enable_compile= to"),
        ((), {"dp_mesh_name": "dp_shard", "dp_shard_cp_mesh_name": "dp_shard"}, ValueError, "use one form"),
        ((torch.bfloat16, None), {"mp_policy": POLICY}, TypeError, "mp_policy was given twice"),
        ((torch.bfloat16,), {"sequence_paralel": True}, TypeError, "has no argument 'sequence_paralel'"),
        ((torch.bfloat16, *[None] * 10), {}, TypeError, "10 arguments after the mesh, not 11"),
        ((), {"param_dtype": "bfloat16"}, TypeError, "param_dtype must be a dtype"),
        ((POLICY, CPUOffloadPolicy), {}, TypeError, "must be an instance of CPUOffloadPolicy"),
        ((), {"mp_policy": MixedPrecisionPolicy(torch.int8)}, ValueError, "param_dtype must be torch.bfloat16"),
    ):
        with pytest.raises(kind, match=words):
            fsdp2_strategy_parallelize(model, newer, *places, **named)


@pytest.mark.usefixtures("world")
def test_nvfsdp_has_its_21_arguments(calls: list[SimpleNamespace]) -> None:  # noqa: F811
    parameters = list(inspect.signature(nvfsdp_strategy_parallelize).parameters.values())
    assert [p.name for p in parameters[:6]] == [
        "model",
        "device_mesh",
        "optimizer",
        "nvfsdp_unit_modules",
        "tp_shard_plan",
        "data_parallel_sharding_strategy",
    ]
    assert len([p for p in parameters if p.kind is not p.KEYWORD_ONLY]) == 21
    mesh, model = mesh_of(data_parallel=4, tensor_parallel=2), llama()
    units, axes = ["LlamaDecoderLayer"], ("data_parallel", "context_parallel", "tensor_parallel")
    flags = (True, True, True, False, False, False, True, True, True, True, True, True)
    nvfsdp_strategy_parallelize(model, mesh, None, units, "llama", "optim_grads", *flags, *axes)
    (call,) = calls
    assert call.plan == "llama" and call.axes == {"dp_shard": "data_parallel", "tp": "tensor_parallel"}
    assert call.data_parallel["units"] == ["model.layers.0"]
    assert call.data_parallel["megatron_fsdp"] == {
        "zero_dp_strategy": "optim_grads",
        "init_model_with_meta_device": True,
        "grad_reduce_in_fp32": True,
        "preserve_fp32_weights": True,
        "overlap_grad_reduce": False,
        "overlap_param_gather": False,
        "check_for_nan_in_grad": False,
        "average_in_collective": True,
        "disable_bucketing": True,
        "calculate_per_token_loss": True,
        "keep_fp8_transpose_cache": True,
        "nccl_ub": True,
        "fsdp_double_buffer": True,
    }
    nvfsdp_strategy_parallelize(model, mesh)
    for word in ("params", "grads_params", "optim_grads_params"):
        nvfsdp_strategy_parallelize(model, mesh, data_parallel_sharding_strategy=word)
    assert {one.data_parallel["megatron_fsdp"]["zero_dp_strategy"] for one in calls[1:]} == {"optim_grads_params"}
    with pytest.raises(ValueError, match="zero_dp_strategy must be one of"):
        nvfsdp_strategy_parallelize(model, mesh, data_parallel_sharding_strategy="grads")


@pytest.mark.usefixtures("world")
def test_the_first_manager_is_a_dataclass(calls: list[SimpleNamespace]) -> None:  # noqa: F811
    offload = CPUOffloadPolicy()
    manager = FSDP2Manager(2, 2, 2, True, POLICY, offload, "gloo", 8)
    assert shape(manager.device_mesh) == {"data_parallel": 2, "context_parallel": 2, "tensor_parallel": 2}
    assert manager.device_mesh["data_parallel"].size() == 2 and manager.device_mesh["dp_cp"].size() == 4
    attributes = (
        "dp_size",
        "tp_size",
        "cp_size",
        "sequence_parallel",
        "mp_policy",
        "offload_policy",
        "backend",
        "world_size",
    )
    assert [getattr(manager, name) for name in attributes] == [2, 2, 2, True, POLICY, offload, "gloo", 8]
    model = llama()
    assert manager.parallelize(model) is model and calls[0].mesh is manager.device_mesh and calls[0].plan == "auto"
    assert calls[0].sequence_parallel and calls[0].data_parallel["mixed_precision"]["param"] == "float16"
    manager.parallelize(model, True)
    assert calls[1].plan["tensor_parallel"]["model.layers.*.mlp.down_proj"] == "rowwise"

    default = FSDP2Manager(tp_size=2, backend="gloo")
    assert shape(default.device_mesh) == {"data_parallel": 4, "context_parallel": 1, "tensor_parallel": 2}
    bf16 = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, torch.bfloat16, cast_forward_inputs=True)
    expected = [4, 2, 1, False, bf16, None, "gloo", 8]
    assert [getattr(default, name) for name in attributes] == expected
    assert FSDP2Manager(None, 2, backend="gloo", mp_policy=None).mp_policy == bf16
    for places, named, kind, words in (
        ((3, 2), {}, ValueError, "dp_size 3 x cp_size 1 x tp_size 2 is 6, but there are 8 ranks"),
        ((4, 2), {"dp_size": 4}, TypeError, "dp_size was given twice"),
        ((4, 2, 1, False, None, None, "gloo", 8, 1), {}, TypeError, "has 8 fields"),
        ((4, 2), {"custom_tp_plan": "llama", "use_hf_tp_plan": True}, ValueError, "give one of them"),
    ):
        with pytest.raises(kind, match=words):
            FSDP2Manager(*places, **{"backend": "gloo", **named} if len(places) < 7 else named)
    with pytest.raises(ValueError, match="use_hf_tp_plan and a plan were given"):
        FSDP2Manager(custom_tp_plan="llama", backend="gloo").parallelize(model, use_hf_tp_plan=True)


@pytest.mark.usefixtures("world")
def test_a_manager_has_the_attributes_of_its_config() -> None:
    mesh = mesh_of(dp_shard=4, tp=2)
    config = FSDP2Config(sequence_parallel=True, tp_plan="llama", activation_checkpointing=True, backend="gloo")
    manager = FSDP2Manager(config, mesh)
    for name, value in config.to_dict().items():
        assert getattr(manager, name) == value, name
    assert manager.device_mesh is mesh and manager.moe_mesh is None and manager.config is config
    with pytest.raises(AttributeError, match="FSDP2Manager has no attribute 'tp_size'"):
        _ = manager.tp_size  # sizes are the mesh's


def test_backends_are_those_of_process_groups() -> None:
    for config in (FSDP2Config, MegatronFSDPConfig, DDPConfig):
        assert config().backend == "nccl" and config.from_dict({"backend": "gloo"}).backend == "gloo"
        assert config(backend="gloo").arguments(llama())["data_parallel"]["backend"] == config.strategy
    older, today = (
        MegatronFSDPConfig(False, None, ["LlamaDecoderLayer"], 2),
        MegatronFSDPConfig(["LlamaDecoderLayer"], 2),
    )
    assert older == today and today.zero_dp_strategy == 2 and MegatronFSDPConfig(False, None).zero_dp_strategy == 3
    with pytest.raises(TypeError, match="tp_plan was given twice"):
        MegatronFSDPConfig(False, None, tp_plan=None)


def test_groups_of_norms_are_not_needed() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    assert get_grad_norm([parameter], dp_group=None, dp_cp_group=None, tp_group=None) == 5.0
    assert get_grad_norm([parameter], None, None, 2) == 5.0


def test_the_check_for_packed_sequences_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import modeling_flash_attention_utils as flash

    monkeypatch.setattr(flash, "_is_packed_sequence", flash._is_packed_sequence)
    with pytest.warns(UserWarning, match="does not detect packed sequences"):
        compat._patch_is_packed_sequence_for_training()
    assert flash._is_packed_sequence(torch.arange(4)[None], 1) is False


# Logits


@pytest.mark.usefixtures("world")
def test_logits_are_split_where_theirs_are(calls: list[SimpleNamespace]) -> None:  # noqa: F811
    mesh, model = mesh_of(dp=4, tp=2), llama()
    config = AutoConfig.for_model("llama", num_hidden_layers=1, hidden_size=64, vocab_size=32)
    classifier = AutoModelForSequenceClassification.from_config(config)

    def all_ways(model: nn.Module, plan: Any = None, **logits: Any) -> set[str]:
        del calls[:]
        FSDP2Manager(FSDP2Config(tp_plan=plan), mesh).parallelize(model, **logits)
        fsdp2_strategy_parallelize(model, mesh, tp_shard_plan=plan, **logits)
        parallelize_model(model, mesh["dp"], mesh["tp"], torch.bfloat16, custom_parallel_plan=plan, **logits)
        megatron_fsdp_strategy_parallelize(model, mesh, tp_shard_plan=plan, **logits)
        nvfsdp_strategy_parallelize(model, mesh, tp_shard_plan=plan, **logits)
        return {call.logits for call in calls}

    assert all_ways(model) == all_ways(model, "hf") == {"as_stored"}
    assert all_ways(model, "llama") == all_ways(classifier) == {"plan"}  # a plan of one's own says it; other losses
    assert all_ways(model, logits="replicated") == {"replicated"}
    assert all_ways(small_model("gpt2"), logits="plan") == {"plan"}


@pytest.mark.usefixtures("world")
def test_plans_under_the_names_that_configurations_have(calls: list[SimpleNamespace]) -> None:  # noqa: F811
    mesh, one = mesh_of(dp=4, tp=2), mesh_of(dp=8, tp=1)
    for plan in (None, "llama_nemotron_super_tp_plan"):
        FSDP2Manager(FSDP2Config(tp_plan=plan), mesh).parallelize(llama())
        parallelize_model(llama(), mesh["dp"], mesh["tp"], torch.bfloat16, custom_parallel_plan=plan)
    fsdp2_strategy_parallelize(llama(), one, tp_shard_plan={})
    assert {(call.plan, call.logits) for call in calls} == {("auto", "as_stored")} and len(calls) == 5
    with pytest.raises(ValueError, match="an empty plan splits nothing: pass None for the model's own plan"):
        fsdp2_strategy_parallelize(llama(), mesh, tp_shard_plan={})
    for plan, code in (
        ("llama_nemotron_super", "SP101"),
        ("nemo_automodel.components.distributed.optimized_tp_plans.PLAN", "SP547"),
        ("torch.nn.Linear", "SP547"),
        ({"model.layers.*.mlp.up_proj": "sideways"}, "SP541"),
    ):
        with pytest.raises(PlanError, match=code):
            resolved = plan_for(llama(), plan)
            apply_plan(llama(), mesh, resolved, prove=False)


def test_names_that_scripts_import() -> None:
    """Of older releases; the package that nvFSDP became is asked for once."""
    assert compat.HAVE_NVFSDP is compat.HAVE_MEGATRON_FSDP is (find_spec("megatron_fsdp") is not None)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    compat._destroy_dist_connection()
    assert not dist.is_initialized()
    compat._destroy_dist_connection()  # where there is none, nothing
