"""The run of a single rank, with its shards of the parameters and the results of the plan's moves.

It needs no process group: the unsharded run gives a move's result, whole or as this rank's slice.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from shardplan.core.layout import Layout, P, in_one_row, over_features
from shardplan.core.mesh import Axis
from shardplan.core.module_program import ArgumentSlice, ParameterProgram
from shardplan.model.forward_code import argument_names
from shardplan.model.rebinding import copied
from shardplan.model.reduced.recorder import Recorder
from shardplan.model.reduced.trace import Place, Trace
from shardplan.styles.bound import BoundModule
from shardplan.styles.boundary import InputBoundary
from shardplan.torchlib.attributes import divide_attributes, owner_of, set_attributes
from shardplan.torchlib.rms_norms import RMS_NORMS, rms_norm

from .rank_experts import distribute_experts
from .spread import chunk, same
from .typed_modules import is_mean, outside_in
from .types import read_order


class RankRecorder(Recorder):
    """Records what one rank computes.

    Args:
        model: its model, as `rank_model` makes it.
        atoms: see Recorder.
        plan: each module and its boundary.
        reference: the unsharded run.
        ranks: the size of the axis.
        rank: this rank.
        probes, planted: see Recorder.
    """

    def __init__(
        self,
        model: nn.Module,
        atoms: frozenset[str],
        plan: Mapping[str, BoundModule],
        reference: Trace,
        ranks: int,
        rank: int,
        probes: Mapping[Place, Iterable[int]] = MappingProxyType({}),
        planted: Mapping[Place, Tensor] = MappingProxyType({}),
    ):
        super().__init__(model, atoms, probes, planted=planted)
        self.plan, self.reference, self.ranks, self.rank = plan, reference, ranks, rank

    def parameter_inputs(self, name: str) -> tuple[str, ...]:
        withheld = {p.name for p in self.plan[name].parameters if p.withheld}
        return tuple(p for p in super().parameter_inputs(name) if p not in withheld)

    def moved_arguments(self, scope: tuple[str, int], module: nn.Module, named: dict[str, Any]) -> dict[str, Tensor]:
        bound = self.plan[scope[0]]
        moved, before = {}, dict[tuple[int, Layout], Tensor]()
        for one in bound.boundary.inputs:
            for name in chosen_arguments(bound, one, module, named):
                if name in moved:
                    raise ValueError(f"the rule moves the argument {name!r} by its style, and under `arguments`")
                whole = self.reference.argument(*scope, name)
                same = before.get((id(named[name]), one.destination))  # the same tensor, as at run time
                new = same if same is not None or whole is None else self._placed(one.destination, named[name], whole)
                if new is not None:
                    moved[name] = before[id(named[name]), one.destination] = new
        for part in bound.slices:
            moved[part.argument] = self._share(part, tensor_argument(bound, part.argument, named))
        return moved

    def _share(self, part: ArgumentSlice, x: Tensor) -> Tensor:
        """The rank's share of an argument."""
        rows = part.rows(x.shape, self.ranks)
        own = x.detach().unflatten(part.dim, rows).narrow(part.dim + 1, *chunk(rows[1], self.ranks, self.rank))
        return _like(x, own.flatten(part.dim, part.dim + 1))

    def moved_results(
        self, scope: tuple[str, int], module: nn.Module, results: list[tuple[str, Tensor]]
    ) -> dict[int, Tensor]:
        bound = self.plan[scope[0]]
        output, outside = bound.boundary.output, outside_in(bound, [name for name, _ in results])
        moved = {}
        for position in (0, *outside):
            whole = self.reference.result(*scope, position)
            if whole is None or position >= len(results):
                continue
            if position in outside:
                moved[position] = _like(results[position][1], whole)
            elif output is not None and output.moves:
                waits = bound.scope is not None and self.runs_inside(bound.scope)
                destination = P if waits else output.destination
                if destination == output.source == P:
                    continue
                new = self._placed(
                    destination, results[0][1], whole, in_one_row(self._argument(scope), whole.shape, destination)
                )
                if new is not None:
                    self._fits_bias(scope[0], new, whole)
                    moved[0] = new
        return moved

    def _fits_bias(self, name: str, own: Tensor, whole: Tensor) -> None:
        """A bias that is added after the reduction is added to all features."""
        biases = [p.name for p in self.plan[name].parameters if p.withheld]
        if biases and own.ndim and own.shape[-1] != whole.shape[-1]:
            raise ValueError(
                f"{name}.{biases[0]} is added to the output after its reduction and has {whole.shape[-1]} features, but a rank's "
                f"output has {own.shape[-1]}: the output is split in its last dim, {whole.ndim - 1}"
            )

    def before_operation(self, name: str, operands: list[Tensor]) -> None:
        """Refuse a rank without heads or features before a kernel gets its empty tensor: some kernels divide by its
        length, which ends the process. Code that gets empty tensors unsharded too (experts without tokens) may run."""
        empty = next((t for t in operands if not t.numel()), None)
        if empty is not None and self._scopes[-1][0] not in self.reference.empty:
            raise ValueError(
                f"{name} gets an empty tensor {list(empty.shape)} on rank {self.rank}: the split leaves nothing for it"
            )

    def in_place_of(self, func: Callable[..., Any], args: tuple, kwargs: dict) -> Callable[..., Any]:
        """torch's RMS norm over features that several ranks share takes the mean of the unsharded run."""
        place = (*self._scopes[-1], self._position())
        event = self.reference.at.get(place)
        if func not in RMS_NORMS or self.plan[place[0]].mean_ranks == 1 or event is None:
            return func
        whole = self.reference.values[event.inputs[0]]
        squares = whole.to(torch.promote_types(whole.dtype, torch.float32)).pow(2)
        mean = self._mean(squares.mean(-1, keepdim=True), place[0])
        return partial(rms_norm, lambda own: mean)

    def settle_choice(self, place: Place, name: str, operands: list[Tensor], results: list[Tensor]) -> None:
        """A rank that chooses among values of the unsharded run takes that run's choice, so that both continue alike.
        Between nearly equal values (the best of many zeros), only rounding would decide. A mean over the features of
        all ranks is that run's too."""
        event = self.reference.at.get(place)
        if event is None or event.name != name or len(event.inputs) != len(operands):
            return
        values = self.reference.values
        if is_mean(self.plan, place[0], name) and over_features(
            operands[0].shape, self.argument_shape(), grouped=self.plan[place[0]].grouped
        ):
            mean = self._mean(values[event.outputs[0]], place[0])
            if results[0].shape == mean.shape:  # over all features, and maybe others
                results[0].data.copy_(mean)
        chosen = [t for t in results if not t.is_floating_point()]
        whole = [values[i] for i in event.outputs if not values[i].is_floating_point()]
        if [t.shape for t in chosen] != [t.shape for t in whole]:
            return
        if any(not torch.equal(t, w) for t, w in zip(chosen, whole, strict=True)) and all(
            same(t, values[i], self.reference.rounding[i]) for t, i in zip(operands, event.inputs, strict=True)
        ):
            for t, w in zip(chosen, whole, strict=True):
                t.copy_(w)

    def _mean(self, whole: Tensor, module: str) -> Tensor:
        """The unsharded run's means, or those of the group that this rank has a part of."""
        over = self.plan[module].mean_ranks
        return whole if over == self.ranks or whole.ndim < 2 else whole.narrow(-2, self.rank // over, 1)

    def _argument(self, scope: tuple[str, int]) -> tuple[int, ...] | None:
        """The shape of the whole argument that a module's rule moves."""
        inputs = self.plan[scope[0]].boundary.inputs
        if not inputs or inputs[0].argument == "*":
            return None
        name = inputs[0].argument or argument_names(self.model.get_submodule(scope[0]))[0]
        value = self.reference.argument(*scope, name)
        return None if value is None else tuple(value.shape)

    def _placed(self, layout: Layout, x: Tensor, whole: Tensor, row: tuple[int, int] | None = None) -> Tensor | None:
        """This rank's part of a whole value; None to keep the present one."""
        if row is not None:
            part = self._placed(layout, x.unflatten(0, row), whole.unflatten(0, row))
            return None if part is None else _like(x, part.detach().flatten(0, 1))
        if layout.kind in "IR":
            return _like(x, whole)
        if layout.kind == "P":
            return _like(x, whole / self.ranks)  # ids too, as the move does: their reader then raises
        dim = layout.split_dim(whole.ndim)
        if layout.dim == 1 and whole.ndim == 2 and tuple(x.shape) == (whole.shape[0] // self.ranks, whole.shape[1]):
            return None  # slices of a sequence, in one row of tokens
        slices, own = self.ranks // layout.copies, self.rank // layout.copies
        part = whole.narrow(dim, *chunk(whole.shape[dim], slices, own))
        return None if x.shape == part.shape else _like(x, part)


def _like(x: Tensor, value: Tensor) -> Tensor:
    """A copy of the value that is differentiable if `x` is, and not a leaf: models may change it in place."""
    return value.clone().requires_grad_().clone() if x.requires_grad else value.clone()


def chosen_arguments(
    bound: BoundModule, one: InputBoundary, module: nn.Module, named: Mapping[str, Any]
) -> tuple[str, ...]:
    """The arguments that an input boundary moves.

    Raises:
        ValueError: the call has no such tensor.
    """
    if one.argument == "*":
        return tuple(n for n, v in named.items() if isinstance(v, Tensor) and v.is_floating_point())
    name = one.argument or argument_names(module)[0]
    tensor_argument(bound, name, named)
    return (name,)


def tensor_argument(bound: BoundModule, name: str, named: Mapping[str, Any]) -> Tensor:
    """An argument that a module's rule moves.

    Raises:
        ValueError: the call has no such tensor.
    """
    value = named.get(name)
    if not isinstance(value, Tensor):
        assert bound.style is not None, bound  # a rule names an argument
        what = "missing" if value is None else f"a {type(value).__name__}"
        raise ValueError(f"style {bound.style.name} moves the argument {name!r}, which is {what} in this call")
    return value


def local_part(whole: Tensor, parameter: ParameterProgram, ranks: int, rank: int) -> Tensor:
    """The part of a parameter that a rank reads."""
    dim = parameter.computed.dim
    if parameter.stored.axis is not Axis.TP:  # the exchange brings each rank the results of all experts
        return whole
    if not isinstance(dim, int):
        return whole / ranks if parameter.computed == P else whole
    order = read_order(parameter, whole.shape[dim], ranks)
    if order is not None:
        return whole.index_select(dim, torch.tensor(order[rank], dtype=torch.long))
    return whole.narrow(dim, *chunk(whole.shape[dim], ranks, rank)).clone()


def rank_model(
    model: nn.Module, plan: Mapping[str, BoundModule], ranks: int, rank: int, written: Collection[str] = ()
) -> nn.Module:
    """A copy of the model with a rank's shards. A tied parameter becomes two, as each is read on its own. Whole
    parameters are shared with the model, except those that a forward changes."""
    local = copied(model, {id(p): p for name, p in model.named_parameters() if name not in written})
    for bound in plan.values():
        module = local.get_submodule(bound.name)
        for parameter in bound.parameters:
            owner, leaf = owner_of(module, parameter.name)
            parameters: dict[str, Any] = owner._parameters  # a plain tensor in place of a withheld parameter
            old = parameters[leaf]
            if old is None:
                continue
            if parameter.withheld:
                parameters[leaf] = torch.zeros_like(old) if parameter.withheld == "zeros" else None
                continue
            data = local_part(old.detach(), parameter, ranks, rank)
            parameters[leaf] = nn.Parameter(data, requires_grad=old.requires_grad)
        layer = module.get_submodule(bound.module.layer)  # "" is the module itself
        for buffer in bound.buffers:
            whole = layer._buffers[buffer.name]
            layer._buffers[buffer.name] = None if whole is None else local_part(whole, buffer, ranks, rank)
        divide_attributes(layer, bound.divide)
        set_attributes(layer, bound.settings)
        if bound.vocabulary is not None:
            assert isinstance(layer, nn.Embedding), bound.name
            layer.padding_idx = None
            _look_up_own_rows(layer, bound.vocabulary, ranks, rank)
        if bound.experts is not None and not bound.experts.exchange:
            distribute_experts(module, bound.experts.count, ranks, rank)
    return local


def _look_up_own_rows(module: nn.Module, rows: int, ranks: int, rank: int) -> None:
    """Ids of other ranks' rows give zeros."""
    start, length = chunk(rows, ranks, rank)
    own: Callable[..., Tensor] = module.forward  # the class's, or one that was set on the instance

    def forward(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        foreign = (input < start) | (input >= start + length)
        vectors = own((input - start).masked_fill(foreign, 0), *args, **kwargs)
        return vectors.masked_fill(foreign.unsqueeze(-1), 0)

    module.forward = forward


def run_rank(
    model: nn.Module,
    inputs: Mapping[str, Any],
    atoms: frozenset[str],
    plan: Mapping[str, BoundModule],
    reference: Trace,
    ranks: int,
    rank: int,
    probes: Mapping[Place, Iterable[int]] = MappingProxyType({}),
    planted: Mapping[Place, Tensor] = MappingProxyType({}),
) -> Trace:
    """Run one rank and record it."""
    own = rank_model(model, plan, ranks, rank, reference.written)
    recorder = RankRecorder(own, atoms, plan, reference, ranks, rank, probes, planted)
    recorder.run(inputs)
    return recorder.trace
