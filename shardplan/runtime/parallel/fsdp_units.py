"""The state of FSDP2's units, which has no public name: `FSDPModule._get_fsdp_state` and its contents
(torch/distributed/fsdp/_fully_shard: `_fsdp_state.py`, `_fsdp_param_group.py`, `_fsdp_param.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule


@dataclass(frozen=True)
class _Group:
    """A parameter group in its original state."""

    group: Any
    unsharded: bool
    training_state: Any
    after_forward: Any  # the mesh that it is resharded to after forward; None where it stays unsharded


def kept_over(model: nn.Module) -> dict[str, int]:
    """The process groups over which FSDP2's units stay split after their forwards: name -> its number of ranks."""
    kept = (group.post_forward_mesh_info for group in groups_in(model.modules()))
    return {one.shard_process_group.group_name: one.shard_mesh_size for one in kept if one is not None}


class Unit:
    """One FSDP2 unit in its original state.

    Args:
        module: a module that belongs to it.
    """

    def __init__(self, module: FSDPModule):
        self.module = module
        self.state = module._get_fsdp_state()
        self.found = (self.state._is_root, self.state._training_state, self.state._state_ctx.iter_forward_root)
        self.groups = [
            _Group(group, group.is_unsharded, group._training_state, group.post_forward_mesh_info)
            for group in groups_of(self.state)
        ]

    def gather(self) -> None:
        """Gather the parameters; they stay gathered after a forward."""
        self.module.unshard()
        for found in self.groups:
            found.group.post_forward_mesh_info = None

    def before_forward(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """FSDP2's work before a forward of the module, for other code: takes the arguments, returns them cast."""
        return self.state._pre_forward(cast(nn.Module, self.module), args, kwargs)

    def after_forward(self, args: tuple, output: Any) -> Any:
        """FSDP2's work after a forward: returns the output with the start of the backward."""
        return self.state._post_forward(cast(nn.Module, self.module), args, output)

    def restore(self) -> None:
        """Restore the original state, also after an exception left a forward."""
        root, training_state, running = self.found
        # The very first forward finds the root, which then stays unsharded after forward unless it was set otherwise.
        became_root = root is None and self.state._is_root and self.state._auto_reshard_after_forward
        self.state._training_state = training_state
        self.state._state_ctx.iter_forward_root = running
        self.state._modules_to_run_forward.clear()
        for found in self.groups:
            group = found.group
            group.wait_for_unshard()  # the group may have been prefetched, but not used
            group._training_state = found.training_state
            if not became_root:
                group.post_forward_mesh_info = found.after_forward
            if not found.unsharded:
                group._to_sharded()


def groups_of(state: Any) -> list[Any]:
    """The parameter groups in a unit's state: a list in torch 2.12 and later, one or None in 2.11."""
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def units_of(modules: Iterable[nn.Module | FSDPModule]) -> list[Unit]:
    """The FSDP2 units of these modules, each once: several modules may be one unit."""
    units: dict[int, Unit] = {}
    for module in modules:
        if isinstance(module, FSDPModule):
            unit = Unit(module)
            units.setdefault(id(unit.state), unit)
    return list(units.values())


def groups_in(modules: Iterable[nn.Module | FSDPModule]) -> list[Any]:
    return [found.group for unit in units_of(modules) for found in unit.groups]


def left_half_way(root: FSDPModule) -> Literal["", "forward", "backward"]:
    """Which pass over the outermost unit's model an exception left half-way, if any; call it outside of forward and backward."""
    context = root._get_fsdp_state()._state_ctx
    if context.post_backward_final_callback_queued:
        return "backward"
    return "" if context.iter_forward_root is None else "forward"


def reset(root: FSDPModule, *, drop: bool) -> bool:
    """Set the state of all units to that between two steps.

    Args:
        drop: also drop gradients.

    Returns:
        Whether it dropped gradients that may come from backwards before the last one.
    """
    groups = groups_in(cast(nn.Module, root).modules())
    kept = [(owner, name, getattr(owner, name)) for group in groups for owner, name in _gradients(group)]
    layouts = [(group, dict(_layout(group))) for group in groups]
    dropped = drop and sum(_drop_gradients(group) for group in groups) > 0
    root.reset_iter_state()
    if not drop:
        for owner, name, value in kept:
            setattr(owner, name, value)
        for group, layout in layouts:
            _layout(group).update(layout)
    return dropped


def _gradients(group: Any) -> Iterator[tuple[Any, str]]:
    """The attributes in which a group has gradients: those of several backwards that are not yet of all replicas, and of each parameter the
    reduced one and those that are not reduced yet. torch 2.15 resets them all, torch 2.14 the first alone."""
    yield group, "_partial_reduce_output"
    for parameter in group.fsdp_params:
        yield parameter.sharded_param, "grad"
        if "unsharded_accumulated_grad" in vars(
            parameter
        ):  # up to torch 2.14; then a gathered parameter accumulates itself
            yield parameter, "unsharded_accumulated_grad"
        if (whole := getattr(parameter, "_unsharded_param", None)) is not None:
            yield whole, "grad"


def _layout(group: Any) -> dict[Any, Any]:
    """Which parameter is where in the gradients that are not yet of all replicas. Up to torch 2.14 all have a place."""
    return getattr(group, "_partial_reduce_output_layout", {})


def _drop_gradients(group: Any) -> bool:
    """Drop the gradients of a group. Returns whether some may come from earlier backwards: all that are reduced or accumulated, and those of
    gathered parameters, unless the last backward had begun in the group."""
    begun = group._training_state.name == "PRE_BACKWARD"
    gathered = {id(getattr(parameter, "_unsharded_param", None)) for parameter in group.fsdp_params}
    found = False
    for owner, name in _gradients(group):
        found |= getattr(owner, name) is not None and not (begun and id(owner) in gathered)
        setattr(owner, name, None)
    return found


@dataclass(frozen=True)
class Parameter:
    """A parameter of a unit: the tensor in its place now, the shard that an optimizer steps, and what FSDP2 puts in its place for forwards."""

    name: str
    now: Tensor | None
    shard: Tensor
    others: tuple[Tensor | None, ...]


def parameters_of(groups: Iterable[Any]) -> Iterator[Parameter]:
    for group in groups:
        for one in group.fsdp_params:
            place = one._module_info
            name = one._param_fqn or f"{place.param_name} of a {type(place.module).__name__}"
            others = getattr(one, "_unsharded_param", None), getattr(one, "_sharded_post_forward_param", None)
            yield Parameter(name, place.module._parameters.get(place.param_name), one.sharded_param, others)


def replaced(groups: Iterable[Any]) -> list[str]:
    """The names of parameters in whose place is another tensor than FSDP2's own. It computes with its own, once the first forward began."""
    found = parameters_of(group for group in groups if group._reset_sharded_params)
    return [one.name for one in found if all(one.now is not own for own in (one.shard, *one.others))]


def keep_requires_grad(modules: Iterable[nn.Module]) -> None:
    """Keep `requires_grad_` of a gathered parameter when FSDP2 shards it again: adapters that are switched off for one forward and on
    again (peft) are trained afterwards."""
    for unit in units_of(modules):
        for found in unit.groups:
            found.group._to_sharded = partial(_to_sharded, found.group, found.group._to_sharded)


def _to_sharded(group: Any, shard: Callable[[], None]) -> None:
    if group.is_unsharded:
        for parameter in group.fsdp_params:
            if parameter.sharded_param.requires_grad != parameter._unsharded_param.requires_grad:
                parameter.sharded_param.requires_grad_(parameter._unsharded_param.requires_grad)
    shard()


def when_gathered(modules: Iterable[nn.Module], action: Callable[[Tensor], Callable[[Tensor], None] | None]) -> None:
    """Do something with the parameter that replaces a sharded one, each time FSDP2 gathers.

    Args:
        action: sharded parameter -> what is done with the gathered one; None: nothing.
    """
    for unit in units_of(modules):
        for found in unit.groups:
            for parameter in found.group.fsdp_params:
                if (act := action(parameter.sharded_param)) is not None:
                    parameter.init_unsharded_param = _then(parameter, parameter.init_unsharded_param, act)


def _then(parameter: Any, gather: Callable[[], None], act: Callable[[Tensor], None]) -> Callable[[], None]:
    def gathered() -> None:
        gather()
        act(parameter._unsharded_param)

    return gathered
