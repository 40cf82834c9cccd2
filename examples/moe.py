"""Train a mixture of experts: experts distributed over ranks, tensor and sequence parallelism, FSDP2, and routers that are balanced
without an auxiliary loss.

    torchrun --nproc-per-node 4 examples/moe.py --text demo/text.txt --tp 2 --ep 2

It runs on GPUs (nccl) or on CPUs (gloo). The model is a small DeepSeek-V3; tokens are the bytes of the text.
"""

import argparse
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, DeepseekV3Config

from shardplan import (
    applied,
    apply_plan,
    build_mesh,
    clip_grad_norm_,
    count_expert_tokens,
    materialize,
    micro_batches,
    update_expert_bias,
)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small mixture of experts on the bytes of a text.")
    parser.add_argument("--text", type=Path, required=True, help="the file to train on")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks, with sequence parallelism")
    parser.add_argument(
        "--ep", type=int, default=1, help="ranks that experts are distributed over, taken from dp_shard x tp"
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=8, help="sequences in a step, over all ranks")
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--bias-rate", type=float, default=1e-3, help="how fast routers are balanced")
    parser.add_argument("--losses", type=Path, help="a file for the losses, one JSON object per line")
    return parser.parse_args()


def make_model() -> torch.nn.Module:
    config = DeepseekV3Config(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=3,
        first_k_dense_replace=1,
        num_attention_heads=8,
        num_key_value_heads=8,
        q_lora_rank=64,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        n_shared_experts=1,
        max_position_embeddings=512,
    )
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def own_part(text: torch.Tensor, step: int, args: argparse.Namespace, part: int, parts: int) -> torch.Tensor:
    """This rank's sequences of a step [batch / parts, seq_len]; the ranks of one tp group get the same ones."""
    random = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - args.seq_len, (args.batch,), generator=random).tolist()
    return torch.stack([text[start : start + args.seq_len] for start in starts]).long().chunk(parts)[part]


def train(args: argparse.Namespace) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    # ep takes no ranks of its own: on 4 ranks, dp_shard 2 x tp 2 with ep 2 has 4.
    mesh = build_mesh(dp_shard=None, tp=args.tp, ep=args.ep)
    model = make_model()
    apply_plan(model, mesh, "auto", sequence_parallel=args.tp > 1, seq_len=args.seq_len)
    torch.manual_seed(0)  # every rank draws the same weights, and keeps its part of them
    materialize(model, device)
    count_expert_tokens(model)
    say = print if dist.get_rank() == 0 else lambda *_, **__: None
    say(applied(model), flush=True)

    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    text = torch.frombuffer(bytearray(args.text.read_bytes()), dtype=torch.uint8)
    part, parts = dist.get_rank() // args.tp, dist.get_world_size() // args.tp
    losses = []
    for step in range(1, args.steps + 1):
        ids = own_part(text, step, args, part, parts).to(device)
        for batch, scale in micro_batches(model, [{"input_ids": ids, "labels": ids}]):
            loss = model(**batch, use_cache=False).loss * scale
            loss.backward()
        norm = clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        update_expert_bias(model, args.bias_rate)  # after the optimizer, once a step

        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
        say(f"step {step:3}  loss {losses[-1]:.6f}  gradient norm {norm.item():.4f}", flush=True)
    if args.losses and dist.get_rank() == 0:
        rows = [{"step": step, "loss": loss} for step, loss in enumerate(losses, 1)]
        args.losses.write_text("".join(json.dumps(row) + "\n" for row in rows))
    dist.destroy_process_group()


if __name__ == "__main__":
    train(arguments())
