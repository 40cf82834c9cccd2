"""What a rank of a planned model needs of host memory to load a checkpoint, against reading all of it.

    python -m benchmarks.loading [--layers N] [--tp N] [--dp-shard N]

A checkpoint of random weights, with the dimensions of an 8B model in a few layers, is written to a temporary folder.
Then each way is run in processes of its own, gloo on the CPU: on a meta-device model with a plan

- slices: `load_checkpoint`, which reads what the rank keeps;
- whole: the whole checkpoint is read (`safetensors.torch.load_file`), and then split: `materialize(state_dict=...)`.

Peaks are those of a process over what it needed before, in MiB: its own memory (RssAnon), sampled every few milliseconds,
and with the file pages that are mapped into it meanwhile (VmRSS), which the system takes back when it needs them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path

warnings.filterwarnings("ignore")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from transformers import AutoModelForCausalLM, LlamaConfig  # noqa: E402

import shardplan  # noqa: E402

MIB = 2**20
WAYS = ("slices", "whole")


def config_of(layers: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=32000,
        dtype="bfloat16",
    )


def write(folder: Path, layers: int) -> None:
    model = AutoModelForCausalLM.from_config(config_of(layers), dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="1GB")


class Peak:
    """The most memory that the process has while the context lasts, over what it had before."""

    def _now(self) -> tuple[int, int]:
        lines = Path("/proc/self/status").read_text().splitlines()
        found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith(("Rss", "VmRSS"))}
        return found["RssAnon"], found["VmRSS"]

    def __enter__(self) -> Peak:
        self.start = self.most = self._now()
        self.running, self.thread = True, threading.Thread(target=self._watch)
        self.thread.start()
        return self

    def _watch(self) -> None:
        while self.running:
            self.most = tuple(max(a, b) for a, b in zip(self.most, self._now(), strict=True))
            time.sleep(0.003)

    def __exit__(self, *_: object) -> None:
        self.running = False
        self.thread.join()
        self.own, self.mapped = ((most - start) / MIB for most, start in zip(self.most, self.start, strict=True))


def load(way: str, folder: Path, tp: int, dp_shard: int) -> dict[str, float]:
    """One rank. Returns its figures, the largest over the ranks."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dp_shard, tp), mesh_dim_names=("dp_shard", "tp"))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LlamaConfig.from_pretrained(folder), dtype=torch.bfloat16)
    shardplan.apply_plan(model, mesh, "auto", sequence_parallel=True, prove=False)
    with Peak() as peak:
        if way == "slices":
            shardplan.load_checkpoint(model, folder, progress=False)
        else:
            from safetensors.torch import load_file

            whole = {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}
            shardplan.materialize(model, "cpu", state_dict=whole)
    kept = sum(p.to_local().nbytes for p in model.parameters()) / MIB
    figures = torch.tensor([kept, peak.own, peak.mapped], dtype=torch.float64)
    dist.all_reduce(figures, op=dist.ReduceOp.MAX)
    dist.destroy_process_group()
    return dict(zip(("kept", "own", "mapped"), figures.tolist(), strict=True))


def run(way: str, folder: Path, args: argparse.Namespace) -> dict[str, float]:
    own = [__file__, "--way", way, "--folder", str(folder), "--tp", str(args.tp), "--dp-shard", str(args.dp_shard)]
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.tp * args.dp_shard)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    printed = subprocess.run([sys.executable, *start, *own], capture_output=True, text=True, env=environment)
    if printed.returncode:
        raise SystemExit(printed.stderr)
    return json.loads(next(line for line in printed.stdout.splitlines() if line.startswith("{")))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--dp-shard", type=int, default=2)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way:
        figures = load(args.way, args.folder, args.tp, args.dp_shard)
        if int(os.environ.get("RANK", "0")) == 0:
            print(json.dumps(figures), flush=True)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "checkpoint"
        write(folder, args.layers)
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors")) / MIB
        print("## Loading a checkpoint\n")
        print(
            f"`python -m benchmarks.loading`: {size:,.0f} MiB, dp_shard {args.dp_shard} x tp {args.tp}, MiB per rank.\n"
        )
        print("| way | kept | own memory at its peak | with mapped file pages | own, of the checkpoint |")
        print("|---|---|---|---|---|")
        for way in WAYS:
            one = run(way, folder, args)
            numbers = [f"{one[key]:,.0f}" for key in ("kept", "own", "mapped")]
            print(f"| {way} | {' | '.join(numbers)} | {one['own'] / size:.2f} |", flush=True)


if __name__ == "__main__":
    main()
