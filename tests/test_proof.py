"""The numeric proof as the last stage of `validate`: what it compares, what it does not let pass, what it says."""

from __future__ import annotations

import copy
import dataclasses
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from case_models import Block, Stack
from processes import on_ranks
from proofs import fake_mesh, reduced_model
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardplan
from shardplan.model.reduced.outcome import results_of
from shardplan.proof.compare import relative_error
from shardplan.proof.threads import on_threads
from shardplan.report import report_text

PLAN = {"version": "1", "name": "mlp", "tensor_parallel": {"layers.*.up": "colwise", "layers.*.down": "rowwise"}}
# The second matrix is split, and its summands are never reduced.
UNREDUCED = {**PLAN, "tensor_parallel": {**PLAN["tensor_parallel"], "box.up": "colwise", "box.down.weight": "rowwise"}}
BOX = {**PLAN, "tensor_parallel": {**PLAN["tensor_parallel"], "box.up": "colwise", "box.down": "rowwise"}}


class Model(Stack):
    """Two blocks, and what a test adds to them."""

    def __init__(self) -> None:
        super().__init__([Block(), Block()])


def features(seed: int) -> dict[str, Tensor]:
    return {"x": torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(seed))}


def validate(model: nn.Module | shardplan.Model, plan: Any = PLAN, **options: Any) -> shardplan.Report:
    named = model if isinstance(model, shardplan.Model) else shardplan.Model(model, inputs=features)
    return shardplan.validate(named, plan, {"tp": 2}, **options)


def codes(report: shardplan.Report) -> list[str]:
    return [d.code for d in report.errors]


def test_a_right_plan_is_proven() -> None:
    report = validate(Model())
    assert report.proven and report.stages[-1] == "proof"
    assert "proven at tp=2: 5 tensors are the unsharded model's" in report_text(report, color=False)


def test_without_the_proof_the_report_says_so() -> None:
    report = validate(Model(), proof=False)
    assert report.ok and not report.proven and report.proof is None
    assert "not proven" in report_text(report, color=False)


@dataclasses.dataclass
class Result:
    aux: Tensor
    sample: Tensor


NESTS = {
    "tuple": lambda a, b: (a, b),
    "dict": lambda a, b: {"aux": a, "sample": b},
    "dataclass": lambda a, b: Result(a, b),
    "nested": lambda a, b: [a, {"more": (b, 3, None)}],
}


class TwoOutputs(Model):
    def __init__(self, nest: str) -> None:
        super().__init__()
        self.nest, self.box = nest, Block()

    def forward(self, x: Tensor) -> Any:
        x = super().forward(x)
        return NESTS[self.nest](x, self.box(x))


@pytest.mark.parametrize("nest", NESTS)
def test_every_output_of_any_structure_is_compared(nest: str) -> None:
    right, wrong = validate(TwoOutputs(nest), BOX), validate(TwoOutputs(nest), UNREDUCED)
    assert right.proven and sum(row.kind == "output" for row in right.proof.rows) == 2
    assert codes(wrong) != []


def test_outputs_are_named_by_their_paths() -> None:
    a, b = torch.ones(1), torch.zeros(2)
    found = results_of({"x": (a, torch.ones(1, dtype=torch.long)), "y": Result(b, b), "cache": object()})
    assert {name: value is a or value is b for name, value in found.items()} == dict.fromkeys(
        ["x.0", "y.aux", "y.sample"], True
    )
    with pytest.raises(ValueError, match="nothing to compare"):
        results_of({"ids": torch.ones(1, dtype=torch.long)})


class Statistics(Block):
    """A block that keeps the running mean of its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.detach().mean((0, 1)), 0.1)
        return super().forward(x)


class Keeping(Model):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Linear(16, 16, bias=False), nn.LayerNorm(16)
        self.layers[1] = Statistics()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(self.embed(x)))


SEQUENCE = {
    **PLAN,
    "sequence_parallel": {
        "layers.0": "split_seq_input",
        "layers.*.up": {"style": "colwise_seq"},
        "layers.*.down": "rowwise_seq",
        "norm": {"style": "sequence_parallel", "output": "gather"},
    },
}


def test_buffers_that_a_slice_of_the_sequence_changes_differ() -> None:
    """Every value and gradient is right; what is kept is the mean of a rank's own tokens."""
    report = validate(Keeping(), SEQUENCE, sequence_parallel=True)
    assert codes(report) == ["SP420"]
    (finding,) = report.errors
    assert "1 buffer" in finding.message and finding.modules == ("layers.1.mean",)
    assert validate(Keeping(), SEQUENCE, sequence_parallel=False).proven


