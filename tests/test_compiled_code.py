"""Models whose code compiles itself (`torch.compile` of a forward or of a function in it): looked at and proven as they are written."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from case_models import Stack
from processes import on_ranks
from small_models import batch, small_model
from test_processes_parts import assert_same_gradients
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

import shardplan
from shardplan.core.sections import Compile as CompileSection
from shardplan.runtime.apply.compilation import compile_modules


@torch.compile(backend="aot_eager")
def gelu(x: Tensor) -> Tensor:
    return nn.functional.gelu(x, approximate="tanh")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(gelu(self.up(x)))


class Compiled(Block):
    forward = torch.compile(Block.forward, backend="aot_eager")


def features(seed: int) -> dict[str, Any]:
    return {"x": torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(seed))}


@pytest.mark.parametrize("block", [Block, Compiled])
def test_a_plan_is_proven_and_derived(block: Callable[[], nn.Module]) -> None:
    plan = {"version": "1", "name": "own", "tensor_parallel": {"layers.*.up": "colwise", "layers.*.down": "rowwise"}}
    report = shardplan.validate(shardplan.Model(Stack([block(), block()]), inputs=features), plan, {"tp": 2})
    assert report.proven, str(report)
    assert (
        shardplan.init_plan(shardplan.Model(Stack([block(), block()]), inputs=features), tp=2).document[
            "tensor_parallel"
        ]["layers.*.up"]
        == "colwise"
    )


def compile_layers(model: nn.Module) -> None:
    for layer in model.model.layers:
        layer.forward = torch.compile(layer.forward, backend="aot_eager")


def trains_as_the_unsharded() -> None:
    mesh = shardplan.build_mesh(tp=2, dp_shard=1, device_type="cpu")
    model, reference = small_model("llama"), small_model("llama")
    compile_layers(model)
    shardplan.apply_plan(model, mesh, "auto", sequence_parallel=True, data_parallel=False)
    ids = batch(1)
    for one in (model, reference):
        one(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert_same_gradients(model, reference, "compiled layers")


@pytest.mark.slow
def test_layers_that_the_user_compiled_train_as_the_unsharded_model() -> None:
    on_ranks(2, trains_as_the_unsharded)


def hidden_states_are_as_the_unsharded_or_refused() -> list[str]:
    """Of the first model, of which Dynamo makes one graph up to its last norm, and of the next: it runs frames that broke one by one."""
    mesh = shardplan.build_mesh(tp=2, dp_shard=1, device_type="cpu")
    torch._dynamo.reset()
    ended, found = list[Any](), list[str]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "unraisablehook", ended.append)
        for _ in range(2):
            model, reference = small_model("llama"), small_model("llama")
            shardplan.apply_plan(model, mesh, "auto", sequence_parallel=True, data_parallel=False)
            try:
                for one in (torch.compile(model, backend="aot_eager"), reference):
                    out = one(input_ids=batch(1), labels=batch(1), output_hidden_states=True, use_cache=False)
                    (out.loss + sum(state.square().mean() for state in out.hidden_states)).backward()
            except RuntimeError as error:
                assert "gradients of its hidden states are not known" in str(error)
                found.append("refused")
                continue
            assert_same_gradients(model, reference, "hidden states of a compiled model")
            found.append("right")
        gc.collect()
    assert [one.exc_value for one in ended] == []
    return found


@pytest.mark.slow
def test_hidden_states_of_a_model_that_the_user_compiled_are_right_or_refused() -> None:
    (found, *others) = on_ranks(2, hidden_states_are_as_the_unsharded_or_refused)
    assert "right" in found and others == [found]


class _Switched(nn.Module):
    """Blocks of four kinds, with a number of their own."""

    def __init__(self, index: int):
        super().__init__()
        self.linear, self.index = nn.Linear(4, 4), index
        self.doubled, self.scale = index % 2 == 0, None if index % 4 < 2 else 0.5

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.linear(x) * (2 if self.doubled else 1)
        return x if self.scale is None else x * self.scale


def test_each_kind_of_block_may_be_compiled_as_often_as_torch_allows():
    blocks = nn.Sequential(*(_Switched(index) for index in range(12)))
    graphs = CompileCounter()
    torch.manual_seed(0)
    inputs = [torch.randn(length, 4, requires_grad=True) for length in (3, 5, 6, 7)]
    expected = [blocks(x) for x in inputs]
    compile_modules(blocks, [str(index) for index in range(12)], CompileSection(backend=graphs), None)
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        found = [blocks(x) for x in inputs]
        with torch.no_grad():
            [blocks.eval()(x) for x in inputs]
    torch.testing.assert_close(found, expected)
    assert graphs.frame_count > torch._dynamo.config.recompile_limit
