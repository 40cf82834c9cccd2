"""Shared by all tests."""

import sys
from pathlib import Path

import pytest

# `pytest` alone, unlike `python -m pytest`, does not put the project's root on the path.
ROOT = str(Path(__file__).parent.parent)
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

# Files whose tests start several processes. Two of them at a time would fight for the cores, and every step that waits
# for the slowest rank would take many times as long: they run one after the other, in one worker.
SEVERAL_PROCESSES = (
    "test_adversaries",
    "test_checkpoints",
    "test_demo",
    "test_example",
    "test_materialize",
    "test_processes_",
)


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.name.startswith(SEVERAL_PROCESSES) or "on_ranks" in item.name:
            item.add_marker(pytest.mark.xdist_group("several processes"))
