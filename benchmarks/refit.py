"""What it takes to give an engine the weights of a training model: `python -m benchmarks.refit`.

Told by `estimate`: no device is needed, and no rank but this one.
"""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from shardplan import EngineRanks, Model, TrainingStep
from shardplan.api.deciding import Asked
from shardplan.api.refitting import refit_estimate
from shardplan.compiler.pipeline import Changes
from shardplan.core.mesh import MeshSizes
from shardplan.cost.devices import read_device
from shardplan.report.estimate_text import bytes_text, seconds_text

from .page import table

STEP = TrainingStep(128, precision="fp32", optimizer="none")
MESH = {"dp_shard": 4, "tp": 2}
ENGINES = {
    "tp 8, the same ranks": ({"tp": 8}, 0),
    "dp_replicate 4 x tp 2, the same ranks": ({"dp_replicate": 4, "dp_shard": 1, "tp": 2}, 0),
    "whole on the same ranks": ({"dp_replicate": 8, "dp_shard": 1, "tp": 1}, 0),
    "tp 4, other ranks": ({"tp": 4}, 8),
}
LAYERS = 4
TEXT = """## Refits of an engine

`python -m benchmarks.refit`: what `refit` sends in a run, told by `estimate(engine=)`, for a Llama with {layers} layers of the 7B model and its embeddings ({count:,}
parameters), trained in float32 on dp_shard 4 x tp 2 of one node, with an engine in bfloat16; the least time is that of an H100's links. The last
column is what every rank receives where all gather whole parameters in float32 and keep their parts.

{table}
"""


def main() -> None:
    config = AutoConfig.for_model("llama", num_hidden_layers=LAYERS, num_key_value_heads=8)
    with torch.device("meta"):
        count = sum(one.numel() for one in AutoModelForCausalLM.from_config(config).parameters())
    sizes, device, rows = MeshSizes(**MESH), read_device("h100"), []
    for name, (mesh, first) in ENGINES.items():
        asked, engine = Asked(Model(config), "auto", Changes()), EngineRanks("auto", mesh, "bf16", first)
        refit = refit_estimate(asked, sizes, STEP, engine, device, lambda text: None)
        assert refit.seconds is not None
        gathered = bytes_text(count * 4 * (sizes.world_size - 1) / sizes.world_size)
        rows.append((name, bytes_text(refit.bytes), bytes_text(refit.busiest), seconds_text(refit.seconds), gathered))
    header = ("engine", "sent by all ranks", "most of one rank", "least time", "whole parameters, each rank")
    print(TEXT.format(layers=LAYERS, count=count, table=table(header, rows)))


if __name__ == "__main__":
    main()
