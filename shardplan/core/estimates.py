"""The cost of a plan on a mesh, as `estimate` reports it: data, which `report` renders."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from .dtypes import dtype_name
from .mesh import Axis, MeshSizes
from .schedules import schedule_of
from .size_bounds import (
    MOST_MICRO_BATCHES,
    MOST_RANKS,
    MOST_SEQUENCES,
    MOST_TOKENS,
    check_amount,
    check_count,
    check_shares,
)

Phase = Literal["forward", "backward", "optimizer step"]
# Possible bounds of a step's time.
# "pipeline": the slowest rank's micro-batches one after the other, and its waiting for others.
Term = Literal["compute", "memory", "links in a node", "network", "pipeline"]
Precision = Literal["bf16", "fp16", "fp32"]
SHORT: dict[str, Precision] = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
OptimizerName = Literal["adamw", "adamw-fused", "adamw-for-loop", "sgd", "none", "muon", "whole-matrix"]
# Uses of memory. "gathered parameters" are FSDP's whole copies of units; "activations" what a forward keeps for its
# backward; "logits" every tensor over tokens and (a rank's part of) the vocabulary; "masks and scores" every tensor
# over pairs of tokens; "temporaries" all else.
Category = Literal[
    "parameters",
    "gradients",
    "optimizer state",
    "gathered parameters",
    "activations",
    "logits",
    "masks and scores",
    "temporaries",
]
CATEGORIES: tuple[Category, ...] = get_args(Category)
# Kept on the host by `cpu_offload`.
OFFLOADED: tuple[Category, ...] = ("parameters", "gradients", "optimizer state")


@dataclass(frozen=True, slots=True)
class Device:
    """A device and its links, as its makers state them.

    Args:
        name: its name on the command line.
        memory: bytes.
        flops: dtype ("bfloat16") -> dense floating point operations per second.
        memory_bandwidth: bytes per second.
        node_gpus: the number of devices that the fast links join.
        node_bandwidth: bytes per second that one device sends over these links (and receives as many).
        network_bandwidth: bytes per second that one device sends to other nodes.
        source: the origin of the numbers.
        efficiency: the shares of the bound's speed that steps reached on such devices, least and most; None: not measured.

    Raises:
        ValueError: a field of another type, or beyond what any device has.
    """

    name: str
    memory: int
    flops: Mapping[str, float]
    memory_bandwidth: float
    node_gpus: int
    node_bandwidth: float
    network_bandwidth: float
    source: str = ""
    efficiency: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.flops, Mapping) or not self.flops:
            raise ValueError(f"flops must be an object: dtype -> operations per second, not {self.flops!r:.80}")
        for dtype, speed in self.flops.items():
            check_amount(f"flops of {dtype}", speed)
        for name in ("memory", "memory_bandwidth", "node_bandwidth", "network_bandwidth"):
            check_amount(name, getattr(self, name))
        check_count("node_gpus", self.node_gpus, MOST_RANKS)
        if not isinstance(self.source, str):
            raise ValueError(f"source must be a text, not {self.source!r:.80}")
        if self.efficiency is not None:
            check_shares("efficiency", self.efficiency)


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """The step whose cost is estimated.

    Args:
        seq_len: tokens of a sequence.
        micro_batch: sequences of a data-parallel rank in one forward.
        precision: the dtype in which parameters, gradients and optimizer state are stored; also written "bfloat16" or
            torch.bfloat16.
        optimizer: "adamw" (torch's default on a GPU, which updates all parameters at once), "adamw-fused",
            "adamw-for-loop", "sgd", "muon" (shardplan.optimizers.Muon, with AdamW for all that is not a matrix),
            "whole-matrix" (the same with your own `whole_matrix`, whose work and states are unknown) or "none".
        expert_load: the busiest ep rank's share of all rows for experts, over the mean of the ranks; the cost is that
            rank's. 1 is an even load; at most ep.
        micro_batches: forwards and backwards per optimizer step; with pp the number that the schedule runs, else
            gradients are accumulated.
        schedule: the pipeline's, if pp is above 1: a name in `shardplan.core.schedules`, or torch's.

    Raises:
        ValueError: a size that is not a positive integer or is above its bound (`shardplan.core.size_bounds`), a load
            that is not a number from 1 on, an unknown word.
    """

    seq_len: int
    micro_batch: int = 1
    precision: Precision = "bf16"
    optimizer: OptimizerName = "adamw"
    expert_load: float = 1.0
    micro_batches: int = 1
    schedule: str = "1f1b"

    def __post_init__(self) -> None:
        object.__setattr__(self, "schedule", schedule_of(self.schedule).name)
        check_count("seq_len", self.seq_len, MOST_TOKENS)
        check_count("micro_batch", self.micro_batch, MOST_SEQUENCES)
        check_count("micro_batches", self.micro_batches, MOST_MICRO_BATCHES)
        load = self.expert_load
        if not isinstance(load, int | float) or isinstance(load, bool) or not 1 <= load < math.inf:
            raise ValueError(
                f"expert_load must be a number from 1 on, the busiest rank's rows over the mean, not {load!r}"
            )
        if self.optimizer not in get_args(OptimizerName):
            raise ValueError(f"optimizer must be one of {', '.join(get_args(OptimizerName))}, not {self.optimizer!r}")
        object.__setattr__(self, "precision", SHORT[dtype_name(self.precision, "precision")])


@dataclass(frozen=True, slots=True)
class EngineRanks:
    """The ranks that run a model for inference during training and get its weights after each step (`shardplan.refit`).

    Args:
        plan: that of the engine's model: a name, a file or a Plan.
        mesh: sizes by axis, `{"tp": 4}`.
        precision: the dtype of its weights.
        first: its first rank in the job: 0, the trainer's first, or another, such as the number of the trainer's ranks.

    Raises:
        ValueError: an unknown precision, or a first rank that is not a number from 0 on.
    """

    plan: Any
    mesh: Mapping[str, int]
    precision: Precision = "bf16"
    first: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "precision", SHORT[dtype_name(self.precision, "precision")])
        if not isinstance(self.first, int) or isinstance(self.first, bool) or self.first < 0:
            raise ValueError(f"first must be the number of a rank, not {self.first!r}")


@dataclass(frozen=True, slots=True)
class RefitEstimate:
    """The cost of one refit of an engine.

    Args:
        bytes: the number that all ranks send.
        busiest: the most bytes that one rank sends or receives.
        seconds: the least time, by the slowest link used of the device; None without a device.
    """

    bytes: int
    busiest: int
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Question:
    """The question of an estimate.

    Args:
        model, plan: the names.
        sequence_parallel: whether the plan's overlay applies.
        step: the step whose cost is estimated.
    """

    model: str
    plan: str
    sequence_parallel: bool
    step: TrainingStep


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of the rank with the largest shards (of pipeline stages, the most bytes) in a training step after the first.

    Args:
        peak: category -> bytes on the device at the moment of the largest sum.
        phase, module: the running phase and module at that moment; the module's full name, "" for the model itself.
        most: category -> the most bytes that it takes at any moment.
        host: category -> the most bytes on the host, where `cpu_offload` keeps them.
    """

    peak: Mapping[Category, int]
    phase: Phase
    module: str
    most: Mapping[Category, int]
    host: Mapping[Category, int]

    @property
    def total(self) -> int:
        """The peak in bytes."""
        return sum(self.peak.values())


@dataclass(frozen=True, slots=True)
class Traffic:
    """The bytes that one kind of collective moves over one mesh axis in a step.

    Args:
        axis: one of the axes that estimates know.
        collective: "all_gather", "reduce_scatter", "all_reduce", ...
        calls: their number.
        bytes: the number that a rank sends with ring algorithms: 2(n-1)/n of the whole tensor for an all-reduce,
            (n-1)/n for the others; for an all-to-all the larger of what it sends and receives.
    """

    axis: Axis
    collective: str
    calls: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Bound:
    """The least time of a step.

    Args:
        terms: possible bounds of the step -> the seconds that each takes at full speed.
        waiting: the seconds of collectives during which the step computes nothing. The terms of the links have them too.
    """

    terms: Mapping[Term, float]
    waiting: float = 0.0

    @property
    def by(self) -> Term:
        """The term that bounds the step."""
        return max(self.terms, key=self.total)

    @property
    def seconds(self) -> float:
        """The longest total of a term, as if all else overlapped perfectly."""
        return self.total(self.by)

    def total(self, term: Term) -> float:
        """The seconds of a term, with those in which the step waits if these come on top."""
        return self.terms[term] + (self.waiting if term in ("compute", "memory") else 0.0)


@dataclass(frozen=True, slots=True)
class PipelineEstimate:
    """The stages of a pipeline, and the effect of their schedule.

    Args:
        schedule: its name.
        micro_batches: their number in a step.
        sizes: the number of blocks in each stage.
        bubble: the share of the step, over all ranks, in which they wait: 0 to 1. It is computed from the stages'
            seconds on the device, or without one from their operations.
        peaks: for each pp rank, the bytes at its peak.
        fullest: the pp rank with the largest peak; its memory is estimated.
        in_flight: the stages of that rank -> micro-batches whose backward is not done, when these keep the most.
        busiest: the pp rank that computes the longest; its operations and communication are estimated.
    """

    schedule: str
    micro_batches: int
    sizes: tuple[int, ...]
    bubble: float
    peaks: tuple[int, ...]
    fullest: int
    in_flight: Mapping[int, int]
    busiest: int


@dataclass(frozen=True, slots=True)
class Estimate:
    """The cost of a training step of a planned model for one rank.

    Args:
        asked: the question.
        sizes: the mesh.
        parameters: the number of parameters of the whole model (elements).
        held: the number of them that a rank stores (elements).
        memory: bytes.
        flops: dtype -> floating point operations of a step, recomputation included.
        traffic: the bytes moved, by axis and collective; axes of one rank have none.
        touched: bytes of memory that the step must at least read or write.
        layers: the number of the model's repeated layers.
        traced: the traced depths; the rest is extrapolated. Equals `layers` if nothing is.
        not_modelled: costs that the figures leave out.
        device, bound: the device and the least time of a step on it; set if a device was named.
        pipeline: the stages and their schedule; set if pp is above 1.
        refit: the cost of one refit; set if an engine was named.
    """

    asked: Question
    sizes: MeshSizes
    parameters: int
    held: int
    memory: Memory
    flops: Mapping[str, int]
    traffic: tuple[Traffic, ...]
    touched: int
    layers: int
    traced: tuple[int, ...]
    not_modelled: tuple[str, ...]
    device: Device | None = None
    bound: Bound | None = None
    pipeline: PipelineEstimate | None = None
    refit: RefitEstimate | None = None

    @property
    def tokens(self) -> int:
        """Tokens of all data-parallel ranks in a step."""
        step = self.asked.step
        rows = step.micro_batch * step.micro_batches * self.sizes.dp_shard * self.sizes.dp_replicate
        return rows * step.seq_len

    @property
    def fits(self) -> bool | None:
        """Whether the peak is below the device's memory; None without a device."""
        return None if self.device is None else self.memory.total <= self.device.memory

    @property
    def tokens_per_second(self) -> float | None:
        """The most tokens per second and device; None without a device."""
        if self.bound is None or not self.bound.seconds:
            return None
        return self.tokens / self.bound.seconds / self.sizes.world_size
