"""What `validate` says of the adversaries, and a sample in processes; `make adversaries` runs all of them so, and more random modules."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from tests.adversaries import judge as reference
from tests.adversaries.__main__ import row_of
from tests.adversaries.adversary import Adversary, document, squares, tensors
from tests.adversaries.cases import CASES, ON_MESHES
from tests.adversaries.generated import adversary_of, drawn, outcome_of
from tests.adversaries.judge import judge
from tests.adversaries.own_choices import ID_HOWS, Marked, halved
from tests.adversaries.parts import MLP, MlpBlock, Stack, features
from tests.adversaries.random_modules import Outcome, run, specs
from tests.adversaries.said import as_expected, validate
from tests.sampling import few

NAMES = {case.name: case for case in CASES}
OF_MESHES = {case.name for case in ON_MESHES}
DRAWN = random.Random(15)
# So many of each verdict: the others of a model are as good as one.
COUNTS = {"right": 3, "wrong": 3, "refused": 1, "unproven": 1}
WITH_REFERENCE = [
    name
    for verdict, count in COUNTS.items()
    for name in DRAWN.sample(
        sorted(n for n, case in NAMES.items() if case.verdict == verdict and n not in OF_MESHES), count
    )
]
SAMPLED = (
    "tuple/second_split",
    "running_mean/slice",
    "flag/right",
    "chooses_length/slice",
    "chooses_by_expert/slice",
    "marks_different/slice",
    "skips/slice",
    "over_own_loss_open/cp_dp",
    "over_plain_shared/cp4",
)
UNSAMPLED = sorted(NAMES.keys() - {*SAMPLED})


@pytest.mark.parametrize("name", [*SAMPLED, *(pytest.param(n, marks=pytest.mark.slow) for n in UNSAMPLED)])
def test_validate_says_what_it_must(name: str) -> None:
    said = validate(NAMES[name])
    assert as_expected(NAMES[name], said), said


class Bytes(Marked):
    """Its layers get the ids as bytes."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, ids.to(torch.int8))
        return self.norm(x)


@pytest.mark.parametrize(("number", "verdict"), [(100, "wrong"), (200, "right")])
def test_ids_become_no_number_that_their_dtype_has_not(monkeypatch: pytest.MonkeyPatch, number: int, verdict: str):
    monkeypatch.setitem(ID_HOWS, "above", (verdict, lambda x, ids: halved(x, ids.max() > number)))
    case = replace(NAMES["marks_most/slice"], build=lambda: Bytes("above"), verdict=verdict)
    said = validate(case)
    assert as_expected(case, said), said


@pytest.mark.slow
@pytest.mark.parametrize("name", [*WITH_REFERENCE, "over_after_hook_norm/cp"])
def test_both_agree(name: str) -> None:
    row = row_of(NAMES[name])
    assert row.problem in ("", "known"), row


def _problems(examples: int, most_edits: int) -> list[str]:
    seen: list[Outcome] = []
    run(specs(most_edits), examples, None, seen.append)
    assert len(seen) == examples
    return [str(outcome) for outcome in seen if outcome.problem]


@pytest.mark.slow
@pytest.mark.parametrize("most_edits", [0, 2])
def test_random_modules(most_edits: int) -> None:
    assert _problems(6, most_edits) == []


def plain() -> nn.Module:
    return Stack(MlpBlock(), MlpBlock())


HALVES = {**MLP, "layers.*.mlp.down.weight": "rowwise"}
del HALVES["layers.*.mlp.down"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "truth", "worst"),
    [
        (MLP, "right", ""),
        (HALVES, "wrong", ""),
        ({**MLP, "layers.*.mlp.down": "colwise"}, "crashed", "shapes"),
        ({"layers.*.mlp.upp": "colwise"}, "not applied", "SP2"),
    ],
)
def test_the_reference_knows_right_from_wrong(plan: dict, truth: str, worst: str) -> None:
    judgement = judge(Adversary("mine", plain, features, document(plan), "right", ""), anyway=True)
    assert judgement.truth == truth and worst in judgement.worst, judgement


