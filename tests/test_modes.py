"""How reduced models are run, and that the caller's settings are put back."""

from __future__ import annotations

import pytest
import torch

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
