"""A training step of a sharded model, traced with the meter, and its ledger."""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from shardplan.compiler.lower.program import Program
from shardplan.core.diagnostics import Code, PlanError
from shardplan.core.estimates import OptimizerName, Question, TrainingStep
from shardplan.core.mesh import Axis
from shardplan.core.plan import ResolvedPlan
from shardplan.model.config_numbers import config_value, text_config
from shardplan.model.found import FoundModel
from shardplan.model.model_findings import reason, refuse
from shardplan.model.reduced.feeding import given
from shardplan.model.reduced.model_inputs import CHOICES, SPAN, labels_of
from shardplan.model.reduced.outcome import loss_of
from shardplan.runtime.apply.applied import applied
from shardplan.runtime.apply.expert_mesh import EP, EP_SHARD
from shardplan.runtime.apply.fsdp2 import gather_once
from shardplan.runtime.apply.kept_ties import restore_ties, tied_groups
from shardplan.runtime.apply.phases import apply_program
from shardplan.runtime.apply.plan_mesh import PlanMesh
from shardplan.runtime.parallel.expert_routes import LOAD
from shardplan.runtime.parallel.fsdp_units import kept_over
from shardplan.runtime.parallel.vocabulary_sums import tokens_of_chunk
from shardplan.runtime.training.context_parallel import context_parallel
from shardplan.styles.backends import BACKENDS
from shardplan.styles.boundary import returns_tokens
from shardplan.torchlib.gathering import without_advice
from shardplan.torchlib.local_parts import to_local_if_dtensor

from .depth import restricted
from .fake_rank import fake_mesh, groups_of, without_memory
from .ledger import Ledger, moments_of
from .meter import Meter, category_of
from .overlap import ALONE, Overlap
from .part_costs import Stored, part_costs
from .running_module import Places
from .traced_parts import SHARED, PartNames, Parts

# An optimizer over a rank's local part of each parameter.
MakeOptimizer: TypeAlias = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class Updates:
    """The optimizer of a traced model. DTensor runs each operator on the local tensors; this optimizer works on the local
    tensors directly, and makes the same tensors in a third of the time.

    Args:
        model: the sharded model.
        make: parameters -> their optimizer.
    """

    def __init__(self, model: nn.Module, make: MakeOptimizer) -> None:
        self._model, self._make = model, make
        self._optimizer: torch.optim.Optimizer | None = None
        self._own: dict[nn.Parameter, nn.Parameter] = {}

    def step(self) -> None:
        """Update every parameter that has a gradient."""
        if self._optimizer is None:  # in the first forward, FSDP2 may give shards another storage
            alike = all(_as_placed(p) for p in self._model.parameters())
            self._own = {p: _local_parameter(p) if alike else p for p in self._model.parameters()}
            self._optimizer = self._make(self._own.values())
        for parameter, own in self._own.items():
            if own is not parameter and parameter.grad is not None:
                own.grad = to_local_if_dtensor(parameter.grad)
        self._optimizer.step()
        for parameter, own in self._own.items():
            if own is not parameter:
                own.grad = None

    @property
    def states(self) -> list[Tensor]:
        """This rank's part of the optimizer's states."""
        return [x for parameter in self._own for x in self.states_of(parameter)]

    def states_of(self, parameter: nn.Parameter) -> list[Tensor]:
        """The states of one parameter."""
        if self._optimizer is None:
            return []
        states = self._optimizer.state.get(self._own[parameter], {}).values()
        return [to_local_if_dtensor(x) for x in states if isinstance(x, Tensor)]


def _as_placed(parameter: nn.Parameter) -> bool:
    """Whether a gradient has its parameter's placements; otherwise DTensor has to redistribute it first."""
    gradient = parameter.grad
    if not isinstance(gradient, DTensor):
        return True
    return isinstance(parameter, DTensor) and gradient.placements == parameter.placements


def _local_parameter(parameter: nn.Parameter) -> nn.Parameter:
    if not isinstance(parameter, DTensor):
        return parameter
    return nn.Parameter(parameter.to_local().detach(), requires_grad=parameter.requires_grad)


NOT_TRACED = Code("SP560")

OPTIMIZERS: dict[OptimizerName, MakeOptimizer | None] = {
    # On a GPU, torch's default updates all parameters at once, and makes temporary tensors of the same size.
    "adamw": partial(torch.optim.AdamW, foreach=True),
    "adamw-fused": partial(torch.optim.AdamW, fused=True),
    "adamw-for-loop": partial(torch.optim.AdamW, foreach=False),
    "sgd": partial(torch.optim.SGD, foreach=True),
    "none": None,
    "muon": None,  # `with_muon` counts it
    "whole-matrix": None,
}


