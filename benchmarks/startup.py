"""What short commands cost, whole processes: `python -m benchmarks.startup [--repeats N]`."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from .checkpoints import LLAMA_405B, QWEN3_235B, write
from .page import table
from .processes import in_turns, row

ROOT = Path(__file__).parents[1]
SECTION = """## Start-up

`python -m benchmarks.startup`: whole processes, in turns with what each is measured against, {repeats} times: the median of
the ratios, in brackets the middle half of them; and the median seconds of both.
"""
# pydantic, the YAML parser, and the module that defines the plan's models with what it imports itself; nothing else of the
# package.
PARSER = f"""
import sys, types
import pydantic, yaml
package = types.ModuleType("shardplan.language")
package.__path__ = [{str(ROOT / "shardplan" / "language")!r}]
sys.modules["shardplan.language"] = package
import shardplan.language.document
"""
BUILD = """
import json, sys
import torch
import transformers
config = transformers.LlamaConfig(**json.load(open(sys.argv[1] + "/config.json")))
with torch.device("meta"):
    transformers.AutoModelForCausalLM.from_config(config)
"""


def many_rules(path: Path, count: int) -> str:
    """A plan that names every matrix of its layers on its own."""
    names = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", *(f"self_attn.{n}_proj" for n in "qkvo")]
    styles = {"down": "rowwise", "o": "rowwise"}
    lines = ['version: "1"', "tensor_parallel:"]
    for i in range(count):
        name = names[i % len(names)]
        style = styles.get(name.rpartition(".")[2].removesuffix("_proj"), "colwise")
        lines.append(f"  model.layers.{i // len(names)}.{name}: {style}")
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return str(path)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=15)
    repeats = parser.parse_args().repeats
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        llama, qwen = str(folder / "llama"), str(folder / "qwen")
        write(folder / "llama", LLAMA_405B)
        tensors = write(folder / "qwen", QWEN3_235B)
        rules = many_rules(folder / "rules.yaml", 1000)
        lint = ["-m", "shardplan", "lint", str(ROOT / "plans" / "qwen3.yaml")]
        quick = ["-m", "shardplan", "validate", qwen, "qwen3_moe", "--tp", "4", "--quick"]
        short = in_turns(
            {
                "parser": ["-c", PARSER],
                "lint": lint,
                "rules": ["-m", "shardplan", "lint", rules],
                "plan": ["-m", "shardplan", "lint", "qwen3_moe"],
                "quick": quick,
            },
            repeats,
        )
        long = in_turns(
            {
                "build": ["-c", BUILD, llama],
                "validate": ["-m", "shardplan", "validate", llama, "llama", "--tp", "8", "--no-proof"],
            },
            max(3, repeats // 2),
        )
    print(SECTION.format(repeats=repeats))
    rows = [
        row("`lint plans/qwen3.yaml` / importing pydantic, yaml, the models", "<= 1.2", short["lint"], short["parser"]),
        row("`lint` of 1,000 rules / the same", "<= 1.2", short["rules"], short["parser"]),
        row(
            f"`validate --quick` of a folder of {tensors:,} tensors / `lint` of the plan",
            "<= 2",
            short["quick"],
            short["plan"],
        ),
        row(
            "`validate --no-proof` of 405B, tp 8 / importing torch, transformers, building",
            "<= 1.0",
            long["validate"],
            long["build"],
        ),
    ]
    print(table(["what", "goal", "wall time", "processor time", "median of both"], rows))


if __name__ == "__main__":
    main()
