"""What may be applied to what, and what is said when it may not."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from shardplan import PlanError, applied, apply_plan, compile_plan, load_plan, validate, verify
from shardplan.runtime.apply import phases, without_sequence_parallel
from shardplan.runtime.apply.plan_mesh import read_mesh
from tests.proofs import PLANS, fake_mesh, plan_like, reduced_model

pytestmark = pytest.mark.usefixtures("compiled_once")


@pytest.fixture(scope="module", autouse=True)
def mesh():
    with fake_mesh(4) as mesh:
        yield mesh


def names(model: nn.Module) -> tuple:
    parameters = model.named_parameters(remove_duplicate=False)
    return [n for n, _ in model.named_modules()], [n for n, _ in parameters], list(model.state_dict())


def untouched(model: nn.Module) -> bool:
    plain = not any(isinstance(p, DTensor) for p in model.parameters())
    return plain and not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


QUICK = ("llama", "phi3", "gpt2")


@pytest.mark.parametrize("plan", [p if p in QUICK else pytest.param(p, marks=pytest.mark.slow) for p in PLANS])
def test_names_are_the_same_afterwards(plan, mesh):
    options = {"sequence_parallel": True, "activation_checkpointing": {"mode": "full"}, "compile": {}}
    before = names(reduced_model(plan, 4).build())
    model = apply_plan(reduced_model(plan, 4).build(), mesh, plan, src_data_rank=None, **options)
    assert names(model) == before
    assert type(model).__name__ == type(reduced_model(plan, 4).build()).__name__
    assert isinstance(model, type(reduced_model(plan, 4).build()))


def test_a_step_that_changes_names_is_caught(mesh, monkeypatch):
    """torch's checkpoint_wrapper renames what it wraps; afterwards rules and checkpoints match nothing."""

    def wrap(model, *arguments):
        for i, layer in enumerate(model.model.layers):
            model.model.layers[i] = checkpoint_wrapper(layer)

    monkeypatch.setattr(phases, "checkpoint_modules", wrap)
    model = reduced_model("llama", 4).build()
    with pytest.raises((AssertionError, RuntimeError), match="the step 'activation checkpointing' changed modules"):
        # The proof runs the same step, and would find it first.
        apply_plan(model, mesh, "llama", activation_checkpointing={"mode": "full"}, src_data_rank=None, prove=False)


def test_what_is_switched_on_are_the_plans_units_also_where_they_are_not_wrapped(mesh):
    """`compile` of a model without data parallelism compiled nothing, and said nothing."""
    options = {"compile": {}, "activation_checkpointing": {"mode": "full"}, "data_parallel": False}
    model = apply_plan(reduced_model("llama", 4).build(), mesh, "llama", src_data_rank=None, **options)
    resolved = applied(model).program.resolved
    assert resolved.compile_modules == resolved.ac_modules == ("model.layers.0", "model.layers.1")
    assert resolved.dp_units == ()


def test_what_is_switched_on_without_units_is_refused(mesh, tmp_path):
    plan = tmp_path / "plan.yaml"
    plan.write_text('version: "1"\nname: plan\ntensor_parallel: {lm_head: colwise_gather_output}\n', "utf-8")
    with pytest.raises(ValueError, match="compile names no modules, and the plan has no data-parallel units"):
        apply_plan(reduced_model("llama", 4).build(), mesh, plan, src_data_rank=None, compile={})


def test_a_second_application_is_refused(mesh):
    model = apply_plan(reduced_model("llama", 4).build(), mesh, "llama", src_data_rank=None)
    before = {n: id(p) for n, p in model.named_parameters()}
    with pytest.raises(ValueError, match="a plan was applied to this model before"):
        apply_plan(model, mesh, "llama")
    assert {n: id(p) for n, p in model.named_parameters()} == before
    assert applied(model).tp == 4


