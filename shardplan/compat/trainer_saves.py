"""Saving, resuming and exporting a planned model in transformers' Trainer, with shardplan's own functions."""

from __future__ import annotations

import secrets
import shutil
import warnings
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from shardplan import applied, load_checkpoint, load_training_state, save_checkpoint, save_training_state
from shardplan.weights import all_or_none, clear, remove, whole_folder

# A checkpoint-N of the Trainer is a Hugging Face folder; it contains this folder, written by `save_training_state`.
_TRAINING_STATE, _TRAINER_STATE = "training_state", "trainer_state.json"
_IGNORED = {
    "push_to_hub": "upload the folder that save_model writes",
    "save_on_each_node": "name an output_dir that all nodes see",
    "auto_find_batch_size": "set the batch size: a rank that runs out of memory alone would leave the others waiting",
    "eval_use_gather_object": "let compute_metrics work on tensors",
    "bf16_full_eval": "it would cast the sharded parameters",
    "fp16_full_eval": "it would cast the sharded parameters",
}


def save_and_resume(trainer: Any, model: nn.Module) -> None:
    """Give a Trainer the methods that save and load a planned model.

    Raises:
        ValueError: the Trainer has another model, or a setting that these methods cannot follow.
    """
    _check(trainer, model)
    saves = _Saves(trainer, model)
    trainer._save_checkpoint = saves.save
    trainer.save_model = saves.save_model
    trainer._save_optimizer_and_scheduler = saves.save_optimizer
    trainer._load_from_checkpoint = saves.check
    trainer._load_optimizer_and_scheduler = saves.load
    trainer._load_best_model = saves.load_best


def _check(trainer: Any, model: nn.Module) -> None:
    if trainer.model is not model:
        raise ValueError("the Trainer was made with another model: pass it what apply_plan returned")
    if trainer.model_init is not None:
        raise ValueError("model_init would replace the planned model when training starts: pass the model alone")
    for setting, instead in _IGNORED.items():
        if getattr(trainer.args, setting):
            raise ValueError(f"the Trainer cannot do {setting} with a planned model: {instead}")
    if trainer.compute_metrics is not None and applied(model).program.sharded_logits:
        raise ValueError("compute_metrics needs whole logits: apply the plan with logits='replicated'")
    if trainer.optimizer is not None:
        applied(model).check_optimizer(_own(trainer.optimizer))
    modules = applied(model).program.resolved.tree.modules.values()
    if trainer.args.save_strategy != "no" and any(one.adapter for module in modules for one in module.parameters):
        raise ValueError(
            'the model has adapters, and a checkpoint of a whole model does not include them: set save_strategy to "no", and save '
            "model.state_dict()"
        )


