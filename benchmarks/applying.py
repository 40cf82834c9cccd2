"""What applying costs besides torch's own calls: `python -m benchmarks.applying [--layers N] [--repeats N]`."""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from transformers import AutoModelForCausalLM, LlamaConfig

from shardplan import compile_plan
from shardplan.compiler.lower.program import Program
from shardplan.runtime.apply.phases import apply_program
from shardplan.runtime.apply.plan_mesh import read_mesh
from shardplan.runtime.parallel.make_styles import make_styles
from shardplan.torchlib.private import private

from .checkpoints import LLAMA_405B
from .page import ratio_text, table

TP, DP = 8, 16
SECTION = """## Applying

`python -m benchmarks.applying`: TP and FSDP2 of a Llama of {layers} layers (405B's sizes) on the meta device, rank 0 of a fake
process group of {ranks} (tp {tp}), after compiling the plan. The direct calls are `parallelize_module` with the same styles and
`fully_shard` of each layer and the root. In turns, {repeats} times: the median of the ratios of processor time, in brackets the
middle half of them, and the least milliseconds of both.
"""


def model(layers: int) -> nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(LlamaConfig(**LLAMA_405B | {"num_hidden_layers": layers}))


def direct(built: nn.Module, mesh: DeviceMesh, program: Program) -> Callable[[], object]:
    styles, _ = make_styles(program.resolved, program.by_name)

    def run() -> None:
        parallelize_module(built, mesh["tp"], styles, src_data_rank=None)
        data = mesh["dp_shard"]
        for name in program.resolved.dp_units:
            fully_shard(built.get_submodule(name), mesh=data)
        fully_shard(built, mesh=data)

    return run


def ours(built: nn.Module, mesh: DeviceMesh, program: Program) -> Callable[[], object]:
    return lambda: apply_program(built, read_mesh(mesh), program, src_data_rank=None)


def seconds(make: Callable[..., Callable[[], object]], layers: int, mesh: DeviceMesh, program: Program) -> float:
    run = make(model(layers), mesh, program)
    gc.collect()
    gc.disable()
    start = time.process_time()
    run()
    taken = time.process_time() - start
    gc.enable()
    return taken


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=LLAMA_405B["num_hidden_layers"])
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    private("fake_pg")
    dist.init_process_group("fake", rank=0, world_size=TP * DP)
    mesh = init_device_mesh("cpu", (DP, TP), mesh_dim_names=("dp_shard", "tp"))
    rows = []
    for sequence_parallel in (False, True):
        program = compile_plan(model(args.layers), mesh, "llama", sequence_parallel=sequence_parallel)
        times: dict[Callable[..., Callable[[], object]], list[float]] = {direct: [], ours: []}
        for turn in range(args.repeats + 1):
            for make, taken in times.items():
                one = seconds(make, args.layers, mesh, program)
                taken += [one] if turn else []
        least = ", ".join(f"{1000 * min(times[make]):.0f}" for make in (ours, direct))
        what = "TP + SP + FSDP2" if sequence_parallel else "TP + FSDP2"
        rows.append([f"{what} / the direct calls", "<= 1.05", ratio_text(times[ours], times[direct]), least])
    print(SECTION.format(layers=args.layers, ranks=TP * DP, tp=TP, repeats=args.repeats))
    print(table(["what", "goal", "measured", "ms"], rows))


if __name__ == "__main__":
    main()
