"""NeMo Automodel's managers, which take a model and a config, or sizes and flags as in its older releases. Their signatures are those of
0.7.0, which deprecates them for `parallelize_model`. 0.8 removes them; they stay here."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from math import prod
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import Optimizer

from shardplan import applied, build_mesh, micro_batches

from .configs import SIZES, DDPConfig, DistributedConfig, FSDP2Config, MegatronFSDPConfig
from .mesh_context import MoEParallelizerConfig, with_experts
from .parallelize import Logits, axis_size, parallelize
from .policies import check_names
from .size_meshes import first_mesh, mesh_of_sizes

_T = TypeVar("_T")


class Manager:
    """The common parts of the managers.

    `Manager(config, device_mesh)` takes a config and a mesh. `Manager(dp_size=..., tp_size=..., backend=..., ...)` takes the
    config's fields and the sizes, and builds the mesh from them (dp_size may be None, 0 or below). Where the processes,
    started by torchrun, have no process group, it makes one and destroys it at exit. The config's fields are attributes
    of the manager; so are the sizes, where it was made from them.

    Args:
        config: None is its defaults.
        device_mesh: a mesh with named axes, as for `apply_plan`.
        moe_mesh: the axes (ep_shard, ep) over the mesh's ranks; only with FSDP2. None is the ep of `build_mesh`, else no
            expert parallelism.
        moe_config: the settings for experts; only with FSDP2.
        older: sizes (dp_size, dp_replicate_size, tp_size, cp_size, pp_size, ep_size), `backend` of the process group,
            `world_size`, `use_hf_tp_plan`, `custom_tp_plan`, and fields of the config.

    Raises:
        ValueError: pp_size above 1 (managers have no pipeline parallelism); a moe_mesh or sizes that the backend does not have;
            sizes that do not fit; an unknown name.
        TypeError: a config of another backend; sizes together with a mesh.
    """

    config_type: ClassVar[type[Any]]
    sizes: ClassVar[tuple[str, ...]]
    older_defaults: ClassVar[dict[str, Any]] = {}

    def __init__(
        self,
        config: DistributedConfig | None = None,
        device_mesh: DeviceMesh | None = None,
        moe_mesh: DeviceMesh | None = None,
        moe_config: MoEParallelizerConfig | None = None,
        **older: Any,
    ):
        if moe_mesh is not None and self.config_type is not FSDP2Config:
            raise ValueError(
                f"moe_mesh must be None: the backend {self.config_type.strategy} has no expert parallelism"
            )
        self.tp_plan: Any = None
        if older and (config is not None or device_mesh is not None):
            raise TypeError(f"give a config and a mesh, or sizes and flags, not both: {', '.join(older)}")
        if config is None and device_mesh is None:
            config, device_mesh = self._from_sizes(**older)
            self._note_sizes(device_mesh)
        config = self.config_type() if config is None else config
        if not isinstance(config, self.config_type):
            raise TypeError(f"{type(self).__name__} takes a {self.config_type.__name__}, not {config!r}")
        self.config, self.moe_mesh, self.moe_config = config, moe_mesh, moe_config
        with_experts(config, moe_config)
        self.device_mesh = self._without_mesh() if device_mesh is None else device_mesh
        self.tp_plan = config.tp_plan if isinstance(config, FSDP2Config) else self.tp_plan

    def parallelize(
        self,
        model: nn.Module,
        reapply_trainability: Callable[[nn.Module], None] | None = None,
        *,
        logits: Logits | None = None,
    ) -> nn.Module:
        """Apply the plan to the model and compile its layers where the config says so. Make the optimizer afterwards.

        Args:
            reapply_trainability: called with the model before the plan is applied; it sets `requires_grad` of parameters.
            logits: as for `apply_plan`. None: a causal language model returns logits split over the vocabulary, where the plan splits
                its head and is not the caller's own.

        Raises:
            PlanError, ValueError, RuntimeError: as `apply_plan`.
        """
        return parallelize(
            model,
            self.device_mesh,
            with_experts(self.config, self.moe_config),
            self.tp_plan,
            moe_mesh=self.moe_mesh,
            logits=logits,
            reapply_trainability=reapply_trainability,
        )

    def maybe_compile(self, model: nn.Module) -> None:
        """Does nothing: `parallelize` has compiled the model, and all names stayed.

        Raises:
            ValueError: `parallelize` was not called with this model.
        """
        applied(model)

    def micro_batches(self, model: nn.Module, batches: Iterable[_T], **how: Any) -> Iterator[tuple[_T, float]]:
        """The micro-batches of one optimizer step with their loss factors, as `shardplan.micro_batches`, which gets `how`. Without
        `defer_fsdp_grad_sync`, each micro-batch reduces its gradients."""
        return micro_batches(model, batches, defer=getattr(self.config, "defer_fsdp_grad_sync", True), **how)

    def __getattr__(self, name: str) -> Any:
        """The fields of the config are attributes too."""
        if name.startswith("__") or name == "config" or name not in {one.name for one in fields(self.config_type)}:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.config, name)

    def _note_sizes(self, mesh: DeviceMesh) -> None:
        """Set the sizes as attributes, where the manager was made from sizes; with the mesh, all are known."""
        sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
        self.world_size, self.tp_size = dist.get_world_size(), axis_size(mesh, "tp")
        self.cp_size = sizes.get("cp", sizes.get("context_parallel", 1))
        self.dp_size = prod(size for name, size in sizes.items() if name in DATA)

    def _without_mesh(self) -> DeviceMesh:
        raise TypeError(f"{type(self).__name__} needs a device_mesh: shardplan.build_mesh makes one")

    def _from_sizes(
        self, *, backend: str = "nccl", world_size: int | None = None, use_hf_tp_plan: bool = False, **given: Any
    ) -> tuple[DistributedConfig, DeviceMesh]:
        plans = ["custom_tp_plan"] if "tp_size" in self.sizes else []
        names = [one.name for one in fields(self.config_type)]
        ignored = ["sequence_parallel"] if "sequence_parallel" not in names else []
        for size in SIZES:
            if size in given and size not in self.sizes and (given[size] or 1) > 1:
                raise ValueError(f"{size} is {given[size]}: the backend {self.config_type.strategy} has no such axis")
        check_names(given, [*SIZES, *plans, *names, *ignored], type(self).__name__)
        sizes = {name: given.pop(name) for name in SIZES if name in given}
        if ignored and given.pop("sequence_parallel", False):
            raise ValueError(f"the backend {self.config_type.strategy} does not work with sequence parallelism")
        plan = given.pop("custom_tp_plan", None)
        if use_hf_tp_plan and (plan is not None or given.get("tp_plan") is not None):
            raise ValueError("use_hf_tp_plan and a plan were given: give one of them")
        self.tp_plan = plan = "hf" if use_hf_tp_plan else plan
        given = {name: value for name, value in given.items() if name != "mp_policy" or value is not None}
        config = self.config_type.from_dict({**self.older_defaults, **given, "backend": backend})
        if plan is not None and isinstance(config, FSDP2Config):
            config.tp_plan = plan
        own_process_group(backend)
        if world_size is not None and world_size != dist.get_world_size():
            raise ValueError(f"world_size is {world_size}, but the process group has {dist.get_world_size()} ranks")
        device = "cuda" if backend == "nccl" else "cpu"
        return config, self._mesh(device, first=not {*given, *sizes}.difference(FIRST) and plan is None, **sizes)

    def _mesh(self, device: str, first: bool, **sizes: int | None) -> DeviceMesh:
        return first_mesh(device, **sizes) if first else mesh_of_sizes(device, **sizes)


DATA = ("dp_replicate", "dp_shard", "data_parallel")  # the axes in `dp_size`
# The fields of the first release's dataclass, in their order; a manager with only these fields gets that release's mesh.
FIRST = ("dp_size", "tp_size", "cp_size", "sequence_parallel", "mp_policy", "offload_policy", "backend", "world_size")


def own_process_group(backend: str) -> None:
    """Where there is no process group, make one and destroy it at exit."""
    if dist.is_initialized():
        return
    dist.init_process_group(backend)
    atexit.register(_destroy_dist_connection)


def _destroy_dist_connection() -> None:
    """Destroy the process group, where there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


