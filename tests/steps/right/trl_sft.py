"""TRL's SFTTrainer: its count of labels, its loss and its clipping."""

# needs: trl

import torch
from trl import SFTConfig, SFTTrainer

from shardplan.compat import adopt
from tests.steps.trl_parts import rows, settings, tokenizer


def make(model):
    trainer = SFTTrainer(model, args=SFTConfig(**settings()), train_dataset=rows("text"), processing_class=tokenizer())
    adopt(trainer, model)
    return trainer, torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(model, batches, state):
    trainer, optimizer = state
    samples, count = trainer.get_batch_samples(iter(batches), len(batches), torch.device("cpu"))
    trainer.current_gradient_accumulation_steps = len(samples)
    for batch in samples:
        trainer.training_step(model, dict(batch), count)
    trainer.accelerator.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
