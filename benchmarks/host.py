"""Host time of one sharded layer: `python -m benchmarks.host`.

With the process group that torch calls "fake", collectives are called and do nothing, so what is measured is what the host
does. Time is CPU time of the process; of one layer it is the difference between two depths, divided by theirs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import LlamaConfig, PretrainedConfig

from .page import table
from .ways import Way, compiled, fake_ranks, fresh, llama, planned, stock_sp, stock_tp, with_fsdp

TP = 2
DEPTHS = (2, 10)
SIZE = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
SEQ, BATCH = 16, 1
TEXT = """## Host time of a layer

`python -m benchmarks.host`: CPU time of the host for a layer of Llama, forward and backward (hidden {hidden_size}, {seq} tokens:
the kernels take next to nothing), against the same layer with the dimensions that a rank has and no parallelism. tp {tp}, the
group of processes is fake; under FSDP2 both sides have it. Median of {repeats} pairs, and the middle half of them.
"""


def own_share(config: LlamaConfig) -> LlamaConfig:
    """The dimensions that one rank's layers have."""
    shares = ("intermediate_size", "num_attention_heads", "num_key_value_heads")
    smaller = {name: getattr(config, name) // TP for name in shares}
    return LlamaConfig(**{**config.to_dict(), **smaller, "head_dim": config.hidden_size // config.num_attention_heads})


def alone(config: LlamaConfig, mesh: DeviceMesh) -> nn.Module:
    return fresh(own_share(config))


GROUPS: dict[str, tuple[Way, dict[str, tuple[Way, str]]]] = {
    "eager": (
        alone,
        {
            "TP": (partial(planned, sp=False), "<= 2.2"),
            "SP": (partial(planned, sp=True), "<= 2.6"),
            "torch's styles, TP": (stock_tp, ""),
            "torch's styles, SP": (stock_sp, ""),
        },
    ),
    "under FSDP2": (
        lambda config, mesh: with_fsdp(alone(config, mesh), mesh),
        {
            "TP": (lambda config, mesh: with_fsdp(planned(config, mesh, sp=False), mesh), "<= 1.6"),
            "SP": (lambda config, mesh: with_fsdp(planned(config, mesh, sp=True), mesh), "<= 1.7"),
        },
    ),
    "compiled per layer": (
        lambda config, mesh: compiled(alone(config, mesh)),
        {
            "TP": (partial(planned, sp=False, compile=True), "<= 2.0"),
            "SP": (partial(planned, sp=True, compile=True), "<= 2.2"),
        },
    ),
}


def step_of(model: nn.Module) -> Callable[[], None]:
    ids = torch.randint(0, 512, (BATCH, SEQ))
    positions = torch.arange(SEQ).unsqueeze(0)

    def step() -> None:
        model(input_ids=ids, position_ids=positions).logits.sum().backward()
        model.zero_grad()

    return step


def layer_times(
    ways: Mapping[str, Way], mesh: DeviceMesh, repeats: int, config_of: Callable[[int], PretrainedConfig]
) -> dict[str, list[float]]:
    """CPU seconds of a layer in a step, of each way, in turns.

    Args:
        config_of: the configuration with so many layers.
    """
    steps = {(name, depth): step_of(way(config_of(depth), mesh)) for name, way in ways.items() for depth in DEPTHS}
    for step in steps.values():
        for _ in range(4):
            step()
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name in ways:
            few, many = (_cpu_time(steps[name, depth]) for depth in DEPTHS)
            times[name].append((many - few) / (DEPTHS[1] - DEPTHS[0]))
    return times


def _cpu_time(step: Callable[[], None]) -> float:
    start = time.process_time()
    step()
    return time.process_time() - start


def ratio(values: Sequence[float], base: Sequence[float]) -> str:
    """The median of the pairs' ratios, and the middle half."""
    each = [a / b for a, b in zip(values, base, strict=True)]
    low, middle, high = statistics.quantiles(each, n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def rows(repeats: int) -> Iterator[tuple[str, str, str]]:
    for name, (base, others) in GROUPS.items():
        with fake_ranks(TP) as mesh:
            ways = {"": base, **{other: way for other, (way, _) in others.items()}}
            times = layer_times(ways, mesh, repeats, partial(llama, **SIZE))
        for other, (_, goal) in others.items():
            yield f"{name}, {other}", goal, ratio(times[other], times[""])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=60)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(TEXT.format(**SIZE, seq=SEQ, tp=TP, repeats=args.repeats))
    print(table(("layer", "goal", "times the layer alone"), rows(args.repeats)))


if __name__ == "__main__":
    main()