def test_a_model_with_dtensors_is_refused(mesh):
    model = reduced_model("llama", 4).build()
    weight = distribute_tensor(model.lm_head.weight.detach(), mesh, [Replicate()], src_data_rank=None)
    model.lm_head.weight = nn.Parameter(weight)
    with pytest.raises(ValueError, match=r"already has DTensors \(lm_head.weight and 0 more\)"):
        apply_plan(model, mesh, "llama")
    assert not isinstance(model.model.norm.weight, DTensor)


def test_a_wrong_plan_leaves_the_model_untouched(mesh):
    for wrong in (plan_like("llama", {"model.layers.*.mlp.gate": "colwise"}), {"version": "1", "tensor_parallel": 3}):
        model = reduced_model("llama", 4).build()
        with pytest.raises(PlanError) as error:
            apply_plan(model, mesh, wrong)
        assert error.value.diagnostics and untouched(model)
    with pytest.raises(ValueError, match="no plan was applied"):
        applied(model)


def test_a_size_that_tp_does_not_divide_is_refused():
    """torch's own parallelize_module accepts it."""
    with pytest.raises(PlanError, match="which tp=3 does not divide"):
        compile_plan(reduced_model("llama", 4).build(), {"tp": 3}, "llama")


def test_a_step_that_fails_names_itself_and_leaves_the_model_marked(mesh, monkeypatch):
    def fail(model, groups):
        raise MemoryError("no memory left")

    monkeypatch.setattr(phases, "restore_ties", fail)
    model = reduced_model("llama", 4, tied=True).build()
    with pytest.raises(RuntimeError, match="applying plan 'llama' failed in the step 'ties'.*no memory left"):
        apply_plan(model, mesh, "llama", src_data_rank=None, prove=False)
    with pytest.raises(ValueError, match="unusable: applying a plan failed in the step 'ties'"):
        applied(model)
    with pytest.raises(ValueError, match="applied to this model before"):
        apply_plan(model, mesh, "llama")


@pytest.mark.parametrize("kind", [MemoryError, KeyboardInterrupt])
def test_a_half_sharded_model_does_not_run(mesh, monkeypatch, kind):
    def fail(model, groups):
        raise kind("in the middle")

    monkeypatch.setattr(phases, "restore_ties", fail)
    model = reduced_model("llama", 4, tied=True).build()
    with pytest.raises(KeyboardInterrupt if kind is KeyboardInterrupt else RuntimeError, match="in the middle"):
        apply_plan(model, mesh, "llama", src_data_rank=None, prove=False)
    ids = torch.ones(1, 8, dtype=torch.long)
    for call in (model, model.model, model.lm_head, model.generate):
        with pytest.raises(RuntimeError, match="unusable: applying a plan failed in the step 'ties'; build it again"):
            call(ids)


def test_an_optimizer_from_before_holds_dead_tensors(mesh):
    model = reduced_model("llama", 4).build()
    early = torch.optim.AdamW(model.parameters())
    apply_plan(model, mesh, "llama", src_data_rank=None)
    with pytest.raises(ValueError, match=r"(\d+) of the optimizer's \1 tensors .*create the optimizer after it"):
        applied(model).check_optimizer(early)
    applied(model).check_optimizer(torch.optim.AdamW(model.parameters()))
    half = [p for n, p in model.named_parameters() if "layers" in n]
    applied(model).check_optimizer(torch.optim.SGD(half, lr=0.1))


def test_what_was_done_is_told(mesh):
    model = apply_plan(reduced_model("llama", 4).build(), mesh, "llama", sequence_parallel=True, src_data_rank=None)
    record = applied(model)
    assert record.steps[0] == "tensor parallel" and record.diagnostics == ()
    first, variants, proof, parameters, *rest = str(record).splitlines()
    assert first == f"plan llama on tp 4: {', '.join(record.steps)}"
    assert variants == "  variants: sequence_parallel, tensor_parallel" and proof.startswith("  proven ")
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    here = sum(p.to_local().numel() * p.element_size() for p in model.parameters())
    assert parameters == f"  parameters: {here:,} of {whole:,} bytes on this rank, float32"
    assert "5 reduce_scatter" in rest[0]
    assert (
        record.program.describe()
        == compile_plan(reduced_model("llama", 4).build(), mesh, "llama", sequence_parallel=True).describe()
    )


