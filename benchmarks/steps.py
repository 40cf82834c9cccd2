"""A training step of two gloo processes, against the plans that people use: `python -m benchmarks.steps`.

Wall time of forward and backward. All ways run in the same two processes, step by step in turns.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.distributed import DistributedConfig

from .host import ratio
from .page import table
from .processes import on_processes
from .ways import Way, fresh, llama, planned, stock_sp, stock_tp

TP = 2
BATCH = 2
SIZES = {
    "22M parameters, hidden 512, 8 layers, 256 tokens": (
        llama(8, hidden_size=512, intermediate_size=1408, num_attention_heads=8, num_key_value_heads=4),
        256,
    ),
    "bound by overhead: hidden 256, 8 layers, 32 tokens": (
        llama(8, hidden_size=256, intermediate_size=704, num_attention_heads=8, num_key_value_heads=4),
        32,
    ),
}
TORCH_TP, HF, TORCH_SP = "torch's styles, TP", "transformers' own TP", "torch's styles, SP"
GOALS = {  # (what, against what) -> for each size
    ("TP", TORCH_TP): ("<= 0.85", "<= 0.56"),
    ("TP", HF): ("<= 0.85", "<= 0.56"),
    ("SP", TORCH_SP): ("<= 0.70", "<= 0.45"),
}
TEXT = """## A training step

`python -m benchmarks.steps`: forward and backward of a Llama on two gloo processes, a core each, batch {batch}, float32, eager: the
wall time of a step of a plan over that of another way to split the same model, the median of {repeats} pairs and the middle
half of them. The sequence-parallel plan of torch's styles is the one that NeMo Automodel ships for Llama.
"""


def own_tp(config: LlamaConfig, mesh: DeviceMesh, *, folder: Path) -> nn.Module:
    """What transformers makes of its own plan."""
    split = DistributedConfig(tp_size=mesh["tp"].size())
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=split, dtype=torch.float32)
    assert isinstance(model.model.layers[0].mlp.up_proj.weight, DTensor), "transformers split nothing"
    return model


def ways(folder: Path) -> dict[str, Way]:
    return {
        "TP": partial(planned, sp=False),
        "SP": partial(planned, sp=True),
        TORCH_TP: stock_tp,
        HF: partial(own_tp, folder=folder),
        TORCH_SP: stock_sp,
    }


def step_of(model: nn.Module, ids: torch.Tensor) -> Callable[[], None]:
    positions = torch.arange(ids.shape[1]).unsqueeze(0)

    def step() -> None:
        logits = model(input_ids=ids, position_ids=positions).logits
        nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()
        model.zero_grad()

    return step


def worker(rank: int, port: int, repeats: int, results: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=TP)
    mesh = init_device_mesh("cpu", (1, TP), mesh_dim_names=("dp_shard", "tp"))
    found = {}
    for size, (config, tokens) in SIZES.items():
        folder = results.parent / size.partition(" ")[0]
        steps = {}
        for name, way in ways(folder).items():
            torch.manual_seed(0)
            steps[name] = step_of(way(config, mesh), torch.randint(0, config.vocab_size, (BATCH, tokens)))
            for _ in range(3):
                steps[name]()
        found[size] = timed(steps, repeats)
    if rank == 0:
        results.write_text(json.dumps(found))
    dist.destroy_process_group()


def timed(steps: Mapping[str, Callable[[], None]], repeats: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats):
        for name, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - start)
    return times


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=30)
    args = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as temporary:
        for size, (config, _) in SIZES.items():
            fresh(config).save_pretrained(Path(temporary) / size.partition(" ")[0])
        results = Path(temporary) / "times.json"
        on_processes(worker, (port, args.repeats, results), TP)
        found = json.loads(results.read_text())
    print(TEXT.format(batch=BATCH, repeats=args.repeats))
    lines = [
        (f"{what} over {other}, {size}", goal, ratio(times[what], times[other]))
        for (what, other), goals in GOALS.items()
        for (size, times), goal in zip(found.items(), goals, strict=True)
    ]
    print(table(("step", "goal", "times the other"), lines))
    medians = {
        size: {name: round(1000 * statistics.median(t), 1) for name, t in times.items()}
        for size, times in found.items()
    }
    print(medians, file=sys.stderr)


if __name__ == "__main__":
    main()
