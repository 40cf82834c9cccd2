"""What the benchmark for CUDA devices measures runs, on the CPU and small; the figures need a device."""

from __future__ import annotations

import shutil
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from processes import fork_server

from benchmarks import gpu
from benchmarks.ways import fake_ranks
from tests.sampling import sampled

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}


def _cases():
    compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
    cases = [(name, way) for name in gpu.MODELS for way in gpu.ways(name)]
    plain = [case for case in cases if not case[1].endswith("compiled")]
    yield from (pytest.param(*case, marks=() if case in plain[::4] else pytest.mark.slow) for case in plain)
    yield from sampled((case for case in cases if case[1].endswith("compiled")), 2, marks=[pytest.mark.slow, compiler])


@pytest.mark.parametrize(("name", "way"), _cases())
def test_each_way_makes_a_step(name, way):
    # A process of its own: torch keeps graphs over the mesh of one way, with which another one does not compile. It is not forked
    # from this one, whose threads it would wait for.
    with ProcessPoolExecutor(1, fork_server()) as process:
        process.submit(_step, name, way).result()


def _step(name: str, way: str) -> None:
    kind, shape = gpu.MODELS[name]
    gpu.MODELS[name] = (kind, {key: SMALL[key] for key in shape})
    with fake_ranks(gpu.TP) as mesh:
        with torch.device("meta"):  # as on a GPU: what is built is where the context says
            gpu.ways(name)[way](gpu.config_of(name, 1), mesh)
        model = gpu.ways(name)[way](gpu.config_of(name, 1), mesh)
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
        gpu.forward_of(model, 16, "cpu")().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
