"""A planned model in accelerate's Accelerator and in transformers' Trainer, whose own wrapping is off."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Never

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from shardplan import applied, clip_grad_norm_, load_training_state, save_training_state

from .trainer_saves import save_and_resume


def adopt(owner: Any, model: nn.Module) -> None:
    """Make an Accelerator or a Trainer take a planned model unchanged, and give the ranks of a tp group the same batches.

    Call it before `accelerator.prepare(...)` or `trainer.train()`. The Trainer saves, resumes and loads its best model with
    shardplan's functions, and so do the Accelerator's `save_state` and `load_state`; its `clip_grad_norm_` is shardplan's. The Accelerator's `save_model` raises an error
    that names the function to call.

    Args:
        owner: an `accelerate.Accelerator`, or a `transformers.Trainer` that was made with the model.
        model: what `apply_plan` returned.

    Raises:
        ValueError: no plan was applied to the model; its mesh does not have all processes, or has an axis that accelerate does
            not know, or a cp axis, over which accelerate would split sequences in its own way; the owner shards, compiles or autocasts
            models itself, dispatches batches, or has prepared a scheduler; a Trainer has another model, or a setting that would be ignored
            or fail later; a TRL trainer scores completions in groups while tp ranks share batches, and its groups are not whole on a
            rank or its rewards are scaled over a batch.
        TypeError: neither an Accelerator nor a Trainer.
    """
    trainer = owner if hasattr(owner, "accelerator") else None
    accelerator = trainer.accelerator if trainer is not None else owner
    if not hasattr(accelerator, "prepare_model"):
        raise TypeError(f"an accelerate.Accelerator or a transformers.Trainer is needed, not a {type(owner).__name__}")
    mesh = applied(model).mesh
    _check_mesh(mesh)
    _check_accelerator(accelerator)
    _check_unprepared(accelerator, mesh)
    if trainer is not None:
        _score_groups(trainer, mesh.tp_size)
        save_and_resume(trainer, model)
    _step_once_for_each_share(accelerator, dist.get_world_size() // mesh.tp_size)
    accelerator.state.device_mesh = mesh.mesh  # its data loaders give all ranks of a tp group the same share
    accelerator.dataloader_config.dispatch_batches = False  # the default for streams ignores these axes
    accelerator.clip_grad_norm_ = clip_grad_norm_
    accelerator.gather_for_metrics = _from_each_share(accelerator, mesh.tp_size)
    if trainer is not None:
        trainer._mixed_mesh_grads = False  # one norm over all meshes, by the line above
        trainer.gather_function = accelerator.gather_for_metrics
        model.__dict__["_tp_size"] = mesh.tp_size  # tp ranks share a batch: the Trainer counts its tokens once
    states = AcceleratorStates(accelerator, model)
    accelerator.save_state, accelerator.load_state = states.save_state, states.load_state
    accelerator.save_model = _refuse_save_model
    model.__dict__["_is_accelerate_prepared"] = True


def _check_mesh(mesh: Any) -> None:
    if mesh.sizes.cp > 1:
        raise ValueError(
            "accelerate splits sequences over a cp axis its own way: train with a loop of your own, or with cp 1"
        )
    foreign = [name for axis, name in mesh.names.items() if axis != name]
    if foreign:
        raise ValueError(f"accelerate does not know the mesh axis {foreign[0]!r}: name the axes as `build_mesh` does")
    if mesh.mesh.mesh.flatten().tolist() != list(range(dist.get_world_size())):
        raise ValueError("accelerate counts the batches of all processes: the mesh must be all of them, in order")


def _check_accelerator(accelerator: Any) -> None:
    if accelerator.distributed_type.value not in ("NO", "MULTI_CPU", "MULTI_GPU") or accelerator.parallelism_config:
        raise ValueError(
            f"the Accelerator is set up to shard models itself ({accelerator.distributed_type.value}): take its FSDP, DeepSpeed "
            "and parallelism settings away, the plan has them"
        )
    if accelerator.mixed_precision != "no":
        raise ValueError(
            f"the Accelerator would not autocast a planned model to {accelerator.mixed_precision}: leave bf16, fp16 and "
            "mixed_precision off, and write `mixed_precision` into the plan's data_parallel, or give apply_plan autocast_dtype"
        )
    if accelerator.state.dynamo_plugin.backend.value != "NO":
        raise ValueError(
            "the Accelerator would not compile a planned model: leave torch_compile off, and write `compile` into the plan"
        )
    if accelerator.dispatch_batches:
        raise ValueError(
            "dispatch_batches would give all ranks one batch: leave it off, and let each rank read its own"
        )


def _check_unprepared(accelerator: Any, mesh: Any) -> None:
    if accelerator._schedulers and getattr(accelerator.state, "device_mesh", None) != mesh.mesh:
        raise ValueError(
            "the Accelerator has prepared a scheduler, which would step once for each process, and the ranks of a tp group share their "
            "batches: call adopt(accelerator, model) before accelerator.prepare(...)"
        )


def _score_groups(trainer: Any, tp: int) -> None:
    """Make the ranks of a tp group shuffle completions alike, in TRL's trainers that score completions in groups (GRPO, RLOO).
    These gather the rewards of all processes, so the rewards of a tp group are there several times."""
    from transformers import set_seed

    each = getattr(trainer, "num_generations", None)
    if each is None or tp == 1:
        return
    args = trainer.args
    own = args.per_device_train_batch_size * args.steps_per_generation
    if own % each:
        raise ValueError(
            f"per_device_train_batch_size * steps_per_generation is {own}, which num_generations={each} does not divide: the ranks of a tp group "
            "share their completions, so that a group must be whole on a rank"
        )
    over_batches = {
        "scale_rewards": "batch",
        "normalize_advantages": True,
        "multi_objective_aggregation": "normalize_then_sum",
    }
    for name, value in over_batches.items():
        if getattr(args, name, None) == value:
            raise ValueError(
                f"rewards that are scaled over a batch ({name}={value!r}) count those of a tp group's ranks several times: scale them over a group, "
                "or not at all"
            )
    set_seed(args.seed + dist.get_rank() // tp)


def _step_once_for_each_share(accelerator: Any, shares: int) -> None:
    """Let prepared schedulers step once for each batch of a step, that is for each data-parallel rank. accelerate's own step calls
    them once for each process, or once in all where loaders split batches."""
    stock = accelerator.prepare_scheduler

    def prepare_scheduler(scheduler: Any) -> Any:
        prepared = stock(scheduler)
        prepared.step = partial(_first_steps, prepared.scheduler, prepared.step, shares)
        return prepared

    accelerator.prepare_scheduler = prepare_scheduler


def _first_steps(scheduler: Any, step: Callable[..., None], count: int, *args: Any, **kwargs: Any) -> None:
    """A step of accelerate's: the scheduler takes only the first `count` of its calls."""
    left = iter(range(count))
    own = scheduler.step

    def first(*args: Any, **kwargs: Any) -> None:
        if next(left, None) is not None:
            own(*args, **kwargs)

    scheduler.step = first
    try:
        step(*args, **kwargs)
    finally:
        del scheduler.step  # its state_dict contains all of its attributes


