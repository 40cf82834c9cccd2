"""Train a diffusion transformer of diffusers with tensor and sequence parallelism and FSDP2: a small Stable Diffusion 3 that learns to
draw bright and dark squares.

    torchrun --nproc-per-node 4 examples/diffusion.py --tp 2

It runs on GPUs (nccl) or on CPUs (gloo), and needs diffusers. Latents and texts of a real data set take the place of `squares`.
"""

import argparse
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from diffusers import SD3Transformer2DModel

from shardplan import Model, applied, apply_plan, build_mesh, clip_grad_norm_

SIZE, CHANNELS, TEXT, TEXT_WIDTH, POOLED = 16, 4, 7, 32, 24


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small diffusion transformer.")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks, with sequence parallelism")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=8, help="images in a step, over all ranks")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--losses", type=Path, help="a file for the losses, one JSON object per line")
    return parser.parse_args()


def make_model() -> torch.nn.Module:
    return SD3Transformer2DModel(
        sample_size=SIZE,
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        num_layers=2,
        num_attention_heads=4,
        attention_head_dim=16,
        joint_attention_dim=TEXT_WIDTH,
        caption_projection_dim=64,
        pooled_projection_dim=POOLED,
        pos_embed_max_size=SIZE // 2,
        qk_norm="rms_norm",
    )


def squares(seed: int, batch: int = 2) -> dict[str, torch.Tensor]:
    """Images that are noise up to a time between 0 and 1, texts that say how bright they are, and where the flow leads."""
    random = torch.Generator().manual_seed(seed)
    bright = torch.randint(2, (batch,), generator=random)
    images = torch.zeros(batch, CHANNELS, SIZE, SIZE)
    images[:, :, 4:12, 4:12] = (2.0 * bright - 1)[:, None, None, None]
    noise = torch.randn(images.shape, generator=random)
    time = torch.rand(batch, generator=random)
    mixed = time[:, None, None, None]
    return {
        "hidden_states": (1 - mixed) * images + mixed * noise,
        "encoder_hidden_states": bright[:, None, None].float().expand(batch, TEXT, TEXT_WIDTH).contiguous(),
        "pooled_projections": bright[:, None].float().expand(batch, POOLED).contiguous(),
        "timestep": 1000 * time,
        "flow": noise - images,  # Liu et al., rectified flow, arXiv 2209.03003
    }


def inputs(seed: int) -> dict[str, torch.Tensor]:
    """What the model is called with, for the proof."""
    return {name: value for name, value in squares(seed).items() if name != "flow"}


def train(args: argparse.Namespace) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    mesh = build_mesh(dp_shard=None, tp=args.tp)
    torch.manual_seed(0)  # every rank draws the same weights, and keeps its part of them
    model = make_model().to(device).train()
    apply_plan(Model(model, inputs=inputs), mesh, "auto", sequence_parallel=args.tp > 1)
    say = print if dist.get_rank() == 0 else lambda *_, **__: None
    say(applied(model), flush=True)

    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    part, parts = dist.get_rank() // args.tp, dist.get_world_size() // args.tp
    losses = []
    for step in range(1, args.steps + 1):
        # The ranks of one tp group get the same images, noise and times.
        made = {name: value.chunk(parts)[part].to(device) for name, value in squares(step, args.batch).items()}
        flow = made.pop("flow")
        loss = torch.nn.functional.mse_loss(model(**made).sample, flow)
        loss.backward()
        norm = clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

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
