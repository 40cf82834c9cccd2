"""Muon for planned models."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardplan.core.first_few import in_a_row
from shardplan.core.plan import MatrixParts
from shardplan.language.globs import parse_glob
from shardplan.model.adapters import unwrapped
from shardplan.model.build_tree import kind_of
from shardplan.runtime.apply.applied import applied, was_touched
from shardplan.runtime.apply.model_parts import Parted, parts_of
from shardplan.runtime.apply.slices import Packing
from shardplan.runtime.apply.state import packed_parameters
from shardplan.runtime.apply.unfit_optimizers import refuse_unfit
from shardplan.torchlib.private import private

from .matrix_shards import Groups, Stack, stack_of
from .matrix_states import MatrixStates
from .owned_matrices import Owned, buckets, exchanged, owned

_newton_schulz = private("muon_newton_schulz")
_adjusted_rate = private("muon_adjusted_rate")

Rest = Callable[[list[dict[str, Any]]], Optimizer]
BUCKET = 2**29  # elements of the matrices that are sent at a time, unless one matrix of each rank has more
# The arguments of torch's Muon other than parameters.
_DEFAULTS = {
    name: one.default
    for name, one in inspect.signature(torch.optim.Muon.__init__).parameters.items()
    if name not in ("self", "params")
}


class Muon(Optimizer):
    """torch.optim.Muon for the matrices of a planned model, and another optimizer for all other parameters, as one optimizer.

    Each matrix has an owner among the ranks that share it, balanced by work. The owner gathers its gradient with momentum, steps it,
    and sends the update back: two all-to-alls for each bucket of matrices. The momentum is stored like its parameter. Given the same
    gradients, the update is that of torch.optim.Muon on the unsharded model. Of parameters that the plan's section `separate_matrices`
    names, it is that of each matrix in them as a parameter of its own.

    Create it on all ranks, after `apply_plan`. `param_groups[0]` has the matrices, and the options below under the names of torch's
    Muon; the later groups are the other optimizer's. `save_training_state` takes it as one optimizer.

    Args:
        model: what `apply_plan` returned, a model or a Pipeline; or a model without a plan.
        rest: makes the optimizer of all other parameters from a list with one group of them: `torch.optim.AdamW`, or
            `lambda groups: torch.optim.AdamW(groups, lr=3e-4)`.
        matrices: patterns of names of parameters with 2 dims, or 3 dims for stacks of matrices (experts). Default: the weights of linear
            layers except the output head, and stacks of parameters that are not in a layer of torch, such as experts.
        whole_matrix: replaces Newton-Schulz: a function of the gradient with momentum [rows, columns] that returns the update, with
            the same shape and dtype. Only the owner calls it. Its update is multiplied by `lr` where `adjust_lr_fn` is not given.
        stateful: `whole_matrix` also takes the matrix's dict, in which it keeps tensors (Shampoo, SOAP).
        bucket_size: elements of the matrices that are sent at a time.
        options: `lr`, `weight_decay`, `momentum`, `nesterov`, `ns_coefficients`, `eps`, `ns_steps` and `adjust_lr_fn` of torch.optim.Muon, with
            its defaults.

    Attributes:
        stacks: the matrices, as ranks share them.
        ranks: the ranks that step together; None: this rank alone.

    Raises:
        ValueError: a pattern matches nothing, or no matrix; torch's Muon refuses an option's value; or the other optimizer cannot step
            sharded parameters.
        TypeError: an option that torch's Muon does not have.
    """

    def __init__(
        self,
        model: nn.Module | Parted,
        *,
        rest: Rest = torch.optim.AdamW,
        matrices: Sequence[str] | None = None,
        whole_matrix: Callable[..., Tensor] | None = None,
        stateful: bool = False,
        bucket_size: int = BUCKET,
        **options: Any,
    ):
        if unknown := sorted(options.keys() - _DEFAULTS.keys()):
            raise TypeError(
                f"Muon has no option {', '.join(unknown)}: it has those of torch.optim.Muon, {', '.join(_DEFAULTS)}"
            )
        torch.optim.Muon([torch.zeros(1, 1)], **options)  # its own checks
        named = dict(_trained(model))
        chosen = _chosen(model, named, matrices)
        groups = Groups()
        matrices_in, packed, tp = of_plan(model)
        self.stacks = [
            stack_of(name, p, packed.get(name), tp, matrices_in.get(name), groups) for name, p in chosen.items()
        ]
        self.ranks = ranks_of(parts_of(model), self.stacks, groups)
        self._pieces, self._whole_matrix, self._bucket_size = owned(self.stacks), whole_matrix, bucket_size
        if stateful and whole_matrix is None:
            raise ValueError("stateful is of whole_matrix: pass the function that takes a matrix and its dict")
        self._rest: Optimizer | None = None
        others = [p for name, p in named.items() if name not in chosen]
        rest_optimizer = rest([{"params": others}])
        refuse_unfit(rest_optimizer)
        super().__init__([{"params": list(chosen.values()), **_DEFAULTS, **options}, *rest_optimizer.param_groups], {})
        self._rest = rest_optimizer
        self._rest.state = self.state
        self._states = MatrixStates(self, self.stacks, self._pieces) if stateful else None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self.__dict__.get("_rest") is not None:
            raise ValueError("Muon has the parameters of its model: create it again where there are new ones")
        super().add_param_group(param_group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        assert self._rest is not None
        self._rest.__setstate__({"state": self.state, "param_groups": self.param_groups[1:]})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters. Call it on all ranks.

        Raises:
            ValueError: some ranks have a gradient of a matrix and others have none. Nothing has changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step_matrices()
        assert self._rest is not None
        self._rest.step()
        return loss

    def _step_matrices(self) -> None:
        if self.ranks is not None:
            check_same_gradients(self.stacks, self.ranks)
        present = [one for one in self._pieces if one.stack.parameter.grad is not None]
        left = Counter(one.stack for one in present)
        values: dict[Stack, Tensor] = {}
        alone = [[one] for one in present if one.alone]
        for bucket in (*alone, *buckets(present, self._bucket_size)):
            for one in bucket:
                if one.stack not in values:
                    values[one.stack] = self._begun(one.stack)
            for one, update in zip(bucket, self._updates(bucket, values), strict=True):
                if update is not None:
                    self._apply(one, update)
                left[one.stack] -= 1
                if not left[one.stack]:
                    del values[one.stack]

    def _updates(self, bucket: Sequence[Owned], values: Mapping[Stack, Tensor]) -> list[Tensor | None]:
        if not bucket[0].alone:
            return exchanged(bucket, [values[one.stack] for one in bucket], self._stepped)
        own = bucket[0].own(values[bucket[0].stack])
        return [None if own is None else self._stepped(bucket[0], own)]

    def _begun(self, stack: Stack) -> Tensor:
        """Decay a parameter and its momentum. Returns this rank's part of the matrices to orthogonalise."""
        group, parameter = self.param_groups[0], stack.parameter
        gradient = parameter.grad
        assert gradient is not None
        if isinstance(parameter, DTensor) and gradient.placements != parameter.placements:  # type: ignore[attr-defined]
            gradient = gradient.redistribute(parameter.device_mesh, parameter.placements)  # type: ignore[attr-defined]
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient, memory_format=torch.preserve_format)
        local, momentum = stack.local(gradient), stack.local(state["momentum_buffer"])
        momentum.lerp_(local, 1 - group["momentum"])
        update = local.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum.clone()
        stack.local(parameter.detach()).mul_(1 - float(group["lr"]) * group["weight_decay"])
        if self._whole_matrix is None:
            update = update.bfloat16()  # the first step of Newton-Schulz
        device = parameter.device_mesh.device_type if isinstance(parameter, DTensor) else update.device
        return update.to(device)  # FSDP2 may keep it on the CPU

    def _stepped(self, one: Owned, whole: Tensor) -> Tensor:
        return one.stack.in_one([self._update(one, i, part) for i, part in enumerate(one.stack.in_parts(whole))])

    def _update(self, one: Owned, part: int, matrices: Tensor) -> Tensor:
        """The update of one part of each matrix, [n, rows, columns]. On a CPU a batch would be no faster, and sum in another order."""
        group, step, states = self.param_groups[0], self._whole_matrix, self._states

        def newton_schulz(matrix: Tensor) -> Tensor:
            return _newton_schulz(matrix, group["ns_coefficients"], group["ns_steps"], group["eps"])

        if step is None and matrices.shape[0] > 1 and matrices.device.type != "cpu":
            return torch.vmap(newton_schulz)(matrices)
        updates = []
        for i, matrix in enumerate(matrices, one.which[0]):
            kept = () if states is None else (states.of(one.stack, i, part),)
            updates.append((step or newton_schulz)(matrix, *kept))
        return torch.stack(updates).to(matrices.dtype)

    def _apply(self, one: Owned, update: Tensor) -> None:
        group, stack = self.param_groups[0], one.stack
        target = one.own(stack.local(stack.parameter.detach()))
        assert target is not None
        update = update.to(target.device)
        for (start, end), shape in stack.stripes:
            rate = float(group["lr"])
            if self._whole_matrix is None or group["adjust_lr_fn"] is not None:
                rate = _adjusted_rate(rate, group["adjust_lr_fn"], torch.Size(shape))
            rows = (slice(None),) * stack.part_dim + (slice(start, end),)
            target[rows].add_(update[rows], alpha=-rate)


