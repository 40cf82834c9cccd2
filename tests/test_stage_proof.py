"""The proof of pipeline stages runs what training runs: built-in plans pass, and what is changed in the run-time does not."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import shardplan
from shardplan.compiler.layout.model import ModelLayouts
from shardplan.compiler.layout.stage_plan import staged_plan
from shardplan.compiler.user_inputs import Model, find_model, read_plan
from shardplan.core.mesh import MeshSizes
from shardplan.core.plan import NO_OVERLAYS
from shardplan.core.report import NumericProof
from shardplan.core.schedules import SCHEDULES
from shardplan.proof import pipelined
from shardplan.proof.prove_stages import prove_stages_on_first_rank, with_pipeline
from shardplan.proof.remembered_proofs import _KNOWN
from shardplan.proof.stage import EARLIER, NOW, Question
from shardplan.runtime.apply.plan_mesh import PlanMesh
from shardplan.runtime.pipeline import pipelined_model, stage_forward, tied_copies
from shardplan.runtime.pipeline.micro_batch_inputs import Inputs
from shardplan.runtime.pipeline.step_loss import StepLoss, zero_like_loss
from tests.adversaries.live import llama
from tests.proofs import fake_mesh
from tests.test_pipeline_cut import PLAN, Stack, Tied

FAMILIES = ("cohere", "gemma2", "gpt_neox", "granite", "llama", "mistral", "mixtral", "olmo2", "phi3", "qwen2", "qwen3")
SAMPLE = random.Random(88).sample(FAMILIES, 3)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", SAMPLE)
def test_built_in_plans_are_proven_in_stages(name: str, tp: int):
    report = shardplan.validate(name, "auto", {"pp": 2, "tp": tp})
    assert report.ok and report.proof is not None and report.proof.pipeline is not None, report
    rows = report.proof.pipeline.rows
    assert report.proof.pipeline.ok and {row.kind for row in rows} >= {"output", "gradient"}
    assert {row.where.split(",")[0] for row in rows} == {"stage 0", "stage 1"}
    assert any("rank" in row.where for row in rows) == (tp > 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fuyu", "gemma3", "got_ocr2", "xglm"])
def test_other_code_is_proven_in_stages_with_tp(name: str):
    """A table that the module around the blocks does not call. Towers: code that reads parameters (a probe of its own, and
    nn.MultiheadAttention, which reads its out_proj's weight), and code that counts heads. A number that float64 alone has."""
    assert shardplan.validate(name, "auto", {"pp": 2, "tp": 2}).ok


def asked(model: Any, pp: int = 2) -> Question:
    found, _ = find_model(Model(model))
    assert found is not None
    plan = read_plan(PLAN, found).plan
    assert plan is not None
    return Question(ModelLayouts(found, 1, pp=pp), Model(model), plan)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_schedule_that_is_asked_for_runs(name: str):
    question, schedule = asked(Stack(blocks=4)), SCHEDULES[name]
    staged = staged_plan(question.plan, question.reduced)
    none = NumericProof(MeshSizes(pp=2), ())
    proof, wrong = with_pipeline(none, question, staged, (NO_OVERLAYS,), schedule)
    assert not wrong and proof.pipeline is not None and proof.pipeline.ok
    assert len(proof.pipeline.sizes) == 2 * schedule.stages_per_rank


def test_a_schedule_that_the_reduced_model_has_too_few_blocks_for_is_1f1b():
    question = asked(Stack(blocks=3))
    staged, none = staged_plan(question.plan, question.reduced), NumericProof(MeshSizes(pp=2), ())
    proof, wrong = with_pipeline(none, question, staged, (NO_OVERLAYS,), SCHEDULES["interleaved"])
    assert not wrong and proof.pipeline is not None and len(proof.pipeline.sizes) == 2


def wrong_gradient(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
    return 2 * gradient.contiguous()


MUTANTS: dict[str, tuple[Any, Any, str, Callable[[Any], Any]]] = {
    "hand-overs have no gradient": (Stack, stage_forward, "_sent", lambda own: lambda x: own(x.detach() + 0 * x)),
    "gradients are sent twice": (Stack, stage_forward._Taken, "backward", lambda own: staticmethod(wrong_gradient)),
    "each micro-batch divides by its own tokens": (
        "llama",
        StepLoss,
        "items",
        lambda own: property(lambda self: None),
    ),
    "every micro-batch of an evaluation is the first": (
        "llama",
        Inputs,
        "split",
        lambda own: lambda self, count: own(self, count)[:1] * count,
    ),
    "ties are not added": (Tied, tied_copies.Copies, "add_gradients", lambda own: lambda *args: None),
    "losses are not summed over ranks": (
        "llama",
        pipelined_model.Pipeline,
        "_mean",
        lambda own: lambda self, losses, replicas: torch.stack([*losses, torch.zeros(())]).sum(),
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_change_of_the_run_time_is_refused(mutant: str, monkeypatch: pytest.MonkeyPatch):
    model, owner, name, change = MUTANTS[mutant]
    plan: Any = "auto" if isinstance(model, str) else PLAN
    monkeypatch.setattr(owner, name, change(vars(owner)[name]))
    report = shardplan.validate(model if isinstance(model, str) else model(), plan, {"pp": 2})
    assert [d.code for d in report.errors] == ["SP436"]


def test_inputs_without_rows_are_refused_and_can_be_accepted():
    class Placed(Stack):
        def forward(self, input_ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
            return super().forward(input_ids) + places.sum()

    def inputs(seed: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(seed))
        return {"input_ids": ids, "places": torch.zeros(3, 2, 8)}

    model = Model(Placed(), inputs=inputs)
    assert [d.code for d in shardplan.validate(model, PLAN, {"pp": 2}).errors] == ["SP438"]
    allowed = shardplan.validate(model, PLAN, {"pp": 2}, allow_unproven=True)
    assert allowed.ok and not allowed.proven and "SP438" in [d.code for d in allowed.diagnostics]


OF_REPLICAS: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "each data-parallel rank divides by its own tokens": (
        StepLoss,
        "items",
        lambda own: property(lambda self: self.tokens / self.micro_batches),
    ),
    "losses are not summed over data-parallel ranks": (
        PlanMesh,
        "batch_groups",
        lambda own: property(lambda self: []),
    ),
}


@pytest.mark.parametrize("mutant", OF_REPLICAS)
def test_a_change_of_what_data_parallel_ranks_do_is_refused(mutant: str, monkeypatch: pytest.MonkeyPatch):
    owner, name, change = OF_REPLICAS[mutant]
    assert shardplan.validate("llama", "auto", {"tp": 1, "pp": 2, "dp_shard": 2}).ok
    monkeypatch.setattr(owner, name, change(vars(owner)[name]))
    report = shardplan.validate("llama", "auto", {"tp": 1, "pp": 2, "dp_shard": 2})
    assert [d.code for d in report.errors] == ["SP436"]


class Careful(Stack):
    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        try:
            return super().forward(input_ids)
        except Exception:
            return torch.zeros(())


class Noisy(Stack):
    """As a gate that adds noise."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        logits = super().forward(input_ids)
        return logits + 0.1 * torch.randn_like(logits) * logits


def drawn_from_the_default_generator(seed: int) -> dict[str, torch.Tensor]:
    assert threading.current_thread() is threading.main_thread()
    torch.manual_seed(seed)
    return {"input_ids": torch.randint(32, (2, 8))}


@pytest.mark.parametrize(
    "model",
    [
        Careful(),  # a stage ends in the middle of the model's forward
        Noisy(),  # ranks draw what the unsharded model does
        Model(Stack(), inputs=drawn_from_the_default_generator),  # which all ranks share
    ],
    ids=["careful", "noisy", "inputs"],
)
def test_code_that_runs_in_stages(model: Any):
    plan = {**PLAN, "data_parallel": {"backend": "fsdp2", "units": ["blocks.*"]}}
    report = shardplan.validate(model, plan, {"pp": 2, "dp_shard": 2})
    assert report.ok and report.proof is not None and report.proof.pipeline is not None, report
    outputs = {row.name: row.verdict for row in report.proof.pipeline.rows if row.kind == "output"}
    assert outputs == {"loss": "equal", pipelined.EVALUATION: "equal"}


class Trains(Stack):
    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        if not self.training:
            raise NotImplementedError("it is not evaluated")
        return super().forward(input_ids)


def test_a_model_that_is_not_evaluated_trains_in_stages():
    report = shardplan.validate(Trains(), PLAN, {"pp": 2})
    assert report.ok and report.proof is not None and report.proof.pipeline is not None, report
    (evaluation,) = (row for row in report.proof.pipeline.rows if row.name == pipelined.EVALUATION)
    assert evaluation.verdict == "unproven"


def test_the_loss_of_a_step_is_float32_whatever_the_default():
    torch.set_default_dtype(torch.float64)
    try:
        assert zero_like_loss(torch.device("cpu")).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_loss_function_may_return_another_dtype(monkeypatch: pytest.MonkeyPatch):
    """torch 2.11 compares the dtype of what the last stage returns."""
    own = pipelined.objective
    monkeypatch.setattr(pipelined, "objective", lambda output, labels: own(output, labels).double())
    assert shardplan.validate(Stack(), PLAN, {"pp": 2}).ok


def test_data_parallel_ranks_of_stages_have_batches_of_their_own(monkeypatch: pytest.MonkeyPatch):
    """The loss is divided by the tokens of all of them."""
    assert shardplan.validate("llama", "auto", {"pp": 2, "dp_shard": 2}).ok
    monkeypatch.setattr(PlanMesh, "data_parallel_ranks", 1)
    assert not shardplan.validate("llama", "auto", {"pp": 2, "dp_shard": 2}).ok


def llama_halved() -> torch.nn.Module:
    """A hook on the model halves its loss."""
    model = llama()

    def halve(module: torch.nn.Module, args: tuple, output: Any) -> Any:
        output.loss = output.loss / 2
        return output

    model.register_forward_hook(halve)
    return model


def llama_normalised() -> torch.nn.Module:
    """Gradients are normalised, so that their size before counts."""
    model = llama()

    def normalise(module: torch.nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient / (1e-3 + gradient.norm(dim=-1, keepdim=True)))
        return output

    model.model.layers[1].mlp.up_proj.register_forward_hook(normalise)
    return model


@pytest.mark.parametrize(("build", "ranks"), [(llama_halved, {}), (llama_normalised, {"dp_shard": 2})])
def test_the_unsharded_steps_are_those_of_training(build: Callable[[], torch.nn.Module], ranks: dict[str, int]):
    assert shardplan.validate(build(), "llama", {"pp": 2, "tp": 1, **ranks}).ok


def test_stages_are_proven_once_in_a_process(monkeypatch: pytest.MonkeyPatch):
    """Not those of a model with another number in its code."""

    class Scaled(Stack):
        def __init__(self, factor: int) -> None:
            super().__init__()
            self.factor = factor

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return super().forward(input_ids) * self.factor

    def known(factor: int, schedule: str = "1f1b") -> str:
        torch.manual_seed(0)
        question = replace(asked(Scaled(factor)), mesh=MeshSizes(tp=1, pp=2))
        staged = staged_plan(question.plan, question.reduced)
        with fake_mesh(2, names=("pp",)) as mesh:
            found, how = prove_stages_on_first_rank(question, staged, NO_OVERLAYS, SCHEDULES[schedule], mesh)
        assert not found
        return how

    _KNOWN.clear()
    assert [known(2), known(2), known(3), known(2, "gpipe")] == [NOW, EARLIER, NOW, NOW]
