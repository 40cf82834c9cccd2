"""Train a planned model with transformers' Trainer.

    torchrun --nproc-per-node 4 examples/trainer.py --tp 2 --sequence-parallel --text demo/text.txt

It runs on GPUs (nccl) or on CPUs (gloo). In one process it trains the unsharded model, with the same losses. The same
command again continues a run that was killed, from its last checkpoint.
"""

import argparse
import json
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from shardplan import apply_plan, build_mesh
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
    parser.add_argument("--save-steps", type=int, default=5, help="evaluate and save after so many steps")
    parser.add_argument("--keep", type=int, default=2, help="the number of checkpoints that are kept")
    parser.add_argument("--output", type=Path, default=Path("trained"), help="a folder for checkpoints and the model")
    parser.add_argument("--losses", type=Path, help="a file for the losses, one JSON object per line")
    return parser.parse_args(words)


def sequences(file: Path, length: int) -> list[dict[str, torch.Tensor]]:
    """The text as samples; tokens are its bytes."""
    text = torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8).long()
    return [{"input_ids": ids, "labels": ids} for ids in text.split(length) if len(ids) == length]


def train(args: argparse.Namespace) -> None:
    shares = max(1, (dist.get_world_size() if dist.is_initialized() else 1) // args.tp)
    settings = TrainingArguments(
        output_dir=str(args.output),
        max_steps=args.steps,
        per_device_train_batch_size=args.batch // shares,
        learning_rate=2e-3,
        logging_steps=1,
        save_strategy="steps",
        save_steps=args.save_steps,
        save_total_limit=args.keep,
        eval_strategy="steps",
        eval_steps=args.save_steps,
        per_device_eval_batch_size=args.batch // shares,
        load_best_model_at_end=True,
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.model))
    if dist.is_initialized():
        mesh = build_mesh(tp=args.tp)
        model = apply_plan(model.to(settings.device), mesh, "auto", sequence_parallel=args.sequence_parallel)
    samples = sequences(args.text, args.seq_len)
    trainer = Trainer(
        model=model, args=settings, train_dataset=samples[args.batch :], eval_dataset=samples[: args.batch]
    )
    if dist.is_initialized():
        adopt(trainer, model)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(args.output) if args.output.exists() else None)
    trainer.save_model()
    if args.losses and trainer.is_world_process_zero():
        rows = [row for row in trainer.state.log_history if "loss" in row or "eval_loss" in row]
        args.losses.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    given = arguments()
    if dist.is_torchelastic_launched():
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    train(given)
    if dist.is_initialized():
        dist.destroy_process_group()