class Renormed(Model):
    """Its forward changes a parameter: rows of a table, or a scale that every call makes smaller."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 16, max_norm=0.5 if way == "rows" else None)
        self.scale = nn.Parameter(torch.ones(16))
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "scale":
            self.scale.data.mul_(0.5)
        return super().forward(self.embed(x)) * self.scale


def token_ids(seed: int) -> dict[str, Tensor]:
    return {"x": torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(seed))}


def changed(way: str, plan: Any) -> tuple[list[str], dict[str, str]]:
    """The findings, and the verdicts about parameters that a forward changes."""
    report = validate(shardplan.Model(Renormed(way), inputs=token_ids), plan)
    return codes(report), {row.name: row.verdict for row in report.proof.rows if row.kind == "parameter"}


def test_a_parameter_that_a_forward_changes_is_compared() -> None:
    """A rank looks up its first row for the ids of other ranks, and so shortens that row too."""
    split = {**PLAN, "tensor_parallel": {**PLAN["tensor_parallel"], "embed": "embedding_rowwise"}}
    assert changed("rows", split) == (["SP420"], {"embed.weight": "differs"})
    assert changed("rows", PLAN) == ([], {"embed.weight": "equal"})
    assert changed("none", split) == ([], {})


def test_each_rank_has_memory_of_its_own_where_a_forward_writes() -> None:
    assert changed("scale", PLAN) == ([], {"scale": "equal"})


def on_data_parallel(way: str, mesh: dict[str, int], *, max_norm: float = 0.5, backend: str = "fsdp2") -> list[str]:
    model = Renormed(way)
    if way == "rows":
        model.embed.max_norm = max_norm
    units = {"units": ["layers.*"]} if backend == "fsdp2" else {}
    plan = {**PLAN, "data_parallel": {"backend": backend, **units}}
    report = shardplan.validate(shardplan.Model(model, inputs=token_ids), plan, {"tp": 1, **mesh})
    compiled = shardplan.Model(model, inputs=token_ids)
    if report.errors:
        with pytest.raises(shardplan.PlanError, match="SP414"):
            shardplan.compile_plan(compiled, {"tp": 1, **mesh}, plan)
    else:
        shardplan.compile_plan(compiled, {"tp": 1, **mesh}, plan)
    return codes(report)


@pytest.mark.parametrize("way", ["rows", "scale"])
def test_a_parameter_that_a_forward_changes_is_not_for_data_parallel_ranks(way: str) -> None:
    """FSDP2 loses what is written into what it gathers, and ranks have other rows to shorten."""
    assert on_data_parallel(way, {"dp_shard": 2}) == ["SP414"]
    assert on_data_parallel(way, {"dp_replicate": 2}, backend="ddp") == ["SP414"]
    assert on_data_parallel(way, {"dp_shard": 2, "tp": 2}) == ["SP414"]
    assert on_data_parallel("none", {"dp_shard": 2}) == []
    assert on_data_parallel(way, {"dp_shard": 1}) == []


def test_a_bound_that_few_rows_pass_is_seen_too() -> None:
    assert on_data_parallel("rows", {"dp_shard": 2}, max_norm=50.0) == ["SP414"]


class Clip(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / gradient.norm()


class Clipped(Model):
    """Normalises a gradient where ranks have slices of it."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = torch.relu(layer.up(x))
            if self.way == "hook" and hidden.requires_grad:
                hidden.register_hook(lambda gradient: gradient / gradient.norm())
            elif self.way == "function":
                hidden = Clip.apply(hidden)
            elif self.way == "center" and hidden.requires_grad:
                hidden.register_hook(lambda gradient: gradient - gradient.mean(-1, keepdim=True))
            x = x + layer.down(hidden)
        return x


@pytest.mark.parametrize("way", ["hook", "function", "center"])
def test_a_backward_that_is_not_linear_is_seen(way: str) -> None:
    report = validate(Clipped(way))
    assert codes(report) == ["SP420"]
    assert "gradients" in report.errors[0].message and report.errors[0].primary is not None
    assert validate(Clipped("none")).proven


class Branches(Model):
    """Reads another part of itself where there is an image."""

    def __init__(self) -> None:
        super().__init__()
        self.box, self.mask_token = Block(), nn.Parameter(torch.randn(16))

    def forward(self, x: Tensor, image: Tensor | None = None) -> Tensor:
        x = super().forward(x)
        return x if image is None else x + self.box(image)


