"""How much of a reduction is hidden in a backward: `python -m benchmarks.overlap`.

One process is rank 0 of a group whose collectives do nothing but take time: as long as the products that run during the reduction.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardplan.runtime.parallel.later_weights import Later

from .page import table
from .ways import llama, planned

TP, TOKENS = 2, 512
SIZE = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 16}
TEXT = """## Reductions during products

`python -m benchmarks.overlap`: backward of a Llama layer (hidden {hidden_size}, {tokens} tokens, float32, tp {tp}) in a group whose
collectives take time and do nothing: each reduction of an input's gradient as long as the products that run during it, which are the
gradients of the weights that read the input. **Hidden** is the part of this time in which the process did not wait. Median of {repeats}
steps, and the middle half of them. A layer's other collectives have no such products, and are waited for at once.
"""
GOAL = ">= 0.60"
READERS = {3: "q, k, v", 2: "gate, up"}  # by the number of weights


class Work(dist.Work):
    """A collective that is over at a time.

    Args:
        end: in seconds of `time.perf_counter`.
        waited: gets the seconds in which the process waited for it.
    """

    def __init__(self, end: float, waited: list[float]):
        super().__init__()
        self.end, self.waited = end, waited

    def wait(self, timeout: Any = None) -> bool:
        begun = time.perf_counter()
        if (left := self.end - begun) > 0:
            time.sleep(left)
        self.waited.append(time.perf_counter() - begun)
        return True


class Delayed(dist.ProcessGroup):
    """A group whose collectives leave their results as they are.

    Attributes:
        takes: number of a collective, from 1 -> its seconds; 0 for others.
        waited: number -> the seconds in which the process waited for it, once or not yet.
        begun: how many collectives there were.
    """

    def __init__(self, rank: int, size: int):
        super().__init__(rank, size)
        self.takes: dict[int, float] = {}
        self.restart()

    def restart(self) -> None:
        """Number collectives from 1 again."""
        self.begun, self.waited = 0, defaultdict(list)

    def _begin(self, *args: Any) -> Work:
        self.begun += 1
        return Work(time.perf_counter() + self.takes.get(self.begun, 0.0), self.waited[self.begun])

    # torch 2.13 has other names than releases before.
    allreduce = allreduce_coalesced = allgather = barrier = broadcast = _begin
    reduce_scatter_single = reduce_scatter_single_coalesced = _begin
    _reduce_scatter_base = reduce_scatter_tensor_coalesced = _begin
    all_gather_single = all_gather_single_coalesced = _begin
    _allgather_base = allgather_into_tensor_coalesced = _begin

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "delayed"


@contextmanager
def delayed_ranks() -> Iterator[DeviceMesh]:
    """A mesh with this process as rank 0, its groups delayed."""
    dist.Backend.register_backend("delayed", lambda store, rank, size, timeout: Delayed(rank, size), devices=["cpu"])
    dist.init_process_group("delayed", rank=0, world_size=TP, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (1, TP), mesh_dim_names=("dp_shard", "tp"))
    finally:
        dist.destroy_process_group()


@contextmanager
def timed(group: Delayed) -> Iterator[dict[int, tuple[int, float]]]:
    """The number of a collective -> how many weights got their gradients right after it began, and the seconds of their products."""
    found: dict[int, tuple[int, float]] = {}
    own = Later.gradients

    def gradients(later: Later, moved: Callable[[], Tensor], wanted: Sequence[bool]) -> list[Tensor | None]:
        begun = time.perf_counter()
        result = own(later, moved, wanted)
        found[group.begun] = (len(result), time.perf_counter() - begun)
        return result

    Later.gradients = gradients
    try:
        yield found
    finally:
        Later.gradients = own


def hidden(model: nn.Module, group: Delayed, repeats: int) -> dict[str, list[float]]:
    """Of each reduction with products, the part that was hidden, in each step."""
    ids = torch.randint(99, (1, TOKENS))
    parts: dict[str, list[float]] = {name: [] for name in READERS.values()}
    # In turns: how long the products take, and steps in which the reductions take as long.
    for step in range(2 * repeats):
        loss = model(input_ids=ids).logits.sum()
        group.restart()
        with timed(group) as found:
            loss.backward()
        if step % 2 == 0:
            group.takes = {number: seconds for number, (weights, seconds) in found.items() if weights in READERS}
            continue
        for number, takes in group.takes.items():
            parts[READERS[found[number][0]]].append(1 - sum(group.waited[number]) / takes)
        group.takes = {}
    return parts


def rows(repeats: int) -> Iterator[tuple[str, str, str, str]]:
    with delayed_ranks() as mesh:
        for name, sp in (("TP", False), ("SP", True)):
            model = planned(llama(1, **SIZE), mesh, sp=sp)
            for readers, parts in hidden(model, mesh["tp"].get_group(), repeats).items():
                low, middle, high = statistics.quantiles(parts, n=4)
                yield name, readers, GOAL, f"{middle:.2f} ({low:.2f} to {high:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(TEXT.format(**SIZE, tokens=TOKENS, tp=TP, repeats=args.repeats))
    print(table(("plan", "readers of the input", "goal", "hidden"), rows(args.repeats)))


if __name__ == "__main__":
    main()
