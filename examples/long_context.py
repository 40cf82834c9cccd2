"""Train on packed documents: every sequence is split over cp, its heads over tp, the parameters over all ranks with FSDP2.

    torchrun --nproc-per-node 8 examples/long_context.py --text demo/text.txt --cp 4 --tp 2

It runs on GPUs (nccl) or on CPUs (gloo). The model is a small Gemma 3, with windows; tokens are the bytes of the text, whose paragraphs
are the documents. Every rank of a cp group is given the whole batch, as without cp.
"""

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Gemma3TextConfig

from shardplan import applied, apply_plan, build_mesh, clip_grad_norm_, context_parallel, materialize, micro_batches

IGNORED = -100  # labels that do not count


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small model with windows on packed paragraphs of a text.")
    parser.add_argument("--text", type=Path, required=True, help="the file to train on")
    parser.add_argument("--cp", type=int, default=1, help="ranks that a sequence is split over")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks, with sequence parallelism")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=8, help="sequences in a step, over all ranks")
    parser.add_argument("--seq-len", type=int, default=512, help="a multiple of cp x tp")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--losses", type=Path, help="a file for the losses and norms, one JSON object per line")
    return parser.parse_args()


def make_model() -> torch.nn.Module:
    config = Gemma3TextConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=16,
        sliding_window=64,
        layer_types=["sliding_attention", "full_attention"],
        max_position_embeddings=4096,
    )
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def packed(text: bytes, seq_len: int) -> Iterator[dict[str, torch.Tensor]]:
    """Rows of documents, one after the other, again and again: a document that ends a row is cut there.

    Returns:
        For each row [1, seq_len]: ids; positions that begin anew with each document, by which the model masks the
        others; labels. A document's first label does not count: no token of its document comes before it.
    """
    documents = [torch.frombuffer(bytearray(part), dtype=torch.uint8).long() for part in text.split(b"\n\n") if part]
    row: list[torch.Tensor] = []
    while True:
        for document in documents:
            row.append(document[: seq_len - sum(map(len, row))])
            if sum(map(len, row)) == seq_len:
                ids = torch.cat(row)
                positions = torch.cat([torch.arange(len(one)) for one in row])
                labels = ids.where(positions > 0, IGNORED)
                given = {"input_ids": ids, "position_ids": positions, "labels": labels}
                yield {name: one[None] for name, one in given.items()}
                row = []


def own_batches(rows: Iterator[dict[str, torch.Tensor]], batch: int, part: int, parts: int, device: str):
    """This rank's rows of a step, a micro-batch each; the ranks of a cp x tp group get the same ones."""
    every = [next(rows) for _ in range(batch)]
    return [{name: one.to(device) for name, one in row.items()} for row in every[part::parts]]


def train(args: argparse.Namespace) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    mesh = build_mesh(dp_shard=None, cp=args.cp, tp=args.tp)
    model = make_model()
    # The rules for cp are derived, and the receipt has them.
    apply_plan(model, mesh, "auto", sequence_parallel=args.tp > 1, seq_len=args.seq_len)
    torch.manual_seed(0)  # every rank draws the same weights, and keeps its part of them
    materialize(model, device)
    say = print if dist.get_rank() == 0 else lambda *_, **__: None
    say(applied(model), flush=True)

    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    rows = packed(args.text.read_bytes(), args.seq_len)
    part, parts = dist.get_rank() // (args.cp * args.tp), dist.get_world_size() // (args.cp * args.tp)
    found = []
    for step in range(1, args.steps + 1):
        mean = torch.zeros((), device=device)
        for batch, scale in micro_batches(model, own_batches(rows, args.batch, part, parts, device)):
            # Labels are shifted, and then cut: a rank's last token predicts the first of the next rank.
            with context_parallel(model, **batch) as inputs:
                loss = model(**inputs, use_cache=False).loss * scale
                loss.backward()
            mean += loss.detach()
        norm = clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

        dist.all_reduce(mean)
        found.append({"step": step, "loss": mean.item() / dist.get_world_size(), "norm": norm.item()})
        say(f"step {step:3}  loss {found[-1]['loss']:.6f}  gradient norm {norm.item():.4f}", flush=True)
    if args.losses and dist.get_rank() == 0:
        args.losses.write_text("".join(json.dumps(row) + "\n" for row in found))
    dist.destroy_process_group()


if __name__ == "__main__":
    train(arguments())
