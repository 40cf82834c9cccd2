"""Host time of one sharded layer, eager and compiled: `python -m benchmarks.host`.

A Llama with the group of processes that torch calls "fake": collectives are called and do nothing, so what is measured is what
the host does. Time is the process's CPU time; of one layer it is the difference between two depths, divided by theirs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

warnings.filterwarnings("ignore")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402
from transformers import AutoModelForCausalLM, LlamaConfig  # noqa: E402

import shardplan  # noqa: E402

TP = 2
DEPTHS = (2, 10)
HIDDEN, HEADS, KV_HEADS, INTER, SEQ, BATCH = 64, 4, 2, 128, 16, 1


def config(layers: int, share: int = 1) -> LlamaConfig:
    """Of the whole model, or of one with the dimensions that a rank's layers have."""
    return LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=INTER // share,
        num_hidden_layers=layers,
        num_attention_heads=HEADS // share,
        num_key_value_heads=KV_HEADS // share,
        head_dim=HIDDEN // HEADS,
        vocab_size=512,
        use_cache=False,
    )


@contextmanager
def fake_ranks(dp: int = 1) -> Iterator[torch.distributed.device_mesh.DeviceMesh]:
    dist.init_process_group("fake", rank=0, world_size=dp * TP, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (dp, TP), mesh_dim_names=("dp_shard", "tp"))
    finally:
        dist.destroy_process_group()


def step_of(model: nn.Module) -> Callable[[], None]:
    ids = torch.randint(0, 512, (BATCH, SEQ))

    def step() -> None:
        model(input_ids=ids).logits.sum().backward()
        model.zero_grad()

    return step


Make = Callable[[int, torch.distributed.device_mesh.DeviceMesh], nn.Module]


def alone(layers: int, mesh: object) -> nn.Module:
    return AutoModelForCausalLM.from_config(config(layers, share=TP))


def planned(layers: int, mesh: object, *, sp: bool, dp: bool = False, compile: bool = False) -> nn.Module:
    model = AutoModelForCausalLM.from_config(config(layers))
    sections = {"compile": {"modules": ["model.layers.*"], "backend": "inductor"} if compile else False}
    return shardplan.apply_plan(
        model, mesh, "llama", sequence_parallel=sp, data_parallel=dp, src_data_rank=None, **sections
    )


def stock(layers: int, mesh: object) -> nn.Module:
    """torch's own styles, as its tutorial and TorchTitan's first plans have them."""
    model = AutoModelForCausalLM.from_config(config(layers))
    colwise = [f"self_attn.{x}_proj" for x in "qkv"] + ["mlp.gate_proj", "mlp.up_proj"]
    rowwise = ["self_attn.o_proj", "mlp.down_proj"]
    for layer in model.model.layers:
        plan = {**{name: ColwiseParallel() for name in colwise}, **{name: RowwiseParallel() for name in rowwise}}
        parallelize_module(layer, mesh["tp"], plan)
    return model


def fsdp(model: nn.Module, mesh: object) -> nn.Module:
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["dp_shard"])
    return fully_shard(model, mesh=mesh["dp_shard"])


def compiled(model: nn.Module) -> nn.Module:
    for layer in model.model.layers:
        layer.forward = torch.compile(layer.forward, fullgraph=True)
    return model


def layer_times(ways: Mapping[str, Make], mesh: object, repeats: int) -> dict[str, list[float]]:
    """CPU seconds of a layer in a step, of each way, in turns."""
    steps = {}
    for name, make in ways.items():
        for depth in DEPTHS:
            torch.manual_seed(0)
            steps[name, depth] = step_of(make(depth, mesh))
            for _ in range(3):
                steps[name, depth]()
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


def ratios(times: Mapping[str, list[float]], base: str) -> Iterator[tuple[str, float, float, float]]:
    low = statistics.median(times[base])
    for name, values in times.items():
        if name != base:
            each = sorted(v / low for v in values)
            yield name, statistics.median(each), each[len(each) // 4], each[3 * len(each) // 4]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--compiled", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with fake_ranks() as mesh:
        ways = {
            "alone": alone,
            "TP": lambda layers, mesh: planned(layers, mesh, sp=False),
            "SP": lambda layers, mesh: planned(layers, mesh, sp=True),
            "stock": stock,
        }
        if not args.compiled:
            times = layer_times(ways, mesh, args.repeats)
        if args.compiled:
            ways = {
                "alone": lambda layers, mesh: compiled(alone(layers, mesh)),
                "TP": lambda layers, mesh: planned(layers, mesh, sp=False, compile=True),
                "SP": lambda layers, mesh: planned(layers, mesh, sp=True, compile=True),
            }
            times = layer_times(ways, mesh, args.repeats)
        print({k: round(1e6 * statistics.median(v)) for k, v in times.items()})
        for row in ratios(times, "alone"):
            print(row)


if __name__ == "__main__":
    main()
