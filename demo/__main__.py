"""The demo's story: validate, refuse, prove, train. Exits with 1 if any part did not come out as announced."""

import sys
import time

from . import shell, training

QWEN3, LLAMA = "demo/models/qwen3-8b.json", "demo/models/llama-3.1-405b.json"


def main() -> int:
    start = time.monotonic()
    results = [
        _validate(),
        _refuse(),
        _refuse_layouts(),
        _prove(),
        training.compare(),
    ]
    shell.heading("Result")
    good = all(results)
    shell.say("all as announced" if good else "NOT as announced: see above", f"({time.monotonic() - start:.0f} s)")
    return 0 if good else 1


def _validate() -> bool:
    shell.heading("1. Check plans against models of real size")
    shell.say(
        "The configurations of Qwen3-8B and Llama-3.1-405B, built on the meta device (names and shapes, no memory).",
        "Every rule of the plan is checked against every layer, for 8 tensor-parallel ranks.",
    )
    return shell.run("validate", QWEN3, "qwen3", "--tp", "8", expect=0) and shell.run(
        "validate", LLAMA, "llama", "--tp", "8", "--sequence-parallel", expect=0
    )


def _refuse() -> bool:
    shell.heading("2. A wrong plan is refused, with its line")
    shell.say(
        "A plan for Qwen3-8B on 12 ranks: a misspelt module, a style that does not fit, a size that fits no heads."
    )
    return shell.run("validate", QWEN3, "demo/wrong-qwen3.yaml", "--tp", "12", "--no-sequence-parallel", expect=1)


def _refuse_layouts() -> bool:
    shell.heading("3. A plan with right losses and wrong gradients is refused")
    shell.say(
        "Llama's plan on Qwen3. Every module is there and every size divides, and the loss would be right. But each rank's",
        "heads give only a part of the gradient of q_norm and k_norm, and nothing would add the parts up.",
    )
    return shell.run("validate", QWEN3, "demo/no-head-norms.yaml", "--tp", "8", "--sequence-parallel", expect=1)


def _prove() -> bool:
    shell.heading("4. A plan is proven")
    shell.say(
        "A reduced model of the architecture runs unsharded and sharded; loss, logits and every gradient are compared.",
    )
    return shell.run("verify", QWEN3, "qwen3", "--tp", "2", "--sequence-parallel", expect=0)


if __name__ == "__main__":
    sys.exit(main())