def trace(
    model: nn.Module,
    mesh: PlanMesh,
    inputs: Callable[[], Mapping[str, Any]],
    *,
    optimizer: OptimizerName,
    logits: Iterable[tuple[int, int]],
    pairs: int,
    offloaded: bool,
    name: str,
    names: PartNames | None = None,
    micro_batches: int = 1,
) -> Ledger:
    """Run a step on tensors without memory, and measure it like a step after the first: the tensors into which FSDP2 gathers
    exist before it, and the optimizer's states, which the first update makes, count from its beginning.

    Args:
        model: the sharded model, on the meta device.
        mesh: the mesh on which it is sharded, over a fake process group.
        inputs: makes keyword arguments of its `forward`; called where tensors have no memory.
        optimizer: one of OPTIMIZERS.
        logits, pairs: see `Meter`.
        offloaded: see `moments_of`.
        name: the model's name, for messages.
        names: the parts whose costs are wanted.
        micro_batches: their number in the step. Two run, as all but the first are the same.

    Raises:
        PlanError: SP560: the model's code raised an exception.
    """
    places = Places()
    done = applied(model)
    section = done.program.resolved.data_parallel
    backend = BACKENDS[section.backend] if section is not None else None
    groups = {
        **{name: (Axis.DP_SHARD, ranks) for name, ranks in kept_over(model).items()},
        **groups_of(mesh, backend, done.shared.regime.neighbours if done.shared is not None else {}),
    }
    parts = Parts(names) if names is not None else None
    over_cp = mesh.cp.get_group().group_name if mesh.cp is not None else None
    meter = Meter(places, groups, logits, pairs, parts, over_cp)
    following = parts.following(model) if parts is not None else nullcontext()
    rounds = min(micro_batches, 2)
    with without_memory(), meter.running(), places.following(model), following:
        if done.shared is not None and (link := done.shared.link) is not None:
            link.watch(source for source, _ in link.sources)  # the step's hooks do not change embeddings' sums
        ties = tied_groups(model)
        model.to_empty(device="cpu")
        restore_ties(model, ties)  # a plain parameter with two names has become two parameters
        meter.mark([*model.parameters(), *model.buffers()], "parameters")
        # On the host, where offloaded parameters are updated, torch's default is the loop.
        make = OPTIMIZERS["adamw-for-loop" if offloaded and optimizer == "adamw" else optimizer]
        updates = Updates(model, make) if make is not None else None
        try:
            gather_once(model)
            meter.mark(model.parameters(), "parameters")  # FSDP2 has moved padded ones to another storage
            meter.start()
            run_step(model, inputs, updates, meter, rounds)
        except PlanError:
            raise
        except Exception as error:  # the modelling code may raise anything on tensors without values
            raise refuse(
                NOT_TRACED, f"a step of {name} cannot be traced without values", notes=(reason(error),)
            ) from error
        log = meter.log
        weights = sum(n for x, n, _ in log.operands if category_of(x) in ("parameters", "gathered parameters"))
        parameters = [to_local_if_dtensor(p) for p in model.parameters()]
        states = updates.states if updates is not None else []
        stored = sum(p.numel() for p in parameters)
        # The optimizer reads parameters, gradients and its state, and writes the first and the last.
        updated = sum(3 * p.nbytes for p in parameters) + sum(2 * x.nbytes for x in states) if updates else 0
        overlap = sum(log.overlaps.values(), ALONE)
        each = _stored(model, updates, parts) if parts is not None else {}
        costs = part_costs(log, parts.handed, each) if parts is not None else {}

    def all_of(measured: int) -> int:
        return measured * micro_batches // rounds

    flops: Counter[str] = Counter()
    for (_, dtype), operations in log.flops.items():
        flops[dtype] += operations
    return Ledger(
        moments_of(log, offloaded=offloaded),
        {dtype: all_of(n) for dtype, n in flops.items()},
        {key: all_of(n) for key, n in log.calls.items()},
        {key: all_of(n) for key, n in log.bytes.items()},
        stored,
        all_of(weights) + updated,
        Overlap({k: all_of(n) for k, n in overlap.sent.items()}, {k: all_of(n) for k, n in overlap.products.items()}),
        costs,
    )


def _stored(model: nn.Module, updates: Updates | None, parts: Parts) -> dict[str, Stored]:
    """The parameters of each part on this rank."""
    found: dict[str, Stored] = {}
    seen: set[tuple[nn.Parameter, str]] = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        part, local = parts.of(name) or SHARED, to_local_if_dtensor(parameter)
        if (parameter, part) in seen:
            continue
        states = updates.states_of(parameter) if updates is not None else []
        ranks, experts = 1, 0
        if isinstance(parameter, DTensor):
            experts = local.numel() if EP in (parameter.device_mesh.mesh_dim_names or ()) else 0
            axes = zip(parameter.device_mesh.mesh_dim_names or (), parameter.placements, strict=True)
            gathered = [
                i
                for i, (axis, p) in enumerate(axes)
                if p.is_shard() and axis.startswith((Axis.DP_SHARD.value, EP_SHARD))
            ]
            ranks = math.prod(parameter.device_mesh.size(i) for i in gathered)
        one = Stored(local.numel(), local.nbytes, local.nbytes * ranks, sum(x.nbytes for x in states), experts)
        found[part] = found[part] + one if part in found else one
        seen.add((parameter, part))
    return found


