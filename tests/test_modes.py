"""How reduced models are run, and that the caller's settings are put back."""

from __future__ import annotations

import pytest
import torch
from own_models import Stack, tokens
from torch import Tensor, nn

from shardplan import Model, validate
from shardplan.torchlib.modes import reduced_runs


@pytest.mark.parametrize("fails", [False, True], ids=["ends", "raises"])
def test_one_thread_and_no_default_device_and_both_put_back(fails):
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with torch.device("meta"):
            try:
                with reduced_runs():
                    inside = torch.get_num_threads(), torch.empty(1).device.type
                    if fails:
                        raise KeyError
            except KeyError:
                pass
            assert inside == (1, "cpu")
            assert (torch.get_num_threads(), torch.empty(1).device.type) == (2, "meta")
    finally:
        torch.set_num_threads(threads)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(16, 32), nn.Linear(32, 16), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(self.up(x).relu()))


@pytest.mark.parametrize("model", ["gpt2", "own"])
def test_the_generators_of_other_devices_are_left_alone(model, monkeypatch):
    """`torch.manual_seed` seeds those of every device, and none of these is put back: the next dropout on a GPU would be the same again."""

    def seeded(seed):
        raise AssertionError("a generator of a user's was seeded")

    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded)
    named = (
        model if model == "gpt2" else Model(Stack(Mlp), inputs=tokens)
    )  # dropout; a module that is copied, not built again
    assert validate(named, "auto", {"tp": 2}).proven
