"""The best configurations of a model on a number of devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from shardplan.compiler.user_inputs import AnyModel, AnyPlan, plan_name
from shardplan.core.estimates import Device, OptimizerName, Precision, Question, TrainingStep
from shardplan.core.mesh import MeshSizes
from shardplan.core.size_bounds import MOST_RANKS, MOST_SEQUENCES, check_amount, check_count, check_shares
from shardplan.core.suggest import with_known_names

from .fit_programs import Programs
from .fit_search import Search
from .keywords import model_of
from .one_at_a_time import one_at_a_time

if TYPE_CHECKING:
    from shardplan.core.fits import Fit, Fitted
    from shardplan.cost.fit_screening import Screened

TRIES = 3  # at most this many times `best` configurations are estimated, until enough of them fit
FULLEST = 0.95  # of a device's memory
OF_A_ROW = 3  # the work of an estimate, where tracing one table is 1
FLOOR = 1.005  # x the time of only the model's operations: nothing is faster


@with_known_names
@one_at_a_time
def fit(
    model: AnyModel,
    plan: AnyPlan = "auto",
    mesh: Mapping[str, int | Sequence[int]] | None = None,
    *,
    gpus: int,
    device: Device | str,
    global_batch: int,
    seq_len: int,
    precision: Precision = "fp32",
    optimizer: OptimizerName = "adamw",
    best: int = 5,
    tokens: float | None = None,
    efficiency: tuple[float, float] | None = None,
    progress: Callable[[str], None] = lambda text: None,
    found_row: Callable[[Fitted], None] = lambda row: None,
    advance: Callable[[int, int], None] = lambda done, total: None,
    derive: bool = True,
) -> Fit:
    """Find the configurations with the fastest training step on a number of devices. A configuration is a mesh (pp, dp_replicate,
    dp_shard, cp, ep, tp), micro-batch, activation checkpointing, layout of the logits, `regather`, schedule and `cpu_offload`. Many are
    compared by the costs of the model's parts. The best one of each mesh is estimated as by `estimate`; those that fit the device are returned.

    Args:
        model, plan, derive: as for `validate`.
        mesh: the sizes that are compared, by axis, `{"tp": 8, "ep": (1, 8)}`; every size is compared for an axis that is left out.
        gpus: the number of devices.
        device: as for `estimate`.
        global_batch: the sequences of a step on all devices. Micro-batches follow from it.
        seq_len: the tokens of a sequence.
        precision: the precision of stored parameters, gradients and the optimizer's state; with fp32, matrix products are in bfloat16.
        optimizer: as for `TrainingStep`. The communication of "muon" and "whole-matrix" is counted only in the estimates of the best.
        best: the number of configurations to return.
        tokens: the tokens of the whole training, for `Fit.days`.
        efficiency: the lowest and the highest share of the bound's speed that was measured on such devices; None takes them from the device's file.
        progress: called with what is being done.
        found_row: called with each configuration that fits, as soon as it is estimated.
        advance: called with the number of parts of the work that are done, and the number of all parts, which may grow.

    Raises:
        PlanError: the plan allows no tp size.
        ValueError: a wrong argument; `gpus` that are not whole nodes; a model without repeated layers; no configuration fits.
    """
    from shardplan.core.fits import Fit, is_tied
    from shardplan.cost.devices import read_device
    from shardplan.cost.mesh_candidates import axes_of
    from shardplan.cost.published import forecast_of

    named = model_of(model)
    known = read_device(device) if isinstance(device, str) else device
    _check(gpus, global_batch, best, tokens, efficiency or known.efficiency)
    _check_nodes(gpus, known)
    step = TrainingStep(seq_len, precision="bf16" if precision == "fp32" else precision, optimizer=optimizer)
    asked = Question(named.shown, plan_name(plan), False, step)
    axes = axes_of(mesh or {}, gpus)
    refused: dict[str, str] = {}
    programs = Programs(named, plan, asked, refused, progress, derive=derive)
    search = Search(programs, asked, known, gpus, global_batch, axes, precision, progress, advance)
    screened = list(search.usual())
    fitting = _fitting(screened, known)
    whole = [one for one in screened if one.choice.checkpointing == "none" and one.choice.schedule is None]
    least = min((one.bound.terms["compute"] for one in whole), default=0.0)
    if fitting and fitting[0].bound.seconds <= FLOOR * least:
        refused["cp, regather, cpu_offload"] = (
            "they save memory and no time, and 1. takes the least that its operations allow"
        )
    else:
        screened += search.sparing()
        fitting = _fitting(screened, known)
        if fitting:
            refused["cpu_offload"] = (
                "what is copied between host and device is not modelled: tried where nothing else fits"
            )
        else:
            screened += search.offloaded()
            fitting = _fitting(screened, known)
    if not fitting:
        smallest = min((one.memory for one in screened), default=0)
        if not screened:
            raise ValueError(
                f"no mesh of {gpus} {known.name} divides {global_batch} sequences among its data-parallel ranks: "
                f"take a global batch that {gpus} divides"
                + "".join(f"; {what}: {why}" for what, why in refused.items() if axes)
            )
        raise ValueError(
            f"nothing fits {gpus} {known.name} ({known.memory / 1e9:.0f} GB): the least that a configuration needs is "
            f"{smallest / 1e9:.1f} GB; take more devices, shorter sequences"
            + (" or precision bf16" if precision == "fp32" else "")
        )
    rows: list[Fitted] = []
    seen: set[MeshSizes] = set()
    search.plan_for(OF_A_ROW * best)
    for one in fitting:
        if len(rows) == best or len(seen) == best * TRIES:
            break
        if one.choice.sizes not in seen:
            seen.add(one.choice.sizes)
            row = search.fitted(one.choice)
            if row is not None:
                rows.append(row)
                found_row(row)
                search.did(OF_A_ROW)
    if not rows:
        raise ValueError(
            f"nothing fits {gpus} {known.name}: the {len(seen)} best meshes were estimated, and need more memory"
        )
    rows.sort(key=lambda row: row.order)
    compiled, _ = programs.program(rows[0].choice)
    least_bound = min(one.bound.seconds for one in fitting)
    return Fit(
        gpus=gpus,
        rows=tuple(rows),
        screened=len(screened),
        too_large=len(screened) - len(fitting),
        refused=tuple(refused.items()),
        tied=len({one.choice.sizes for one in fitting if is_tied(one.bound.seconds, least_bound)}),
        efficiency=efficiency or known.efficiency,
        forecast=forecast_of(known.name, rows[0].flops_of_a_token, rows[0].estimate.parameters),
        tokens=tokens,
        derived=compiled.given.derived,
    )


def _fitting(screened: Iterable[Screened], device: Device) -> list[Screened]:
    return sorted((one for one in screened if one.memory <= FULLEST * device.memory), key=lambda one: one.order)


def _check(
    gpus: int, global_batch: int, best: int, tokens: float | None, efficiency: tuple[float, float] | None
) -> None:
    for name, value, most in (
        ("gpus", gpus, MOST_RANKS),
        ("global_batch", global_batch, MOST_SEQUENCES),
        ("best", best, MOST_RANKS),
    ):
        check_count(name, value, most)
    if efficiency is not None:
        check_shares("efficiency", efficiency)
    if tokens is not None:
        check_amount("tokens", tokens)


def _check_nodes(gpus: int, device: Device) -> None:
    """Raise ValueError unless the devices are whole nodes: estimated times and launch lines assume this."""
    node = device.node_gpus
    if gpus > node and gpus % node:
        fewer = gpus - gpus % node
        raise ValueError(
            f"{gpus} devices are no whole nodes of {node} {device.name}: take {fewer} or {fewer + node}, or describe the device "
            f"in a file with another node_gpus"
        )
