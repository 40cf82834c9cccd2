"""The two runs that the reference compares: the sharded model on this rank, and for each data-parallel rank an unsharded copy
with its own batch and buffers, whose gradients are averaged.

A pipeline is held against the same copies on the same micro-batches: the loss is the sum over all tokens of all copies, divided by their
number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import shardplan
from tests.small_models import whole

from .adversary import Adversary, tensors

Seen = dict[str, Tensor]
IGNORED = -100


def parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """With every name of those that have several."""
    return list(model.named_parameters(remove_duplicate=False))


def parts_of(model: nn.Module | shardplan.Pipeline) -> list[nn.Module]:
    """The stages of this rank, or the model; inside of a data-parallel wrapper."""
    parts = model.parts if isinstance(model, shardplan.Pipeline) else [model]
    return [one.module if isinstance(one, nn.parallel.DistributedDataParallel) else one for one in parts]


class Unsharded:
    """A copy of the model for each data-parallel rank."""

    def __init__(self, adversary: Adversary, copies: Sequence[nn.Module], own: int, dtype: torch.dtype) -> None:
        self.adversary, self.copies, self.own, self.dtype = adversary, copies, own, dtype
        self.optimizers = [adversary.optimizer(_trained(one)) for one in copies]

    def step(self, number: int) -> Seen:
        """Forward, backward and a step of the optimizer; everything that can be compared, by kind and name."""
        adversary = self.adversary
        for copy, optimizer in zip(self.copies, self.optimizers, strict=True):
            if adversary.before is not None:
                adversary.before(copy, number)
            optimizer.zero_grad()
        seen = self._staged(number) if adversary.staged else self._whole(number)
        self._average()
        if adversary.max_norm is not None:
            norms = [nn.utils.clip_grad_norm_(_trained(one), adversary.max_norm) for one in self.copies]
            seen["norm"] = norms[self.own]
        own = self.copies[self.own]
        seen |= {f"gradient {n}": p.grad.clone() for n, p in parameters(own) if p.grad is not None}
        for optimizer in self.optimizers:
            optimizer.step()
        return seen | _state(own)

    def _whole(self, number: int) -> Seen:
        seen: Seen = {}
        for share, copy in enumerate(self.copies):
            made = _forward_and_back(self.adversary, copy, number, share, self.dtype)
            seen = made if share == self.own else seen
        return seen

    def _staged(self, number: int) -> Seen:
        """Each micro-batch by itself, weighted by its tokens."""
        adversary, count = self.adversary, _parts(self.adversary)
        batches = [_batch(adversary, number, share, self.dtype) for share in range(len(self.copies))]
        tokens = sum(_tokens(adversary, batch) for batch in batches)
        total = 0.0
        for copy, batch in zip(self.copies, batches, strict=True):
            for part in _split(batch, count):
                torch.manual_seed(number + 1000)
                # A loss of one's own has the labels, and the model has none.
                given = {n: v for n, v in part.items() if adversary.stage_loss is None or n != "labels"}
                output = copy(**given)
                loss = self._share(output, part, tokens, count * len(batches))
                (loss * len(batches)).backward()  # they are averaged afterwards
                total += loss.item()
        return {"loss": torch.tensor(total)}

    def _share(self, output: Any, part: Mapping[str, Any], tokens: int, parts: int) -> Tensor:
        adversary = self.adversary
        if adversary.stage_loss is not None:
            return adversary.stage_loss(getattr(output, "logits", output), part["labels"]) / tokens
        loss, more = adversary.loss(output), 0.0
        if adversary.auxiliary is not None:
            more = adversary.auxiliary(output)
        return (loss - more) * _tokens(adversary, part) / tokens + more / parts

    def _average(self) -> None:
        """The gradients of all copies; that of a copy that has none is zero."""
        for group in zip(*(copy.parameters() for copy in self.copies), strict=True):
            given = [one.grad for one in group if one.grad is not None]
            for one in group if given else ():
                one.grad = torch.stack(given).sum(0) / len(group)


class Sharded:
    """The model with its plan, on this rank.

    Args:
        orders: of the rows of packed parameters, by name.
        cp: the ranks that have outputs of their own tokens.
    """

    def __init__(
        self,
        adversary: Adversary,
        model: nn.Module | shardplan.Pipeline,
        own: int,
        dtype: torch.dtype,
        orders: Mapping[str, tuple[int, Tensor] | None],
        cp: DeviceMesh | None = None,
    ) -> None:
        self.adversary, self.model, self.own, self.dtype, self.orders = adversary, model, own, dtype, orders
        self.cp = cp
        trained = _trained(model)
        self.optimizer = adversary.optimizer(trained) if trained else None

    def step(self, number: int) -> Seen:
        """As `Unsharded.step`."""
        adversary, model = self.adversary, self.model
        parts = parts_of(model)
        for part in parts if adversary.before is not None else ():
            adversary.before(part, number)
        model.zero_grad()
        if isinstance(model, shardplan.Pipeline):
            torch.manual_seed(number + 1000)
            seen = {"loss": model.step(**_batch(adversary, number, self.own, self.dtype))}
        else:
            seen = _forward_and_back(adversary, model, number, self.own, self.dtype, self.cp)
        if adversary.max_norm is not None:
            clipped = model if isinstance(model, shardplan.Pipeline) else _trained(model)
            norm = shardplan.clip_grad_norm_(clipped, adversary.max_norm)
            seen["norm"] = whole(norm) if isinstance(norm, Tensor) else torch.tensor(norm)
        found = {n: whole(p.grad).clone() for part in parts for n, p in parameters(part) if p.grad is not None}
        if self.optimizer is not None:
            self.optimizer.step()
        state = {f"gradient {name}": value for name, value in found.items()}
        for part in parts:
            state |= _state(part)
        seen |= {name: self._own_order(name, value) for name, value in state.items()}
        return {name: value.detach().clone() for name, value in seen.items()}

    def _own_order(self, name: str, value: Tensor) -> Tensor:
        kind, _, place = name.partition(" ")
        order = self.orders.get(place) if kind != "buffer" else None
        return value if order is None else value.index_select(*order)


def _forward_and_back(
    adversary: Adversary, model: nn.Module, number: int, share: int, dtype: torch.dtype, cp: DeviceMesh | None = None
) -> Seen:
    """Of each micro-batch, which are batches of their own: the outputs and the loss.

    Args:
        cp: the ranks that have outputs of their own tokens, and losses whose mean is that of all.
    """
    seen: Seen = {}
    for micro in range(adversary.micro_batches):
        torch.manual_seed(number + 1000)
        batch = _batch(adversary, number, share, dtype, micro)
        with nullcontext(batch) if cp is None else shardplan.context_parallel(model, **batch) as given:
            output = model(**given)
            loss = adversary.loss(output) / adversary.micro_batches
            loss.backward()
        values = {f"output{place}": value for place, value in tensors(output) if value.is_floating_point()}
        made = {name: whole(value).detach().clone() for name, value in {**values, "loss": loss}.items()}
        seen |= {
            f"{name} of {micro}": value if cp is None else _of_all(value, cp, batch) for name, value in made.items()
        }
    return seen


def _of_all(value: Tensor, cp: DeviceMesh, batch: Mapping[str, Any]) -> Tensor:
    """The mean of the ranks' losses; of a value that has their own tokens, those of all."""
    own = value.ndim > 2 and value.shape[1] * cp.size() == batch["input_ids"].shape[1]
    if not own and value.ndim:
        return value
    every = [torch.empty_like(value) for _ in range(cp.size())]
    dist.all_gather(every, value.contiguous(), group=cp.get_group())
    return torch.cat(every, 1) if own else torch.stack(every).mean(0)


