"""TRL's GRPOTrainer: completions of the step are scored, shuffled and divided into micro-batches."""

# needs: trl

import torch
from trl import GRPOConfig, GRPOTrainer

from shardplan.compat import adopt
from tests.steps.trl_parts import rows, settings, tokenizer


def rollouts(prompts, trainer):
    every = [[int(word) for word in prompt.split()] for prompt in prompts]
    cuts = [len(ids) // 2 for ids in every]
    return {
        "prompt_ids": [ids[:cut] for ids, cut in zip(every, cuts, strict=True)],
        "completion_ids": [ids[cut : cut + 2 + ids[0] % 5] for ids, cut in zip(every, cuts, strict=True)],
        "logprobs": None,
    }


def reward(completion_ids, **_):
    return [float(sum(ids) % 11) for ids in completion_ids]


def make(model):
    args = GRPOConfig(**settings(), num_generations=2, max_completion_length=8, beta=0.0)
    trainer = GRPOTrainer(
        model,
        reward_funcs=reward,
        args=args,
        train_dataset=rows("prompt"),
        processing_class=tokenizer(),
        rollout_func=rollouts,
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