def _trained(model: nn.Module | Parted) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that are trained, each once, under their names in the model."""
    seen: set[nn.Parameter] = set()
    for part in parts_of(model):
        inner = part
        if was_touched(part):
            record = applied(part)
            record.reshard()
            inner = unwrapped(record.model)
        for name, parameter in inner.named_parameters():
            if parameter.requires_grad and parameter not in seen:
                seen.add(parameter)
                yield name, parameter


def of_plan(model: nn.Module | Parted) -> tuple[dict[str, MatrixParts], dict[str, Packing], int]:
    """The matrices in each parameter that the plan takes apart, how packed parameters are stored, and the size of tp for which they are."""
    matrices: dict[str, MatrixParts] = {}
    packed: dict[str, Packing] = {}
    tp = 1
    for part in parts_of(model):
        if was_touched(part):
            record = applied(part)
            matrices |= record.program.resolved.matrices
            if record.tp > 1:
                packed |= packed_parameters(record.program)
                tp = record.tp
    return matrices, packed, tp


def _chosen(
    model: nn.Module | Parted, named: Mapping[str, nn.Parameter], patterns: Sequence[str] | None
) -> dict[str, nn.Parameter]:
    if patterns is None:
        default = {id(p) for part in parts_of(model) for p in _matrices_of(part)}
        return {name: p for name, p in named.items() if id(p) in default}
    chosen: dict[str, nn.Parameter] = {}
    for pattern in patterns:
        glob = parse_glob(pattern)
        found = {name: p for name, p in named.items() if glob.matches(name)}
        if not found and not isinstance(model, Parted):  # a stage does not have all of the model
            one = f"; one is {next(iter(named))}" if named else ""
            raise ValueError(f"matrices: {pattern} fits no parameter that is trained{one}")
        chosen |= found
    for name, parameter in chosen.items():
        if parameter.ndim not in (2, 3):
            raise ValueError(f"matrices: {name} has {parameter.ndim} dims: a matrix has 2, a stack of matrices has 3")
    return {name: p for name, p in named.items() if name in chosen}


def _matrices_of(model: nn.Module) -> Iterator[Tensor]:
    """The weights of linear layers except the output head, and stacks of matrices that the model's own code multiplies with."""
    modules = list(model.modules())
    head = getattr(model, "get_output_embeddings", lambda: None)()
    left_out = {id(p) for module in modules if kind_of(module) == "embedding" for p in module.parameters(recurse=False)}
    left_out |= {id(p) for p in head.parameters()} if head is not None else set()
    for module in modules:
        linear = kind_of(module) in ("linear", "conv1d")
        own_code = not type(module).__module__.startswith("torch.nn.modules.")
        for parameter in module.parameters(recurse=False):
            stacked = own_code and parameter.ndim == 3 and min(parameter.shape) > 1
            if id(parameter) not in left_out and (stacked or (linear and parameter.ndim == 2)):
                yield parameter


