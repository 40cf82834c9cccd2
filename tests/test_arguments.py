"""What the public functions take: a model, a mesh, a step and dtypes, each in one way everywhere."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import shardplan
from shardplan import Model, TrainingStep, compat
from shardplan.api.apply import ApplyOptions
from shardplan.api.keywords import sizes_of
from shardplan.core.dtypes import dtype_name
from shardplan.core.mesh import MeshSizes
from shardplan.runtime import training

SMALL = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 96}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2}


def quick(model: object, mesh: object = None, **options: object) -> shardplan.Report:
    return shardplan.validate(model, "llama", mesh, layouts=False, **options)


def test_a_model_is_what_is_named_or_the_record_of_it() -> None:
    named = Model("llama", settings=SMALL)
    assert quick(Model("llama"), {"tp": 2}) == quick("llama", {"tp": 2})
    assert quick(named).allowed_tp == (1, 2, 4) and quick("llama").allowed_tp != (1, 2, 4)
    program = shardplan.compile_plan(named, {"tp": 2}, "llama")
    assert program.modules == shardplan.compile_plan(named.find().config, {"tp": 2}, "llama").modules


def test_options_of_a_model_next_to_it_are_a_wrong_call() -> None:
    for wrong in ("settings", "inputs", "reduced", "trust_remote_code"):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{wrong}'"):
            quick("llama", **{wrong: None})


def test_a_mesh_is_sizes_by_axis_in_any_spelling() -> None:
    assert sizes_of({"tp": 2, "fsdp": 4}) == MeshSizes(tp=2, dp_shard=4) and sizes_of(None) == MeshSizes()
    small = Model("llama", settings=SMALL)
    assert quick(small, {"tp": 2}).sizes == quick(small, {"tensor_parallel": 2}).sizes == MeshSizes(tp=2)
    with pytest.raises(TypeError, match="unexpected keyword argument 'tp'"):
        quick(small, tp=2)
    assert quick(small, quick(small, {"tp": 2}).sizes).sizes == MeshSizes(tp=2)  # as results have it
    with pytest.raises(TypeError, match="mesh must be sizes by axis"):
        quick(small, 2)
    with pytest.raises(TypeError, match="verify needs a tp size"):
        shardplan.verify(small, "llama")
    for wrong, text in (
        ({"schedule": "gpipe"}, "a schedule and micro-batches are for pipeline stages in real processes"),
        ({"processes": True, "schedule": "2f2b"}, "there is no pipeline schedule '2f2b'"),
        ({"processes": True, "micro_batches": 0}, "micro_batches must be at least 1, not 0"),
        ({"processes": True, "micro_batches": 1}, "1f1b needs a micro-batch for each of its 2 stages"),
    ):
        with pytest.raises(ValueError, match=text):
            shardplan.verify(small, "llama", {"pp": 2}, **wrong)


@pytest.mark.parametrize(
    "name", ["data_parallel", "activation_checkpointing", "compile", "pipeline_parallel", "separate_matrices"]
)
def test_a_section_is_a_mapping_or_left_out(name: str) -> None:
    for wrong in (True, 1, "full"):
        with pytest.raises(TypeError, match=f"{name} must be a mapping"):
            shardplan.compile_plan(Model("llama", settings=SMALL), {"tp": 2}, "llama", **{name: wrong})


def test_a_step_is_a_record() -> None:
    small = Model("llama", settings=SMALL)
    found = shardplan.estimate(small, "llama", {"tp": 2}, TrainingStep(32, precision="float32", optimizer="sgd"))
    assert found.asked.step == TrainingStep(32, 1, "fp32", "sgd")
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'step'"):
        shardplan.estimate(small, "llama", {"tp": 2})


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
PASSED_ON = {"context_parallel", "watch_ranks"}  # to the model's forward, to init_process_group


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
    assert len(functions) > 3
    for function in functions:
        needed = [one for one in inspect.signature(function).parameters.values() if one.default is one.empty]
        named = [one.name for one in needed if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)]
        given = {name: GIVEN.get(name, object()) for name in named}
        with pytest.raises((TypeError, ValueError), match="misspelt"):
            function(**given, misspelt=1)
            pytest.fail(function.__name__)


def _wrappers(function: Any) -> list[str]:
    """The names of the functions that wrapped a function."""
    found = []
    while hasattr(function, "__wrapped__"):
        found.append(function.__code__.co_qualname.partition(".")[0])
        function = function.__wrapped__
    return found


def test_a_misspelt_name_is_met_with_the_nearest() -> None:
    public = (getattr(shardplan, name) for name in shardplan.__all__)
    named = {one.__name__: one for one in public if getattr(one, "__module__", "").startswith("shardplan.api.")}
    said = {}
    for name, function in named.items():
        for known in inspect.signature(function).parameters if inspect.isfunction(function) else ():
            if known in ("sequence_parallel", "derive", "progress"):
                with pytest.raises(
                    TypeError, match=rf"{name}\(\) has no argument '{known}x': did you mean `{known}`\?"
                ):
                    function(**{f"{known}x": True})
                said[name] = known
    assert {
        "validate",
        "apply_plan",
        "coverage",
        "diff_plans",
        "export_plan",
        "lock_plan",
        "plan_report",
    } <= said.keys()
    assert not [name for name in said if name != "apply_plan" and "one_at_a_time" not in _wrappers(named[name])]
    with pytest.raises(TypeError, match="unexpected keyword argument 'zzz'"):
        shardplan.validate("llama", "llama", zzz=1)


def test_the_loss_takes_no_name_that_it_does_not_know() -> None:
    logits, labels = torch.zeros(1, 4, 8), torch.zeros(1, 4, dtype=torch.long)
    for name, value in {"label_smooth": 0.1, "reduction": "sum", "num_items": 4}.items():
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
            shardplan.causal_lm_loss(logits, labels, **{name: value})
    with pytest.raises(TypeError, match="needs labels or shift_labels"):
        shardplan.causal_lm_loss(logits, None)


def test_what_type_checkers_know_of_apply_plan_is_what_it_takes() -> None:
    taken = [
        one.name for one in inspect.signature(shardplan.apply_plan).parameters.values() if one.kind is one.KEYWORD_ONLY
    ]
    assert sorted((*ApplyOptions.__annotations__, "pipeline")) == sorted(taken)


@pytest.mark.parametrize("dtype", ["bf16", "bfloat16", "torch.bfloat16", torch.bfloat16])
def test_a_dtype_is_said_in_any_way(dtype: object) -> None:
    assert dtype_name(dtype, "it") == "bfloat16"
    assert TrainingStep(8, precision=dtype).precision == "bf16"
    with pytest.raises(ValueError, match="it must be float16 or float32, not"):
        dtype_name(dtype, "it", ("float16", "float32"))
