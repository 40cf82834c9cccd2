"""Train a causal language model with tensor parallelism, sequence parallelism, FSDP2 and activation checkpointing.

    torchrun --nproc-per-node 4 examples/train.py --tp 2 --sequence-parallel --text demo/text.txt

It runs on GPUs (nccl) or on CPUs (gloo). Tokens are the bytes of the text, so it needs no tokenizer and no download.
"""

import argparse
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from shardplan import (
    applied,
    apply_plan,
    clip_grad_norm_,
    load_checkpoint,
    load_training_state,
    materialize,
    micro_batches,
    save_checkpoint,
    save_training_state,
)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small language model on the bytes of a text.")
    parser.add_argument("--text", type=Path, required=True, help="the file to train on")
    parser.add_argument("--model", default=str(Path(__file__).with_name("tiny-qwen3.json")), help="a config.json")
    parser.add_argument("--weights", type=Path, help="a folder with config.json and safetensors to start from")
    parser.add_argument("--plan", default="auto", help="a plan file, a built-in plan's name, or auto")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--dp-replicate", type=int, default=1, help="copies of the model; the rest is dp_shard")
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--steps", type=int, default=30, help="the last step")
    parser.add_argument("--batch", type=int, default=8, help="sequences in a step, over all ranks")
    parser.add_argument("--seq-len", type=int, default=128, help="tokens in a sequence")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", type=Path, help="a checkpoint folder to go on from")
    parser.add_argument("--checkpoint", type=Path, help="a folder for a checkpoint at the end")
    parser.add_argument(
        "--export", type=Path, help="a folder for the weights at the end, as from_pretrained reads them"
    )
    parser.add_argument("--losses", type=Path, help="a file for the losses, one JSON object per line")
    return parser.parse_args()


def make_mesh(device: str, tp: int, dp_replicate: int) -> DeviceMesh:
    """The ranks as [dp_replicate, dp_shard, tp]; tp last, so that its ranks are neighbours."""
    dp_shard, rest = divmod(dist.get_world_size(), tp * dp_replicate)
    if rest or not dp_shard:
        raise SystemExit(
            f"{dist.get_world_size()} processes are not a multiple of tp {tp} x dp_replicate {dp_replicate}"
        )
    names = ("dp_replicate", "dp_shard", "tp") if dp_replicate > 1 else ("dp_shard", "tp")
    sizes = {"dp_replicate": dp_replicate, "dp_shard": dp_shard, "tp": tp}
    return init_device_mesh(device, tuple(sizes[name] for name in names), mesh_dim_names=names)


def make_model(config: PreTrainedConfig, mesh: DeviceMesh, args: argparse.Namespace) -> torch.nn.Module:
    # On the meta device a model has names and shapes but no memory: no rank ever holds the whole model.
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    apply_plan(
        model,
        mesh,
        args.plan,
        sequence_parallel=args.sequence_parallel,
        activation_checkpointing={"mode": "full"},
        seq_len=args.seq_len,
    )
    # Every rank reads its part of real weights, or draws the same random ones and keeps its part of them.
    torch.manual_seed(args.seed)
    if args.weights:
        load_checkpoint(model, args.weights)
    else:
        materialize(model, mesh.device_type)
    return model


def global_batch(text: torch.Tensor, step: int, batch: int, seq_len: int) -> torch.Tensor:
    """Token ids [batch, seq_len] of a step: the same on every rank, and the same for every mesh."""
    random = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - seq_len, (batch,), generator=random).tolist()
    return torch.stack([text[start : start + seq_len] for start in starts]).long()


def own_part(batch: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """This rank's sequences. The ranks of one tp group get the same ones."""
    tp_ranks = mesh["tp"].size()
    parts, index = dist.get_world_size() // tp_ranks, dist.get_rank() // tp_ranks
    if len(batch) % parts:
        raise SystemExit(f"--batch {len(batch)} is not a multiple of the {parts} data-parallel ranks")
    return batch.chunk(parts)[index]


def train(args: argparse.Namespace) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    mesh = make_mesh(device, args.tp, args.dp_replicate)
    model = make_model(AutoConfig.from_pretrained(args.weights or args.model), mesh, args)
    say = print if dist.get_rank() == 0 else lambda *_, **__: None
    say(applied(model), flush=True)

    # The optimizer comes after the plan, which replaces the parameters.
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    applied(model).check_optimizer(optimizer)
    # What any mesh wrote can be read on this one.
    done = load_training_state(model, optimizer, args.resume)["step"] if args.resume else 0

    text = torch.frombuffer(bytearray(args.text.read_bytes()), dtype=torch.uint8)
    losses = {}
    for step in range(done + 1, args.steps + 1):
        ids = own_part(global_batch(text, step, args.batch, args.seq_len), mesh).to(device)
        # One batch a step. With several, their gradients are those of the mean over all of their tokens.
        for batch, scale in micro_batches(model, [{"input_ids": ids, "labels": ids}]):
            loss = model(**batch, use_cache=False).loss * scale
            loss.backward()
        norm = clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

        # The mean over the ranks is the mean over the tokens of all.
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses[step] = mean.item() / dist.get_world_size()
        say(f"step {step:3}  loss {losses[step]:.6f}  gradient norm {norm.item():.4f}", flush=True)

    if args.checkpoint:
        save_training_state(model, optimizer, args.checkpoint, extra={"step": args.steps}, overwrite=True)
    if args.export:
        save_checkpoint(model, args.export, overwrite=True)
    if args.losses and dist.get_rank() == 0:
        rows = [{"step": step, "loss": loss} for step, loss in losses.items()]
        args.losses.write_text("".join(json.dumps(row) + "\n" for row in rows))
    dist.destroy_process_group()


if __name__ == "__main__":
    train(arguments())
