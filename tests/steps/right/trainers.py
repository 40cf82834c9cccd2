"""The Trainer's step: it counts the labels of the micro-batches on all ranks."""

import tempfile

import torch
from transformers import Trainer, TrainingArguments

from shardplan.compat import adopt


def make(model):
    settings = TrainingArguments(output_dir=tempfile.mkdtemp(), use_cpu=True, report_to=[], disable_tqdm=True)
    trainer = Trainer(model=model, args=settings)
    adopt(trainer, model)
    return trainer, torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(model, batches, state):
    trainer, optimizer = state
    samples, count = trainer.get_batch_samples(iter(batches), len(batches), torch.device("cpu"))
    for batch in samples:
        trainer.training_step(model, batch, count)
    trainer.accelerator.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