def test_every_tensor_of_a_nest_is_seen() -> None:
    one, two = torch.ones(2), torch.zeros(3)
    assert [place for place, _ in tensors(({"a": one}, [None, two], "text"))] == [".0.a", ".1.1"]
    assert tensors("text") == []


def test_every_element_counts_in_the_loss() -> None:
    value = torch.zeros(2, 3, requires_grad=True)
    squares({"a": value, "b": torch.ones(2)}).backward()
    assert value.grad.flatten().unique().numel() == 6


def test_the_order_of_packed_rows_is_read_off_the_values() -> None:
    before = torch.randn(6, 3)
    order = torch.tensor([0, 3, 1, 4, 2, 5])
    dim, place = reference._order(before, before[order])
    assert dim == 0 and torch.equal(before[order].index_select(dim, place), before)
    assert reference._order(before, before.clone()) is None


@pytest.mark.parametrize(
    ("seen", "expected", "error"),
    [
        (torch.ones(2), torch.ones(2), 0.0),
        (torch.tensor([1.0, 3.0]), torch.tensor([1.0, 2.0]), 0.5),
        (None, torch.ones(2), float("inf")),
        (None, torch.zeros(2), 0.0),
        (torch.ones(2), None, float("inf")),
        (torch.ones(3), torch.ones(2), float("inf")),
        (torch.full((2,), float("nan")), torch.ones(2), float("inf")),
    ],
)
def test_errors_are_of_the_largest_reference_value(seen: Tensor | None, expected: Tensor | None, error: float) -> None:
    assert reference._error(seen, expected, 1e-12) == error


OURS = """Traceback (most recent call last):
  File "{tests}/judge.py", line 1, in errors
    run.step(step)
    ~~~~~~~~^^^^^^
  File "{package}/runtime/apply/guards.py", line 2, in look
    raise RuntimeError(text)
RuntimeError: layers.0 has a hook: apply the plan
again
"""


def test_what_the_package_says_is_told_from_a_crash() -> None:
    package, tests = str(reference.PACKAGE), str(Path(__file__).parent / "adversaries")
    ours = OURS.format(package=package, tests=tests)
    wrapped = f"{ours}\n{reference.CAUSED}:\n\n{ours.replace('guards', 'engine')}"
    assert reference.said_by_us(ours) and reference.said_by_us(wrapped)
    assert not reference.said_by_us(ours.replace("RuntimeError:", "AssertionError:"))
    assert not reference.said_by_us(ours.replace(f"{package}/runtime", "/elsewhere/torch"))
    assert not reference.said_by_us(ours.replace("raise RuntimeError(text)", "nn.functional.linear(x, weight)"))
    assert not reference.said_by_us(wrapped.replace(f"{package}/runtime/apply/guards", "/elsewhere/torch", 1))


@pytest.mark.parametrize("number", range(30))
def test_what_a_seed_draws_can_be_built(number: int) -> None:
    spec = drawn(7, number)
    adversary = adversary_of(spec)
    assert drawn(7, number) == spec and adversary.ranks in (2, 4)
    adversary.loss(adversary.model()(**adversary.batch(0))).backward()


@pytest.mark.slow
@pytest.mark.parametrize("name", few([case.name for case in ON_MESHES], 6))
def test_both_agree_on_every_axis(name: str) -> None:
    row = row_of(NAMES[name])
    assert row.problem == "", row


@pytest.mark.slow
@pytest.mark.parametrize("number", few(range(40), 4))
def test_generated_models(number: int) -> None:
    outcome = outcome_of(11, number)
    assert outcome.problem == "", str(outcome)


def unaveraged(model: nn.Module) -> None:
    """FSDP2 leaves each rank's gradient as it is."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(False)


@pytest.mark.slow
def test_the_reference_averages_over_data_parallel_ranks() -> None:
    plan = {**document(MLP), "data_parallel": {"backend": "fsdp2", "units": ["layers.*"]}}
    right = Adversary("mine", plain, features, plan, "right", "", mesh={"dp_shard": 2})
    alone = replace(right, after=unaveraged)
    assert judge(right, anyway=False).right
    judgement = judge(alone, anyway=False)
    assert judgement.truth == "wrong" and judgement.worst.startswith(("gradient", "parameter")), judgement
