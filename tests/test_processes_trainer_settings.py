"""Settings of transformers' Trainer around a planned model, on four processes, against a plain loop of the unsharded model over the
batches that the ranks saw."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import on_ranks
from small_models import small_model, whole_state
from test_processes_trainers import as_torchrun
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, EarlyStoppingCallback, Trainer, TrainingArguments

import shardplan
from shardplan.compat import adopt
from shardplan.proof.compare import relative_error

RATE, STEPS = 0.5, 3


def samples(count: int) -> list[dict[str, Tensor]]:
    """Sequences of 5 to 20 tokens, of whose labels some do not count."""
    generator = torch.Generator().manual_seed(4)
    found = []
    for i in range(count):
        ids = torch.randint(10, 132, (5 + 7 * i % 16,), generator=generator)
        labels = ids.clone()
        labels[: i % 4] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def padded(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A batch, padded on the right to an even length, which sequence parallelism needs."""
    length = max(len(row["input_ids"]) for row in rows)
    length += length % 2
    result = {}
    for name, filler in (("input_ids", 3), ("labels", -100)):
        result[name] = torch.stack(
            [torch.nn.functional.pad(row[name], (0, length - len(row[name])), value=filler) for row in rows]
        )
    return result


class Recorded(Trainer):
    """Notes the batches of each step, and the losses."""

    seen: list[dict[str, Tensor]]

    def training_step(self, model: nn.Module, inputs: dict[str, Tensor], *args: Any, **kwargs: Any) -> Tensor:
        self.seen = [*getattr(self, "seen", []), {name: value.clone() for name, value in inputs.items()}]
        return super().training_step(model, inputs, *args, **kwargs)


def trainer_of(model: nn.Module, folder: str, callbacks: tuple = (), **settings: Any) -> Recorded:
    arguments = {
        "output_dir": folder,
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "save_strategy": "no",
        **settings,
    }
    trainer = Recorded(
        model,
        TrainingArguments(**arguments),
        data_collator=padded,
        train_dataset=samples(40),
        eval_dataset=samples(8),
        callbacks=list(callbacks),
    )
    adopt(trainer, model)
    return trainer


def plain_loop(seen: list[list[dict[str, Tensor]]], micro: int) -> tuple[list[float], dict[str, Tensor]]:
    """The losses and the weights after the same batches; `seen` is by data-parallel share."""
    model = small_model("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = []
    for step in range(STEPS):
        batches = [share[i] for share in seen for i in range(step * micro, (step + 1) * micro)]
        count = sum((batch["labels"][:, 1:] != -100).sum() for batch in batches)
        total = 0.0
        for batch in batches:
            logits = model(input_ids=batch["input_ids"], use_cache=False).logits[:, :-1].flatten(0, 1)
            loss = cross_entropy(logits, batch["labels"][:, 1:].flatten(), ignore_index=-100, reduction="sum") / count
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, whole_state(model)


def train(folder: str, settings: dict, options: dict, limit: float) -> None:
    as_torchrun()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    model = shardplan.apply_plan(small_model("llama"), mesh, "auto", sequence_parallel=True, prove=False, **options)
    trainer = trainer_of(model, folder, **settings)
    trainer.train()
    everywhere: list[Any] = [None] * 4
    dist.all_gather_object(everywhere, trainer.seen)
    for pair in (0, 2):  # the ranks of a tp group see the same
        for one, other in zip(everywhere[pair], everywhere[pair + 1], strict=True):
            assert all(torch.equal(one[name], other[name]) for name in one)
    rows = [tuple(row.tolist()) for share in everywhere[::2] for batch in share for row in batch["input_ids"]]
    assert len({tuple(token for token in row if token != 3) for row in rows}) == len(rows), "each sample once"
    lengths = {batch["input_ids"].shape for batch in trainer.seen}
    assert len(lengths) > 1
    losses, weights = plain_loop(everywhere[::2], settings.get("gradient_accumulation_steps", 1))
    logged = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert logged == pytest.approx(losses, rel=max(limit, 2e-4)), (logged, losses)  # they are logged with few digits
    for name, value in whole_state(model).items():
        assert relative_error(value, weights[name]) <= limit, (name, relative_error(value, weights[name]))
    if settings.get("train_sampling_strategy") == "group_by_length":
        spread = [
            max(len(r) for r in b["input_ids"]) - (b["labels"] != -100).sum(-1).min().item() for b in trainer.seen
        ]
        assert min(spread) <= 6, spread


BF16 = {"data_parallel": {"mixed_precision": {"param": "bfloat16", "reduce": "float32", "output": "float32"}}}
CASES = {
    "uneven tokens": ({"gradient_accumulation_steps": 2}, {}, 1e-5),
    "group by length": ({"train_sampling_strategy": "group_by_length"}, {}, 1e-5),
    "mixed precision": ({"gradient_accumulation_steps": 2}, BF16, 0.02),
    "split logits": ({"gradient_accumulation_steps": 2}, {"logits": "sharded"}, 1e-5),
}


def all_cases(folder: str, names: list[str]) -> None:
    for name in names:
        try:
            train(folder, *CASES[name])
        except Exception as error:
            error.add_note(f"in the case {name!r}")
            raise


def test_settings_train_as_a_plain_loop_does(tmp_path: Path) -> None:
    on_ranks(4, all_cases, str(tmp_path), ["uneven tokens"])


@pytest.mark.slow
def test_more_settings_train_as_a_plain_loop_does(tmp_path: Path) -> None:
    on_ranks(4, all_cases, str(tmp_path), ["group by length", "mixed precision", "split logits"])


def stop_early(folder: str) -> tuple[int, str]:
    """The metric is the loss, which falls, and more counts as better: so the first evaluation is the best, and after two more the training stops."""
    as_torchrun()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    model = shardplan.apply_plan(small_model("llama"), mesh, "auto", sequence_parallel=True, prove=False)
    trainer = trainer_of(
        model,
        folder,
        callbacks=(EarlyStoppingCallback(early_stopping_patience=2),),
        max_steps=8,
        learning_rate=0.05,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        greater_is_better=True,
        metric_for_best_model="eval_loss",
    )
    trainer.train()
    best = AutoModelForCausalLM.from_pretrained(Path(folder, "checkpoint-1")).state_dict()
    for name, value in whole_state(model).items():
        assert torch.equal(value, best[name]), name
    trainer.save_model(str(Path(folder, "export")))
    exported = AutoModelForCausalLM.from_pretrained(Path(folder, "export")).state_dict()
    assert all(torch.equal(exported[name], value) for name, value in best.items())
    assert Path(folder, "export", "config.json").is_file() and not list(Path(folder, "export").glob("*.distcp"))
    return trainer.state.global_step, str(trainer.state.best_model_checkpoint)


@pytest.mark.slow
def test_training_stops_early_on_all_ranks_and_the_best_model_is_loaded_and_exported(tmp_path: Path) -> None:
    assert on_ranks(4, stop_early, str(tmp_path)) == [(3, str(tmp_path / "checkpoint-1"))] * 4