class _Saves:
    """The replacements of methods of one Trainer."""

    def __init__(self, trainer: Any, model: nn.Module):
        self.trainer, self.model = trainer, model
        self.write_checkpoint, self.first = trainer._save_checkpoint, dist.get_rank() == 0

    def save(self, model: nn.Module, trial: Any) -> None:
        """Write `checkpoint-N`: the Trainer writes into a hidden folder, which is renamed when all ranks are done."""
        trainer, run = self.trainer, Path(self.trainer._get_output_dir(trial=trial))
        folder = run / f"checkpoint-{trainer.state.global_step}"
        with whole_folder(folder, marks=(_TRAINER_STATE, _TRAINING_STATE), overwrite=True) as hidden:
            appended = hidden / folder.name  # as the Trainer does
            with all_or_none(None, f"preparing to save {folder}"):
                if self.first:
                    appended.symlink_to(".")
            trainer._get_output_dir = lambda trial: str(hidden)
            try:
                with all_or_none(None, f"saving {folder}"):
                    self.write_checkpoint(model, trial)
            finally:
                del trainer._get_output_dir
            best = trainer.state.best_model_checkpoint
            if best is not None and Path(best) == appended:
                trainer.state.best_model_checkpoint = str(folder)
            if self.first:
                trainer.state.save_to_json(str(hidden / _TRAINER_STATE))
                appended.unlink()
        with all_or_none(None, f"removing checkpoints older than {folder}"):
            if self.first:
                _remove_older(folder, trainer.args.save_total_limit, trainer.state.best_model_checkpoint)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model as an ordinary Hugging Face folder; other files in the folder stay. Call it on all ranks."""
        folder = Path(output_dir or self.trainer.args.output_dir).resolve()
        token = [secrets.token_hex(8)]  # for this save only
        dist.broadcast_object_list(token)
        hidden = folder / f".saved-model-{token[0]}"
        save_checkpoint(self.model, hidden, progress=False)
        with all_or_none(None, f"finishing {folder}"):
            if self.first:
                self._write_beside_model(hidden)
                _move_model(hidden, folder)

    def _write_beside_model(self, folder: Path) -> None:
        trainer = self.trainer
        words = trainer.processing_class or getattr(trainer.data_collator, "tokenizer", None)
        if words is not None:
            words.save_pretrained(folder)
        torch.save(trainer.args, folder / "training_args.bin")

    def save_optimizer(self, output_dir: str) -> None:
        extra = {"scheduler": self.trainer.lr_scheduler.state_dict(), "ranks": dist.get_world_size()}
        save_training_state(self.model, _own(self.trainer.optimizer), Path(output_dir, _TRAINING_STATE), extra=extra)

    def check(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Refuse a folder from which training cannot be resumed. `load` reads the weights with the optimizer's state."""
        folder = Path(resume_from_checkpoint)
        for name in (_TRAINING_STATE, _TRAINER_STATE):
            if not (folder / name).exists():
                raise ValueError(
                    f"training cannot be resumed from {folder}, which has no {name}: a Trainer with a planned model writes "
                    "it unless save_only_model is set. load_checkpoint reads the weights alone"
                )

    def load(self, checkpoint: str | None) -> None:
        """Read the weights, the optimizer, the schedule and the state of the model's random numbers."""
        if checkpoint is None:
            return
        extra = load_training_state(self.model, _own(self.trainer.optimizer), Path(checkpoint, _TRAINING_STATE))
        self.trainer.lr_scheduler.load_state_dict(extra["scheduler"])
        if extra["ranks"] != dist.get_world_size():
            warnings.warn(
                f"{checkpoint} is of {extra['ranks']} processes, not {dist.get_world_size()}: the random state of each process "
                "(data collators, dropout outside of the plan) is not that of the run that wrote it",
                stacklevel=2,
            )

    def load_best(self) -> None:
        load_checkpoint(self.model, self.trainer.state.best_model_checkpoint, progress=False)


def _move_model(hidden: Path, folder: Path) -> None:
    """Replace the files of an older model by those of a new one. Every step is a rename from or into `hidden`. So it fails in a job
    that was paused and continues after another job has saved its model there."""
    for other in folder.glob(".*saved-model-*"):
        if other != hidden:
            with suppress(FileNotFoundError):  # the loop has reached its end
                other.rename(hidden / f".{other.name}")
    for old in (*folder.glob("model*.index.json"), *folder.glob("model*.safetensors")):
        old.rename(hidden / f".{old.name}")
    files = [file for file in hidden.iterdir() if not file.name.startswith(".")]
    for file in sorted(files, key=lambda file: file.name.endswith(".index.json")):
        file.rename(folder / file.name)  # the index last: without it, an incomplete model cannot be read
    shutil.rmtree(hidden)


def _own(optimizer: Any) -> Optimizer:
    """The optimizer inside accelerate's wrapper; the wrapper has no hooks."""
    return getattr(optimizer, "optimizer", optimizer)


def _remove_older(newest: Path, limit: int | None, best: str | None) -> None:
    """Keep the newest and the best checkpoint, and as many others as the limit allows. Checkpoints of later steps do not count: another job
    may have written them. The Trainer's own function, when killed, leaves an incomplete checkpoint under its final name."""
    saved = _by_step(newest.parent.glob("checkpoint-*"))
    own = saved[newest]
    for unfinished, step in _by_step(
        one.with_name(one.name[1:-6]) for one in newest.parent.glob(".checkpoint-*.saves")
    ).items():
        if step < own:
            clear(unfinished)
    kept = {path for path in saved if path == newest or (best is not None and path == Path(best))}
    if limit is not None and limit > 0:
        surplus = max(len(saved) - max(limit, len(kept)), 0)
        for path in [path for path, step in saved.items() if path not in kept and step < own][:surplus]:
            remove(path)


def _by_step(paths: Iterable[Path]) -> dict[Path, int]:
    """The folders named after a step, with the step, in the order of the steps."""
    numbers = {path: path.name.removeprefix("checkpoint-") for path in paths}
    steps = {path: int(number) for path, number in numbers.items() if number.isdigit()}
    return dict(sorted(steps.items(), key=lambda one: one[1]))