def test_what_no_run_reaches_is_an_error_where_it_is_split_and_else_counted() -> None:
    whole = validate(Branches())
    assert whole.proven and set(whole.proof.variants[0].unreached) == {"mask_token", "box.up.weight", "box.down.weight"}
    assert "not reached, and not split: mask_token, box.up.weight, box.down.weight (3 in all)" in report_text(
        whole, color=False
    )
    split = validate(Branches(), BOX)
    assert codes(split) == ["SP421", "SP421"] and not split.proven
    assert {name for d in split.errors for name in d.modules} == {"box.up.weight", "box.down.weight"}
    allowed = validate(Branches(), BOX, allow_unproven=True)
    assert allowed.proven and [d.code for d in allowed.warnings] == ["SP421", "SP421"]
    reached = validate(
        shardplan.Model(Branches(), inputs=lambda seed: {**features(seed), "image": features(seed + 9)["x"]}), BOX
    )
    assert reached.proven and reached.proof.variants[0].unreached == ("mask_token",)


def test_a_model_that_cannot_be_called_is_not_proven() -> None:
    report = shardplan.validate(Model(), PLAN, {"tp": 2})
    assert codes(report) == ["SP522"] and "not proven" in report.errors[0].message
    allowed = shardplan.validate(Model(), PLAN, {"tp": 2}, allow_unproven=True)
    assert allowed.ok and not allowed.proven and [d.code for d in allowed.warnings] == ["SP522"]


def test_a_sequence_that_tp_does_not_divide_is_refused() -> None:
    def odd(seed: int) -> dict[str, Tensor]:
        return {"x": torch.randn(2, 17, 16, generator=torch.Generator().manual_seed(seed))}

    report = validate(shardplan.Model(Keeping(), inputs=odd), SEQUENCE, sequence_parallel=True)
    assert codes(report) == ["SP422"] and "17 elements, which tp=2 does not divide" in report.errors[0].message
    assert "`--no-sequence-parallel` (`sequence_parallel=False`)" in (report.errors[0].help or "")
    assert codes(
        shardplan.verify(shardplan.Model(Keeping(), inputs=odd), SEQUENCE, {"tp": 2}, sequence_parallel=True)
    ) == ["SP422"]


def test_masks_are_no_scale() -> None:
    lowest = torch.finfo(torch.float32).min
    reference = torch.tensor([lowest, 1.0, 2.0])
    assert relative_error(torch.tensor([lowest, 1.0, 2.1]), reference) == pytest.approx(0.05)
    assert relative_error(torch.tensor([0.0, 1.0, 2.0]), reference) == float("inf")
    assert relative_error(torch.tensor([float("nan"), 1.0, 2.0]), reference) == float("inf")
    infinite = torch.tensor([float("-inf"), 1.0])
    assert relative_error(infinite.clone(), infinite) == 0.0


def test_imaginary_parts_are_compared() -> None:
    reference = torch.tensor([1 + 2j, 0.5j])
    assert relative_error(reference.clone(), reference) == relative_error(reference.conj().conj(), reference) == 0.0
    assert relative_error(reference.conj(), reference) == pytest.approx(2.0)
    assert relative_error(reference.real.clone(), reference) == float("inf")


# On threads, one for each rank.


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_threads_answer_by_rank_and_compute_together() -> None:
    def summed(rank: int) -> float:
        x = torch.full((1,), float(rank), requires_grad=True)
        y = x * 2
        dist.all_reduce(y.detach())
        y.sum().backward()
        return y.item() + x.grad.item()

    assert on_threads(3, summed) == [8.0, 8.0, 8.0]
    assert not dist.is_initialized()


def test_what_a_rank_raises_is_raised_though_others_wait_for_it() -> None:
    def failing(rank: int) -> None:
        if rank == 1:
            raise KeyError("no")
        dist.barrier()

    with pytest.raises(KeyError, match="no"):
        on_threads(3, failing)
    assert on_threads(2, lambda rank: rank) == [0, 1]


def test_ranks_that_wait_for_one_that_has_ended_are_told() -> None:
    def uneven(rank: int) -> None:
        for _ in range(3 - rank):
            dist.barrier()

    with pytest.raises(RuntimeError, match="rank 2 ended, but the other ranks wait"):
        on_threads(3, uneven)


def test_the_groups_of_the_process_are_there_again() -> None:
    with fake_mesh(2) as mesh:
        assert on_threads(4, lambda rank: dist.get_world_size()) == [4] * 4
        assert dist.get_world_size() == 2 and mesh.get_group().size() == 2


def test_an_exception_afterwards_is_printed_as_without_process_groups() -> None:
    hook = sys.excepthook
    on_threads(2, lambda _: None)
    assert sys.excepthook is hook
    shardplan.estimate(shardplan.Model(Model(), inputs=features), PLAN, {"tp": 2}, shardplan.TrainingStep(8))
    assert sys.excepthook is hook