# Whether all ranks are about to step the same matrices: if one skips a collective, the others wait for it.
SHOWN = 3


def ranks_of(parts: Iterable[nn.Module], stacks: Iterable[Stack], groups: Groups) -> ProcessGroup | None:
    """The group of all ranks that have a model's parameters, as shards or copies; None where no parameter is shared.

    It is for facts that the hosts know: its collectives run on the hosts, and do not wait for the devices.
    """
    meshes = [applied(part).mesh.mesh for part in parts if was_touched(part)]
    if not meshes or all(stack.group is None for stack in stacks):
        return None
    on_cpu = meshes[0].device_type == "cpu"
    return groups.of(tuple(sorted(meshes[0].mesh.flatten().tolist())), None if on_cpu else "gloo")


def check_same_gradients(stacks: Sequence[Stack], ranks: ProcessGroup) -> None:
    """A collective of `ranks`: an all-reduce of two numbers for each parameter.

    Raises:
        ValueError: on all ranks: some have a gradient of a parameter and others have none.
    """
    own = [stack.parameter.grad is not None for stack in stacks]
    of_all = torch.tensor([*own, *(not has for has in own)], dtype=torch.int32)
    dist.all_reduce(of_all, dist.ReduceOp.MIN, group=ranks)
    have, lack = of_all.view(2, -1).tolist()
    partly = [
        f"{stack.name} (this rank has {'one' if has else 'none'})"
        for stack, has, all_have, all_lack in zip(stacks, own, have, lack, strict=True)
        if not all_have and not all_lack
    ]
    if partly:
        raise ValueError(
            f"ranks step matrices together, and only some of them have a gradient of {in_a_row(partly, SHOWN)}. Nothing was changed. "
            "Where a rank's gradient is zero, write `p.grad = torch.zeros_like(p)` for it before step(); where the parameter is not to be "
            "stepped, set p.grad = None on all ranks"
        )
