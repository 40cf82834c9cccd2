"""Parameters that several stages share: each stage has a copy, and the copies' gradients are added."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shardplan.model.build_tree import has_hooks
from shardplan.runtime.apply.same_weights import checksum
from shardplan.torchlib.local_parts import to_local_if_dtensor


@dataclass(frozen=True)
class Copies:
    """The copies of one tied parameter.

    Args:
        names: stage -> its name there, in the order of stages.
        owners: stage -> its rank on the pp axis.
        parts: stage -> the model that it is in, for the stages of this rank.
    """

    names: Mapping[int, str]
    owners: Mapping[int, int]
    parts: Mapping[int, nn.Module]

    @property
    def own(self) -> dict[int, nn.Parameter]:
        """Stage -> the parameter, for the stages of this rank. FSDP2 and materialising replace the objects."""
        return {stage: part.get_parameter(self.names[stage]) for stage, part in self.parts.items()}

    @property
    def later(self) -> tuple[nn.Parameter, ...]:
        """This rank's copies whose values an earlier stage has too."""
        first = next(iter(self.names))
        own = self.own
        return tuple(one for stage, one in own.items() if stage != first and one is not own.get(first))

    @property
    def hooked(self) -> str | None:
        """The name of a copy on this rank that has a gradient hook: the hook would see only a part of the gradient."""
        return next((self.names[stage] for stage, parameter in self.own.items() if has_hooks(parameter)), None)

    def share(self) -> None:
        """Make this rank's copies one parameter. Not under FSDP2, which manages the parameters of each part separately."""
        first, *others = self.own.items()
        for stage, _ in others:
            owner, leaf = self.names[stage].rpartition(".")[::2]
            self.parts[stage].get_submodule(owner)._parameters[leaf] = first[1]

    def add_gradients(self, group: ProcessGroup, rank: int) -> None:
        """Set the gradient of each copy to the sum over all copies, in the order of stages, so that all are equal.

        Args:
            group: the pp axis.
            rank: this process's rank on it.
        """
        own = self.own
        if not own or not any(parameter.requires_grad for parameter in own.values()):
            return
        mine = {stage: _gradient(parameter) for stage, parameter in own.items()}
        if len({id(parameter) for parameter in own.values()}) < len(own):
            first = next(iter(own))  # they are one parameter: its gradient is the sum over this rank's stages
            mine = {stage: (x if stage == first else torch.zeros_like(x)) for stage, x in mine.items()}
        values = {stage: mine[stage] if stage in mine else torch.empty_like(_any(mine)) for stage in self.names}
        others = {self.owners[stage] for stage in self.names} - {rank}
        operations = []
        for stage in self.names:  # in one order on all ranks
            if stage in mine:
                operations += [_operation(dist.isend, mine[stage], group, other) for other in sorted(others)]
            else:
                operations.append(_operation(dist.irecv, values[stage], group, self.owners[stage]))
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        total = values[next(iter(self.names))].clone()
        for stage in list(self.names)[1:]:
            total += values[stage]
        for parameter in own.values():
            assert parameter.grad is not None  # `_gradient` has made it
            to_local_if_dtensor(parameter.grad).copy_(total)


def _operation(kind: object, tensor: Tensor, group: ProcessGroup, peer: int) -> dist.P2POp:
    return dist.P2POp(kind, tensor, group=group, group_peer=peer)  # type: ignore[arg-type]


def _any(values: Mapping[int, Tensor]) -> Tensor:
    return next(iter(values.values()))


def _gradient(parameter: nn.Parameter) -> Tensor:
    """This rank's part of a gradient, contiguous; zeros where there is no gradient."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return to_local_if_dtensor(parameter.grad).contiguous()


def copies_of(
    ties: Sequence[Sequence[str]],
    stage_of: Mapping[str, int],
    owners: Mapping[int, int],
    parts: Mapping[int, nn.Module],
) -> tuple[Copies, ...]:
    """The tied parameters of a cut.

    Args:
        stage_of: name -> its stage, for each name in `ties`.
        parts: stage -> the model with these names, for the stages of this rank.
    """
    found = []
    for tie in ties:
        names: dict[int, str] = {}
        for name in tie:
            names.setdefault(stage_of[name], name)
        names = dict(sorted(names.items()))
        own = {stage: parts[stage] for stage in names if stage in parts}
        found.append(Copies(names, {stage: owners[stage] for stage in names}, own))
    return tuple(found)


def compare_copies(every: Sequence[Copies], group: ProcessGroup, device: torch.device) -> None:
    """Compare the copies of tied parameters over the stages that have them. A collective over pp.

    Raises:
        RuntimeError: they differ; every rank raises it.
    """
    if not every:
        return
    mine = torch.zeros(
        len(every), 2, dtype=torch.int64, device=device
    )  # whether it is here, and a number for its values
    for i, copies in enumerate(every):
        sums = [checksum(to_local_if_dtensor(parameter)) for parameter in copies.own.values()]
        if sums:
            same = all(torch.equal(one, sums[0]) for one in sums)
            mine[i] = torch.stack([torch.ones_like(sums[0]), sums[0] if same else sums[0] - 1]).to(device)
    table = mine.repeat(dist.get_world_size(group), 1, 1)
    dist.all_gather(list(table.unbind()), mine, group=group)
    for i, copies in enumerate(every):
        values = {number for there, number in table[:, i].tolist() if there}
        if len(values) > 1:
            raise RuntimeError(
                f"the stages have different values of the tied parameter {' = '.join(copies.names.values())}: load a checkpoint, "
                "or build the model from one seed on all ranks"
            )