class FSDP2Manager(Manager):
    """FSDP2 with tensor and sequence parallelism. The older form reduces gradients in bfloat16, as in NeMo Automodel."""

    config_type = FSDP2Config
    sizes = SIZES
    older_defaults: ClassVar[dict[str, Any]] = {
        "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, torch.bfloat16, cast_forward_inputs=True)
    }

    def __init__(self, *places: Any, **named: Any):
        today = len(places) < 5 and not any(isinstance(place, bool) for place in places[3:])
        if (
            any(isinstance(place, int) for place in places[:2]) or not today
        ):  # the first release's fields, in their order
            if len(places) > len(FIRST):
                raise TypeError(f"FSDP2Manager has {len(FIRST)} fields: {', '.join(FIRST)}; give others by keyword")
            twice = [name for name in FIRST[: len(places)] if name in named]
            if twice:
                raise TypeError(f"{twice[0]} was given twice")
            places, named = (), {**dict(zip(FIRST, places, strict=False)), **named}
        super().__init__(*places, **named)

    def parallelize(
        self,
        model: nn.Module,
        reapply_trainability: Callable[[nn.Module], None] | bool | None = None,
        use_hf_tp_plan: bool = False,
        *,
        logits: Logits | None = None,
    ) -> nn.Module:
        """Apply the plan to the model, as all managers do.

        Args:
            reapply_trainability: as for all managers; a bool here is `use_hf_tp_plan`, the first release's argument in this position.
            use_hf_tp_plan: take the plan that transformers has for the model.

        Raises:
            ValueError: `use_hf_tp_plan` where the manager has a plan of its own. PlanError, ValueError, RuntimeError: as `apply_plan`.
        """
        if isinstance(reapply_trainability, bool):
            use_hf_tp_plan, reapply_trainability = reapply_trainability, None
        if use_hf_tp_plan and self.tp_plan not in (None, "hf"):
            raise ValueError("use_hf_tp_plan and a plan were given: give one of them")
        self.tp_plan = "hf" if use_hf_tp_plan else self.tp_plan
        return super().parallelize(model, reapply_trainability, logits=logits)


