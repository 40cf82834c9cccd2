"""Reinforcement learning with an inference engine next to the trained model: sample, score, step, and hand the new weights over.

    torchrun --nproc-per-node 4 examples/rl_refit.py --tp 2

The trained model is split; the engine is the same small model, whole on every rank. `refit` computes once who sends which slice to whom,
and `run()` moves the weights before each step: an engine with a plan and a mesh of its own would get its slices alone. An engine in
other processes (vLLM, SGLang) has `load_weights(pairs)`, which reads full_parameters(model, names="checkpoint"). The reward counts a token.
"""

import argparse
import os

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from shardplan import apply_plan, build_mesh, clip_grad_norm_, materialize, refit
from shardplan.runtime.training import log_probabilities

CONFIG = os.path.join(os.path.dirname(__file__), "tiny-qwen3.json")
WANTED = ord("e")  # the token that is rewarded


class Engine:
    """What an inference engine offers: sampling."""

    def __init__(self, device: str) -> None:
        self.model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(CONFIG)).to(device).eval()

    @torch.no_grad()
    def generate(self, prompts: torch.Tensor, new_tokens: int) -> torch.Tensor:
        """[batch, prompt + new_tokens]"""
        return self.model.generate(
            prompts, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=True, top_k=0
        )

    @torch.no_grad()
    def log_probabilities(self, ids: torch.Tensor) -> torch.Tensor:
        """[batch, tokens - 1]: for each token after the first."""
        logs = self.model(input_ids=ids).logits[:, :-1].float().log_softmax(-1)
        return logs.gather(-1, ids[:, 1:, None]).squeeze(-1)


def train(args: argparse.Namespace) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    mesh = build_mesh(dp_shard=None, tp=args.tp)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(CONFIG))
    # Logits stay split over the vocabulary: log_probabilities reads them so.
    apply_plan(model, mesh, "auto", sequence_parallel=args.tp > 1, logits="sharded" if args.tp > 1 else "plan")
    torch.manual_seed(0)
    materialize(model, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    engine = Engine(device)
    weights = refit(model, engine.model)
    say = print if dist.get_rank() == 0 else lambda *_, **__: None
    say(f"each refit sends {weights.bytes:,} bytes, the least is {weights.bound:,}", flush=True)

    for step in range(1, args.steps + 1):
        weights.run()  # on all ranks
        torch.manual_seed(1000 * step + dist.get_rank() // args.tp)  # the ranks of a tp group sample the same
        prompts = torch.randint(256, (args.batch, 8), device=device)
        ids = engine.generate(prompts, args.new_tokens)
        reward = (ids[:, 8:] == WANTED).float().mean(-1)
        before = engine.log_probabilities(ids)

        logs = log_probabilities(model(input_ids=ids, use_cache=False).logits, ids, shift=True)
        difference = (logs.detach() - before).abs().max()  # what refitting left between engine and model
        advantage = reward - reward.mean()
        ratio = (logs - before).exp()[:, 7:]
        loss = -(ratio * advantage[:, None]).mean()
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

        shown = torch.stack([reward.mean(), difference])
        dist.all_reduce(shown[:1])
        dist.all_reduce(shown[1:], dist.ReduceOp.MAX)
        mean = shown[0].item() / dist.get_world_size()
        say(f"step {step:3}  reward {mean:.4f}  engine against model {shown[1].item():.1e}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Policy gradients with weights handed to an engine after each step.")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batch", type=int, default=16, help="sequences of a data-parallel rank")
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--lr", type=float, default=1e-3)
    train(parser.parse_args())
