"""Train a causal language model in pipeline stages, with tensor parallelism and FSDP2.

    torchrun --nproc-per-node 4 examples/train_pipeline.py --pp 2 --tp 2 --text demo/text.txt

It runs on GPUs (nccl) or on CPUs (gloo). Tokens are the bytes of the text, so it needs no tokenizer and no download.
"""

import argparse
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from shardplan import (
    Pipeline,
    PipelineOptions,
    applied,
    apply_plan,
    build_mesh,
    clip_grad_norm_,
    load_training_state,
    materialize,
    save_checkpoint,
    save_training_state,
)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small language model in pipeline stages.")
    parser.add_argument("--text", type=Path, required=True, help="the file to train on")
    parser.add_argument("--model", default=str(Path(__file__).with_name("tiny-qwen3.json")), help="a config.json")
    parser.add_argument("--plan", default="auto", help="a plan file, a built-in plan's name, or auto")
    parser.add_argument("--layers", default="model.layers.*", help="the repeated blocks")
    parser.add_argument("--pp", type=int, default=2, help="pipeline ranks")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks; the rest is dp_shard")
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--steps", type=int, default=30, help="the last step")
    parser.add_argument("--batch", type=int, default=8, help="sequences in a step, on each data-parallel rank")
    parser.add_argument("--seq-len", type=int, default=128, help="tokens in a sequence")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", type=Path, help="a folder of training state to go on from, of any mesh")
    parser.add_argument("--checkpoint", type=Path, help="a folder for training state at the end")
    parser.add_argument(
        "--export", type=Path, help="a folder for the weights at the end, as from_pretrained reads them"
    )
    parser.add_argument("--losses", type=Path, help="a file for the losses, one JSON object per line")
    return parser.parse_args()


def make_pipeline(args: argparse.Namespace, device: str) -> Pipeline:
    mesh = build_mesh(pp=args.pp, tp=args.tp, device_type=device)
    # On the meta device a model has names and shapes but no memory: no rank ever holds the whole model.
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.model))
    pipeline = apply_plan(
        model,
        mesh,
        args.plan,
        pipeline=PipelineOptions(args.schedule, args.micro_batches),
        sequence_parallel=args.sequence_parallel,
        pipeline_parallel={"layers": args.layers},
        seq_len=args.seq_len,
    )
    torch.manual_seed(args.seed)  # every rank draws the same weights and keeps its part of them
    materialize(pipeline, device)
    return pipeline


def batch(text: torch.Tensor, step: int, args: argparse.Namespace, replica: int, replicas: int) -> torch.Tensor:
    """The rows of this data-parallel rank; the ranks of pp and tp get the same ones."""
    generator = torch.Generator().manual_seed(args.seed + step)
    starts = torch.randint(0, len(text) - args.seq_len, (args.batch * replicas,), generator=generator)
    own = starts[replica * args.batch : (replica + 1) * args.batch]
    return torch.stack([text[start : start + args.seq_len] for start in own.tolist()])


def main() -> None:
    args = arguments()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    pipeline = make_pipeline(args, device)
    if dist.get_rank() == 0:
        print(applied(pipeline), flush=True)
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=args.lr)
    start = load_training_state(pipeline, optimizer, args.resume)["step"] if args.resume else 0
    text = torch.tensor(list(args.text.read_bytes()))
    data_parallel = pipeline.layout.mesh.mesh["dp_shard"]
    losses = []
    for step in range(start, args.steps):
        ids = batch(text, step, args, data_parallel.get_local_rank(), data_parallel.size()).to(device)
        loss = pipeline.step(input_ids=ids, labels=ids)  # the mean over the tokens of all ranks
        norm = clip_grad_norm_(pipeline, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append({"step": step, "loss": loss.item(), "norm": norm.item()})
        if dist.get_rank() == 0 and step % 10 == 0:
            print(f"step {step}: loss {losses[-1]['loss']:.4f}, norm {losses[-1]['norm']:.3f}", flush=True)
    if args.checkpoint:
        save_training_state(pipeline, optimizer, args.checkpoint, extra={"step": args.steps})
    if args.export:
        save_checkpoint(pipeline, args.export, overwrite=True)
    if args.losses and dist.get_rank() == 0:
        args.losses.write_text("".join(json.dumps(row) + "\n" for row in losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
