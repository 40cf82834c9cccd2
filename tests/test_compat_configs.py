"""Configs in Python: their fields, what they come to, and the way through dictionaries and YAML."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import yaml
from small_models import small_config
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, LlavaConfig

from shardplan import compile_plan
from shardplan.compat import (
    DDPConfig,
    DistributedConfig,
    FSDP2Config,
    MegatronFSDPConfig,
    MultimodalDistributedConfig,
    to_dict,
)
from shardplan.core.sections import DDP, MegatronFSDP, MixedPrecision, Prefetch

CONFIGS = (FSDP2Config, MegatronFSDPConfig, DDPConfig)
POLICY = MixedPrecisionPolicy(torch.bfloat16, torch.float32, None, cast_forward_inputs=False)
TESTS = Path(__file__).parent
PAGE = (TESTS.parent / "docs" / "compat.md").read_text("utf-8")

# The fields of NeMo Automodel's configs in their order with their defaults, as 0.7.0 has them, and what older releases have besides.
DEFAULTS = {
    FSDP2Config: {
        "sequence_parallel": False,
        "tp_plan": None,
        "patch_is_packed_sequence": False,
        "mp_policy": POLICY,
        "offload_policy": None,
        "autocast_dtype": None,
        "activation_checkpointing": False,
        "activation_checkpointing_scope": "all",
        "defer_fsdp_grad_sync": True,
        "reshard_after_forward": None,
        "enable_async_tensor_parallel": False,
        "enable_compile": False,
        "enable_fsdp2_prefetch": False,
        "fsdp2_backward_prefetch_depth": 2,
        "fsdp2_forward_prefetch_depth": 1,
        "multimodal": MultimodalDistributedConfig(),
        "backend": "nccl",
    },
    MegatronFSDPConfig: {
        "megatron_fsdp_unit_modules": None,
        "zero_dp_strategy": 3,
        "init_fsdp_with_meta_device": False,
        "grad_reduce_in_fp32": False,
        "preserve_fp32_weights": False,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "check_for_nan_in_grad": True,
        "report_nan_in_param_grad": False,
        "average_in_collective": False,
        "disable_bucketing": False,
        "calculate_per_token_loss": False,
        "keep_fp8_transpose_cache": False,
        "nccl_ub": False,
        "fsdp_double_buffer": False,
        "activation_checkpointing": False,
        "sequence_parallel": False,
        "tp_plan": None,
        "backend": "nccl",
    },
    DDPConfig: {
        "activation_checkpointing": False,
        "activation_checkpointing_scope": "all",
        "broadcast_buffers": False,
        "find_unused_parameters": False,
        "static_graph": False,
        "bucket_cap_mb": None,
        "gradient_as_bucket_view": False,
        "autocast_dtype": None,
        "backend": "nccl",
    },
}
EVERYTHING = (
    FSDP2Config(
        sequence_parallel=True,
        patch_is_packed_sequence=True,
        mp_policy=MixedPrecisionPolicy(torch.float16, None, torch.float32, cast_forward_inputs=False),
        offload_policy=CPUOffloadPolicy(pin_memory=False),
        autocast_dtype=torch.float16,
        activation_checkpointing="selective",
        defer_fsdp_grad_sync=False,
        reshard_after_forward=False,
        enable_async_tensor_parallel=True,
        enable_compile=True,
        enable_fsdp2_prefetch=True,
        fsdp2_backward_prefetch_depth=3,
        fsdp2_forward_prefetch_depth=0,
        activation_checkpointing_scope=["language", "vision"],
        multimodal=MultimodalDistributedConfig("replicate"),
        backend="gloo",
    ),
    FSDP2Config(mp_policy=None, offload_policy=OffloadPolicy()),
    MegatronFSDPConfig(megatron_fsdp_unit_modules=["LlamaDecoderLayer"], zero_dp_strategy="optim", nccl_ub=True),
    DDPConfig(bucket_cap_mb=10, static_graph=True, autocast_dtype=torch.bfloat16),
)


def small_llava() -> LlavaConfig:
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    return LlavaConfig(text_config=small_config("llama"), vision_config={"model_type": "clip_vision_model", **vision})


def meta_llama() -> nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(small_config("llama"))


@pytest.mark.parametrize("config", CONFIGS)
def test_fields_and_defaults(config: type) -> None:
    assert to_dict(config()) == config().to_dict() == DEFAULTS[config]
    assert [one.name for one in fields(config)] == list(DEFAULTS[config])


@pytest.mark.parametrize("config", EVERYTHING, ids=lambda config: type(config).__name__)
def test_through_a_dictionary_and_yaml(config: DistributedConfig) -> None:
    kept = config.to_dict()
    assert type(config).from_dict(kept) == config
    assert all(kept[one.name] is getattr(config, one.name) for one in fields(config))
    text = yaml.safe_dump(config.to_plain())
    assert type(config).from_dict(yaml.safe_load(text)) == config
    if isinstance(config, FSDP2Config) and config.mp_policy is not None:
        assert "_target_: torch.distributed.fsdp.MixedPrecisionPolicy" in text and "param_dtype: float16" in text


WRONG = {
    "a misspelt field": (
        FSDP2Config,
        {"sequence_paralel": True},
        "has no 'sequence_paralel': did you mean 'sequence_parallel'?",
    ),
    "a field of another config": (DDPConfig, {"zero_dp_strategy": 1}, "DDPConfig has no 'zero_dp_strategy'"),
    "a size": (
        DDPConfig,
        {"dp_replicate_size": 2},
        "dp_replicate_size is a size, not a field of DDPConfig: .*build_mesh",
    ),
    "async without the sequence": (FSDP2Config, {"enable_async_tensor_parallel": True}, "needs sequence_parallel=True"),
    "another target": (
        FSDP2Config,
        {"mp_policy": {"_target_": "os.system"}},
        "`_target_` must be one of .*, not 'os.system'",
    ),
    "a target elsewhere": (
        FSDP2Config,
        {"mp_policy": {"_target_": "mine.MixedPrecisionPolicy"}},
        "`_target_` must be one of",
    ),
    "no target": (FSDP2Config, {"mp_policy": {"param_dtype": "bfloat16"}}, "`_target_` must be one of .*, not None"),
    "a field of a policy": (
        FSDP2Config,
        {"mp_policy": {"_target_": "torch.distributed.fsdp.MixedPrecisionPolicy", "parm_dtype": "bfloat16"}},
        "MixedPrecisionPolicy has no 'parm_dtype': did you mean 'param_dtype'?",
    ),
    "a dtype": (
        FSDP2Config,
        {"mp_policy": {"_target_": "torch.distributed.fsdp.MixedPrecisionPolicy", "param_dtype": "bf61"}},
        "param_dtype must be bfloat16, float16 or float32, not 'bf61'",
    ),
    "autocast": (DDPConfig, {"autocast_dtype": "float32"}, "autocast_dtype must be bfloat16 or float16"),
    "the other policy": (
        FSDP2Config,
        {"mp_policy": {"_target_": "torch.distributed.fsdp.CPUOffloadPolicy"}},
        "mp_policy must be a MixedPrecisionPolicy or None",
    ),
    "a mode": (FSDP2Config, {"activation_checkpointing": "some"}, 'must be True, False, "full" or "selective"'),
    "a scope": (
        FSDP2Config,
        {"activation_checkpointing_scope": ["vision", "sound"]},
        'must be "all", "language", "vision"',
    ),
    "no scope": (DDPConfig, {"activation_checkpointing_scope": []}, "switch activation_checkpointing off"),
    "frames": (
        FSDP2Config,
        {"multimodal": {"vision": {"frame_sharding": {"enabled": True}}}},
        "frame_sharding.enabled must be False: a vision tower runs on all its frames",
    ),
    "frozen towers": (
        FSDP2Config,
        {"multimodal": {"frozen_sharding": "none"}},
        'must be "root", "per_layer" or "replicate"',
    ),
    "a field of multimodal": (FSDP2Config, {"multimodal": {"frozen": "root"}}, "multimodal has no 'frozen'"),
    "a policy's class": (
        FSDP2Config,
        {"offload_policy": CPUOffloadPolicy},
        "must be an instance of CPUOffloadPolicy, not the class: write CPUOffloadPolicy\\(\\)",
    ),
    "a dtype of a policy": (
        FSDP2Config,
        {"mp_policy": MixedPrecisionPolicy(torch.int8)},
        "mp_policy: param_dtype must be torch.bfloat16, .* or None, not torch.int8",
    ),
    "a name as a dtype": (
        FSDP2Config,
        {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, reduce_dtype="float32")},
        "mp_policy: reduce_dtype must be .*, not 'float32'",
    ),
    "a backend": (FSDP2Config, {"backend": None}, "backend must be the process group's"),
    "a plan with Megatron-FSDP": (
        MegatronFSDPConfig,
        {"tp_plan": {}},
        "takes no tp_plan: give it to MegatronFSDPManager",
    ),
    "sequences with Megatron-FSDP": (MegatronFSDPConfig, {"sequence_parallel": True}, "does not work with sequence"),
    "a switch": (FSDP2Config, {"sequence_parallel": "false"}, "sequence_parallel must be True or False"),
    "a depth": (FSDP2Config, {"fsdp2_forward_prefetch_depth": -1}, "a whole number of units"),
    "resharding": (FSDP2Config, {"reshard_after_forward": 2}, "reshard_after_forward must be True, False or None"),
    "a strategy": (MegatronFSDPConfig, {"zero_dp_strategy": 4}, "zero_dp_strategy must be one of 0 \\(no_shard\\)"),
    "one class": (MegatronFSDPConfig, {"megatron_fsdp_unit_modules": "LlamaDecoderLayer"}, "a list of class paths"),
    "half a MiB": (DDPConfig, {"bucket_cap_mb": 0.5}, "a whole number of MiB"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_is_told(name: str) -> None:
    config, values, text = WRONG[name]
    with pytest.raises((ValueError, TypeError), match=text):
        config.from_dict(values)


def test_a_changed_config_is_checked_again() -> None:
    config = FSDP2Config(sequence_parallel=True, enable_async_tensor_parallel=True)
    config.sequence_parallel = False
    with pytest.raises(ValueError, match="needs sequence_parallel=True"):
        config.arguments(meta_llama())


def program(config: DistributedConfig, **sizes: int):
    model = meta_llama()
    arguments = config.arguments(model)
    arguments.pop("autocast_dtype", None), arguments.pop("patch_is_packed_sequence", None)
    return compile_plan(model, sizes, "auto", **arguments).resolved


def test_fsdp2_comes_to_sections_of_the_plan() -> None:
    section = program(FSDP2Config(), tp=1, dp_shard=2).data_parallel
    assert section.mixed_precision == MixedPrecision("bfloat16", "float32", None, cast_forward_inputs=False)
    assert (section.reshard_after_forward, section.cpu_offload) == ("all_but_last", False)
    assert section.prefetch is None
    config = FSDP2Config(
        sequence_parallel=True,
        mp_policy=MixedPrecisionPolicy(torch.float16, cast_forward_inputs=False),
        offload_policy=CPUOffloadPolicy(),
        activation_checkpointing="selective",
        reshard_after_forward=False,
        enable_compile=True,
        enable_fsdp2_prefetch=True,
    )
    resolved = program(config, tp=2, dp_shard=2)
    assert resolved.sequence_parallel and resolved.data_parallel.units == ("model.layers.*",)
    assert resolved.data_parallel.mixed_precision == MixedPrecision("float16", cast_forward_inputs=False)
    assert (resolved.data_parallel.cpu_offload, resolved.data_parallel.reshard_after_forward) == ("pinned", False)
    assert resolved.data_parallel.prefetch == Prefetch(1, 2)
    assert resolved.activation_checkpointing.mode == "selective" and resolved.compile is not None
    assert resolved.ac_modules == resolved.compile_modules == resolved.dp_units == ("model.layers.0", "model.layers.1")


def test_what_is_not_set_stays_as_the_plan_says() -> None:
    arguments = FSDP2Config(mp_policy=None).arguments(meta_llama())
    assert arguments["data_parallel"] == {"backend": "fsdp2"}
    assert arguments["activation_checkpointing"] is arguments["compile"] is arguments["autocast_dtype"] is None
    asynchronous = FSDP2Config(sequence_parallel=True, enable_async_tensor_parallel=True, autocast_dtype="bfloat16")
    assert asynchronous.arguments(meta_llama())["compile"] == {"async_tensor_parallel": True}
    assert asynchronous.arguments(meta_llama())["autocast_dtype"] is torch.bfloat16
    offload = FSDP2Config(offload_policy=CPUOffloadPolicy(pin_memory=False)).arguments(meta_llama())
    assert offload["data_parallel"]["cpu_offload"] is True


def test_scopes_are_the_layers_of_the_parts_of_a_model() -> None:
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(small_llava())
    config = FSDP2Config(activation_checkpointing=True, activation_checkpointing_scope="vision")
    language, vision = "model.language_model.layers.*", "model.vision_tower.encoder.layers.*"
    assert config.arguments(model)["activation_checkpointing"] == {"mode": "full", "modules": [vision]}
    config.activation_checkpointing_scope = ["language", "vision"]
    assert config.arguments(model)["activation_checkpointing"]["modules"] == [language, vision]
    config.activation_checkpointing_scope = "language"
    assert config.arguments(model)["activation_checkpointing"]["modules"] == [language]
    assert config.arguments(meta_llama())["activation_checkpointing"]["modules"] == ["model.layers.*"]
    config.activation_checkpointing_scope = ["all"]
    assert config.arguments(model)["activation_checkpointing"] == {"mode": "full"}
    config.activation_checkpointing_scope = "audio"
    with pytest.raises(ValueError, match="no part 'audio', only vision, language"):
        config.arguments(model)
    ddp = DDPConfig(activation_checkpointing="selective", activation_checkpointing_scope="vision")
    assert ddp.arguments(model)["activation_checkpointing"] == {"mode": "selective", "modules": [vision]}


def test_frozen_towers_may_be_stored_whole() -> None:
    given = FSDP2Config.from_dict({"multimodal": {"frozen_sharding": "replicate"}}).arguments(meta_llama())
    assert given["data_parallel"]["frozen"] == "replicated"
    for word in ("root", "per_layer"):  # as the plan says
        config = FSDP2Config(multimodal=MultimodalDistributedConfig(word))
        assert "frozen" not in config.arguments(meta_llama())["data_parallel"]


def test_ddp_comes_to_sections_of_the_plan() -> None:
    resolved = program(
        DDPConfig(activation_checkpointing=True, bucket_cap_mb=7.0, static_graph=True), tp=1, dp_replicate=2
    )
    assert resolved.data_parallel.backend == "ddp" and resolved.activation_checkpointing.mode == "full"
    assert resolved.data_parallel.ddp == DDP(broadcast_buffers=False, static_graph=True, bucket_cap_mb=7)


def test_megatron_fsdp_comes_to_a_section_of_the_plan() -> None:
    from shardplan.language import parse_plan

    layer = "transformers.models.llama.modeling_llama.LlamaDecoderLayer"
    config = MegatronFSDPConfig(
        megatron_fsdp_unit_modules=[layer, "Embedding"], zero_dp_strategy=1, report_nan_in_param_grad=True
    )
    given = config.arguments(meta_llama())["data_parallel"]
    section = parse_plan({"version": "1", "data_parallel": given}).plan.data_parallel
    assert section.units == ("model.layers.0", "model.layers.1", "model.embed_tokens")
    assert section.megatron_fsdp == MegatronFSDP(
        zero_dp_strategy=1, preserve_fp32_weights=False, check_for_nan_in_grad=True
    )
    on_meta = MegatronFSDPConfig(init_fsdp_with_meta_device=True).arguments(meta_llama())["data_parallel"]
    assert on_meta["megatron_fsdp"]["init_model_with_meta_device"] is True and "units" not in on_meta
    with pytest.raises(ValueError, match="no module of the class LlamaDecoderlayer: did you mean 'LlamaDecoderLayer'?"):
        MegatronFSDPConfig(megatron_fsdp_unit_modules=["LlamaDecoderlayer"]).arguments(meta_llama())


def functions_of(path: Path) -> set[str]:
    return set(re.findall(r"^def (test_\w+)", path.read_text("utf-8"), re.MULTILINE))


def rows_of_tables() -> list[list[str]]:
    """The cells of all rows of the page's tables, the heads too."""
    lines = [line for line in PAGE.splitlines() if line.startswith("|") and not re.fullmatch(r"[|-]+", line)]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def test_every_row_names_a_test_that_there_is() -> None:
    everywhere = {path.name: functions_of(path) for path in TESTS.glob("test_*.py")}
    rows = rows_of_tables()
    assert len(rows) > 80
    for cells in rows:
        assert len(cells) == 3, cells
        if cells[2] == "test":  # the head of a table
            continue
        files = set(re.findall(r"`tests/(test_\w+\.py)`", cells[2]))
        named = set(re.findall(r"`(test_\w+)`", cells[2]))
        assert named and files <= everywhere.keys(), cells
        there = set().union(*everywhere.values())
        assert named <= there, (cells, named - there)
        for name in files:  # a file is named for one of its tests
            assert named & everywhere[name], (cells, name)


@pytest.mark.parametrize("config", CONFIGS)
def test_the_table_names_every_field(config: type) -> None:
    section = PAGE.partition(f"\n### {config.__name__}\n")[2].partition("\n#")[0]
    first = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    assert [name.strip(" `") for cell in first for name in cell.split(",")] == [one.name for one in fields(config)]


@pytest.mark.parametrize(
    ("config", "section", "elsewhere", "other_defaults"),
    [
        (
            MegatronFSDPConfig,
            MegatronFSDP,
            {"outer_dp_sharding_strategy", "init_model_with_meta_device"},
            {"preserve_fp32_weights", "check_for_nan_in_grad"},
        ),
        (DDPConfig, DDP, set(), {"broadcast_buffers"}),
    ],
)
def test_a_config_has_the_options_of_its_section(
    config: type, section: type, elsewhere: set[str], other_defaults: set[str]
) -> None:
    """With their defaults, where the other project has no other one."""
    own, defaults = {one.name: one.default for one in fields(config)}, section().values
    assert defaults.keys() - own.keys() == elsewhere
    assert {name for name in defaults.keys() & own.keys() if own[name] != defaults[name]} == other_defaults