def _state(model: nn.Module) -> Seen:
    return {
        **{f"parameter {name}": whole(value.detach()).clone() for name, value in parameters(model)},
        **{f"buffer {n}": whole(value).detach().clone() for n, value in model.named_buffers(remove_duplicate=False)},
    }


def _trained(model: nn.Module | shardplan.Pipeline) -> list[nn.Parameter]:
    return [p for part in parts_of(model) for p in part.parameters() if p.requires_grad]


def _batch(adversary: Adversary, number: int, share: int, dtype: torch.dtype, micro: int = 0) -> dict[str, Any]:
    return adversary.batch(adversary.seeds[number] + 100 * micro + 1000 * share, dtype)


def _parts(adversary: Adversary) -> int:
    """How many micro-batches a pipeline's batch has."""
    return max(adversary.micro_batches, adversary.mesh["pp"])


def _split(batch: Mapping[str, Any], parts: int) -> list[dict[str, Any]]:
    """The rows of each micro-batch. Lengths of documents are none."""
    rows = next(value.shape[0] for value in batch.values() if isinstance(value, Tensor)) // parts
    return [
        {
            n: v[i * rows : (i + 1) * rows] if isinstance(v, Tensor) and "cu_seq" not in n else v
            for n, v in batch.items()
        }
        for i in range(parts)
    ]


def _tokens(adversary: Adversary, batch: Mapping[str, Any]) -> int:
    """The labels that count; a model's own loss predicts the next token, so that the first of a row has none."""
    labels = batch["labels"] if adversary.stage_loss is not None else batch["labels"][:, 1:]
    return int((labels != IGNORED).sum())
