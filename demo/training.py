"""The same training twice: in one process without a plan, and in four processes with one. The losses must agree."""

import json
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from . import shell

# In float32 a sharded sum is added up in another order than a whole one, which changes its last bits (about 1e-7 of
# it). AdamW divides by the gradient's own size, so that these differences grow a little with every step; they stayed
# below 1e-6 of the loss over the steps shown. Without the reduction of two small norms' gradients (demo/no-head-norms.yaml,
# applied without its checks) the losses were 3e-4 apart.
TOLERANCE = 1e-5

ONE = ("-m", "demo.single", "--text", "demo/text.txt")
FOUR = (
    "-m torch.distributed.run --standalone --nproc-per-node 4 "
    "examples/train.py --text demo/text.txt --tp 2 --sequence-parallel"
).split()


def compare(steps: int = 30, plan: str = "auto") -> bool:
    """Train both ways and show the two loss curves. Returns whether they agree."""
    shell.heading("5. Training: one process, and four with the plan")
    shell.say(
        "A Qwen3 of 4 layers learns the bytes of a text (demo/text.txt). On the left in plain PyTorch, on the right in",
        "4 processes: dp 2 x tp 2, sequence parallel, FSDP2, activation checkpointing. Same weights, same batches.",
    )
    with tempfile.TemporaryDirectory() as folder:
        one = _train(ONE, Path(folder, "one.jsonl"), "one process", steps)
        four = _train([*FOUR, "--plan", plan], Path(folder, "four.jsonl"), "four processes", steps)
    if one is None or four is None:
        shell.say("a training run failed: see above")
        return False
    shell.say("", *table(one, four))
    error = worst(one, four)
    agree = error <= TOLERANCE
    shell.say(
        "",
        f"largest difference: {error:.1e} of the loss, {'within' if agree else 'NOT within'} {TOLERANCE:.0e} "
        "(float32: sums in another order differ in the last bits)",
    )
    return agree


def _train(words: Sequence[str], file: Path, what: str, steps: int) -> list[float] | None:
    """The losses of a run; None if it failed."""
    command = [*words, "--steps", str(steps)]
    shell.say("", f"$ python {shlex.join(command)}")
    with shell.Progress(f"training, {what}") as progress:

        def follow(line: str) -> None:
            if line.startswith("step "):
                progress.note = f"{line.split('  ')[0]} of {steps} "

        code, _ = shell.execute([sys.executable, *command, "--losses", str(file)], follow)
    return [json.loads(line)["loss"] for line in file.read_text().splitlines()] if code == 0 else None


def worst(one: Sequence[float], four: Sequence[float]) -> float:
    """The largest difference of a step, relative to the loss of the reference.

    Raises:
        ValueError: the runs have different lengths.
    """
    return max(abs(a - b) / a for a, b in zip(one, four, strict=True))


def table(one: Sequence[float], four: Sequence[float], rows: int = 10) -> list[str]:
    """Every few steps of both curves, each with a bar as long as the loss."""
    every = max(1, len(one) // rows)
    shown = [step for step in range(1, len(one) + 1) if step == 1 or step % every == 0]
    lines = [f"{'step':>4}  {'one process':<34}  {'four processes':<34}  difference"]
    for step in shown:
        a, b = one[step - 1], four[step - 1]
        lines.append(f"{step:4}  {_bar(a)}  {_bar(b)}  {abs(a - b):.1e}")
    return lines


def _bar(loss: float) -> str:
    return f"{loss:.6f} {'#' * max(0, round(loss * 4)):<25}"
