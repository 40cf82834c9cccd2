"""The best configurations as records of their JSON form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from shardplan.core.fits import Fit, Fitted

from .estimate_json import asked_record, mesh_record
from .fit_script import launch_lines
from .fit_text import why
from .records import VERSION, AskedRecord, EstimateRecord


@dataclass(frozen=True, slots=True)
class ConfigurationRecord:
    """One configuration of a training step."""

    asked: AskedRecord
    checkpointing: Literal["none", "selective", "full"]
    logits: Annotated[Literal["plan", "sharded"], "sharded: split over tp; plan: as the plan has them"]
    schedule: Annotated[str | None, "of pipeline stages; null without"]
    regather: Annotated[bool, "what is gathered along the sequence is gathered again in backward"]
    cpu_offload: Annotated[bool, "parameters, gradients and the optimizer's states are in the host's memory"]
    estimate: EstimateRecord
    mfu: Annotated[float, "model FLOP/s utilisation at the bound, 0 to 1"]
    days: Annotated[float | None, "of the whole training at the bound; null where its tokens were not given"]
    before_the_next: Annotated[str | None, "why it is before the next one; null for the last"]


@dataclass(frozen=True, slots=True)
class LaunchRecord:
    launcher: str
    command: str


@dataclass(frozen=True, slots=True)
class NotSearchedRecord:
    what: str
    reason: str


@dataclass(frozen=True, slots=True)
class FitReport:
    """What `shardplan fit --json` prints."""

    kind: Literal["fit"]
    version: Literal["1"]
    devices: int
    configurations: Annotated[tuple[ConfigurationRecord, ...], "the fastest bound first"]
    compared: Annotated[int, "how many configurations were compared"]
    too_large: Annotated[int, "of them, those that need more memory than a device has"]
    efficiency: Annotated[tuple[float, ...] | None, "measured shares of the bound, the least and the most"]
    not_searched: tuple[NotSearchedRecord, ...]
    launch: Annotated[tuple[LaunchRecord, ...], "of the first configuration, with a script train.py"]
    plan: Annotated[str | None, "the plan, where auto derived it"]


def fit_record(fit: Fit) -> FitReport:
    reasons = [why(one, other) for one, other in zip(fit.rows, fit.rows[1:], strict=False)]
    return FitReport(
        kind="fit",
        version=VERSION,
        devices=fit.gpus,
        configurations=tuple(
            _configuration(fit, row, reason) for row, reason in zip(fit.rows, [*reasons, None], strict=True)
        ),
        compared=fit.screened,
        too_large=fit.too_large,
        efficiency=fit.efficiency,
        not_searched=tuple(NotSearchedRecord(what, reason) for what, reason in fit.refused),
        launch=tuple(LaunchRecord(*line) for line in launch_lines(fit.rows[0], "train.py")),
        plan=fit.derived.text if fit.derived is not None else None,
    )


def _configuration(fit: Fit, row: Fitted, reason: str | None) -> ConfigurationRecord:
    return ConfigurationRecord(
        asked=asked_record(row.estimate.asked),
        checkpointing=row.choice.checkpointing,
        logits="sharded" if row.choice.sharded_logits else "plan",
        schedule=row.choice.schedule,
        regather=row.choice.regather,
        cpu_offload=row.choice.offload,
        estimate=mesh_record(row.estimate),
        mfu=row.mfu,
        days=fit.days(row),
        before_the_next=reason,
    )
