"""`refused_arguments`: the calls that a plan is not for."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardplan
from tests.processes import on_ranks, raised
from tests.test_init_idioms import HEADS, WIDTH, hidden


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        b, t, _ = x.shape
        q, k, v = (one(x).view(b, t, self.heads, -1).transpose(1, 2) for one in (self.q, self.k, self.v))
        attention = F.softmax(q @ k.transpose(2, 3), -1)
        return self.o((attention @ v).transpose(1, 2).reshape(b, t, -1)), attention


class Maps(nn.Module):
    """Its result has the attention maps where a switch or the configuration says so."""

    def __init__(self, wrong: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attention() for _ in range(2))
        self.config, self.wrong = SimpleNamespace(maps=False), wrong

    def forward(
        self, x: Tensor, scaled: bool = False, maps: bool | None = None, sums: bool = False
    ) -> Tensor | tuple[Tensor, ...]:
        found = []
        for block in self.blocks:
            y, attention = block(x)
            x = x + y
            found.append(attention)
        x = x * 2 if scaled else x
        x = x + found[0].mean() if self.wrong else x
        if self.config.maps if maps is None else maps:
            return x, *found
        return (x, found[0].sum((1, 2))) if sums else x


RULES = {"blocks.*": {"style": "input_with_grad_allreduce", "shares": "heads"}} | {
    "blocks.*.{q,k,v}": "colwise",
    "blocks.*.o": "rowwise",
}


def plan(*refused: str, **more: Any) -> dict[str, Any]:
    return {"version": "1", "name": "maps", "tensor_parallel": RULES, "refused_arguments": list(refused), **more}


def checked(document: Mapping[str, Any], *, wrong: bool = False) -> shardplan.Report:
    return shardplan.validate(shardplan.Model(Maps(wrong), inputs=hidden), document, {"tp": 2})


def test_init_refuses_what_is_wrong_alone_and_says_so() -> None:
    made = shardplan.init_plan(shardplan.Model(Maps(), inputs=hidden))
    assert made.document["tensor_parallel"]["blocks.*.o"] == "rowwise"
    assert made.document["refused_arguments"] == ["maps", "sums"]
    assert shardplan.load_plan(made.document).file.refused_arguments == ("maps", "sums")
    (said,) = made.diagnostics
    assert said.code == "SP535" and said.message.startswith("calls with maps or sums are refused")
    assert "\nrefused_arguments: [maps, sums]\n" in made.text and checked(made.document).proven


def test_init_refuses_no_calls_for_a_plan_that_is_wrong_without_them() -> None:
    made = shardplan.init_plan(shardplan.Model(Maps(wrong=True), inputs=hidden))
    assert not made.document.get("refused_arguments")
    assert made.document["tensor_parallel"]["blocks.*.o"] == "rowwise_split_input"  # what is between them is whole


def test_without_the_word_the_calls_are_a_finding_with_it() -> None:
    (found,) = checked(plan()).errors
    assert found.code == "SP420" and "only where the model is called with maps=True or sums=True" in found.notes
    assert "`refused_arguments: [maps, sums]`" in (found.help or "")
    (found,) = checked(plan("maps")).errors
    assert "only where the model is called with sums=True" in found.notes
    report = checked(plan("maps", "sums"))
    assert report.proven and report.proof is not None
    (calls,) = report.proof.calls
    assert calls.left_out == {f"{name}=True": "raises: the plan refuses it" for name in ("maps", "sums")}
    assert "scaled=True" in calls.switched


def test_it_mends_no_plain_call() -> None:
    found = checked(plan("maps", "sums"), wrong=True)
    assert found.errors and not any("refused_arguments" in (one.help or "") for one in found.errors)


class Masked(Maps):
    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = super().forward(x)
        return x if attention_mask is None else x * (attention_mask * 2 - 1)[..., None]


def test_a_change_that_gives_a_refused_argument_is_left_out() -> None:
    """Of padding the name is not that of the argument."""

    def inputs(seed: int) -> dict[str, Tensor]:
        return {"input_ids": torch.randint(1, 32, (2, 8), generator=torch.Generator().manual_seed(seed))}

    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.model = nn.Embedding(32, WIDTH), Masked()

        def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            return self.model(self.embedding(input_ids), attention_mask)

    rules = {f"model.{pattern}": rule for pattern, rule in RULES.items()}
    model = shardplan.Model(Language(), inputs=inputs)
    document = {"version": "1", "name": "language", "tensor_parallel": rules}
    plain = shardplan.validate(model, document, {"tp": 2})
    refused = shardplan.validate(model, document | {"refused_arguments": ["attention_mask"]}, {"tp": 2})
    assert plain.proven and refused.proven and plain.proof is not None and refused.proof is not None
    padded = {name for name in plain.proof.calls[0].switched if "padding" in name}
    assert padded and padded <= refused.proof.calls[0].left_out.keys()


def test_an_argument_that_the_forward_does_not_take() -> None:
    (found,) = checked(plan("map", "sums")).errors
    assert (found.code, found.message) == ("SP201", "the forward of Maps has no argument map")
    assert found.help == "write `maps`" and found.primary is not None
    assert found.primary.location.path == ("refused_arguments", 0)


def test_a_child_inherits_them(tmp_path) -> None:
    import yaml

    (tmp_path / "base.yaml").write_text(yaml.safe_dump(plan("maps")))
    child = {"version": "1", "name": "child", "extends": "base.yaml", "refused_arguments": ["sums"]}
    (tmp_path / "child.yaml").write_text(yaml.safe_dump(child))
    model = shardplan.Model(Maps(), inputs=hidden)
    assert shardplan.validate(model, str(tmp_path / "child.yaml"), {"tp": 2}).proven
    changed = shardplan.diff_plans(str(tmp_path / "base.yaml"), str(tmp_path / "child.yaml"))
    assert [(one.name, one.old, one.new) for one in changed.fields] == [("refused_arguments", "[maps]", "[maps, sums]")]


CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "by its name": ((), {"maps": True}),
    "by its place": ((False, True), {}),
    "a number": ((), {"sums": 1}),
}


def _calls(compiled: bool) -> list[str]:
    model = Maps()
    shardplan.apply_plan(shardplan.Model(model, inputs=hidden), shardplan.build_mesh(tp=2), plan("maps", "sums"))
    called = torch.compile(model, backend="eager") if compiled else model
    x = hidden(0)["x"]
    called(x, True, None, sums=False).sum().backward()
    said = [raised(called, x, *args, kind=ValueError, **given) for args, given in CALLS.values()]
    model.config.maps = True
    return [*said, raised(called, x, kind=ValueError)]


@pytest.mark.parametrize("compiled", [False, True])
def test_a_call_raises_before_anything_is_computed(compiled: bool) -> None:
    for said in on_ranks(2, partial(_calls, compiled)):
        assert [one.partition(":")[0] for one in said] == ["maps", "maps", "sums", "maps"]
        assert all("refused_arguments" in one for one in said)
