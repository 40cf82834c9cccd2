"""Host time of one sharded layer with a state: `python -m benchmarks.states`, measured as `benchmarks.host` does."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoConfig, PretrainedConfig

import shardplan

from .host import SEQ, TP, layer_times, ratio
from .page import table
from .ways import fake_ranks, fresh

HIDDEN, HEADS, HEAD_DIM, VOCABULARY = 64, 8, 16, 1024
TEXT = """## Host time of a layer with a state

`python -m benchmarks.states`: as above, for a layer of Mamba 2 and for one of Qwen3.5's with a gated delta net (hidden {hidden},
{heads} heads, {seq} tokens; torch's own code of the scans, which is what both sides run here), eager. tp {tp}, the group of processes is
fake. Median of {repeats} pairs, and the middle half of them.
"""


def mamba2(layers: int, ranks: int = 1) -> PretrainedConfig:
    """The dimensions that one of `ranks` ranks has."""
    return AutoConfig.for_model(
        "mamba2",
        num_hidden_layers=layers,
        hidden_size=HIDDEN,
        num_heads=HEADS // ranks,
        head_dim=HEAD_DIM,
        expand=HEADS * HEAD_DIM // HIDDEN // ranks,
        n_groups=4 // ranks,
        state_size=16,
        chunk_size=16,
        vocab_size=VOCABULARY,
        use_cache=False,
    )


def qwen3_5(layers: int, ranks: int = 1) -> PretrainedConfig:
    """Its first layer has full attention, as its plan wants one; the others differ."""
    return AutoConfig.for_model(
        "qwen3_5_text",
        num_hidden_layers=layers,
        layer_types=["full_attention", *["linear_attention"] * (layers - 1)],
        hidden_size=HIDDEN,
        intermediate_size=128 // ranks,
        linear_num_key_heads=HEADS // 2 // ranks,
        linear_num_value_heads=HEADS // ranks,
        linear_key_head_dim=HEAD_DIM,
        linear_value_head_dim=HEAD_DIM,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        use_cache=False,
    )


TYPES: dict[str, Callable[..., PretrainedConfig]] = {"mamba2": mamba2, "qwen3_5": qwen3_5}


def planned(config: PretrainedConfig, mesh: DeviceMesh, *, plan: str, sp: bool) -> nn.Module:
    options = {"data_parallel": False, "src_data_rank": None, "prove": False}
    return shardplan.apply_plan(fresh(config), mesh, plan, sequence_parallel=sp, **options)


def rows(repeats: int) -> Iterator[tuple[str, str, str]]:
    for name, config_of in TYPES.items():

        def alone(
            config: PretrainedConfig, mesh: DeviceMesh, of: Callable[..., PretrainedConfig] = config_of
        ) -> nn.Module:
            return fresh(of(config.num_hidden_layers, TP))

        with fake_ranks(TP) as mesh:
            ways = {"": alone, **{word: partial(planned, plan=name, sp=word == "SP") for word in ("TP", "SP")}}
            times = layer_times(ways, mesh, repeats, config_of)
        for word in ("TP", "SP"):
            yield f"{name}, {word}", "", ratio(times[word], times[""])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=40)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(TEXT.format(hidden=HIDDEN, heads=HEADS, seq=SEQ, tp=TP, repeats=args.repeats))
    print(table(("layer", "goal", "times the layer alone"), rows(args.repeats)))


if __name__ == "__main__":
    main()
