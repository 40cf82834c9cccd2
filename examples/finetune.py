"""Fine-tune a model of a Hugging Face folder: bf16, a learning-rate schedule, accumulation, saves, resuming, and an export.

    torchrun --nproc-per-node 4 examples/finetune.py --model ./Qwen3-8B --text book.txt --output run --tp 2

It runs on GPUs (nccl) or on CPUs (gloo). The same command continues a run that was killed, from its last save, bit for bit. A run that gets
SIGTERM (a machine is taken away) saves after the step that it is in, and ends. The output folder has `step-N`, the last saves, `losses.jsonl`, and at the end `model`, which `from_pretrained` reads.
"""

import argparse
import json
import os
import signal
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, get_cosine_schedule_with_warmup

from shardplan import (
    applied,
    apply_plan,
    build_mesh,
    clip_grad_norm_,
    load_checkpoint,
    load_training_state,
    micro_batches,
    save_checkpoint,
    save_training_state,
    watch_ranks,
)
from shardplan.weights import clear, remove


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fine-tune a causal language model on a text.")
    parser.add_argument("--model", type=Path, required=True, help="a folder with config, safetensors and tokenizer")
    parser.add_argument("--text", type=Path, required=True, help="the file to train on")
    parser.add_argument("--output", type=Path, required=True, help="a folder for the run, which all nodes see")
    parser.add_argument("--plan", default="auto", help="a plan file, a built-in plan's name, or auto")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks, with sequence parallelism")
    parser.add_argument("--dp-replicate", type=int, default=1, help="copies of the model; the rest is dp_shard")
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16", help="what layers compute in")
    parser.add_argument("--steps", type=int, default=1000, help="the last step")
    parser.add_argument("--batch", type=int, default=64, help="sequences in a step, over all ranks")
    parser.add_argument("--micro-batch", type=int, default=1, help="sequences that a rank works on at a time")
    parser.add_argument("--seq-len", type=int, default=2048, help="tokens in a sequence")
    parser.add_argument("--lr", type=float, default=1e-5, help="the largest learning rate")
    parser.add_argument("--warmup", type=int, default=20, help="steps until it is reached; it falls to 0 afterwards")
    parser.add_argument("--max-norm", type=float, default=1.0, help="gradients are clipped to this norm")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the data and of dropout")
    parser.add_argument("--save-every", type=int, default=100, help="steps from one save to the next")
    parser.add_argument("--keep", type=int, default=2, help="the number of saves that are kept")
    return parser.parse_args(words)


def make_model(args: argparse.Namespace) -> torch.nn.Module:
    """The planned model with weights in float32; its layers compute in bfloat16."""
    config = AutoConfig.from_pretrained(args.model)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    torch.manual_seed(args.seed)  # under tp, apply_plan takes the seed of dropout from here
    halved = {"mixed_precision": {"param": "bfloat16", "reduce": "float32"}}
    apply_plan(
        model,
        build_mesh(dp_shard=None, tp=args.tp, dp_replicate=args.dp_replicate),
        args.plan,
        sequence_parallel=True,
        activation_checkpointing={"mode": "full"},
        data_parallel=halved if args.precision == "bf16" else None,
        seq_len=args.seq_len,
    )
    load_checkpoint(model, args.model)  # each rank reads its slices
    return model


def read_sequences(args: argparse.Namespace) -> torch.Tensor:
    """The text as token ids [sequences, seq_len]."""
    ids = torch.tensor(AutoTokenizer.from_pretrained(args.model)(args.text.read_text())["input_ids"])
    count = len(ids) // args.seq_len
    if not count:
        raise SystemExit(f"{args.text} has {len(ids)} tokens, fewer than --seq-len {args.seq_len}")
    return ids[: count * args.seq_len].view(count, args.seq_len)


def batch_of(step: int, sequences: torch.Tensor, args: argparse.Namespace) -> torch.Tensor:
    """Token ids [batch, seq_len] of a step. Each epoch has an order of its own. It follows from the seed, so no save has it."""
    chosen = []
    for position in range((step - 1) * args.batch, step * args.batch):
        epoch, place = divmod(position, len(sequences))
        if not chosen or place == 0:
            order = torch.randperm(len(sequences), generator=torch.Generator().manual_seed(args.seed + epoch))
        chosen.append(order[place])
    return sequences[torch.stack(chosen)]


