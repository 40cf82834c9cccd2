"""Parts of a planned model that are called directly, outside of the model's own forward: a head on hidden states, a trunk
without its head, one block.

The caller passes whole values, and expects complete gradients. Without sequence parallelism the plan has both between blocks, so
such a part runs with the moves of that variant. A module inside of a split block takes or returns only a rank's share, so its
direct call raises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardplan.core.module_program import ModuleProgram
from shardplan.core.tree import ancestors, block, element
from shardplan.torchlib.private import private

from .fsdp_units import Unit
from .later_weights import eager_keeper, of_checkpoint
from .left_steps import put_right
from .regime import NOT_ALONE, Regime
from .whole_values import inside, unfit

_current_graph_task_id = private("current_graph_task_id")
_ONE_VARIANT = "the program has no variant without sequence parallelism"


def hooks_of_parts(
    model: nn.Module, outer: nn.Module, variants: Mapping[str, Mapping[str, ModuleProgram]], plain: str, regime: Regime
) -> dict[nn.Module, _Part]:
    """The forward pre-hooks of a model's parts. They know whether the part is called in the model's own forward, which `OwnForward` wraps.

    Args:
        model: the model that the program is for.
        outer: the root of FSDP2's units, if FSDP2 is used: the model or a wrapper around it.
        variants: `Program.by_name`.
        plain: the variant without sequence parallelism; if it is missing in `variants`, no part can be called directly.
    """
    planned = {name for modules in variants.values() for name in modules if name}
    around = {a for name in planned for a in ancestors(name) if a}
    hooks, programs = {}, variants.get(plain)
    inner = inside(programs or ())
    for name in sorted(planned | around):
        module, why = model.get_submodule(name), _ONE_VARIANT if programs is None else unfit(name, programs, inner)
        if why:
            why = f"{name} was called by itself, outside of the model's forward: {why}"
        if why and name not in around and all(m.get(name, ModuleProgram(name)).parameters for m in variants.values()):
            module.__dict__[NOT_ALONE] = why  # checked only where it reads its parameters: other modules pay nothing
        else:
            hooks[module] = _Part(name, why, plain, regime, outer)
    return hooks


def hooks_outside_of_units(model: nn.Module, outer: nn.Module, regime: Regime) -> dict[nn.Module, _Part]:
    """The hooks of the parts that are not inside of a unit of FSDP2, for a model whose values are whole everywhere: the root's parameters are
    gathered for a direct call. A unit gathers its own.

    Args:
        regime: one without variants.
    """
    units = {name for name, module in model.named_modules() if name and isinstance(module, FSDPModule)}
    return {
        module: _Part(name, "", regime.variant, regime, outer)
        for name, module in model.named_modules()
        if name and units.isdisjoint(ancestors(name)) and next(module.parameters(), None) is not None
    }


class OwnForward:
    """Wraps the model's forward: modules called in it are called by the model itself."""

    def __init__(self, regime: Regime):
        self.regime = regime

    def __call__(self, forward: Callable[..., Any], module: nn.Module, args: tuple, kwargs: dict) -> Any:
        regime = self.regime
        if regime.inside or torch.compiler.is_compiling():
            return forward(*args, **kwargs)
        regime.inside, regime.recording = "model", torch.is_grad_enabled()
        try:
            return forward(*args, **kwargs)
        finally:
            regime.inside = ""


class _Part:
    """Forward pre-hook of a module that may be called directly.

    Args:
        why: why it cannot be called directly; empty where it can.
    """

    def __init__(self, name: str, why: str, plain: str, regime: Regime, outer: nn.Module):
        self.name, self.why, self.plain, self.regime, self.outer = name, why, plain, regime, outer
        self.in_block = element(block(name))
        self.recomputed = False  # a checkpoint in the model's forward runs it again
        self.unrecorded = (
            False  # it was called directly without gradients, perhaps in a checkpoint with use_reentrant=True
        )

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        regime = self.regime
        if torch.compiler.is_compiling():
            return None
        if regime.inside:
            if regime.inside == "model":
                self.recomputed = self.recomputed or (not self.in_block and _checkpointed(regime))
            elif regime.inside == "part" and self.in_block and regime.home != self.plain and _checkpointed(regime):
                raise RuntimeError(self._around_checkpoint("the model's forward"))
            return None
        if _current_graph_task_id() != -1:
            if self.in_block or self.recomputed:
                self._run_again()
                return None
        elif self.why:
            raise RuntimeError(self.why)
        elif regime.home != self.plain and (self.in_block or self.recomputed) and _checkpoint_runs():
            raise RuntimeError(self._around_checkpoint(f"{self.name} (or a module around it)"))
        return self._begin(module, args, kwargs)

    def _run_again(self) -> None:
        """Called in backward: a checkpoint in the model's own forward runs the module again."""
        if self.unrecorded and self.regime.variant != self.plain and not _checkpoint_runs():
            raise RuntimeError(
                f"{self.name} runs in a backward, and was called by itself before: it is not known whether a checkpoint of the "
                "model's own forward runs it again. Under sequence parallelism use checkpoints with use_reentrant=False, and let "
                "backwards of your own code use values from the forward"
            )

    def _around_checkpoint(self, called: str) -> str:
        return (
            f"{self.name} runs in a checkpoint (gradient_checkpointing_enable(), torch.utils.checkpoint), but not in the model's own "
            "forward: in backward it would run with other moves. Use activation_checkpointing of apply_plan, or call "
            f"{called} without a checkpoint around it"
        )

    def _begin(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        regime, before = self.regime, self.regime.variant
        if regime.look is not None:
            regime.look()
        if regime.unreadable and before != self.plain:
            raise RuntimeError(
                f"{self.name} was called by itself: the plan stores {regime.unreadable} differently without sequence parallelism, so "
                "it cannot run with whole values. Call the model that the plan was applied to"
            )
        self.unrecorded = self.unrecorded or not torch.is_grad_enabled()
        root = Unit(self.outer) if isinstance(self.outer, FSDPModule) else None
        if root is not None:
            put_right(root.module)
            # As in a call of the model: the root's parameters are gathered here, and their gradients reduced after backward.
            args, kwargs = root.before_forward(args, kwargs)

        def end(module: nn.Module, args: Any, output: Any) -> Any:
            handle.remove()
            regime.variant, regime.inside = before, ""
            return output if root is None or output is None else root.after_forward(args, output)

        handle = module.register_forward_hook(end, always_call=True)
        regime.variant, regime.inside, regime.recording = self.plain, "part", torch.is_grad_enabled()
        return args, kwargs


def _checkpoint_runs() -> bool:
    """Whether a checkpoint (use_reentrant=False) keeps the tensors of this forward, or runs it again."""
    return of_checkpoint(eager_keeper())


def _checkpointed(regime: Regime) -> bool:
    return (regime.recording and not torch.is_grad_enabled()) or _checkpoint_runs()


def same_moves(forward: Callable[..., Any], regime: Regime | None) -> Callable[..., Any]:
    """The forward for a checkpoint: backward runs it again with the moves of the variant that is current now."""
    if regime is None or not regime.inside or torch.compiler.is_compiling():
        return forward
    return partial(_with_moves, forward, regime, regime.variant)


def _with_moves(forward: Callable[..., Any], regime: Regime, variant: str, /, *args: Any, **kwargs: Any) -> Any:
    before = regime.variant, regime.inside
    regime.variant, regime.inside = variant, "checkpoint"
    try:
        return forward(*args, **kwargs)
    finally:
        regime.variant, regime.inside = before
