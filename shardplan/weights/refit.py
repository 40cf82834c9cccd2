"""From a training model's mesh to an engine's at every step: which rank sends which slice where is computed once."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardplan.core.by_key import by_key
from shardplan.runtime.pipeline import Pipeline
from shardplan.torchlib.gathering import of_all

from .all_ranks import all_or_none
from .checkpoint_names import original_classes, resolve
from .lazy import Box, Lazy, expressions, in_slices, read
from .ranges import boxes_of
from .slices_sent import Round, Unit, amounts, busiest, elements, exchange, narrower, rounds_of, sent_by_pairs, unit_of
from .stored_parts import ranges_of
from .whole_tensors import (
    Arrived,
    Described,
    Elsewhere,
    Own,
    Want,
    merged,
    numbers_of,
    own_of,
    stored_parts,
    under_checkpoint_names,
    under_own_names,
)

Fused = Mapping[str, Sequence[str]]
Model = nn.Module | Pipeline | None


@dataclass(frozen=True)
class Refit:
    """Which rank sends which slice where, for an engine's weights from a training model. `refit` makes it.

    Args:
        sent: (source, destination) -> bytes of a run, over all ranks.
        bound: the least possible bytes of a run, over all ranks: each rank of the engine must receive the elements of its parts
            that it does not hold as a rank of the trainer, in the smaller of the two dtypes. A tied tensor counts once.
        unused: the trainer's tensors that no rank of the engine has.
        rounds: this rank's sends and receives, in order.
    """

    sent: Mapping[tuple[int, int], int]
    bound: int
    unused: tuple[str, ...]
    rounds: Sequence[Round] = field(repr=False)
    _side: _Side = field(repr=False)

    @property
    def bytes(self) -> int:
        """The bytes of a run, over all ranks."""
        return sum(self.sent.values())

    @property
    def busiest(self) -> int:
        """The most bytes that one rank sends or receives in a run."""
        return busiest(self.sent)

    @torch.no_grad()
    def run(self) -> None:
        """Give the engine the trainer's current weights, cast to the engine's dtypes by the sender. Call it on all ranks.

        Raises:
            ValueError: a tensor of either side has changed its shape, dtype or placement since `refit` was called.
        """
        side = self._side
        with all_or_none(None, "a refit"):
            trainer, engine = side.now()
        for one in self.rounds:
            exchange(one, lambda key, box: trainer[key].take(box), side.arrived, side.place)
            for number in one.units:
                for fill in side.fills[number]:
                    fill.run(engine[fill.number].local)
            side.arrived.boxes.clear()


@dataclass(frozen=True)
class _Fill:
    """A box of one of this rank's tensors of the engine, and its sources.

    Args:
        number: the tensor's, among those of this rank.
        pieces: place in this rank's part -> place in the whole tensor.
    """

    number: int
    source: Lazy
    pieces: tuple[tuple[Box, Box], ...]

    def run(self, local: Tensor) -> None:
        for place, box in self.pieces:
            read(self.source, local[tuple(slice(*one) for one in place)], box)

    def wants(self, local: Tensor, arrived: Arrived) -> tuple[Want, ...]:
        meta = torch.empty(local.shape, dtype=local.dtype, device="meta")
        return arrived.wanted(lambda: self.run(meta))

    def least(self, dtype: torch.dtype) -> int:
        """The bytes of this box."""
        return sum(elements(box) for _, box in self.pieces) * narrower(self.source.dtype, dtype).itemsize


@dataclass(frozen=True)
class _Side:
    """The models of this rank, and the tensors that are read.

    Args:
        described: the tensors of both models when the slices were computed.
        numbers: the trainer's tensors: number on this rank -> number in the whole model.
    """

    models: tuple[Model, Model]
    described: tuple[Sequence[Described], Sequence[Described]]
    numbers: Sequence[int]
    arrived: Arrived
    fills: Sequence[Sequence[_Fill]]
    place: torch.device

    def now(self) -> tuple[dict[int, Own], list[Own]]:
        """The current tensors of the models: `to` and optimizers may have replaced their memory.

        Raises:
            ValueError: they differ from those described.
        """
        found = [own_of(model) for model in self.models]
        for model, then, own in zip(("trainer", "engine"), self.described, found, strict=True):
            changed = [one for one, row in zip(own, then, strict=False) if one.described != row]
            if changed or len(own) != len(then):
                what = f"{changed[0].names[0]} of the {model}" if changed else f"the {model}'s number of tensors"
                raise ValueError(
                    f"{what} has changed since the slices were computed: write moved = refit(trainer, engine) again"
                )
        return dict(zip(self.numbers, found[0], strict=True)), found[1]


def refit(
    trainer: nn.Module | Pipeline | None,
    engine: nn.Module | Pipeline | None,
    *,
    fused: Fused | None = None,
    round_bytes: int = 2**28,
) -> Refit:
    """Compute once which rank sends which slice where, so that an inference engine gets a training model's weights at every step.
    Call it, and `run()` of the result, on all ranks of the default process group.

    Each rank of the engine receives the parts that its plan gives it, except those that it holds as a rank of the trainer. Each
    comes from one rank that holds it, in the engine's dtype if that is no larger: fewer bytes are not possible. No rank holds a
    whole tensor unless its plan says so, or a conversion of transformers needs a whole one. The two models may differ in plans,
    meshes, ranks, dtypes and classes: two classes are matched by the names and layouts of the checkpoint.

    Args:
        trainer: what `apply_plan` returned, with memory. A model without a plan is whole on each rank that passes it; None on ranks
            that do not train.
        engine: the model that gets the weights, in the same forms; None on ranks that have no part of it.
        fused: a fused module of one side -> the modules of the other side whose rows it has, in order, as in vLLM's
            `packed_modules_mapping`: `{"qkv_proj": ("q_proj", "k_proj", "v_proj")}`.
        round_bytes: the most bytes that a rank sends or receives at once. A run needs twice that memory (for sending and receiving)
            in addition to the two models.

    Returns:
        A Refit: `run()` moves the weights; `bytes` and `bound` are their amounts.

    Raises:
        ValueError: no process group; no rank has a trainer or an engine; a model is on the meta device, has adapters, or differs
                between ranks; the engine has tensors that the trainer lacks, or in other shapes or of another kind, or ties
                tensors that the trainer does not tie.
        RuntimeError: it failed on another rank. Every rank raises.
    """
    if not dist.is_initialized():
        raise ValueError(
            "refit needs the process group of all ranks: write torch.distributed.init_process_group() before"
        )
    rank = dist.get_rank()
    with all_or_none(None, "preparing a refit", "refit"):
        _check_call(trainer, engine, fused, round_bytes)
        own, into = own_of(trainer), own_of(engine)
    described = [one.described for one in own]
    rows = of_all((described, _class_of(trainer), _class_of(engine), _kinds([*own, *into])))
    with all_or_none(None, "preparing a refit"):
        for side, column in (("trainer", 1), ("engine", 2)):
            if not any(row[column] for row in rows):
                raise ValueError(f"no rank has the {side}: write refit(trainer, engine) on the ranks that have it")
        wholes, arrived = merged([row[0] for row in rows]), Arrived()
        # Two models of one class have the same names. Two classes are matched by the checkpoint's names, which the trainer knows.
        alike = len({row[column] for row in rows for column in (1, 2) if row[column]}) == 1
        sources, text = under_own_names(wholes, arrived), [b""]
        first = next(number for number, row in enumerate(rows) if row[1])
        if not alike and rank == first:
            assert trainer is not None
            inner = stored_parts(trainer)[0].inner
            text = [pickle.dumps((arrived, under_checkpoint_names(wholes, arrived, inner, tied=True)))]
    if not alike:
        dist.broadcast_object_list(text, src=first)
        arrived, sources = pickle.loads(text[0])
    with all_or_none(None, "preparing a refit"):
        fillings = _fills(engine, into, sources, fused or {}, round_bytes, alike=alike)
        by_wants = by_key((fill.wants(into[fill.number].local, arrived), fill) for fill in fillings)
        units = [unit_of(wants, wholes, rank, rank + i) for i, wants in enumerate(by_wants)]
        least = [sum(fill.least(into[fill.number].tensor.dtype) for fill in fills) for fills in by_wants.values()]
        bound = sum(min(amounts(unit, rank).total(), size) for unit, size in zip(units, least, strict=True))
    asked = dict(enumerate(of_all((units, bound))))
    wanted = {receiver: its for receiver, (its, _) in asked.items() if its}
    number = numbers_of(wholes)
    used = {want.key for its in wanted.values() for unit in its for want, *_ in unit}
    return Refit(
        sent=sent_by_pairs(wanted),
        bound=sum(bound for _, bound in asked.values()),
        unused=tuple(one.names[0] for key, one in enumerate(wholes) if key not in used),
        rounds=tuple(rounds_of(wanted, rank, round_bytes)),
        _side=_Side(
            (trainer, engine),
            (described, [one.described for one in into]),
            [number[one.names[0]] for one in own],
            arrived,
            list(by_wants.values()),
            torch.device(next((kind for row in rows for kind in row[3] if kind != "cpu"), "cpu")),
        ),
    )


def _check_call(trainer: object, engine: object, fused: object, round_bytes: object) -> None:
    for name, model in (("trainer", trainer), ("engine", engine)):
        if model is not None and not isinstance(model, nn.Module | Pipeline):
            raise TypeError(f"the {name} must be a model, a Pipeline or None, not {type(model).__name__}")
    if not isinstance(round_bytes, int) or isinstance(round_bytes, bool) or round_bytes < 1:
        raise ValueError(f"round_bytes must be a positive number of bytes, such as 2**28, not {round_bytes!r}")
    if fused is not None and not (
        isinstance(fused, Mapping)
        and all(isinstance(k, str) and not isinstance(v, str) and len(v) > 1 for k, v in fused.items())
    ):
        raise TypeError(f'fused must be as in {{"qkv_proj": ("q_proj", "k_proj", "v_proj")}}, not {fused!r}')


def _class_of(model: Model) -> str | None:
    if model is None:
        return None
    inner = stored_parts(model)[0].inner
    with original_classes(inner):
        return f"{type(inner).__module__}.{type(inner).__qualname__}"


def _kinds(own: Sequence[Own]) -> list[str]:
    """The device types of tensors and of their meshes, which differ if FSDP2 offloads to the CPU."""
    meshes = [one.tensor.device_mesh.device_type for one in own if isinstance(one.tensor, DTensor)]
    return sorted({*meshes, *(one.tensor.device.type for one in own)})


def _fills(
    engine: Model,
    into: Sequence[Own],
    sources: Mapping[str, Lazy],
    fused: Fused,
    most: int,
    *,
    alike: bool,
) -> Iterator[_Fill]:
    """The reads that fill the tensors of this rank's engine, in boxes of at most `most` bytes where a tensor can be read in slices."""
    if engine is None:
        return
    found: dict[str, Lazy] = {}
    for part in stored_parts(engine):
        state = {**part.elsewhere, **{name: one.tensor for one in part.entries for name in one.names}}
        known = {**sources, **_joined(sources, state, fused)}
        found |= known if alike else resolve(part.inner, known, state).tensors
    missing = [one.names[0] for one in into if not any(name in found for name in one.names)]
    if missing:
        raise ValueError(
            f"the trainer lacks tensors of the engine: {', '.join(missing[:5])}{', ...' if len(missing) > 5 else ''}. Build both "
            'models from one configuration; where one has fused modules, write fused={"qkv_proj": ("q_proj", "k_proj", "v_proj")}'
        )
    for i, one in enumerate(into):
        present = [name for name in one.names if name in found]
        source = found[present[0]]
        _check_fit(one, present, found)
        boxes = list(boxes_of(one.ranges))
        if in_slices(source):
            width = one.tensor.dtype.itemsize
            yield from (_Fill(i, source, (cut,)) for both in boxes for cut in _cut(*both, most // width))
        elif boxes:
            yield _Fill(i, source, tuple(boxes))


def _check_fit(own: Own, present: Sequence[str], found: Mapping[str, Lazy]) -> None:
    source, tensor = found[present[0]], own.tensor
    if source.shape != tensor.shape:
        raise ValueError(
            f"{present[0]} is {tuple(tensor.shape)} in the engine and {tuple(source.shape)} in the trainer: build both "
            "models from one configuration"
        )
    if source.dtype != tensor.dtype and not all(
        one.is_floating_point() and one.itemsize > 1 for one in (source, tensor)
    ):
        raise ValueError(
            f"{present[0]} is {tensor.dtype} in the engine and {source.dtype} in the trainer: build the engine in bfloat16, "
            "float16 or float32, as a quantized one needs scales next to its weights"
        )
    made_of = {name: {e.key for e in expressions(found[name]) if isinstance(e, Elsewhere)} for name in present}
    other = next((name for name in present if made_of[name] != made_of[present[0]]), None)
    if other is not None:
        raise ValueError(
            f"the engine ties {present[0]} and {other}, and the trainer has two tensors for them: build the engine with "
            "tie_word_embeddings=False"
        )


def _joined(sources: Mapping[str, Lazy], state: Mapping[str, Tensor], fused: Fused) -> dict[str, Lazy]:
    """The engine's tensors that join rows of several of the trainer's, and those that are a part of the rows of one."""
    made: dict[str, Lazy] = {}
    for whole, parts in fused.items():
        for name in [*state, *sources]:
            words = name.split(".")
            if whole not in words:
                continue
            names = [".".join(part if word == whole else word for word in words) for part in parts]
            if name in state and name not in sources and all(one in sources for one in names):
                made[name] = cast(Lazy, torch.cat([sources[one] for one in names]))
            elif name in sources and name not in state and all(one in state for one in names):
                rows = [len(state[one]) for one in names]
                if sum(rows) == len(sources[name]):
                    made |= zip(names, cast("list[Lazy]", sources[name].split(rows)), strict=True)
    return made


def _cut(place: Box, box: Box, most: int) -> Iterator[tuple[Box, Box]]:
    """A box halved repeatedly, until no piece has more than `most` elements."""
    dim = next((dim for dim, (start, stop) in enumerate(box) if stop - start > 1), None)
    if dim is None or elements(box) <= most:
        yield place, box
        return
    half = (box[dim][1] - box[dim][0]) // 2
    for first, last in ((0, half), (half, box[dim][1] - box[dim][0])):
        halves = [(*one[:dim], (one[dim][0] + first, one[dim][0] + last), *one[dim + 1 :]) for one in (place, box)]
        yield from _cut(halves[0], halves[1], most)


# The bytes that a refit will send, computed from two models without memory.
def of_every_rank(model: nn.Module, ranks: int) -> list[list[Described]]:
    """What each rank of a job holds of a planned model on the meta device, computed from the plan on one rank."""
    (part,) = stored_parts(model)
    return [
        [(e.names, tuple(e.tensor.shape), e.tensor.dtype, ranges_of(e, part.packed, rank)) for e in part.entries]
        for rank in range(ranks)
    ]


def refit_bytes(
    trainer: Sequence[Sequence[Described]], engine: Sequence[Sequence[Described]], first: int, dtype: torch.dtype
) -> Mapping[tuple[int, int], int]:
    """(source, destination) -> bytes of a refit between models of one class.

    Args:
        first: the rank in the job of the engine's first rank; the trainer's first is rank 0.
        dtype: the engine's floating-point dtype.
    """
    wholes = merged(trainer)
    number = numbers_of(wholes)
    asked: dict[int, list[Unit]] = {}
    for rank, rows in enumerate(engine, first):
        wants = [
            Want(number[names[0]], box, dtype if own.is_floating_point else own)
            for names, _, own, ranges in rows
            for box in product(*ranges)
        ]
        asked[rank] = [unit_of([want], wholes, rank, rank + i) for i, want in enumerate(dict.fromkeys(wants))]
    return sent_by_pairs(asked)
