"""Tests leave things as they found them (tests/left_behind.py)."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.left_behind import differences, state

FILE = """
import os
import signal
import sys

import pytest


@pytest.fixture(scope="module")
def left_by_the_file():
    yield
    os.environ["SOME_WORD"] = "3"


@pytest.fixture
def own():
    os.environ["OTHER_WORD"] = "1"
    yield
    del os.environ["OTHER_WORD"]


def test_nothing_is_left(own, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SOME_WORD", "2")
    sys.path.append("somewhere")
    sys.path.remove("somewhere")


def test_the_path():
    sys.path.append("somewhere")


def test_arguments():
    sys.argv = ["a", "b"]


def test_the_working_folder(tmp_path):
    os.chdir(tmp_path)


def test_the_handler():
    signal.signal(signal.SIGINT, lambda *_: None)  # a process in the background begins with SIG_IGN


def test_a_module(tmp_path):
    (tmp_path / "somewhat.py").write_text("")
    sys.path.insert(0, str(tmp_path))
    import somewhat


def test_it_is_gone():
    with pytest.raises(ModuleNotFoundError):
        import somewhat


@pytest.mark.slow
def test_that_is_slow():
    signal.signal(signal.SIGTERM, lambda *_: None)


def test_the_last(left_by_the_file):
    pass
"""
LEFT = {
    "the_path": "sys.path",
    "arguments": "sys.argv",
    "the_working_folder": "the working folder",
    "the_handler": "the handler of SIGINT",
    "the_last": "the environment",
}


def test_what_a_test_leaves_is_an_error_of_that_test(tmp_path):
    (tmp_path / "test_some.py").write_text(FILE)
    options = [
        "-p",
        "tests.left_behind",
        "-p",
        "no:cacheprovider",
        "-c",
        "/dev/null",
        "-W",
        "ignore::pytest.PytestUnknownMarkWarning",
        "--rootdir",
        str(tmp_path),
    ]
    command = [sys.executable, "-m", "pytest", *options, str(tmp_path)]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    told = re.findall(r"_ ERROR at teardown of test_(\w+) _+\nwhat a test found is not as it was: (.*?) was ", made)
    assert dict(told) == LEFT, made
    assert "9 passed, 1 warning, 5 errors" in made


def group(begins):
    import torch.distributed as dist

    if begins:
        dist.init_process_group("fake", rank=0, world_size=2)
    else:
        dist.destroy_process_group()


# What is left; who leaves it, with a torch and a value; the value that is not the default, and the default.
OF_TORCH = [
    ("the default dtype", lambda torch, value: torch.set_default_dtype(getattr(torch, value)), "float64", "float32"),
    ("the default device", lambda torch, value: torch.set_default_device(value), "meta", None),
    ("whether gradients are recorded", lambda torch, value: torch.set_grad_enabled(value), False, True),
    ("the number of threads", lambda torch, value: torch.set_num_threads(value), 3, None),
    (
        "whether deterministic algorithms are asked for",
        lambda torch, value: torch.use_deterministic_algorithms(value),
        True,
        False,
    ),
    (
        "the precision of matrix products",
        lambda torch, value: torch.set_float32_matmul_precision(value),
        "high",
        "highest",
    ),
    (
        "whether autograd looks for anomalies",
        lambda torch, value: torch.autograd.set_detect_anomaly(value),
        True,
        False,
    ),
    ("the default process group", lambda _, value: group(value), True, False),
]


@pytest.mark.torch
@pytest.mark.parametrize(("name", "leave", "value", "own"), OF_TORCH, ids=[row[0] for row in OF_TORCH])
def test_it_is_told_of_torch(name, leave, value, own):
    import torch

    own = torch.get_num_threads() if name == "the number of threads" else own
    before = state()
    leave(torch, value)
    try:
        assert [*differences(before, state())] == [name]
    finally:
        leave(torch, own)
    assert not differences(before, state())
