"""The state of FSDP2's units that has no public name: `FSDPModule._get_fsdp_state` and what it holds
(torch/distributed/fsdp/_fully_shard: `_fsdp_state.py`, `_fsdp_param_group.py`, `_fsdp_param.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule


@dataclass(frozen=True)
class _Group:
    """A parameter group as it was found."""

    group: Any
    unsharded: bool
    training_state: Any
    after_forward: Any  # the mesh that it is resharded to after forward; None where it stays unsharded


class Unit:
    """One FSDP2 unit, as it was found.

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
        """Gather the parameters, to stay so after a forward."""
        self.module.unshard()
        for found in self.groups:
            found.group.post_forward_mesh_info = None

    def restore(self) -> None:
        """Bring back what was found, also out of a forward that was left by an exception."""
        root, training_state, running = self.found
        # The first forward of all finds the root, which then stays unsharded after forward unless it was set not to.
        became_root = root is None and self.state._is_root and self.state._auto_reshard_after_forward
        self.state._training_state = training_state
        self.state._state_ctx.iter_forward_root = running
        self.state._modules_to_run_forward.clear()
        for found in self.groups:
            group = found.group
            group.wait_for_unshard()  # one that was prefetched, and not reached
            group._training_state = found.training_state
            if not became_root:
                group.post_forward_mesh_info = found.after_forward
            if not found.unsharded:
                group._to_sharded()


def groups_of(state: Any) -> list[Any]:
    """The parameter groups in a unit's state: torch 2.12 and later have a list of them, 2.11 has one or None."""
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def units_of(modules: Iterable[nn.Module]) -> list[Unit]:
    """The FSDP2 units of some modules, each once: several modules may be one unit."""
    units: dict[int, Unit] = {}
    for module in modules:
        if isinstance(module, FSDPModule):
            unit = Unit(module)
            units.setdefault(id(unit.state), unit)
    return list(units.values())


def when_gathered(modules: Iterable[nn.Module], action: Callable[[Tensor], Callable[[Tensor], None] | None]) -> None:
    """Do something with the parameter that FSDP2 puts in the place of a sharded one, each time it gathers.

    Args:
        action: from the sharded parameter to what is done with the gathered one; None is nothing.
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
