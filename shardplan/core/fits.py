"""Configurations for a number of devices, as `fit` compares them: data, which `report` renders."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from .derived_plan import DerivedPlan
from .estimates import CATEGORIES, Bound, Category, Estimate
from .mesh import Axis, MeshSizes

Checkpointing = Literal["none", "selective", "full"]
CHECKPOINTING: dict[Checkpointing, bool | dict[str, str]] = {
    "none": False,
    "selective": {"mode": "selective"},
    "full": {"mode": "full"},
}


@dataclass(frozen=True, slots=True)
class Choice:
    """One configuration.

    Args:
        sizes: the mesh.
        micro_batch: sequences in one forward of a data-parallel rank.
        micro_batches: forwards and backwards in a step.
        checkpointing: what backward computes again.
        sharded_logits: whether logits are split over tp.
        sequence_parallel: whether the plan's overlay applies.
        regather: whether values gathered along the sequence are gathered again in backward.
        schedule: the pipeline's; None without one.
        offload: whether parameters, gradients and the optimizer's states are in the host's memory.
    """

    sizes: MeshSizes
    micro_batch: int
    micro_batches: int
    checkpointing: Checkpointing
    sharded_logits: bool = False
    sequence_parallel: bool = False
    regather: bool = False
    schedule: str | None = None
    offload: bool = False


class Order(NamedTuple):
    """The criteria by which one configuration is better than another: the first that is less decides.

    Args:
        bound: seconds of a step, to three digits.
        overlapping: the sum of all times, to a millisecond, since no step overlaps perfectly.
        memory: bytes.
    """

    bound: float
    overlapping: float
    memory: int

    @classmethod
    def of(cls, bound: Bound, memory: int) -> Order:
        return cls(float(f"{bound.seconds:.3g}"), round(sum(bound.terms.values()), 3), memory)


# Bounds that differ by less do not say which step is faster. What they do not see makes so much between published runs: compiling Llama 3.1 8B (5,605
# and 6,514 tokens/s of an H100, torchtitan); 256 and 1,024 devices for DeepSeek-V3 (1,002 and 865, NeMo Automodel), where the second has the better bound.
BOUND_ERROR = 0.15


def is_tied(seconds: float, least: float) -> bool:
    """Whether a bound is so near the least one that they do not say which step is faster."""
    return seconds <= (1 + BOUND_ERROR) * least


@dataclass(frozen=True, slots=True)
class Forecast:
    """What published runs reached.

    Args:
        least, most: the lowest and the highest MFU, 0 to 1.
        runs: the number of runs.
        of: the kind of their models.
    """

    least: float
    most: float
    runs: int
    of: str


@dataclass(frozen=True, slots=True)
class Fitted:
    """An estimated configuration.

    Args:
        flops_of_a_token: the operations of the unsharded model for one token, forward and backward, without recomputation.
    """

    choice: Choice
    estimate: Estimate
    flops_of_a_token: float

    @property
    def seconds(self) -> float:
        assert self.estimate.bound is not None
        return self.estimate.bound.seconds

    @property
    def order(self) -> Order:
        """The criteria by which configurations are compared."""
        assert self.estimate.bound is not None
        return Order.of(self.estimate.bound, self.estimate.memory.total)

    @property
    def mfu(self) -> float:
        """Model FLOP/s utilisation at the bound: operations of the model over those possible on the devices, 0 to 1."""
        device = self.estimate.device
        assert device is not None and self.estimate.tokens_per_second is not None
        return (
            self.flops_of_a_token * self.estimate.tokens_per_second / max(device.flops[d] for d in self.estimate.flops)
        )

    @property
    def largest(self) -> tuple[Category, int]:
        """The largest use of the peak memory."""
        peak = self.estimate.memory.peak
        category = max(CATEGORIES, key=lambda c: peak.get(c, 0))
        return category, peak.get(category, 0)

    @property
    def tensor_parallel(self) -> int:
        return self.choice.sizes.of(Axis.TP)


@dataclass(frozen=True, slots=True)
class Fit:
    """The best configurations for a number of devices.

    Args:
        gpus: the number of devices.
        rows: the fastest bound first.
        screened: the number of configurations compared.
        too_large: the number of them that need more memory than a device has.
        refused: configurations that were not searched, and why.
        tied: the number of meshes whose best bound is within BOUND_ERROR of the least.
        efficiency: the device's: the shares of the bound that steps reached, least and most; None: not measured.
        forecast: what published runs reached on the device; None where there are none.
        tokens: the tokens of the whole training, if given.
        derived: the plan, if `auto` derived it.
    """

    gpus: int
    rows: tuple[Fitted, ...]
    screened: int
    too_large: int
    refused: tuple[tuple[str, str], ...]
    tied: int
    efficiency: tuple[float, float] | None = None
    forecast: Forecast | None = None
    tokens: float | None = None
    derived: DerivedPlan | None = None

    def speeds(self, row: Fitted) -> tuple[float, float] | None:
        """The shares of a row's bound that its steps should reach, least and most: those measured, else those of published runs."""
        if self.efficiency is not None:
            return self.efficiency
        if self.forecast is None:
            return None
        return min(1.0, self.forecast.least / row.mfu), min(1.0, self.forecast.most / row.mfu)

    def days(self, row: Fitted, share: float = 1.0) -> float | None:
        """Days of the training at a share of the bound's speed."""
        speed = row.estimate.tokens_per_second
        if self.tokens is None or speed is None:
            return None
        return self.tokens / (speed * self.gpus * share) / 86_400
