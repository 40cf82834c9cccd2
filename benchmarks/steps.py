"""A training step of two gloo processes, against the plans that people use: `python -m benchmarks.steps`.

Wall time of forward and backward, host time and bytes. All ways run in the same two processes, step by step in turns, then on one rank of a fake group.
NeMo Automodel is among them where it is installed: `pip install --no-deps nemo_automodel==0.7.0`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.distributed import DistributedConfig

from tests.collective_counter import CollectiveCounter

from .collectives import ring_bytes
from .host import SIZE, alone, layer_times, ratio
from .page import table
from .processes import on_processes
from .ways import Way, fake_ranks, fresh, llama, planned, stock_sp, stock_tp, trunk

TP = 2
BATCH = 2
TOKENS = 128  # where bytes are counted
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
NEMO_TP, NEMO_SP = "NeMo Automodel, TP", "NeMo Automodel, SP"
NEMO = importlib.util.find_spec("nemo_automodel") is not None
ITEM = 4  # float32
GOALS = {  # (what, against what) -> for each size
    ("TP", TORCH_TP): ("<= 0.85", "<= 0.56"),
    ("TP", HF): ("<= 0.85", "<= 0.56"),
    ("TP", NEMO_TP): ("", ""),
    ("SP", TORCH_SP): ("<= 0.70", "<= 0.45"),
    ("SP", NEMO_SP): ("", ""),
}
TEXT = """## A training step

`python -m benchmarks.steps`: forward and backward of a Llama on two gloo processes, a core each, batch {batch}, float32, eager: the
wall time of a step of a plan over that of another way to split the same model, the median of {repeats} pairs and the middle
half of them. torch's styles are a plan by hand for `parallelize_module`; transformers' is its own `tp_plan`; NeMo Automodel's is the one that it chooses
for Llama. {versions}.
"""
OTHER = """
**Host time and bytes**, of a layer in the same run, on one rank of a fake group: CPU time of the host as above, against the layer alone; ring bytes in
units of the minimum, for {batch} x {tokens} tokens, hidden {hidden_size}.
"""


def own_tp(config: LlamaConfig, mesh: DeviceMesh, *, folder: Path) -> nn.Module:
    """What transformers makes of its own plan."""
    split = DistributedConfig(tp_size=mesh["tp"].size())
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=split, dtype=torch.float32)
    assert isinstance(model.model.layers[0].mlp.up_proj.weight, DTensor), "transformers split nothing"
    return model


def automodel(config: LlamaConfig, mesh: DeviceMesh, *, sp: bool) -> nn.Module:
    """As NeMo Automodel's FSDP2 strategy splits a Llama over tp."""
    from nemo_automodel.components.distributed.parallelizer import _get_parallel_plan

    model = fresh(config)
    return parallelize_module(model, mesh["tp"], _get_parallel_plan(model, sp, tp_size=mesh["tp"].size()))


def ways(folder: Path) -> dict[str, Way]:
    found = {
        "TP": partial(planned, sp=False),
        "SP": partial(planned, sp=True),
        TORCH_TP: stock_tp,
        HF: partial(own_tp, folder=folder),
        TORCH_SP: stock_sp,
    }
    if NEMO:
        found |= {NEMO_TP: partial(automodel, sp=False), NEMO_SP: partial(automodel, sp=True)}
    return found


def saved(folder: Path, config: LlamaConfig) -> Path:
    """The folder of a model of this configuration, for `own_tp`."""
    path = folder / f"{config.hidden_size}-{config.num_hidden_layers}"
    if not path.exists():
        fresh(config).save_pretrained(path)
    return path


def on_a_fake_rank(folder: Path, repeats: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """CPU seconds of a layer, each way and alone; ring bytes of a layer in units of the minimum."""

    def own(config: LlamaConfig, mesh: DeviceMesh) -> nn.Module:
        return own_tp(config, mesh, folder=saved(folder, config))

    with fake_ranks(TP) as mesh:
        every = ways(folder) | {HF: own}
        times = layer_times({"": alone, **every}, mesh, repeats, partial(llama, **SIZE))
        sent = {}
        for name, way in every.items():
            few, many = (layers_bytes(way(llama(depth, **SIZE), mesh)) for depth in (1, 2))
            sent[name] = (many - few) / (8 * BATCH * TOKENS * SIZE["hidden_size"] * ITEM * (TP - 1) / TP)
    return times, sent


def layers_bytes(model: nn.Module) -> float:
    ids = torch.randint(0, 512, (BATCH, TOKENS))
    with CollectiveCounter() as counter:
        hidden = trunk(model, input_ids=ids, position_ids=torch.arange(TOKENS).unsqueeze(0))
        (hidden.to_local() if isinstance(hidden, DTensor) else hidden).sum().backward()
    return ring_bytes(counter.calls, TP) * ITEM / 2  # counted for two bytes each


def step_of(model: nn.Module, ids: torch.Tensor) -> Callable[[], None]:
    positions = torch.arange(ids.shape[1]).unsqueeze(0)

    def step() -> None:
        logits = model(input_ids=ids, position_ids=positions).logits
        if isinstance(logits, DTensor):  # as NeMo Automodel's loss does
            logits = logits.full_tensor()
        nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()
        model.zero_grad()

    return step


def worker(rank: int, port: int, repeats: int, results: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=TP)
    mesh = init_device_mesh("cpu", (1, TP), mesh_dim_names=("dp_shard", "tp"))
    found = {}
    for size, (config, tokens) in SIZES.items():
        steps = {}
        for name, way in ways(saved(results.parent, config)).items():
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
        for config, _ in SIZES.values():
            saved(Path(temporary), config)
        results = Path(temporary) / "times.json"
        on_processes(worker, (port, args.repeats, results), TP)
        found = json.loads(results.read_text())
        host, sent = on_a_fake_rank(Path(temporary), args.repeats)
    packages = ["torch", "transformers", *(["nemo_automodel"] if NEMO else [])]
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    print(TEXT.format(batch=BATCH, repeats=args.repeats, versions=versions))
    lines = [
        (f"{what} over {other}, {size}", goal, ratio(times[what], times[other]))
        for (what, other), goals in GOALS.items()
        if other in host
        for (size, times), goal in zip(found.items(), goals, strict=True)
    ]
    print(table(("step", "goal", "times the other"), lines))
    print(OTHER.format(batch=BATCH, tokens=TOKENS, **SIZE))
    costs = [(name, ratio(host[name], host[""]), f"{sent[name]:.2f}") for name in host if name]
    print(table(("way", "host time, times the layer alone", "ring bytes, of the minimum"), costs))
    medians = {
        size: {name: round(1000 * statistics.median(t), 1) for name, t in times.items()}
        for size, times in found.items()
    }
    print(medians, file=sys.stderr)


if __name__ == "__main__":
    main()
