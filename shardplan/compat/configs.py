"""The sections of a plan as Python values. Fields, their order and their defaults are those of NeMo Automodel 0.7.0's strategy
configs; fields that only older releases had follow. A config gives the arguments of `apply_plan`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import wraps
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from .multimodal import MultimodalDistributedConfig, check_scope, layers_of, read_multimodal, unwrapped
from .policies import check_names, name_of, nearest, plain, read_dtype, read_policy

Checkpointing = bool | Literal["full", "selective"]
_C = TypeVar("_C", bound="Config")

SIZES = ("dp_size", "dp_replicate_size", "tp_size", "cp_size", "pp_size", "ep_size")
ZERO = ("no_shard", "optim", "optim_grads", "optim_grads_params")  # the words of `zero_dp_strategy`, 0 to 3
AUTOCAST = (torch.bfloat16, torch.float16)


def default_policy() -> MixedPrecisionPolicy:
    """The dtypes of NeMo Automodel 0.7.0: compute in bfloat16, reduce gradients in float32, leave inputs and outputs as they are."""
    return MixedPrecisionPolicy(torch.bfloat16, torch.float32, None, cast_forward_inputs=False)


@dataclass
class Config:
    """The common parts of the configs. A config can be changed, and is checked whenever it is used."""

    strategy: ClassVar[str]  # the backend of `data_parallel`; the field `backend` is that of the process group

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Read values that are given by name, and raise ValueError or TypeError for those that are not valid."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """The fields; policies and dtypes stay objects."""
        return {one.name: getattr(self, one.name) for one in fields(self)}

    def to_plain(self) -> dict[str, Any]:
        """The fields for YAML or JSON: policies as mappings with `_target_`, dtypes by name."""
        return {name: plain(value) for name, value in self.to_dict().items()}

    @classmethod
    def from_dict(cls: type[_C], values: Mapping[str, Any]) -> _C:
        """The config from a mapping: what `to_dict` or `to_plain` gave, or a section of a YAML file.

        Raises:
            ValueError: an unknown field, with the nearest name; a value that is not valid.
            TypeError: a value of another type.
        """
        for name in SIZES:
            if name in values:
                raise ValueError(f"{name} is a size, not a field of {cls.__name__}: give sizes to shardplan.build_mesh")
        check_names(values, [one.name for one in fields(cls)], cls.__name__)
        return cls(**values)

    def arguments(self, model: nn.Module) -> dict[str, Any]:
        """The keyword arguments of `apply_plan`.

        Args:
            model: the model that they are for.
        """
        raise NotImplementedError

    def _check_flags(self) -> None:
        """Check that fields with a bool as their default hold a bool, unless they may be words too, and that `backend` is a text."""
        backend = getattr(self, "backend", None)
        if not isinstance(backend, str):
            raise TypeError(f'backend must be the process group\'s, such as "nccl", not {backend!r}')
        for one in fields(self):
            value = getattr(self, one.name)
            if isinstance(one.default, bool) and one.name != "activation_checkpointing" and not isinstance(value, bool):
                raise TypeError(f"{one.name} must be True or False, not {value!r}")


def _checkpointing(mode: Checkpointing, model: nn.Module, scope: Any = "all") -> dict[str, Any] | None:
    """The section `activation_checkpointing`; None leaves it to the plan."""
    if not mode:
        return None
    layers = layers_of(model, check_scope(scope))
    section: dict[str, Any] = {"mode": "selective" if mode == "selective" else "full"}
    return section if layers is None else {**section, "modules": layers}


def _check_checkpointing(mode: Any, scope: Any) -> None:
    if not (isinstance(mode, bool) or mode in ("full", "selective")):
        raise ValueError(f'activation_checkpointing must be True, False, "full" or "selective", not {mode!r}')
    check_scope(scope)


def _check_depth(value: Any, name: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{name} must be a whole number of units, 0 or more, not {value!r}")


@dataclass
class FSDP2Config(Config):
    """FSDP2, with tensor and sequence parallelism where the mesh has a tp axis.

    Args:
        sequence_parallel: use the plan's sequence-parallel section too.
        tp_plan: None is the built-in plan for the model. Else a plan of shardplan's (its content, a file, a built-in name), or a
            dictionary from names to styles or its import path, which is converted.
        patch_is_packed_sequence, autocast_dtype: arguments of `apply_plan`.
        mp_policy: FSDP2's dtypes; None is the plan's dtypes, else the model's.
        offload_policy: FSDP2's offloading; None is as the plan says.
        activation_checkpointing: checkpoint the data-parallel units; False is as the plan says.
        activation_checkpointing_scope: "all" for the data-parallel units; "language", "vision", "audio" or a list of them for the layers
            of these parts, which transformers' `get_encoder` and `get_decoder` find.
        multimodal: policies for frozen towers.
        defer_fsdp_grad_sync: `FSDP2Manager.micro_batches` reduces gradients only at the last micro-batch.
        reshard_after_forward: None is as the plan says, by default all units but the last.
        enable_async_tensor_parallel: needs sequence_parallel; it compiles too.
        enable_compile: compile each data-parallel unit.
        enable_fsdp2_prefetch: gather as many units ahead as the two depths say; False leaves it to the plan.
        backend: a field of older releases: the process group's backend.
    """

    strategy: ClassVar[str] = "fsdp2"

    sequence_parallel: bool = False
    tp_plan: Any = None
    patch_is_packed_sequence: bool = False
    mp_policy: MixedPrecisionPolicy | None = field(default_factory=default_policy)
    offload_policy: OffloadPolicy | None = None
    autocast_dtype: torch.dtype | None = None
    activation_checkpointing: Checkpointing = False
    activation_checkpointing_scope: str | list[str] | tuple[str, ...] | None = "all"
    defer_fsdp_grad_sync: bool = True
    reshard_after_forward: bool | None = None
    enable_async_tensor_parallel: bool = False
    enable_compile: bool = False
    enable_fsdp2_prefetch: bool = False
    fsdp2_backward_prefetch_depth: int = 2
    fsdp2_forward_prefetch_depth: int = 1
    multimodal: MultimodalDistributedConfig = field(default_factory=MultimodalDistributedConfig)
    backend: str = "nccl"

    def check(self) -> None:
        self._check_flags()
        self.mp_policy = read_policy(self.mp_policy, (MixedPrecisionPolicy,), "mp_policy")
        self.offload_policy = read_policy(self.offload_policy, (OffloadPolicy,), "offload_policy")
        self.autocast_dtype = read_dtype(self.autocast_dtype, "autocast_dtype", AUTOCAST)
        self.multimodal = read_multimodal(self.multimodal)
        _check_checkpointing(self.activation_checkpointing, self.activation_checkpointing_scope)
        for name in ("fsdp2_backward_prefetch_depth", "fsdp2_forward_prefetch_depth"):
            _check_depth(getattr(self, name), name)
        if not (self.reshard_after_forward is None or isinstance(self.reshard_after_forward, bool)):
            raise TypeError(f"reshard_after_forward must be True, False or None, not {self.reshard_after_forward!r}")
        if self.enable_async_tensor_parallel and not self.sequence_parallel:
            raise ValueError("enable_async_tensor_parallel needs sequence_parallel=True: set it, or switch it off")

    def arguments(self, model: nn.Module) -> dict[str, Any]:
        self.check()
        asynchronous = {"async_tensor_parallel": True} if self.enable_async_tensor_parallel else {}
        return {
            "sequence_parallel": self.sequence_parallel,
            "data_parallel": {"backend": self.strategy, **self._wrapping()},
            "activation_checkpointing": _checkpointing(
                self.activation_checkpointing, model, self.activation_checkpointing_scope
            ),
            "compile": asynchronous if asynchronous or self.enable_compile else None,
            "autocast_dtype": self.autocast_dtype,
            "patch_is_packed_sequence": self.patch_is_packed_sequence,
        }

    def _wrapping(self) -> dict[str, Any]:
        section: dict[str, Any] = {}
        if self.mp_policy is not None:
            dtypes = {word: getattr(self.mp_policy, f"{word}_dtype") for word in ("param", "reduce", "output")}
            section["mixed_precision"] = {word: name_of(dtype) for word, dtype in dtypes.items() if dtype is not None}
            section["mixed_precision"]["cast_forward_inputs"] = self.mp_policy.cast_forward_inputs
        if isinstance(self.offload_policy, CPUOffloadPolicy):
            section["cpu_offload"] = "pinned" if self.offload_policy.pin_memory else True
        elif self.offload_policy is not None:
            section["cpu_offload"] = False
        if self.reshard_after_forward is not None:
            section["reshard_after_forward"] = self.reshard_after_forward
        if self.enable_fsdp2_prefetch:
            depths = {"forward": self.fsdp2_forward_prefetch_depth, "backward": self.fsdp2_backward_prefetch_depth}
            section["prefetch"] = depths
        if self.multimodal.frozen_sharding == "replicate":
            section["frozen"] = "replicated"
        return section


# The fields that are not options of `data_parallel.megatron_fsdp` or `data_parallel.ddp`.
MEGATRON_FSDP_OWN = {
    *("sequence_parallel", "tp_plan", "activation_checkpointing", "backend", "megatron_fsdp_unit_modules"),
    *("init_fsdp_with_meta_device", "report_nan_in_param_grad"),
}
DDP_OWN = {"activation_checkpointing", "activation_checkpointing_scope", "autocast_dtype", "backend"}


def _with_older_places(kind: type[_C]) -> type[_C]:
    """Let a config take the positional arguments of older releases too. They begin with `sequence_parallel` and `tp_plan`, so the first is a bool."""
    made: Any = kind
    today = made.__init__
    names = ["sequence_parallel", "tp_plan", *(one.name for one in fields(kind))]

    @wraps(today)
    def either(self: Any, *places: Any, **named: Any) -> None:
        if not (places and isinstance(places[0], bool)):
            today(self, *places, **named)
            return
        if twice := [name for name, _ in zip(names, places, strict=False) if name in named]:
            raise TypeError(f"{twice[0]} was given twice")
        today(self, **dict(zip(names, places, strict=False)), **named)

    made.__init__ = either
    return kind


@_with_older_places
@dataclass
class MegatronFSDPConfig(Config):
    """Megatron-FSDP (the package megatron-fsdp).

    Args:
        sequence_parallel, tp_plan: fields of older releases; must be False and None.
        megatron_fsdp_unit_modules: the classes of units, by import path or name; None is the units of the plan. Nothing
            is imported: the classes are looked up among the model's modules.
        zero_dp_strategy: 0 to 3, or the package's words for them.
        init_fsdp_with_meta_device: without effect where False: the model tells whether it is on the meta device.
        check_for_nan_in_grad: without effect, as in the package, which no longer has such a check;
            report_nan_in_param_grad does check.
        activation_checkpointing: checkpoint the data-parallel units; False is as the plan says.
        backend: a field of older releases: the process group's backend.

    The other fields are those of the plan's `data_parallel.megatron_fsdp`.
    """

    strategy: ClassVar[str] = "megatron_fsdp"

    megatron_fsdp_unit_modules: list[str] | None = None
    zero_dp_strategy: int | str = 3
    init_fsdp_with_meta_device: bool = False
    grad_reduce_in_fp32: bool = False
    preserve_fp32_weights: bool = False
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = True
    check_for_nan_in_grad: bool = True
    report_nan_in_param_grad: bool = False
    average_in_collective: bool = False
    disable_bucketing: bool = False
    calculate_per_token_loss: bool = False
    keep_fp8_transpose_cache: bool = False
    nccl_ub: bool = False
    fsdp_double_buffer: bool = False
    activation_checkpointing: bool = False
    sequence_parallel: bool = False
    tp_plan: Any = None
    backend: str = "nccl"

    def check(self) -> None:
        self._check_flags()
        if self.sequence_parallel:
            raise ValueError(
                f"the backend {self.strategy} does not work with sequence parallelism: set sequence_parallel=False"
            )
        if self.tp_plan is not None:
            raise ValueError(
                "MegatronFSDPConfig takes no tp_plan: give it to MegatronFSDPManager as custom_tp_plan, or use FSDP2Config"
            )
        if isinstance(self.zero_dp_strategy, bool) or self.zero_dp_strategy not in (*range(4), *ZERO):
            words = ", ".join(f"{i} ({word})" for i, word in enumerate(ZERO))
            raise ValueError(f"zero_dp_strategy must be one of {words}, not {self.zero_dp_strategy!r}")
        _check_checkpointing(self.activation_checkpointing, "all")
        paths = self.megatron_fsdp_unit_modules
        if paths is not None and (isinstance(paths, str) or not all(isinstance(path, str) for path in paths)):
            raise TypeError(f"megatron_fsdp_unit_modules must be a list of class paths or None, not {paths!r}")

    def arguments(self, model: nn.Module) -> dict[str, Any]:
        self.check()
        values = {name: value for name, value in self.to_dict().items() if name not in MEGATRON_FSDP_OWN}
        values["check_for_nan_in_grad"] = self.report_nan_in_param_grad
        if self.init_fsdp_with_meta_device:
            values["init_model_with_meta_device"] = True
        section = {"backend": self.strategy, "megatron_fsdp": values}
        if self.megatron_fsdp_unit_modules is not None:
            section["units"] = units_of_classes(model, self.megatron_fsdp_unit_modules)
        return {
            "data_parallel": section,
            "activation_checkpointing": _checkpointing(self.activation_checkpointing, model),
        }


def units_of_classes(model: nn.Module, paths: list[str]) -> list[str]:
    """The names of the modules that have these classes.

    Args:
        paths: import paths, or only class names.

    Raises:
        ValueError: the model has no module of a class.
    """
    modules = list(unwrapped(model).named_modules())
    spellings = {name: (type(m).__qualname__, f"{type(m).__module__}.{type(m).__qualname__}") for name, m in modules}
    units: list[str] = []
    for path in paths:
        found = [name for name, words in spellings.items() if path in words]
        if not found:
            classes = {words[0] for words in spellings.values()}
            raise ValueError(f"the model has no module of the class {path}{nearest(path.rpartition('.')[2], classes)}")
        units += found
    return units


@dataclass
class DDPConfig(Config):
    """DistributedDataParallel: whole copies of the model.

    Args:
        activation_checkpointing: checkpoint the plan's data-parallel units; False is as the plan says.
        activation_checkpointing_scope: as for FSDP2Config.
        autocast_dtype: an argument of `apply_plan`.
        bucket_cap_mb: the bucket size in whole MiB; None is torch's default.
        backend: a field of older releases: the process group's backend.

    The other fields are those of the plan's `data_parallel.ddp`.
    """

    strategy: ClassVar[str] = "ddp"

    activation_checkpointing: Checkpointing = False
    activation_checkpointing_scope: str | list[str] | tuple[str, ...] | None = "all"
    broadcast_buffers: bool = False
    find_unused_parameters: bool = False
    static_graph: bool = False
    bucket_cap_mb: float | None = None
    gradient_as_bucket_view: bool = False
    autocast_dtype: torch.dtype | None = None
    backend: str = "nccl"

    def check(self) -> None:
        self._check_flags()
        self.autocast_dtype = read_dtype(self.autocast_dtype, "autocast_dtype", AUTOCAST)
        _check_checkpointing(self.activation_checkpointing, self.activation_checkpointing_scope)
        size = self.bucket_cap_mb
        if size is not None and (isinstance(size, bool) or not isinstance(size, (int, float)) or size < 1 or size % 1):
            raise ValueError(f"bucket_cap_mb must be a whole number of MiB, 1 or more, or None, not {size!r}")

    def arguments(self, model: nn.Module) -> dict[str, Any]:
        self.check()
        values = {name: v for name, v in self.to_dict().items() if name not in DDP_OWN and v is not None}
        if self.bucket_cap_mb is not None:
            values["bucket_cap_mb"] = int(self.bucket_cap_mb)
        return {
            "data_parallel": {"backend": self.strategy, "ddp": values},
            "activation_checkpointing": _checkpointing(
                self.activation_checkpointing, model, self.activation_checkpointing_scope
            ),
            "autocast_dtype": self.autocast_dtype,
        }


DistributedConfig = FSDP2Config | MegatronFSDPConfig | DDPConfig


def to_dict(config: DistributedConfig) -> dict[str, Any]:
    """The fields of a config; policies and dtypes stay objects."""
    return config.to_dict()
