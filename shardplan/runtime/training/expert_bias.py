"""Balancing experts without an auxiliary loss: a bias on the scores by which a router chooses them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardplan.core.layout import V
from shardplan.core.mesh import BATCHES, Axis
from shardplan.core.plan import variant_name, without_sequence
from shardplan.core.tree import full_name, parent
from shardplan.runtime.apply import Applied, applied
from shardplan.runtime.apply.applied import was_touched
from shardplan.runtime.apply.model_parts import Parted, parts_of
from shardplan.runtime.parallel.expert_calls import expert_call
from shardplan.styles.token_layouts import has_own_tokens, tokens_layout
from shardplan.torchlib.gathering import of_all
from shardplan.torchlib.private import private

_current_graph_task_id = private("current_graph_task_id")
_KEY = "_shardplan_token_counts"  # on a module of experts
_BEGUN = "_shardplan_counts_tokens"  # on a model, or a part of one, which may have no experts
BIAS = "e_score_correction_bias"  # its name in DeepSeek-V3 and its relatives
_DTYPES = (torch.float32, torch.float64)


@dataclass(eq=False)
class _Counts:
    """The tokens of each expert of a module since the last update.

    Args:
        module: the name of the module of experts.
        bias: their router's, [E].
        record: the plan's record; None where no plan was applied.
        found: (whether each tp rank counts different tokens, whether each cp rank does) -> counts, [E].
    """

    module: str
    bias: Tensor
    record: Applied | None
    found: dict[tuple[bool, bool], Tensor] = field(default_factory=dict)

    @torch.compiler.disable(reason="what runs is counted, not what is compiled")
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count before a call of the experts. A call in backward is not counted: a checkpoint makes it, with the same tokens."""
        if not (module.training and torch.is_grad_enabled()) or _current_graph_task_id() != -1:
            return
        with torch.no_grad():
            ids = expert_call(self.module, args, kwargs).ids.reshape(-1).long()
            own = self.bias.new_zeros(self.bias.shape, dtype=torch.long, device=ids.device)
            own.scatter_add_(0, ids, torch.ones_like(ids))
            split = self._split()
            self.found[split] = self.found[split] + own if split in self.found else own

    def _split(self) -> tuple[bool, bool]:
        """Whether tp ranks, and whether cp ranks, have different tokens in the current variant."""
        if self.record is None or self.record.shared is None:
            return False, False
        resolved = self.record.program.resolved
        if self.record.shared.regime.variant == variant_name(without_sequence(resolved.overlays)):
            return False, False
        return tokens_layout(resolved, self.module) == V(0), has_own_tokens(resolved, self.module)

    def of(self, split: tuple[bool, bool]) -> Tensor:
        """[E] on the bias's device."""
        found = self.found.get(split)
        return torch.zeros_like(self.bias, dtype=torch.long) if found is None else found.to(self.bias.device)


def count_expert_tokens(model: nn.Module | Parted, bias: str = BIAS) -> None:
    """Begin to count the tokens of each expert, for `update_expert_bias`: in forwards of modules in training mode, while gradients
    are recorded. Call it once, after `apply_plan`, on all ranks. Further calls change nothing.

    Modules of experts are found by their structure: their own parameters are stacks [E, ...], some with three dims or more; and
    they or the module around them have a floating-point buffer with the bias's name and E elements.

    Args:
        model: what `apply_plan` returned, or a model without a plan; its tokens are then this process's.
        bias: the last part of the buffer's name.

    Raises:
        ValueError: no module of experts has such a buffer, or one has several; the buffer is in half precision, which loses
            small steps.
    """
    pairs = [pair for part in parts_of(model) for pair in _pairs(part, bias)]
    if not _on_any_rank(model, bool(pairs)):
        raise ValueError(
            f"no module of experts has a router bias {bias!r} next to it, a floating-point buffer with an element for each expert: "
            "pass the name that the buffer has in this model"
        )
    modules, owners = [name for _, name, *_ in pairs], [id(found) for *_, found in pairs]
    if len(set(modules)) < len(modules) or len(set(owners)) < len(owners):
        raise ValueError(
            f"each module of experts needs one buffer {bias!r}, and each buffer one module, which is not so for {', '.join(modules)}"
        )
    for _, name, _, found in pairs:
        if found.dtype not in _DTYPES:
            raise ValueError(
                f"{bias} of the router of {name} is in {found.dtype}, in which small steps are lost: keep it in float32"
            )
    for part in parts_of(model):
        part.__dict__[_BEGUN] = True
    for record, name, module, found in pairs:
        if _KEY not in module.__dict__:
            module.__dict__[_KEY] = counts = _Counts(name, found, record)
            module.register_forward_pre_hook(counts, with_kwargs=True)