def parts_of(batch: torch.Tensor, share: int, shares: int, args: argparse.Namespace) -> tuple[torch.Tensor, ...]:
    """This rank's sequences, equally many at a time."""
    if args.batch % (shares * args.micro_batch):
        raise SystemExit(
            f"--batch {args.batch} is not a multiple of {shares} data-parallel ranks x --micro-batch {args.micro_batch}"
        )
    return batch.chunk(shares)[share].split(args.micro_batch)


def name_whole_saves(output: Path) -> None:
    """Clean up after killed saves: a state that is whole gets its name, the rest is removed. Called on one rank."""
    for hidden in output.glob(".step-*.saves"):
        clear(output / hidden.name.removeprefix(".").removesuffix(".saves"))


def saves(output: Path) -> list[Path]:
    """The saves, the newest last. A folder has such a name only when it is complete."""
    return sorted(output.glob("step-*"), key=lambda folder: int(folder.name.removeprefix("step-")))


def backward(model: torch.nn.Module, parts: tuple[torch.Tensor, ...], device: str) -> torch.Tensor:
    """The gradients of the mean loss over the tokens of all parts, on all ranks. Returns that loss, the same on all ranks."""
    mean = torch.zeros((), device=device)
    for ids, scale in micro_batches(model, parts, labels=lambda ids: ids):
        loss = model(input_ids=ids.to(device), labels=ids.to(device), use_cache=False).loss * scale
        loss.backward()
        mean += loss.detach()
    dist.all_reduce(mean)
    return mean / dist.get_world_size()


def train(args: argparse.Namespace, steps: Callable[[Iterable[int]], Iterable[int]] = iter) -> None:
    """Train, save and export.

    Args:
        steps: goes over the steps, and tells the other ranks in which one this rank is.
    """
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    leave = torch.zeros((), device=device)  # 1 once this rank was asked to
    signal.signal(signal.SIGTERM, lambda *_: leave.fill_(1))
    first, shares = dist.get_rank() == 0, dist.get_world_size() // args.tp
    share = dist.get_rank() // args.tp  # the ranks of a tp group have the same data
    sequences = read_sequences(args)
    model = make_model(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    schedule = get_cosine_schedule_with_warmup(optimizer, args.warmup, args.steps)
    done = 0
    if first:
        name_whole_saves(args.output)
    dist.barrier()
    if found := saves(args.output):
        done = load_training_state(model, optimizer, found[-1], schedulers=[schedule])["step"]
    if first:
        print(applied(model), f"after step {done}", sep="\n", flush=True)
        args.output.mkdir(parents=True, exist_ok=True)

    for step in steps(range(done + 1, args.steps + 1)):
        torch.manual_seed((args.seed * args.steps + step) * shares + share)  # dropout where tp is 1
        loss = backward(model, parts_of(batch_of(step, sequences, args), share, shares, args), device)
        norm = clip_grad_norm_(model.parameters(), args.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        if first:
            row = {"step": step, "loss": loss.item(), "norm": norm.item(), "lr": schedule.get_last_lr()[0]}
            print(row, flush=True)
            with (args.output / "losses.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
        schedule.step()
        leaving = leave.clone()  # what all ranks know alike: a signal may come at any moment
        dist.all_reduce(leaving, dist.ReduceOp.MAX)
        if step % args.save_every == 0 or step == args.steps or leaving:
            folder, extra = args.output / f"step-{step}", {"step": step}
            save_training_state(model, optimizer, folder, schedulers=[schedule], extra=extra, overwrite=True)
            for old in saves(args.output)[: -args.keep] if first else ():
                remove(old)
        if leaving and step < args.steps:
            return

    stored = AutoConfig.from_pretrained(args.model).dtype  # the export has the dtype of the folder
    save_checkpoint(model, args.output / "model", dtype=stored, overwrite=True)
    if first:
        AutoTokenizer.from_pretrained(args.model).save_pretrained(args.output / "model")


if __name__ == "__main__":
    given = arguments()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # Where a rank ends, the last line of the others names it, and the step that it was in.
    with watch_ranks("nccl" if torch.cuda.is_available() else "gloo") as watch:
        train(given, watch.steps)
