"""A step of one rank on a CUDA device, at real layer sizes: `python -m benchmarks.gpu`.

One process, a fake process group of eight: collectives are called and nothing is sent, so what is measured is what a rank
computes, launches and keeps. Layers of Llama-3.1-8B and Qwen3-30B-A3B in bfloat16; a layer is the difference of two depths.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, PretrainedConfig

import shardplan

from .page import table
from .ways import SHAPES, Way, compiled, fake_ranks, fresh, stock_sp, stock_tp

TP = 8
DEPTHS = (1, 3)
SEQ, BATCH = 8192, 1
MODELS = {
    "Llama-3.1-8B": ("llama", {**SHAPES["8B"], "num_key_value_heads": 8}),
    "Qwen3-30B-A3B": (
        "qwen3_moe",
        {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,  # 4 in the model: tp 8 must divide them
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
        },
    ),
}
TEXT = """## A rank's step on a GPU

`python -m benchmarks.gpu` on {device}, torch {torch}: a layer's forward and backward on one of {tp} ranks, {batch} x {seq:,} tokens,
bfloat16, collectives not carried out; eager unless it says compiled (per layer). Kernel time is the sum over kernels; the step
lies between events on the device; the gap is what of it no kernel ran; kept is the memory that the forward leaves for the
backward. Medians of {repeats}.
"""


@dataclass(frozen=True)
class Figures:
    """The figures of one step: times in milliseconds, memory in MiB."""

    step: float
    kernels: float
    kept: float
    peak: float

    def per_layer(self, fewer: Figures) -> tuple[float, float, float, float]:
        layers = DEPTHS[1] - DEPTHS[0]
        step, kernels, kept, peak = (
            (getattr(self, name) - getattr(fewer, name)) / layers for name in ("step", "kernels", "kept", "peak")
        )
        return step, kernels, kept, peak


def config_of(name: str, layers: int) -> PretrainedConfig:
    kind, shape = MODELS[name]
    more = {"num_hidden_layers": layers, "vocab_size": 1024, "use_cache": False, "dtype": torch.bfloat16}
    return AutoConfig.for_model(kind, **shape, **more)


def planned(config: PretrainedConfig, mesh: DeviceMesh, **options: object) -> nn.Module:
    options = {"data_parallel": False, "compile": False, "logits": "replicated", "prove": False, **options}
    return shardplan.apply_plan(fresh(config), mesh, "auto", src_data_rank=None, **options)


def stock_compiled(config: PretrainedConfig, mesh: DeviceMesh, way: Way) -> nn.Module:
    """torch's styles, compiled per layer. The embedding's collective is waited for: the gradient of a tensor that waits at
    its first use does not find its way out of a compiled graph (torch 2.13)."""
    model = way(config, mesh)
    model.model.embed_tokens.register_forward_hook(lambda module, args, output: output.clone())
    return compiled(model)


STOCK: dict[str, Way] = {"torch's styles, TP": stock_tp, "torch's styles, SP": stock_sp}
OURS: dict[str, Way] = {
    "TP": partial(planned, sequence_parallel=False),
    "SP": partial(planned, sequence_parallel=True),
    "SP, regather": partial(planned, sequence_parallel=True, regather=True),
    "TP, compiled": partial(planned, sequence_parallel=False, compile={}),
    "SP, compiled": partial(planned, sequence_parallel=True, compile={}),
}
STOCK_COMPILED: dict[str, Way] = {f"{name}, compiled": partial(stock_compiled, way=way) for name, way in STOCK.items()}


def ways(name: str) -> dict[str, Way]:
    """torch has no style for stacks of experts."""
    return OURS if name == "Qwen3-30B-A3B" else STOCK | STOCK_COMPILED | OURS


def forward_of(model: nn.Module, tokens: int, device: str) -> Callable[[], torch.Tensor]:
    ids = torch.randint(0, 1024, (BATCH, tokens), device=device)
    positions = torch.arange(tokens, device=device)[None]
    return lambda: model(input_ids=ids, position_ids=positions).logits.float().mean()


def measured(model: nn.Module, repeats: int) -> Figures:
    forward = forward_of(model, SEQ, "cuda")

    for _ in range(3):
        forward().backward()
        model.zero_grad()
    times, kept, peaks = [], [], []
    for _ in range(repeats):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        loss = forward()
        kept.append((torch.cuda.memory_allocated() - before) / 2**20)
        loss.backward()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
        peaks.append((torch.cuda.max_memory_allocated() - before) / 2**20)
        model.zero_grad()
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        forward().backward()
        torch.cuda.synchronize()
    kernels = sum(event.self_device_time_total for event in prof.key_averages()) / 1000
    return Figures(*map(statistics.median, (times, [kernels], kept, peaks)))


def layer_of(name: str, make: Way, repeats: int) -> tuple[float, float, float, float]:
    """Step, kernels, kept and peak of a layer of a model split in one way."""
    found = []
    for depth in DEPTHS:
        torch.compiler.reset()
        with fake_ranks(TP, device="cuda") as mesh:
            with torch.device("cuda"):
                model = make(config_of(name, depth), mesh)
            found.append(measured(model, repeats))
        torch.cuda.empty_cache()
    return found[1].per_layer(found[0])


def rows(repeats: int) -> Iterator[tuple[str, ...]]:
    for name in MODELS:
        for way, make in ways(name).items():
            print(name, way, file=sys.stderr, flush=True)
            step, kernels, kept, peak = layer_of(name, make, repeats)
            numbers = (step, kernels, max(0.0, step - kernels))
            yield name, way, *(f"{n:.2f}" for n in numbers), f"{kept:,.0f}", f"{peak:,.0f}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.gpu needs a CUDA device")
    device = torch.cuda.get_device_name()
    print(TEXT.format(device=device, torch=torch.__version__, tp=TP, batch=BATCH, seq=SEQ, repeats=args.repeats))
    header = ("model", "plan", "step, ms", "kernels, ms", "gaps, ms", "kept, MiB", "peak, MiB")
    print(table(header, rows(args.repeats)))


if __name__ == "__main__":
    main()