def test_autograd_has_its_threads_again() -> None:
    on_threads(2, lambda _: None)
    now = torch.autograd.set_multithreading_enabled(True)
    assert now.prev


def test_tensors_without_memory_are_made_after_the_threads_have_ended() -> None:
    """In CUDA builds of torch 2.11, on a machine without CUDA, the process ended; in the others it is fine anyway."""
    script = """
import torch
from shardplan.proof.threads import on_threads
from shardplan.torchlib.private import private
def made(rank):
    with private("FakeTensorMode")():
        return torch.empty(2).shape[0]
assert on_threads(2, made) == [2, 2]
kept = [(torch.nn.Linear(3, 3), [bytearray(n) for n in range(1, 64)]) for _ in range(2000)]
assert made(0) == 2
"""
    assert subprocess.run([sys.executable, "-c", script], timeout=120).returncode == 0


def test_a_plan_is_proven_where_a_process_group_exists() -> None:
    with fake_mesh(2):
        assert validate(Model()).proven
        assert codes(validate(Clipped("hook"))) == ["SP420"]


def test_a_mesh_like_the_simulated_one_does_not_get_into_its_way() -> None:
    """torch keeps what it knows of a mesh of this size and these names."""
    with fake_mesh(2) as mesh:
        assert applied_on(mesh, Model(), prove=False)
        assert validate(TwoOutputs("tuple"), BOX).proven
        assert shardplan.verify("llama", "llama", {"tp": 2}, sequence_parallel=False).ok


def applied_on(mesh: Any, model: nn.Module, **options: Any) -> str:
    shardplan.apply_plan(shardplan.Model(model, inputs=features), mesh, PLAN, **options)
    return shardplan.applied(model).proof


def test_apply_plan_proves_once_and_says_how() -> None:
    with fake_mesh(2) as mesh:
        assert applied_on(mesh, Clipped("never"), prove=False) == "not proven: prove=False"
        model = Clipped("never")
        model.layers.append(Block())  # no test has proven one of three
        assert applied_on(mesh, copy.deepcopy(model)) == "proven before it was applied, on a reduced model"
        assert applied_on(mesh, model) == "proven by an earlier proof in this process, on a reduced model"
        assert "proven by an earlier proof" in str(shardplan.applied(model))


def test_apply_plan_refuses_what_the_proof_refutes_and_leaves_the_model() -> None:
    with fake_mesh(2) as mesh:
        for _ in range(2):  # proven, and known
            model = Clipped("function")
            with pytest.raises(shardplan.PlanError, match="SP420"):
                applied_on(mesh, model)
            assert type(model.layers[0].up.weight) is nn.Parameter
            with pytest.raises(ValueError, match="no plan was applied"):
                shardplan.applied(model)


def test_a_proof_that_accepts_what_is_not_proven_is_none_for_one_that_does_not() -> None:
    with fake_mesh(2) as mesh:
        shardplan.apply_plan(shardplan.Model(Branches(), inputs=features), mesh, BOX, allow_unproven=True)
        model = Branches()
        with pytest.raises(shardplan.PlanError, match="SP421"):
            shardplan.apply_plan(shardplan.Model(model, inputs=features), mesh, BOX)
        assert type(model.layers[0].up.weight) is nn.Parameter


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.slow
def test_a_process_proves_again_and_again(name: str) -> None:
    """torch remembers the meshes of earlier threads, whose groups are gone."""
    with fake_mesh(4) as mesh:
        for _ in range(2):
            model = reduced_model(name, 4).build()
            shardplan.apply_plan(model, mesh, name, sequence_parallel=True, src_data_rank=None)
            assert "proven" in shardplan.applied(model).proof


class Counting(Model):
    """Its buffers have values of their own; one is not of floating point."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x).transpose(1, 2))


def test_buffers_on_the_meta_device_are_what_reset_parameters_makes_them() -> None:
    with torch.device("meta"):
        model, other = Counting(), Counting()
    assert validate(model).proven
    other.register_buffer("steps", torch.zeros((), dtype=torch.int64, device="meta"))
    (unknown,) = validate(other).errors
    assert unknown.code == "SP520" and unknown.notes == ("steps",)


def _refused_and_applied() -> tuple[str, str]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    try:
        applied_on(mesh, Clipped("center"))
        refused = ""
    except shardplan.PlanError as error:
        refused = error.diagnostics[0].code
    return refused, applied_on(mesh, Clipped("none"))


@pytest.mark.slow
def test_every_rank_hears_of_the_proof_of_the_first() -> None:
    told = on_ranks(2, _refused_and_applied)
    assert told == [("SP420", "proven before it was applied, on a reduced model")] * 2
