"""What a test must leave as it found it: tests that run after it in the same process, and processes that start later, would read it."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest

# pytest's own; what torch sets when the compiler of graphs is imported, and what judges and benchmarks set when they are.
KNOWN = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "TRANSFORMERS_VERBOSITY"}


@pytest.fixture(autouse=True, scope="module")
def nothing_is_left_of_a_file(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[set[str]]:
    """Around the fixtures of a file. Gives the set of what was told of its tests, which is not told again."""
    told = set[str]()
    items = (item for item in request.session.items if item.path == request.path)
    with _compared(str(tmp_path_factory.getbasetemp()), items, told):
        yield told


@pytest.fixture(autouse=True)
def nothing_is_left(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, nothing_is_left_of_a_file: set[str]
) -> Iterator[None]:
    """Around a test and its own fixtures: autouse fixtures begin first and end last."""
    with _compared(str(tmp_path_factory.getbasetemp()), [request.node], nothing_is_left_of_a_file):
        yield


@contextmanager
def _compared(folder: str, items: Iterable[pytest.Item], told: set[str]) -> Iterator[None]:
    """Fail where the state differs afterwards; warn where all the tests are slow. What commands and imports leave by design of a
    temporary folder is taken away.

    Args:
        folder: of all temporary files.
        told: names of what is not told again.
    """
    before, modules = state(), _modules_of(folder)
    yield
    for name in _modules_of(folder) - modules:
        del sys.modules[name]
    sys.path[:] = [path for path in sys.path if path in before["sys.path"] or not path.startswith(folder)]
    left = {name: text for name, text in differences(before, state()).items() if name not in told}
    told |= {*left}
    if left:
        text = "what a test found is not as it was: " + "; ".join(left.values())
        if all(any(map(item.get_closest_marker, ("slow", "exhaustive"))) for item in items):
            warnings.warn(text, stacklevel=1)
        else:
            pytest.fail(text, pytrace=False)


def state() -> dict[str, Any]:
    """What is compared, by name. What torch has is left out until it is imported, as `make quick` runs without it."""
    return {
        "sys.path": [*sys.path],
        "sys.argv": [*sys.argv],
        "the environment": {name: value for name, value in os.environ.items() if name not in KNOWN},
        "the working folder": os.getcwd(),
        "the handler of SIGINT": signal.getsignal(signal.SIGINT),
        "the handler of SIGTERM": signal.getsignal(signal.SIGTERM),
        **(_state_of_torch(torch) if (torch := sys.modules.get("torch")) is not None else {}),
    }


def _state_of_torch(torch: ModuleType) -> dict[str, Any]:
    return {
        "the default dtype": torch.get_default_dtype(),
        "the default device": torch.get_default_device(),
        "whether gradients are recorded": torch.is_grad_enabled(),
        "whether inference mode is on": torch.is_inference_mode_enabled(),
        "the number of threads": torch.get_num_threads(),
        "whether deterministic algorithms are asked for": torch.are_deterministic_algorithms_enabled(),
        "the precision of matrix products": torch.get_float32_matmul_precision(),
        "whether autocast is on": torch.is_autocast_enabled("cpu"),
        "whether autograd looks for anomalies": torch.is_anomaly_enabled(),
        "the default process group": torch.distributed.group.WORLD,
    }


def differences(before: dict[str, Any], after: dict[str, Any]) -> dict[str, str]:
    """Of each that is in both and differs, what it was and is."""
    found = {}
    for name, was in before.items():
        now = after[name]
        if was is now or was == now:
            continue
        if isinstance(was, dict):
            names = sorted(key for key in {**was, **now} if was.get(key) != now.get(key))
            was, now = ({key: values.get(key) for key in names} for values in (was, now))
        found[name] = f"{name} was {was!r} and is {now!r}"
    return found


_FOUND: set[str] = set()
_COUNT = 0


def _modules_of(folder: str) -> set[str]:
    """The imported modules from files of a folder. What was imported before is not looked at again: there are thousands."""
    global _COUNT
    if len(sys.modules) != _COUNT:
        names = [*sys.modules]
        new = (
            name for name in names[_COUNT:] if (getattr(sys.modules[name], "__file__", None) or "").startswith(folder)
        )
        _FOUND.update(new)
        _COUNT = len(names)
    return {name for name in _FOUND if name in sys.modules}
