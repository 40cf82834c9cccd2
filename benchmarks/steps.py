"""A training step of two gloo processes, against the plans that people use: `python -m benchmarks.steps`.

Wall time of forward and backward, host time and bytes, and how far each way is from the unsharded model. All ways run in the same two
processes, step by step in turns, then on one rank of a fake group. `make build/automodel` installs NeMo Automodel.
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
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
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
FOLDER = Path(__file__).parents[1] / "build" / "automodel"
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
half of them. torch's styles are a plan by hand for `parallelize_module`; transformers' own TP is its `tp_plan`. NeMo Automodel is what its FSDP2
strategy makes of transformers' Llama (`ModelParallelizer`), without `fully_shard`. Its own Llama and its recipes are not run: these need more
packages, and transformers 5.18.0. {versions}.
"""
OTHER = """
**Host time and bytes**, of a layer in the same run, on one rank of a fake group: CPU time of the host as above, against the layer alone; ring bytes in
units of the minimum, for {batch} x {tokens} tokens, hidden {hidden_size}. **Off**: in the two processes, the norm of a difference from the unsharded model over
that of what is right, the largest of the loss and every gradient, on both ranks and for both sizes.
"""


def own_tp(config: LlamaConfig, mesh: DeviceMesh, *, folder: Path) -> nn.Module:
    """What transformers makes of its own plan."""
    split = DistributedConfig(tp_size=mesh["tp"].size())
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=split, dtype=torch.float32)
    assert isinstance(model.model.layers[0].mlp.up_proj.weight, DTensor), "transformers split nothing"
    return model


def automodel(config: LlamaConfig, mesh: DeviceMesh, *, sp: bool) -> nn.Module:
    """What NeMo Automodel's FSDP2 strategy makes of transformers' Llama, all but FSDP2 itself."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    from nemo_automodel.components.distributed.parallelizer import ModelParallelizer

    class Unsharded(ModelParallelizer):
        """Its two places that call `fully_shard` do not."""

        def _apply_fsdp_sharding(self, *args: Any, **kwargs: Any) -> None:
            pass

        def _fully_shard_module(self, module: nn.Module, **kwargs: Any) -> nn.Module:
            return module

    names = {"dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": mesh["tp"].size()}
    own = init_device_mesh(mesh.device_type, tuple(names.values()), mesh_dim_names=tuple(names))
    return Unsharded()._apply(fresh(config), own, sequence_parallel=sp)


def ways(folder: Path) -> dict[str, Way]:
    return {
        "TP": partial(planned, sp=False),
        "SP": partial(planned, sp=True),
        TORCH_TP: stock_tp,
        HF: partial(own_tp, folder=folder),
        TORCH_SP: stock_sp,
        NEMO_TP: partial(automodel, sp=False),
        NEMO_SP: partial(automodel, sp=True),
    }


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


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=ids, position_ids=torch.arange(ids.shape[1]).unsqueeze(0)).logits
    logits = logits.full_tensor() if isinstance(logits, DTensor) else logits  # as NeMo Automodel's loss does
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


def step_of(model: nn.Module, ids: torch.Tensor) -> Callable[[], None]:
    def step() -> None:
        loss_of(model, ids).backward()
        model.zero_grad()

    return step


def results_of(model: nn.Module, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """The loss, and every parameter's gradient, whole."""
    loss = loss_of(model, ids)
    loss.backward()
    found = {"the loss": loss.detach()}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        assert gradient is not None, f"{name} has no gradient"
        found[name] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient.clone()
    model.zero_grad()
    return found


def off(found: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> float:
    """The norm of a difference over that of what is right: the largest of the loss and all gradients, on all ranks."""
    assert found.keys() == right.keys()
    worst = torch.stack([(found[name] - right[name]).norm() / right[name].norm() for name in right]).max()
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return worst.item()


def worker(rank: int, port: int, repeats: int, results: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=TP)
    mesh = init_device_mesh("cpu", (1, TP), mesh_dim_names=("dp_shard", "tp"))
    found, wrong = {}, dict.fromkeys(ways(results.parent), 0.0)
    for size, (config, tokens) in SIZES.items():
        ids = torch.randint(0, config.vocab_size, (BATCH, tokens), generator=torch.Generator().manual_seed(0))
        right, steps = results_of(fresh(config), ids), {}
        for name, way in ways(saved(results.parent, config)).items():
            model = way(config, mesh)
            wrong[name] = max(wrong[name], off(results_of(model, ids), right))
            steps[name] = step_of(model, ids)
            for _ in range(3):
                steps[name]()
        found[size] = timed(steps, repeats)
    if rank == 0:
        results.write_text(json.dumps([found, wrong]))
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
        found, wrong = json.loads(results.read_text())
        host, sent = on_a_fake_rank(Path(temporary), args.repeats)
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "nemo_automodel"))
    print(TEXT.format(batch=BATCH, repeats=args.repeats, versions=versions))
    lines = [
        (f"{what} over {other}, {size}", goal, ratio(times[what], times[other]))
        for (what, other), goals in GOALS.items()
        for (size, times), goal in zip(found.items(), goals, strict=True)
    ]
    print(table(("step", "goal", "times the other"), lines))
    print(OTHER.format(batch=BATCH, tokens=TOKENS, **SIZE))
    costs = [(name, ratio(host[name], host[""]), f"{sent[name]:.2f}", f"{wrong[name]:.1e}") for name in wrong]
    print(table(("way", "host time, times the layer alone", "ring bytes, of the minimum", "off"), costs))
    medians = {
        size: {name: round(1000 * statistics.median(t), 1) for name, t in times.items()}
        for size, times in found.items()
    }
    print(medians, file=sys.stderr)


if __name__ == "__main__":
    main()