def _on_any_rank(model: nn.Module | Parted, found: bool) -> bool:
    """Whether some rank found something in its parts of the model."""
    return any(of_all(found, model.group)) if isinstance(model, Parted) else found


def _pairs(part: nn.Module, bias: str) -> Iterator[tuple[Applied | None, str, nn.Module, Tensor]]:
    """(record of the plan, name, module, bias) of each module of experts."""
    record, names = _names(part)
    for name, module in names.items():
        yield from ((record, name, module, found) for found in _biases(names, name, module, bias))


def _names(model: nn.Module) -> tuple[Applied | None, dict[str, nn.Module]]:
    """The plan's record, and the modules of the model inside of wrappers, by the plan's names."""
    if not was_touched(model):
        return None, dict(model.named_modules())
    record = applied(model)
    *_, inner = (module for module in model.modules() if was_touched(module) and applied(module) is record)
    return record, dict(inner.named_modules())


def _biases(names: dict[str, nn.Module], name: str, module: nn.Module, bias: str) -> Iterator[Tensor]:
    """The biases of a module's router; none for a module without experts."""
    shapes = [parameter.shape for parameter in module.parameters(recurse=False)]
    counts = {shape[0] for shape in shapes if shape}
    if not name or len(counts) != 1 or not all(shapes) or max(map(len, shapes)) < 3:
        return
    for path, buffer in names[parent(name)].named_buffers():
        inside = full_name(parent(name), path).startswith(f"{name}.")
        if path.rpartition(".")[2] == bias and buffer.is_floating_point() and not inside:
            if buffer.ndim == 1 and buffer.numel() in counts:
                yield buffer


@torch.no_grad()
def update_expert_bias(model: nn.Module | Parted, rate: float) -> None:
    """Balance the experts, after the optimizer's step. The bias of an expert grows by the rate if the expert had fewer tokens than
    its router's mean, and shrinks by the rate if it had more. Then the counts restart.

        shardplan.count_expert_tokens(model)  # once
        ...
        optimizer.step()
        shardplan.update_expert_bias(model, 1e-3)

    It uses the tokens of all micro-batches since the last update, on all ranks with different tokens. A token counts once for each of
    its experts, and not again if activation checkpointing reruns the experts. The call is a collective of all ranks of the mesh,
    with one all-reduce for each axis. The biases are equal on all ranks, and equal to the unsharded model's.

    Auxiliary-loss-free load balancing (arXiv 2408.15664), as DeepSeek-V3 was trained.

    Args:
        model: as in `count_expert_tokens`.
        rate: the number that is added or subtracted, above 0: 1e-3 in the paper.

    Raises:
        ValueError: the rate is not a number above 0; tokens are not being counted; no rank counted a token since the last
            update.
    """
    if not (isinstance(rate, int | float) and not isinstance(rate, bool) and math.isfinite(rate) and rate > 0):
        raise ValueError(f"rate must be a number above 0, not {rate!r}")
    if not any(_BEGUN in part.__dict__ for part in parts_of(model)):
        raise ValueError("tokens are not counted: call shardplan.count_expert_tokens(model) once, after apply_plan")
    modules = (module for part in parts_of(model) for module in part.modules())
    routers: list[_Counts] = [module.__dict__[_KEY] for module in modules if _KEY in module.__dict__]
    if not routers:
        return  # neither this rank's stages nor those of the ranks that it reduces with have experts
    totals = _on_all_ranks(routers)
    nothing = [router.module for router, total in zip(routers, totals, strict=True) if not total.any()]
    if nothing:
        raise ValueError(
            f"no token reached {nothing[0]} since the last update: call this after a step, and run the forward in training mode with "
            "gradients recorded (a reentrant checkpoint records none)"
        )
    for router, total in zip(routers, totals, strict=True):
        # In integers, so that a count equal to the mean does not differ from it by rounding.
        router.bias.add_((total.sum() - total * total.numel()).sign().to(router.bias.dtype), alpha=rate)
        router.found.clear()


def _on_all_ranks(routers: Sequence[_Counts]) -> list[Tensor]:
    """The counts of each router, [E]."""
    record, split = routers[0].record, (False, True)
    found = [[torch.cat([router.of((tp, cp)) for router in routers]) for cp in split] for tp in split]
    (whole, over_cp), over_tp = found[0], torch.stack(found[1])
    if record is not None:
        mesh = record.mesh

        def add_up(counts: Tensor, axis: Axis) -> None:
            if axis in mesh.names and mesh.sizes.of(axis) > 1:
                dist.all_reduce(counts, group=mesh.axes[axis].get_group())

        add_up(over_tp, Axis.TP)
        over_cp += over_tp[1]
        add_up(over_cp, Axis.CP)
        whole += over_tp[0] + over_cp
        for axis in BATCHES:
            add_up(whole, axis)
    return list(whole.split([router.bias.numel() for router in routers]))
