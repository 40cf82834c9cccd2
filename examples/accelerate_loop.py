"""Train a planned model in a loop of one's own with accelerate.

    torchrun --nproc-per-node 4 examples/accelerate_loop.py --tp 2 --sequence-parallel --text demo/text.txt

It runs on GPUs (nccl) or on CPUs (gloo). In one process it trains the unsharded model, with the same losses.
"""

import argparse
import json
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM

from shardplan import apply_plan, build_mesh, load_training_state, save_training_state
from shardplan.compat import adopt


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small language model on the bytes of a text.")
    parser.add_argument("--text", type=Path, required=True, help="the file to train on")
    parser.add_argument("--model", default=str(Path(__file__).with_name("tiny-qwen3.json")), help="a config.json")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks; the rest is dp_shard")
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=8, help="sequences in a step, over all ranks")
    parser.add_argument("--seq-len", type=int, default=128, help="tokens in a sequence")
    parser.add_argument("--resume", type=Path, help="a checkpoint folder to continue from")
    parser.add_argument("--checkpoint", type=Path, help="a folder for a checkpoint at the end")
    parser.add_argument("--losses", type=Path, help="a file for the losses, one JSON object per line")
    return parser.parse_args(words)


def train(args: argparse.Namespace) -> None:
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    text = torch.frombuffer(bytearray(args.text.read_bytes()), dtype=torch.uint8).long()
    rows = [row for row in text.split(args.seq_len) if len(row) == args.seq_len]
    shares = accelerator.num_processes // args.tp
    loader = DataLoader(rows, batch_size=args.batch // shares, drop_last=True)

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.model))
    if dist.is_initialized():
        mesh = build_mesh(tp=args.tp)
        model = apply_plan(model.to(accelerator.device), mesh, "auto", sequence_parallel=args.sequence_parallel)
        adopt(accelerator, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    # accelerator.load_state and save_state work too; a save of these functions is whole even where a process is killed.
    done = load_training_state(model, optimizer.optimizer, args.resume)["step"] if args.resume else 0
    losses = []
    for step, ids in zip(range(done + 1, args.steps + 1), accelerator.skip_first_batches(loader, done), strict=False):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
        accelerator.print(f"step {step:3}  loss {losses[-1]:.6f}", flush=True)
    if args.checkpoint:
        save_training_state(model, optimizer.optimizer, args.checkpoint, extra={"step": args.steps}, overwrite=True)
    if args.losses and accelerator.is_main_process:
        rows = [{"step": step, "loss": loss} for step, loss in enumerate(losses, done + 1)]
        args.losses.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    train(arguments())
    if dist.is_initialized():
        dist.destroy_process_group()
