"""What the public functions take: a model, a mesh, a step and dtypes, each in one way everywhere."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator

import pytest
import torch

import shardplan
from shardplan import Model, TrainingStep, compat
from shardplan.api.keywords import MeshOptions, ModelOptions, sizes_of, split_options
from shardplan.core.dtypes import dtype_name
from shardplan.core.mesh import MeshSizes
from shardplan.cost.step_options import StepOptions
from shardplan.runtime import training

SMALL = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 96}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2}


def quick(model: object, mesh: object = None, **options: object) -> shardplan.Report:
    return shardplan.validate(model, "llama", mesh, layouts=False, **options)


def test_a_model_is_named_in_one_record_or_by_keywords() -> None:
    named = Model("llama", settings=SMALL)
    assert quick(named, tp=2) == quick("llama", tp=2, settings=SMALL)
    assert quick(named).allowed_tp == (1, 2, 4) and quick("llama").allowed_tp != (1, 2, 4)
    assert shardplan.coverage(named) == shardplan.coverage("llama", settings=SMALL)
    program = shardplan.compile_plan(named, {"tp": 2}, "llama")
    assert program.modules == shardplan.compile_plan("llama", MeshSizes(tp=2), "llama", settings=SMALL).modules


def test_a_model_and_its_options_beside_it_are_a_wrong_call() -> None:
    with pytest.raises(TypeError, match="settings: set it in the Model"):
        quick(Model("llama"), settings=SMALL)


def test_a_mesh_is_sizes_by_axis_in_any_spelling_or_keywords() -> None:
    expected = MeshSizes(tp=2, dp_shard=4)
    assert sizes_of({"tp": 2, "fsdp": 4}, {}) == sizes_of(None, {"tp": 2, "dp_shard": 4}) == expected
    assert sizes_of(expected, {}) is expected
    small = Model("llama", settings=SMALL)
    assert quick(small, {"tp": 2}) == quick(small, tp=2) == quick(small, MeshSizes(tp=2))
    with pytest.raises(TypeError, match="tp: give the sizes in the mesh or as keyword arguments"):
        quick(small, {"dp_shard": 2}, tp=2)
    with pytest.raises(TypeError, match="verify needs a tp size"):
        shardplan.verify(small, "llama")
    for wrong, text in (
        ({"pp": 2, "schedule": "gpipe"}, "a schedule and micro-batches are for pipeline stages in real processes"),
        ({"pp": 2, "processes": True, "schedule": "2f2b"}, "there is no pipeline schedule '2f2b'"),
        ({"pp": 2, "processes": True, "micro_batches": 0}, "micro_batches must be at least 1, not 0"),
        ({"pp": 2, "processes": True, "micro_batches": 1}, "1f1b needs a micro-batch for each of its 2 stages"),
    ):
        with pytest.raises(ValueError, match=text):
            shardplan.verify(small, "llama", **wrong)


def test_a_step_is_a_record_or_keywords() -> None:
    small = Model("llama", settings=SMALL)
    step = TrainingStep(32, precision="float32", optimizer="sgd")
    said_so = {"seq_len": 32, "precision": torch.float32, "optimizer": "sgd"}
    expected = shardplan.estimate(small, "llama", {"tp": 2}, step)
    assert expected == shardplan.estimate(small, "llama", tp=2, **said_so)
    assert expected.asked.step == TrainingStep(32, 1, "fp32", "sgd")
    with pytest.raises(TypeError, match="an estimate needs seq_len"):
        shardplan.estimate(small, "llama", {"tp": 2})
    with pytest.raises(TypeError, match="seq_len: put it into the TrainingStep"):
        shardplan.estimate(small, "llama", {"tp": 2}, step, seq_len=32)


def test_a_keyword_that_is_none_is_a_wrong_call() -> None:
    for function in (shardplan.validate, shardplan.verify, shardplan.estimate, shardplan.coverage, shardplan.init_plan):
        with pytest.raises(TypeError, match=rf"{function.__name__}\(\) got an unexpected keyword argument 'tq'"):
            function("llama", *(["llama"] if function is not shardplan.init_plan else []), tq=2)
    with pytest.raises(TypeError, match="unexpected keyword argument 'tq'"):
        shardplan.compile_plan("llama", {"tp": 2}, "llama", tq=2)


# A value for each argument that has no default; what stands here is not looked at before the names are.
GIVEN = {
    "model": "llama",
    "plan": "auto",
    "old": "llama",
    "new": "llama",
    "gpus": 2,
    "device": "h100",
    "file": "plan.yaml",
    "seq_len": 16,
    "global_batch": 2,
}
PASSED_ON = {"context_parallel"}  # to the model's forward


def open_functions() -> Iterator[Callable[..., object]]:
    """The public functions and classes that take further keyword arguments."""
    for module in (shardplan, training, compat):
        for name in module.__all__:
            function = getattr(module, name)
            if callable(function) and name not in PASSED_ON and (found := _signature(function)) is not None:
                if any(one.kind is one.VAR_KEYWORD for one in found.parameters.values()):
                    yield function


def _signature(function: Callable[..., object]) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except ValueError:  # a type of Python's own
        return None


def test_no_public_function_ignores_a_name() -> None:
    functions = list(open_functions())
    assert len(functions) > 12
    for function in functions:
        needed = [one for one in inspect.signature(function).parameters.values() if one.default is one.empty]
        named = [one.name for one in needed if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)]
        given = {name: GIVEN.get(name, object()) for name in named}
        with pytest.raises((TypeError, ValueError), match="misspelt"):
            function(**given, misspelt=1)
            pytest.fail(function.__name__)


def test_the_loss_takes_no_name_that_it_does_not_know() -> None:
    logits, labels = torch.zeros(1, 4, 8), torch.zeros(1, 4, dtype=torch.long)
    for name, value in {"label_smoothing": 0.1, "reduction": "sum", "num_items": 4}.items():
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
            shardplan.causal_lm_loss(logits, labels, **{name: value})
    with pytest.raises(TypeError, match="needs labels or shift_labels"):
        shardplan.causal_lm_loss(logits, None)


def test_options_are_the_fields_of_the_records() -> None:
    for options, record, first in ((ModelOptions, Model, "name"), (StepOptions, TrainingStep, "")):
        names = [name for name in inspect.signature(record).parameters if name != first]
        assert sorted(options.__annotations__) == sorted(names)
    assert set(MeshOptions.__annotations__) <= set(inspect.signature(MeshSizes).parameters)
    assert split_options("f", {"tp": 2, "settings": {}}, ModelOptions, MeshOptions) == [{"settings": {}}, {"tp": 2}]


@pytest.mark.parametrize("dtype", ["bf16", "bfloat16", "torch.bfloat16", torch.bfloat16])
def test_a_dtype_is_said_in_any_way(dtype: object) -> None:
    assert dtype_name(dtype, "it") == "bfloat16"
    assert TrainingStep(8, precision=dtype).precision == "bf16"
    with pytest.raises(ValueError, match="it must be float16 or float32, not"):
        dtype_name(dtype, "it", ("float16", "float32"))
