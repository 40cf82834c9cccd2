"""Copies of models (shardplan/model/rebinding.py): as `copy.deepcopy` makes them, whatever modules say of their own copies."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from shardplan.model.rebinding import copied


class Counted(nn.Linear):
    """Says how it is copied."""

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        made = Counted(self.in_features, self.out_features)
        made.load_state_dict(self.state_dict())
        made.copies = getattr(self, "copies", 0) + 1
        return made


class Kept(nn.Linear):
    """Says what of it is kept."""

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "seen"}


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.counted, self.kept = nn.Linear(4, 4), Counted(4, 4), Kept(4, 4)
        self.kept.seen = [1]
        self.again = nn.ModuleList([self.one, nn.BatchNorm1d(4)])
        self.lstm = nn.LSTM(4, 4)
        self.above = [self]  # no child, which would be a cycle
        self.numbers, self.names = {"a": [1, 2]}, ("x", {3})
        self.register_buffer("none", None)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.one.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.kept(self.counted(self.again[1](self.again[0](x))))
        return self.tied(self.lstm(inner)[0])


def shown(value: Any, model: nn.Module) -> Any:
    """What an attribute holds, without identities."""
    if isinstance(value, nn.Module):
        return next((name for name, module in model.named_modules() if module is value), type(value))
    if isinstance(value, torch.Tensor):
        return type(value), value.requires_grad, value.tolist()
    if isinstance(value, dict):
        return type(value), [(key, shown(item, model)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [shown(item, model) for item in value]
    return value


def test_a_copy_is_what_deepcopy_makes():
    model = Whole()
    copy_of, expected = copied(model), copy.deepcopy(model)
    assert [name for name, _ in copy_of.named_modules()] == [name for name, _ in expected.named_modules()]
    for (name, made), right in zip(copy_of.named_modules(), expected.modules(), strict=True):
        one, other = vars(made), vars(right)
        for key in one.keys() | other.keys():
            if key != "_flat_weight_refs":
                assert shown(one[key], copy_of) == shown(other[key], expected), (name, key)
    assert copy_of.counted.copies == 1
    assert copy_of.tied.weight is copy_of.one.weight
    x = torch.randn(3, 4)
    assert torch.equal(copy_of(x), model(x))


def test_nothing_is_shared_with_the_original():
    model = Whole()
    copy_of = copied(model)
    mine = {
        id(value) for module in model.modules() for value in vars(module).values() if isinstance(value, (dict, list))
    }
    theirs = {id(value) for module in copy_of.modules() for value in vars(module).values()}
    assert not mine & theirs
    memory = {p.data_ptr() for p in (*model.parameters(), *model.buffers())}
    assert not memory & {p.data_ptr() for p in (*copy_of.parameters(), *copy_of.buffers())}


def test_what_is_below_a_module_that_is_replaced_is_not_copied(monkeypatch):
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(3, 3)))
    made = []
    monkeypatch.setattr(
        nn.Parameter, "__deepcopy__", lambda p, memo: memo.setdefault(id(p), made.append(p) or p.clone())
    )
    stub = nn.Identity()
    assert copied(model, {id(model[1]): stub})[1] is stub
    assert len(made) == 2


@pytest.mark.parametrize("attribute", ["lists", "hooks"])
def test_a_module_that_only_an_attribute_has_is_copied_once(attribute):
    model, inner = nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2)
    model.held = [inner, inner]
    if attribute == "hooks":
        model.register_forward_hook(lambda module, args, output: output)
    copy_of = copied(model)
    assert copy_of.held[0] is copy_of.held[1] is not inner


def test_a_set_of_names_keeps_its_order() -> None:
    """Gemma 4 calls its rotary embedding for each name of a set. Strings have another hash in each process: two whose order turns are looked for."""
    pairs = ({f"a{i}", f"b{j}"} for i in range(20) for j in range(20))
    model = nn.Linear(1, 1)
    model.names = model.same = next(pair for pair in pairs if [*copy.deepcopy(pair)] != [*pair])
    made = copied(model)
    assert [*made.names] == [*model.names]
    assert made.names is made.same is not model.names


def test_functions_of_a_copy_keep_what_they_count_apart() -> None:
    """In a list or a dict that they share, or in a variable; the original's functions, and who else has the list, see nothing of it."""
    model, seen, state, calls = nn.Linear(4, 4), [], {"calls": 0, "inner": []}, 0

    def before(module: nn.Module, args: tuple) -> None:
        nonlocal calls
        calls += 1
        state["calls"] += 1

    def after(module: nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
        state["inner"].append(calls)
        seen.append(state["calls"])
        return output * (10 * calls + state["calls"] + len(state["inner"]))

    model.register_forward_pre_hook(before)
    model.register_forward_hook(after)
    x, plain = torch.randn(2, 4), copy.deepcopy(model)
    plain._forward_hooks.clear()
    plain._forward_pre_hooks.clear()
    for one in (copied(model), copied(model), model):
        assert all(torch.equal(one(x), plain(x) * 12 * times) for times in (1, 2))
    assert seen == [1, 2] and state == {"calls": 2, "inner": [1, 2]} and calls == 2
