"""accelerate's `save_state` and `load_state` for a planned model: accelerate's own files, and a folder of shardplan's for the shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from shardplan import load_training_state, save_training_state

FOLDER = "training_state"  # that `save_training_state` writes, inside accelerate's folder


class AcceleratorStates:
    """The replacements of both methods of one Accelerator. accelerate writes and reads schedulers, random numbers, samplers,
    its step and registered objects; shardplan writes and reads the weights and the optimizer's state, on any mesh."""

    def __init__(self, accelerator: Any, model: nn.Module):
        self.accelerator, self.model = accelerator, model
        self._save, self._load = accelerator.save_state, accelerator.load_state

    def save_state(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """As accelerate's. Call it on all ranks; all ranks must see the same folder.

        Raises:
            ValueError: not exactly one optimizer was prepared; the errors of `save_training_state`.
        """
        optimizer = self._optimizer()

        def shards(models: list[Any], weights: list[Any], folder: str) -> None:
            save_training_state(self.model, optimizer, Path(folder, FOLDER), overwrite=True)

        with self._without_shards(self.accelerator.register_save_state_pre_hook, shards):
            return self._save(output_dir, *args, **kwargs)

    def load_state(self, input_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """As accelerate's. Weights and moments may come from any mesh; a process reads its random state where the same number
        of processes wrote it.

        Raises:
            ValueError: not exactly one optimizer was prepared; the folder was not written for a planned model; the errors of
                `load_training_state`.
        """
        optimizer = self._optimizer()

        def shards(models: list[Any], folder: str) -> None:
            if not Path(folder, FOLDER).is_dir():
                raise ValueError(f"{folder} has no {FOLDER}: it was not written by save_state with a planned model")
            load_training_state(self.model, optimizer, Path(folder, FOLDER))

        with self._without_shards(self.accelerator.register_load_state_pre_hook, shards):
            self._load(input_dir, *args, **kwargs)

    def _optimizer(self) -> Optimizer:
        prepared = self.accelerator._optimizers
        if len(prepared) != 1:
            raise ValueError(f"one optimizer is saved with a planned model, and {len(prepared)} were prepared")
        return prepared[0].optimizer

    @contextmanager
    def _without_shards(self, register: Callable[..., Any], hook: Callable[..., None]) -> Iterator[None]:
        """Hide model and optimizer from accelerate; it calls the hook with the folder before it reads or writes."""
        accelerator, handle = self.accelerator, register(hook)
        kept = accelerator._models, accelerator._optimizers
        accelerator._models, accelerator._optimizers = [], []
        try:
            yield
        finally:
            accelerator._models, accelerator._optimizers = kept
            handle.remove()