def _from_each_share(accelerator: Any, tp: int) -> Callable[..., Any]:
    """`gather_for_metrics` with each sample once: the ranks of a tp group have the same samples."""
    from accelerate.utils import recursively_apply

    gather, stock = accelerator.gather, accelerator.gather_for_metrics

    def once(data: Any) -> Any:
        def first_of_each_group(tensor: Tensor) -> Tensor:
            return tensor.unflatten(0, (dist.get_world_size(), -1))[::tp].flatten(0, 1)

        return recursively_apply(first_of_each_group, gather(data))

    def gather_for_metrics(input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather tensors, or tuples, lists and dicts of them, from each data-parallel rank."""
        if use_gather_object:
            raise ValueError(
                "with a planned model gather_for_metrics gathers tensors alone: leave use_gather_object off"
            )
        recursively_apply(lambda tensor: tensor, input_data, error_on_other_type=True)
        accelerator.gather = once
        try:
            return stock(input_data)
        finally:
            accelerator.gather = gather

    return gather_for_metrics


def _refuse_save_model(*_: Any, **__: Any) -> Never:
    raise ValueError(
        "accelerate's save_model does not know the shards of a planned model: call shardplan.save_checkpoint(model, folder)"
    )


# accelerate's `save_state` and `load_state` for a planned model: accelerate's own files, and a folder of shardplan's for the shards.
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