class MegatronFSDPManager(Manager):
    """Megatron-FSDP, with tensor parallelism. It needs CUDA."""

    config_type = MegatronFSDPConfig
    sizes = ("dp_size", "tp_size", "cp_size")

    def _mesh(self, device: str, first: bool, **sizes: int | None) -> DeviceMesh:
        return mesh_of_sizes(device, **sizes)

    def parallelize(  # type: ignore[override]  # its second argument is Automodel's
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        reapply_trainability: Callable[[nn.Module], None] | None = None,
        *,
        logits: Logits | None = None,
    ) -> nn.Module:
        """Wrap and return the model, even where NeMo Automodel returns a pair.

        Args:
            optimizer: must be None.
            reapply_trainability, logits: as for the other managers.

        Raises:
            ValueError: an optimizer, whose parameters would be replaced.
        """
        refuse_optimizer(optimizer)
        return super().parallelize(model, reapply_trainability, logits=logits)


class DDPManager(Manager):
    """DistributedDataParallel over all ranks; `DDPManager(config)` needs no mesh."""

    config_type = DDPConfig
    sizes = ("dp_size",)

    def _without_mesh(self) -> DeviceMesh:
        return build_mesh(dp_shard=1, dp_replicate=None)

    def _mesh(self, device: str, first: bool, **sizes: int | None) -> DeviceMesh:
        return build_mesh(dp_shard=1, dp_replicate=sizes.get("dp_size"), device_type=device)


def refuse_optimizer(optimizer: Optimizer | None) -> None:
    """Raise ValueError where an optimizer is given."""
    if optimizer is not None:
        raise ValueError(
            "parallelizing replaces the model's parameters: create the optimizer afterwards, and wrap it with "
            "shardplan.applied(model).wrap_optimizer(optimizer)"
        )
