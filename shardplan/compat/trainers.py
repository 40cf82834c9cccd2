"""Training loops of others around a planned model: accelerate's Accelerator and transformers' Trainer, with their own wrapping off."""

from __future__ import annotations

from typing import Any

from torch import nn

from shardplan.runtime.apply import applied
from shardplan.weights import save_checkpoint


def adopt(owner: Any, model: nn.Module) -> None:
    """Make an Accelerator or a Trainer take a planned model as it is, and feed the ranks of one tp group the same batches.

    Call it before `accelerator.prepare(...)` or `trainer.train()`. The Trainer's checkpoints are its model alone, written
    by `save_checkpoint`.

    Args:
        owner: an `accelerate.Accelerator`, or a `transformers.Trainer` that was made with the model.
        model: what `apply_plan` returned.

    Raises:
        ValueError: no plan was applied to the model; it was on a mesh whose axes accelerate does not know, or with a cp axis,
            over which accelerate would split sequences its own way; the owner was set up to shard models itself; a Trainer
            of another model, or one that writes the optimizer's state too.
        TypeError: neither an Accelerator nor a Trainer.
    """
    trainer = owner if hasattr(owner, "accelerator") else None
    accelerator = trainer.accelerator if trainer is not None else owner
    if not hasattr(accelerator, "prepare_model"):
        raise TypeError(f"an accelerate.Accelerator or a transformers.Trainer is needed, not a {type(owner).__name__}")
    mesh = applied(model).mesh
    if mesh.sizes.cp > 1:
        raise ValueError(
            "accelerate splits sequences over a cp axis its own way: train with a loop of your own, or with cp 1"
        )
    foreign = [name for axis, name in mesh.names.items() if axis != name]
    if foreign:
        raise ValueError(f"accelerate does not know the mesh axis {foreign[0]!r}: name the axes as `build_mesh` does")
    if accelerator.distributed_type.value not in ("NO", "MULTI_CPU", "MULTI_GPU") or accelerator.parallelism_config:
        raise ValueError(
            f"the Accelerator is set up to shard models itself ({accelerator.distributed_type.value}): take its FSDP, DeepSpeed "
            "and parallelism settings away, the plan has them"
        )
    accelerator.state.device_mesh = mesh.mesh  # its data loaders give the ranks of a tp group one share
    model.__dict__["_is_accelerate_prepared"] = True
    if trainer is not None:
        _adopt_trainer(trainer, model, mesh.tp_size)


def _adopt_trainer(trainer: Any, model: nn.Module, tp: int) -> None:
    if trainer.model is not model:
        raise ValueError("the Trainer was made with another model: pass it what apply_plan returned")
    if trainer.args.save_strategy != "no" and not trainer.args.save_only_model:
        raise ValueError(
            "the Trainer would write its optimizer's state from one rank: set save_only_model=True or save_strategy='no'"
        )
    model._tp_size = tp  # tp ranks share a batch: the Trainer counts its tokens once

    def save_model(output_dir: str | None = None, _internal_call: bool = False) -> None:
        save_checkpoint(model, output_dir or trainer.args.output_dir)

    trainer.save_model = save_model
