"""Sharding a model with a program, and tracing it to one ledger."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from shardplan.compiler.lower.program import Program
from shardplan.core.estimates import Question, TrainingStep
from shardplan.core.mesh import Axis
from shardplan.core.plan import ResolvedPlan
from shardplan.model.config_numbers import config_value, text_config
from shardplan.model.found import FoundModel
from shardplan.model.reduced.feeding import given
from shardplan.model.reduced.model_inputs import CHOICES, SPAN, labels_of
from shardplan.runtime.apply.phases import apply_program
from shardplan.runtime.parallel.expert_routes import LOAD
from shardplan.runtime.parallel.vocabulary_sums import tokens_of_chunk
from shardplan.styles.boundary import returns_tokens
from shardplan.torchlib.gathering import without_advice

from .depth import restricted
from .fake_rank import fake_mesh
from .ledger import Ledger
from .traced_parts import PartNames
from .traced_step import trace

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