def run_step(
    model: nn.Module,
    inputs: Callable[[], Mapping[str, Any]],
    updates: Updates | None,
    meter: Meter,
    micro_batches: int = 1,
) -> None:
    """Run forward and backward for each micro-batch, and the optimizer's second step. Only the batch and the loss outlive the forward, and no
    gradient outlives the step."""
    places = meter.places
    for _ in range(micro_batches):
        places.enter("forward")
        batch = inputs()
        with context_parallel(model, **batch) as given:
            loss = loss_of(model(**given))
            meter.end_forward()
            places.enter("backward")
            loss.backward()
        del loss
        meter.mark((p.grad for p in model.parameters() if p.grad is not None), "gradients")
    places.enter("optimizer step")
    if updates is not None:
        with meter.before():
            updates.step()
            meter.mark(updates.states, "optimizer state")
        updates.step()
    model.zero_grad(set_to_none=True)


SHORT = 1024  # tokens; up to this length, a tensor shaped like a mask may be something else, as heads may be as wide
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def step_ledger(
    found: FoundModel,
    program: Program,
    asked: Question,
    *,
    offloaded: bool = False,
    shorten: Callable[[nn.Module], None] = lambda model: None,
    names: PartNames | None = None,
    unwrapped: bool = False,
) -> Ledger:
    """Measure the step of a model, at its whole depth or at a smaller one.

    Args:
        offloaded: parameters and optimizer state are in the host's memory.
        shorten: removes layers.
        names: the parts whose costs are wanted.
        unwrapped: leave out the costs of data parallelism, whatever the mesh is.
    """
    model = found.build("meta", DTYPES[asked.step.precision]).train()
    shorten(model)
    with fake_mesh(program.resolved.sizes) as mesh, without_advice(), _loaded(asked.step, program):
        if not unwrapped:
            mesh.check_sections(program.resolved)
        applied = apply_program(model, mesh, restricted(program, model), src_data_rank=None, bare=unwrapped)
        return trace(
            applied,
            mesh,
            inputs_of(found, model, asked.step.micro_batch, asked.step.seq_len),
            optimizer=asked.step.optimizer,
            logits=_logits(found, asked, program.resolved),
            pairs=asked.step.seq_len if asked.step.seq_len > SHORT else 0,
            offloaded=offloaded,
            name=found.name,
            names=names.within({name for name, _ in model.named_modules()}) if names is not None else None,
            micro_batches=asked.step.micro_batches,
        )


@contextmanager
def _loaded(step: TrainingStep, program: Program) -> Iterator[None]:
    """A context in which this rank is the busiest one with experts."""
    token = LOAD.set(min(step.expert_load, program.resolved.sizes.ep))
    try:
        yield
    finally:
        LOAD.reset(token)


def _logits(found: FoundModel, asked: Question, resolved: ResolvedPlan) -> list[tuple[int, int]]:
    """(elements, last dim) of tensors over tokens and vocabulary: whole or split, for all tokens or for all but the last of
    each sequence."""
    rows = config_value(text_config(found.config), "vocab_size") if found.config is not None else None
    if not isinstance(rows, int):
        return []
    sizes = resolved.sizes
    own = asked.step.seq_len // (sizes.cp if returns_tokens(resolved.on_cp) else 1)
    tokens = [asked.step.micro_batch * length for length in (own, own - 1)]
    logits = [(n * width, width) for n in tokens for width in (rows, -(-rows // sizes.of(Axis.TP)))]
    for n, width in tuple((n // width, width) for n, width in logits):  # the chunks of a fused head
        each = tokens_of_chunk(width)
        logits += [(part * width, width) for part in (each, n % each) if part and n > each]
    return logits


# The inputs of the traced model.
def inputs_of(found: FoundModel, model: nn.Module, micro_batch: int, seq_len: int) -> Callable[[], Mapping[str, Any]]:
    """A function that makes keyword arguments of `forward`: token ids [micro_batch, seq_len] (for each choice, where the class compares
    several), and labels where the class has a loss; for a module with inputs of its own, these inputs in their own size."""
    if found.inputs is not None:
        own = found.inputs if found.config is None else given(found.inputs, found.config)
        return lambda: own(0)
    labels = labels_of(type(model)) if isinstance(model, PreTrainedModel) else None
    argument = (
        "input_ids" if isinstance(model, PreTrainedModel) else next(iter(inspect.signature(model.forward).parameters))
    )
    shape = (micro_batch, CHOICES, seq_len) if labels == "choice" else (micro_batch, seq_len)
    shapes = dict.fromkeys(("next", "classes", "spoken"), shape) | dict.fromkeys(("class", "choice"), (micro_batch,))

    def make() -> dict[str, Any]:
        made: dict[str, Any] = {argument: torch.zeros(shape, dtype=torch.long)}
        if labels == "span":
            made |= {name: torch.zeros(micro_batch, dtype=torch.long) for name in SPAN}
        elif labels is not None:
            made["labels"] = torch.zeros(shapes[labels], dtype=torch.long)
        if isinstance(model, PreTrainedModel) and "use_cache" in inspect.signature(model.forward).parameters:
            made["use_cache"] = False
        return made

    return make
