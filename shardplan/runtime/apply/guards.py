"""The guards that watch the forwards of a planned model (docs/decisions/0004): one table, and one hook before each watched module."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardplan.runtime.parallel.left_steps import put_right

from .refusals import (
    no_attention_maps,
    no_later_adapters,
    no_later_float8,
    no_refused_arguments,
    no_whole_labels,
    weights_are_there,
)
from .same_inputs import is_compared, same_inputs
from .same_kinds import same_kinds
from .same_weights import one_initialisation, same_weights
from .sampling import end_together, sample_alike
from .unchanged import same_flags, unchanged
from .unequal_means import warn_of_unequal_means
from .watched import Look, Looks, Watched

Kind = Literal["program", "stage", "model"]
KINDS: tuple[Kind, ...] = ("program", "stage", "model")


@dataclass(frozen=True, slots=True)
class Guard:
    """A row of the table.

    Args:
        looks: a watched model -> its modules before whose forwards the guard looks, and the function that looks; empty: nothing to check.
        of: what it is attached to: "program": every applied program, also in proofs; "stage": the stages of a pipeline and whole models that
            users train; "model": such whole models alone.
        some: it looks only at forwards 1, 2, 4, ..., 512, and then at every 1,000th.
        compares: it compares values between ranks; attached only with `check_inputs`.
        alone: it is a separate hook, because it may change the arguments, and hundreds of modules have one; others share one hook per module.
        in_graphs: it also looks while a forward is being compiled; what it reads becomes part of the graph's guards.
    """

    looks: Callable[[Watched], Looks]
    of: Kind
    some: bool = False
    compares: bool = False
    alone: bool = False
    in_graphs: bool = False


def _put_right(watched: Watched) -> Looks:
    root = watched.outer
    return {root: lambda module, args, kwargs: put_right(root)} if isinstance(root, FSDPModule) else {}


# In the order in which they look. First the calls that are refused whatever the ranks hold. Then missing weights: without weights there
# is nothing to compare. Then the comparisons between ranks; the inputs come last, as the others name errors of all inputs. FSDP2's state
# is put right last, if nothing else raises. FSDP2's own hooks run after all guards: where only some ranks raise, their collectives would
# not match otherwise; and FSDP2 fixes its state in its first forward, even in one that fails.
GUARDS: tuple[Guard, ...] = (
    Guard(no_attention_maps, "program", in_graphs=True),
    Guard(no_refused_arguments, "program", in_graphs=True),
    Guard(no_whole_labels, "program", in_graphs=True),
    Guard(no_later_adapters, "program", in_graphs=True),
    Guard(weights_are_there, "stage"),
    Guard(no_later_float8, "model", some=True),
    Guard(unchanged, "stage"),
    Guard(same_flags, "stage", some=True),
    Guard(same_weights, "stage", compares=True),
    Guard(one_initialisation, "model", compares=True),
    Guard(same_kinds, "model", compares=True),
    Guard(same_inputs, "model", compares=True),
    Guard(_put_right, "program"),
    Guard(lambda watched: watched.parts, "program", alone=True),
)


def guard(watched: Watched, kind: Kind, *, compare: bool) -> None:
    """Attach the guards to a model that a plan was applied to. Let its ranks sample together, and watch which labels its losses average.

    Args:
        compare: compare the inputs of tp ranks, the kinds of inputs and the labels of data-parallel ranks, and the weights of replicas.
    """
    found: dict[nn.Module, list[tuple[Guard, Look]]] = defaultdict(list)
    for one in GUARDS:
        if KINDS.index(one.of) <= KINDS.index(kind) and (compare or not one.compares):
            for module, look in one.looks(watched).items():
                if one.alone:
                    module.register_forward_pre_hook(look, prepend=True, with_kwargs=True)
                else:
                    found[module].append((one, look))
    for module, looking in found.items():  # registered last with prepend=True, so it runs before the separate hooks
        _watch(module, looking)
    if kind == "model" and watched.mesh.tp is not None and watched.mesh.tp_size > 1:
        sample_alike(watched.inner, watched.mesh.tp)
    if kind == "model" and watched.mesh.sizes.dp_shard > 1:
        end_together(watched.inner)
    if kind == "model" and compare:
        warn_of_unequal_means(watched)


def _watch(module: nn.Module, looking: Sequence[tuple[Guard, Look]]) -> None:
    """Call all guards of a module before its forward; the hook is removed with the last of them."""
    always = [look for one, look in looking if one.in_graphs]
    others = [(one.some, look) for one, look in looking if not one.in_graphs]
    count = 0

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal count
        for look in always:
            look(module, args, kwargs)
        if torch.compiler.is_compiling():
            return
        count += 1
        for one in tuple(others):
            some, look = one
            if (not some or is_compared(count)) and look(module, args, kwargs):
                others.remove(one)
        if not (always or others):
            handle.remove()

    handle = module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
