"""The tensors of a planned model as a checkpoint has them, whole, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardplan.runtime.apply.applied import applied
from shardplan.runtime.parallel.process_groups import named_ranks
from shardplan.runtime.pipeline import Pipeline
from shardplan.torchlib.gathering import of_all

from .lazy import Lazy, read
from .slices_sent import Round, exchange, rounds_of, unit_of
from .whole_tensors import Arrived, WholeTensor, merged, numbers_of, own_of, stored_parts, under_checkpoint_names


def checkpoint_parameters(model: nn.Module | Pipeline, ranks: Sequence[int] | None) -> Iterator[tuple[str, Tensor]]:
    """`full_parameters(names="checkpoint")`: the same results and errors."""
    mesh = applied(model).mesh.mesh
    members = mesh.mesh.flatten().tolist()
    chosen = members if ranks is None else [*ranks]
    if others := set(chosen) - set(members):
        raise ValueError(f"{named_ranks(others, ('is', 'are'))} not on the model's mesh: choose from ranks={members}")
    own, inner = own_of(model), stored_parts(model)[0].inner
    group = None
    if len(members) != dist.get_world_size():
        group = dist.new_group(members, use_local_synchronization=True)
    wholes, arrived = merged(of_all([one.described for one in own], group)), Arrived()
    sources = under_checkpoint_names(wholes, arrived, inner, tied=False)
    number = numbers_of(wholes)
    held = {number[one.names[0]]: one for one in own}
    receivers = [members.index(rank) for rank in dict.fromkeys(chosen)]
    place = torch.device(mesh.device_type)

    def send(one: Round) -> None:
        exchange(one, lambda key, box: held[key].take(box), arrived, place, group)

    return _sent(sources, wholes, arrived, receivers, members.index(dist.get_rank()), send, place)


@torch.no_grad()
def _sent(
    sources: Mapping[str, Lazy],
    wholes: Sequence[WholeTensor],
    arrived: Arrived,
    receivers: Sequence[int],
    rank: int,
    send: Callable[[Round], None],
    place: torch.device,
) -> Iterator[tuple[str, Tensor]]:
    for name, source in sources.items():
        whole = torch.empty(source.shape, dtype=source.dtype, device="meta")
        wants = arrived.wanted(partial(read, source, whole))
        asked = {receiver: [unit_of(wants, wholes, receiver, receiver)] for receiver in receivers}
        for one in rounds_of(asked, rank, source.numel() * source.dtype.itemsize):
            send(one)
        if rank in receivers:
            value = torch.empty(source.shape, dtype=source.dtype, device=place)
            read(source, value)
            arrived.boxes.clear()
            yield name, value
