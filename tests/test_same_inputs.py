"""Comparing what the ranks of a tp group are fed: which forwards, what of the inputs, and what stays out of graphs. Ranks that
differ are in tests/test_processes_calls.py."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardplan.runtime.apply.same_inputs import SLOTS, comparing, content, is_compared
from shardplan.torchlib.private import private
from tests.proofs import fake_mesh


def test_which_forwards_are_compared():
    compared = [count for count in range(1, 4_001) if is_compared(count)]
    assert compared == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1_000, 2_000, 3_000, 4_000]


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float32, torch.complex64, torch.float8_e4m3fn]
)
def test_every_bit_and_its_place_counts(dtype):
    x = torch.arange(60).reshape(3, 20).remainder(7).to(dtype)
    assert content(x).shape == () and content(x).dtype == torch.int64
    assert content(x) == content(x.clone())
    size = x.numel() * x.element_size()
    seen = {int(content(x))}
    for bit in range(1 if dtype == torch.bool else 8):
        for place in range(size):
            changed = x.clone()
            changed.view(torch.uint8).view(-1)[place] ^= 1 << bit
            seen.add(int(content(changed)))
    assert len(seen) == 1 + size * (1 if dtype == torch.bool else 8)
    exchanged = x[[2, 1, 0]]
    assert content(exchanged) != content(x)


def test_views_count_as_what_they_show():
    x = torch.arange(101, dtype=torch.int16)
    for view in (x[1:], x[::3], x[3], x[:0], x[:100].view(4, 25).T):
        assert content(view) == content(view.clone(memory_format=torch.contiguous_format))
    z = torch.tensor([1 + 2j, 3 - 1j])
    assert content(z.conj()) == content(z.conj().resolve_conj()) != content(z)


@pytest.fixture
def sent(monkeypatch):
    """What is sent to the other ranks, by forward."""
    found: list[list[int]] = []
    gather = dist.all_gather

    def recorded(rows, mine, **options):
        assert options["async_op"]
        found.append(mine.tolist())
        return gather(rows, mine, **options)

    monkeypatch.setattr(dist, "all_gather", recorded)
    return found


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x, y=None, flag=True):
        return x * self.weight if y is None else x * y


def watched() -> nn.Module:
    with fake_mesh(4) as mesh:
        model = Pair()
        model.register_forward_pre_hook(comparing(mesh), with_kwargs=True)
        yield model


@pytest.fixture
def model():
    yield from watched()


def test_a_table_of_one_size_whatever_the_arguments(model, sent):
    x = torch.ones(2, 4)
    model(x)
    model(x, y=x)
    model(x)
    model(x, x.to_sparse().to_dense(), flag=False)
    assert [len(one) for one in sent] == [SLOTS] * 3
    assert [sum(number != 0 for number in one) for one in sent] == [2, 3, 3]


def test_only_training_is_counted(model, sent):
    x = torch.ones(4)
    with torch.no_grad():
        model(x)
    model.eval()(x)
    assert not sent
    model.train()(x)
    assert len(sent) == 1


def test_tensors_whose_contents_cannot_be_seen(model, sent):
    model(torch.ones(2, 4).to_sparse())
    model(torch.nested.nested_tensor([torch.ones(2, 4)], layout=torch.jagged))
    assert [sum(number != 0 for number in one) for one in sent] == [1, 1]


def test_nothing_is_compared_in_graphs(model, sent):
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    compiled(torch.ones(4)).sum().backward()
    with private("FakeTensorMode")(allow_non_fake_inputs=True) as mode:
        model(mode.from_tensor(torch.ones(4)))
    assert not sent
    model(torch.ones(4))
    assert len(sent) == 1
