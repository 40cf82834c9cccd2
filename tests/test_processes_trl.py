"""TRL's SFTTrainer and DPOTrainer around a planned model, on four processes, against plain loops of the unsharded model over the
batches that the ranks saw."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from processes import on_ranks
from small_models import small_model, whole_state
from test_processes_trainers import as_torchrun
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy, logsigmoid
from transformers import PreTrainedTokenizerFast

import shardplan
from shardplan.compat import adopt
from shardplan.proof.compare import relative_error

pytest.importorskip("trl", reason="TRL is not installed: with datasets and pyarrow it takes 300 MB")
pytest.importorskip("datasets", reason="datasets is not installed")
pytestmark = pytest.mark.slow
RATE, STEPS, BETA = 0.3, 3, 0.1
SETTINGS = {
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
    "bf16": False,
    "save_strategy": "no",
    "gradient_checkpointing": False,
}


def tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({str(i): i for i in range(132)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="3", eos_token="2", unk_token="0")


def planned(**options: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    return shardplan.apply_plan(small_model("llama"), mesh, "auto", prove=False, **options)


def recorded(kind: type) -> type:
    """A trainer that notes its batches."""

    def training_step(self: Any, model: nn.Module, inputs: dict[str, Tensor], *args: Any, **kwargs: Any) -> Tensor:
        self.seen = [
            *getattr(self, "seen", []),
            {name: x.clone() for name, x in inputs.items() if isinstance(x, Tensor)},
        ]
        return kind.training_step(self, model, inputs, *args, **kwargs)

    return type(f"Recorded{kind.__name__}", (kind,), {"training_step": training_step})


def compare(
    trainer: Any, model: nn.Module, loss_of: Callable[[nn.Module, nn.Module, list[dict[str, Tensor]]], Tensor]
) -> None:
    """`loss_of(model, untrained, batches of a step)` is the loss of the unsharded model."""
    everywhere: list[Any] = [None] * 4
    dist.all_gather_object(everywhere, trainer.seen)
    for pair in (0, 2):
        for one, other in zip(everywhere[pair], everywhere[pair + 1], strict=True):
            assert all(torch.equal(one[name], other[name]) for name in one)
    reference, untrained = small_model("llama"), small_model("llama")
    optimizer = torch.optim.SGD(reference.parameters(), lr=RATE)
    expected = []
    for step in range(STEPS):
        loss = loss_of(reference, untrained, [share[step] for share in everywhere[::2]])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    logged = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert logged == pytest.approx(expected, rel=2e-4)
    state = whole_state(model)
    for name, value in reference.state_dict().items():
        assert relative_error(state[name], value) <= 2e-5, (name, relative_error(state[name], value))


def mean_of_tokens(model: nn.Module, untrained: nn.Module, batches: list[dict[str, Tensor]]) -> Tensor:
    count = sum((one["labels"][:, 1:] != -100).sum() for one in batches)
    total = 0.0
    for one in batches:
        logits = model(input_ids=one["input_ids"], use_cache=False).logits[:, :-1].flatten(0, 1)
        total = total + cross_entropy(logits, one["labels"][:, 1:].flatten(), ignore_index=-100, reduction="sum")
    return total / count


def supervised(folder: str) -> None:
    as_torchrun()
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    model = planned()
    generator = torch.Generator().manual_seed(0)
    rows = [{"input_ids": torch.randint(10, 132, (6 + 3 * i % 7,), generator=generator).tolist()} for i in range(24)]
    trainer = recorded(SFTTrainer)(
        model,
        args=SFTConfig(output_dir=folder, **SETTINGS),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(),
    )
    adopt(trainer, model)
    trainer.train()
    compare(trainer, model, mean_of_tokens)


def preferences(model: nn.Module, untrained: nn.Module, batches: list[dict[str, Tensor]]) -> Tensor:
    """Direct preference optimisation (arXiv 2305.18290, equation 7): the first half of a batch was chosen."""

    def logs(which: nn.Module, one: dict[str, Tensor]) -> Tensor:
        given = {"input_ids": one["input_ids"], "attention_mask": one["attention_mask"]}
        each = which(**given, use_cache=False).logits[:, :-1].log_softmax(-1).gather(-1, one["input_ids"][:, 1:, None])
        return (each.squeeze(-1) * one["completion_mask"][:, 1:]).sum(-1)

    losses = []
    for one in batches:
        with torch.no_grad():
            before = logs(untrained, one)
        chosen, rejected = (logs(model, one) - before).chunk(2)
        losses.append(-logsigmoid(BETA * (chosen - rejected)))
    return torch.cat(losses).mean()


def preferred(folder: str) -> None:
    as_torchrun()
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    model, reference = planned(), planned()
    adopt(Accelerator(cpu=True), reference)  # before the trainer, which wraps it when it is made
    rows = [
        {"prompt": f"{10 + i} {20 + i} ", "chosen": f"{30 + i} {31 + i} {40 + i}", "rejected": f"{50 + i} {60 + i}"}
        for i in range(24)
    ]
    trainer = recorded(DPOTrainer)(
        model,
        ref_model=reference,
        args=DPOConfig(output_dir=folder, beta=BETA, **SETTINGS),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(),
    )
    adopt(trainer, model)
    trainer.train()
    compare(trainer, model, preferences)


def test_sft(tmp_path: Path) -> None:
    on_ranks(4, supervised, str(tmp_path))


def test_dpo(tmp_path: Path) -> None:
    on_ranks(4, preferred, str(tmp_path))
