"""The interface of NeMo Automodel 0.7: `parallelize_model(model, mesh_context)`, where the context holds meshes and a config."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from shardplan import build_mesh

from .configs import Checkpointing, DDPConfig, DistributedConfig, FSDP2Config
from .parallelize import EP, Logits, axis_size, parallelize
from .policies import read_policy
from .size_meshes import mesh_of_sizes


@dataclass(frozen=True, kw_only=True)
class ParallelismSizes:
    """Sizes of a mesh. dp_size is dp_replicate x dp_shard; None is the ranks that the other sizes leave."""

    dp_size: int | None = None
    dp_replicate_size: int | None = None
    tp_size: int = 1
    pp_size: int = 1
    cp_size: int = 1
    ep_size: int = 1


@dataclass
class MoEParallelizerConfig:
    """The settings for experts, with the fields and defaults of NeMo Automodel 0.7.0.

    Args:
        ignore_router_for_ac: without effect: a router in a checkpointed part is recomputed with it.
        reshard_after_forward: used where the strategy's config leaves it open.
        lm_head_precision, wrap_outer_model: must be None and True.
        mp_policy: replaces that of the strategy's config.
    """

    ignore_router_for_ac: bool = True
    reshard_after_forward: bool = False
    lm_head_precision: str | torch.dtype | None = None
    wrap_outer_model: bool = True
    mp_policy: MixedPrecisionPolicy | None = None

    def __post_init__(self) -> None:
        self.mp_policy = read_policy(self.mp_policy, (MixedPrecisionPolicy,), "mp_policy")
        for name in ("ignore_router_for_ac", "reshard_after_forward", "wrap_outer_model"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, not {getattr(self, name)!r}")
        if self.lm_head_precision is not None or not self.wrap_outer_model:
            raise ValueError(
                "lm_head_precision must be None and wrap_outer_model True: a plan has one `mixed_precision`, and its root is a unit"
            )

    def to_dict(self) -> dict[str, Any]:
        return {one.name: getattr(self, one.name) for one in fields(self)}


def with_experts(config: DistributedConfig, experts: MoEParallelizerConfig | None) -> DistributedConfig:
    """The config together with the settings for experts.

    Raises:
        TypeError: not a MoEParallelizerConfig. ValueError: a config of another backend than FSDP2.
    """
    if experts is None:
        return config
    if not isinstance(experts, MoEParallelizerConfig):
        raise TypeError(f"moe_config must be a MoEParallelizerConfig, not {experts!r}")
    if not isinstance(config, FSDP2Config):
        raise ValueError(f"moe_config must be None: the backend {config.strategy} has no expert parallelism")
    said = config.reshard_after_forward
    return replace(
        config,
        reshard_after_forward=experts.reshard_after_forward if said is None else said,
        mp_policy=experts.mp_policy or config.mp_policy,
    )


@dataclass
class MeshContext:
    """Meshes, a config and the other settings of `parallelize_model`, with the fields of NeMo Automodel 0.7.0. Sizes are
    properties; ep_size is that of the moe_mesh, or of `build`.

    Args:
        device_mesh: a mesh with named axes, as for `apply_plan`.
        moe_mesh: the axes (ep_shard, ep) over the mesh's ranks; None is the ep of `build_mesh`, else no expert parallelism.
        process_group: kept, but not used.
        strategy_config: a config; None is `FSDP2Config()`.
        moe_parallel_config: the settings for experts.
        activation_checkpointing: False is as the config says.
        reapply_trainability: called with the model before the plan is applied; it sets `requires_grad` of parameters.
        cp_ring_degree, cp_ulysses_degree: must be 1 and None: the plan's section `context_parallel` says what is exchanged over cp.

    Raises:
        TypeError, ValueError: a value that is not valid.
    """

    device_mesh: DeviceMesh | None = field(default=None, repr=False)
    moe_mesh: DeviceMesh | None = field(default=None, repr=False)
    process_group: Any = field(default=None, repr=False)
    strategy_config: DistributedConfig | None = None
    moe_parallel_config: MoEParallelizerConfig | None = None
    activation_checkpointing: Checkpointing = False
    reapply_trainability: Callable[[nn.Module], None] | None = field(default=None, repr=False)
    cp_ring_degree: int = 1
    cp_ulysses_degree: int | None = None
    _ep: int = field(default=1, init=False, repr=False)  # that `build` gave the mesh

    def __post_init__(self) -> None:
        for name in ("device_mesh", "moe_mesh"):
            if not isinstance(getattr(self, name), DeviceMesh | None):
                raise TypeError(f"{name} must be a torch DeviceMesh or None, not {getattr(self, name)!r}")
        if not isinstance(self.strategy_config, DistributedConfig | None):
            raise TypeError(f"strategy_config must be a config of shardplan.compat, not {self.strategy_config!r}")
        if self.cp_ring_degree != 1 or self.cp_ulysses_degree is not None:
            raise ValueError(
                "cp_ring_degree must be 1 and cp_ulysses_degree None: the section `context_parallel` of a plan says which modules "
                "exchange heads over cp"
            )

    def _size(self, axis: str) -> int:
        return 1 if self.device_mesh is None else axis_size(self.device_mesh, axis)

    @property
    def tp_size(self) -> int:
        return self._size("tp")

    @property
    def pp_size(self) -> int:
        return self._size("pp")

    @property
    def pp_enabled(self) -> bool:
        return self.pp_size > 1

    @property
    def cp_size(self) -> int:
        return self._size("cp")

    @property
    def ep_size(self) -> int:
        if self.moe_mesh is not None:
            return axis_size(self.moe_mesh, EP)
        return self._ep

    @property
    def dp_replicate_size(self) -> int | None:
        return None if self.device_mesh is None else self._size("dp_replicate")

    @property
    def dp_shard_size(self) -> int:
        return self._size("dp_shard")

    @property
    def dp_size(self) -> int | None:
        return None if self.device_mesh is None else self._size("dp_replicate") * self.dp_shard_size

    @classmethod
    def from_meshes(
        cls, device_mesh: DeviceMesh | None, moe_mesh: DeviceMesh | None = None, **policies: Any
    ) -> MeshContext:
        """The context for meshes; `policies` are its other fields, by keyword."""
        return cls(device_mesh, moe_mesh, **policies)

    @classmethod
    def build(
        cls,
        strategy_config: DistributedConfig,
        parallelism_sizes: ParallelismSizes | None = None,
        *,
        world_size: int | None = None,
        timeout_minutes: int | None = None,
        ranks: Sequence[int] | None = None,
        **policies: Any,
    ) -> MeshContext:
        """The context for a mesh of these sizes, over all ranks of the process group.

        Args:
            world_size, ranks: None, or those of the process group.
            timeout_minutes: must be None: the timeout is set on the process group.
            policies: the other fields, by keyword.

        Raises:
            ValueError: no process group; sizes that do not fit, or that the backend does not have; other ranks; a timeout.
        """
        sizes = parallelism_sizes or ParallelismSizes()
        if not dist.is_initialized():
            raise ValueError("there is no process group: call torch.distributed.init_process_group() first")
        world = dist.get_world_size()
        if world_size not in (None, world) or (ranks is not None and list(ranks) != list(range(world))):
            raise ValueError(f"a mesh is over all {world} ranks of the process group: leave world_size and ranks out")
        if timeout_minutes is not None:
            raise ValueError("timeout_minutes must be None: give init_process_group a timeout")
        given = {one.name: getattr(sizes, one.name) for one in fields(sizes)}
        if isinstance(strategy_config, DDPConfig):
            wrong = [f"{name} {size}" for name, size in given.items() if name != "dp_size" and (size or 1) > 1]
            if wrong:
                raise ValueError(f"the backend ddp has dp_size alone, not {', '.join(wrong)}")
            mesh = build_mesh(dp_shard=1, dp_replicate=sizes.dp_size)
        else:
            mesh = mesh_of_sizes(None, **given)
        made = cls(mesh, strategy_config=strategy_config, **policies)
        made._ep = given["ep_size"] or 1
        return made


class ModelParallelizer:
    """NeMo Automodel's object that parallelizes a model class. It has `parallelize(model, mesh_context)`, and is the class's attribute
    `parallelizer`. A subclass may extend `parallelize`. Automodel's class has private methods for units and checkpointing; here the
    plan says these.

    Raises:
        TypeError: a subclass defines one of these methods (raised with the class definition).
    """

    THEIRS: ClassVar[tuple[str, ...]] = (
        *("_apply", "_customizes_moe_fsdp", "_fully_shard_module", "_fully_shard_untied_input_output_embeddings"),
        *("_use_full_layer_activation_checkpointing", "_validate_tp_mesh"),
    )

    def __init_subclass__(cls, **how: Any):
        super().__init_subclass__(**how)
        if found := [name for name in ModelParallelizer.THEIRS if name in vars(cls)]:
            raise TypeError(
                f"{cls.__name__} defines {', '.join(found)}, which nothing here calls: units, checkpointing and styles are a plan, which "
                "`shardplan init` writes; give it to FSDP2Config(tp_plan=...)"
            )

    def parallelize(self, model: nn.Module, mesh_context: MeshContext, /, *, logits: Logits | None = None) -> nn.Module:
        """Apply the plan to the model. Make the optimizer afterwards.

        Args:
            mesh_context: a context with a device_mesh, which only DDP does not need.
            logits: as for the managers.

        Raises:
            TypeError: not a MeshContext. ValueError: no device_mesh; what the config refuses. PlanError, RuntimeError: as `apply_plan`.
        """
        if not isinstance(mesh_context, MeshContext):
            raise TypeError(f"mesh_context must be a MeshContext, not {mesh_context!r}")
        config, mesh = mesh_context.strategy_config or FSDP2Config(), mesh_context.device_mesh
        if mesh is None and not isinstance(config, DDPConfig):
            raise ValueError("mesh_context has no device_mesh: shardplan.build_mesh, or MeshContext.build, makes one")
        mesh = build_mesh(dp_shard=1, dp_replicate=None) if mesh is None else mesh
        config = with_experts(config, mesh_context.moe_parallel_config)
        if mesh_context.activation_checkpointing:
            config = replace(config)  # the caller's config is not changed
            config.activation_checkpointing = mesh_context.activation_checkpointing
        return parallelize(
            model,
            mesh,
            config,
            getattr(config, "tp_plan", None),
            moe_mesh=mesh_context.moe_mesh,
            logits=logits,
            reapply_trainability=mesh_context.reapply_trainability,
        )


def get_model_parallelizer(model: nn.Module) -> Any:
    """The `parallelizer` of the model's class, else the default one.

    Raises:
        TypeError: the class's has no `parallelize`.
    """
    found = getattr(type(model), "parallelizer", None) or ModelParallelizer()
    if not callable(getattr(found, "parallelize", None)):
        raise TypeError(
            f"{type(model).__name__}.parallelizer must have parallelize(model, mesh_context), not be {found!r}"
        )
    return found


def compile_parallelized_model(model: nn.Module, mesh_context: MeshContext) -> None:
    """Does nothing: `parallelize_model` has compiled the model, and all names stayed."""
