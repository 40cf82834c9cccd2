"""TRL's DPOTrainer: in a batch the answers that were chosen come first."""

# needs: trl

import torch
from transformers import AutoModelForCausalLM
from trl import DPOConfig, DPOTrainer

from shardplan.compat import adopt
from tests.steps.trl_parts import rows, settings, tokenizer


def make(model):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        reference = AutoModelForCausalLM.from_config(model.config).to(next(model.parameters()).dtype)
    trainer = DPOTrainer(
        model,
        ref_model=reference,
        args=DPOConfig(**settings()),
        train_dataset=rows("prompt", "chosen", "rejected"),
        processing_class=tokenizer(),
    )
    adopt(trainer, model)
    return trainer, torch.optim.AdamW(model.parameters(), lr=1e-2)


def pairs(batch):
    ordered = {name: torch.cat([value[0::2], value[1::2]]) for name, value in batch.items()}
    mask = (ordered.pop("labels") != -100).long()
    return {**ordered, "completion_mask": mask}


def step(model, batches, state):
    trainer, optimizer = state
    trainer.current_gradient_accumulation_steps = len(batches)
    for batch in batches:
        trainer.training_step(model, pairs(batch), None)
    trainer.accelerator.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
