"""TRL's GRPOTrainer with completions of the model itself, which end at different lengths on each rank."""

# needs: trl

import torch
from trl import GRPOConfig, GRPOTrainer

from shardplan.compat import adopt
from tests.steps.trl_parts import rows, settings, tokenizer


def reward(completion_ids, **_):
    return [float(sum(ids) % 11) for ids in completion_ids]


def make(model):
    model.generation_config.eos_token_id = [*range(2, model.config.vocab_size, 5)]
    # With top_k=1 the likeliest token is drawn, whatever the ranks draw by.
    args = GRPOConfig(**settings(), num_generations=2, max_completion_length=6, beta=0.0, top_k=1)
    trainer = GRPOTrainer(
        model, reward_funcs=reward, args=args, train_dataset=rows("prompt"), processing_class=tokenizer()
    )
    adopt(trainer, model)
    return trainer, torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(model, batches, state):
    trainer, optimizer = state
    trainer.current_gradient_accumulation_steps = len(batches)
    trainer.args.steps_per_generation = trainer.args.gradient_accumulation_steps = len(batches)
    prompts = [{"prompt": " ".join(map(str, row))} for batch in batches for row in batch["input_ids"].tolist()]
    for _ in batches:
        trainer.training_step(model, prompts, None)
    trainer.accelerator.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
