"""The reference of the demo: the same training in one process, in plain PyTorch, without a plan.

python -m demo.single --text demo/text.txt --losses losses.jsonl
"""

import json

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from examples.train import arguments, global_batch


def main() -> None:
    args = arguments()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.model))
    # The same random numbers that `materialize` draws: those of transformers' own initialisation.
    model.to_empty(device="cpu")
    torch.manual_seed(args.seed)
    model.init_weights()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    text = torch.frombuffer(bytearray(args.text.read_bytes()), dtype=torch.uint8)
    with open(args.losses, "w", encoding="utf-8") as file:
        for step in range(1, args.steps + 1):
            ids = global_batch(text, step, args.batch, args.seq_len)
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            print(f"step {step:3}  loss {loss.item():.6f}  gradient norm {norm.item():.4f}", flush=True)
            file.write(json.dumps({"step": step, "loss": loss.item()}) + "\n")


if __name__ == "__main__":
    main()