@pytest.mark.parametrize(
    ("spelling", "axis"),
    [("tp", "tp"), ("tensor_parallel", "tp"), ("dp", "dp_shard"), ("fsdp", "dp_shard"), ("data_parallel", "dp_shard"),
     ("dp_cp", "dp_shard"), ("context_parallel", "cp"), ("hsdp", "dp_replicate")],
)  # fmt: skip
def test_mesh_axes_in_other_spellings(spelling, axis):
    known = read_mesh(init_device_mesh("cpu", (4,), mesh_dim_names=(spelling,)))
    assert getattr(known.sizes, axis) == 4


def test_mesh_axes_by_argument_and_wrong_ones():
    odd = init_device_mesh("cpu", (4,), mesh_dim_names=("columns",))
    with pytest.raises(ValueError, match="unknown mesh axis 'columns'"):
        read_mesh(odd)
    assert read_mesh(odd, {"tp": "columns"}).sizes.tp == 4
    with pytest.raises(ValueError, match="the axes are"):
        read_mesh(odd, {"tp": "rows"})
    with pytest.raises(ValueError, match="two axes of the mesh .* mean dp_shard"):
        read_mesh(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "fsdp")))
    with pytest.raises(ValueError, match="no axis names"):
        read_mesh(init_device_mesh("cpu", (4,)))


def test_no_tp_axis_and_tp_of_one_shard_nothing(mesh):
    for shape, axes in (((4, 1), ("dp_shard", "tp")), ((4,), ("dp_shard",))):
        one = init_device_mesh("cpu", shape, mesh_dim_names=axes)
        model = apply_plan(reduced_model("llama", 2).build(), one, "llama", sequence_parallel=True, src_data_rank=None)
        record = applied(model)
        assert record.tp == 1 and not record.program.sequence_parallel and "tensor parallel" not in record.steps


WRONG_CALLS = {
    "a plan of another type": (TypeError, lambda mesh: load_plan(3)),
    "auto without a model": (ValueError, lambda mesh: load_plan("auto")),
    "a model of another type": (TypeError, lambda mesh: validate(3, "llama")),
    "a size that is no number": (ValueError, lambda mesh: validate("llama", "llama", {"tp": "2"})),
    "a size of zero": (ValueError, lambda mesh: validate("llama", "llama", {"tp": 0})),
    "no mesh": (TypeError, lambda mesh: apply_plan(reduced_model("llama", 4).build(), 4, "llama")),
    "a section of another type": (
        TypeError,
        lambda mesh: apply_plan(reduced_model("llama", 4).build(), mesh, "llama", activation_checkpointing="full"),
    ),
    "unknown logits": (
        ValueError,
        lambda mesh: apply_plan(reduced_model("llama", 4).build(), mesh, "llama", logits="gathered"),
    ),
    "sharded logits without a head": (
        ValueError,
        lambda mesh: apply_plan(
            reduced_model("llama", 4, classes="LlamaModel").build(), mesh, "llama", logits="sharded"
        ),
    ),
    "data parallelism alone in the simulation": (TypeError, lambda mesh: verify("llama", "llama", {"dp_shard": 2})),
    "a question about a model without a plan": (ValueError, lambda mesh: applied(nn.Linear(1, 1))),
    "an unplanned model without sequence parallelism": (
        ValueError,
        lambda mesh: without_sequence_parallel(nn.Linear(1, 1)).__enter__(),
    ),
}


@pytest.mark.parametrize("what", WRONG_CALLS)
def test_wrong_calls(what, mesh):
    error, call = WRONG_CALLS[what]
    with pytest.raises(error) as caught:
        call(mesh)
    assert type(caught.value) is error, "PlanError is for plans"


def test_attention_maps_are_refused(mesh):
    model = apply_plan(reduced_model("llama", 4, attn="eager").build(), mesh, "llama", src_data_rank=None)
    with pytest.raises(ValueError, match="output_attentions=True"):
        model(input_ids=torch.ones(1, 8, dtype=torch.long), output_attentions=True)
