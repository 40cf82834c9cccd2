"""`validate` in a process of its own, forked from one that has imported torch and none of the run-time."""

from __future__ import annotations

import builtins
import importlib
import os
import pickle
import pkgutil
import select
import signal
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, FrameType, ModuleType
from typing import Any, TypeVar

from .plans import Case
from .sites import OTHER, ROOT, Site

T = TypeVar("T")
PRELOADED = ("torch", "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "pydantic", "transformers")
LIMIT = 600  # seconds, also while other programs run


def preload(cases: Sequence[Case]) -> None:
    """Import what all processes need."""
    for name in PRELOADED:
        importlib.import_module(name)
    import torch

    torch.set_num_threads(1)
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    for case in cases:
        if case.own is not None:
            continue
        MODEL_FOR_CAUSAL_LM_MAPPING[type(AutoConfig.for_model(case.model))]
    assert not any(name.startswith("shardplan.runtime") for name in sys.modules)


def reached(case: Case) -> dict[str, frozenset[int]]:
    """Which lines of functions of the run-time run, by file. The plan must pass."""
    return in_process(lambda: _traced(case))


def verdict(site: Site, case: Case) -> tuple[str, str]:
    """What `validate` says of a case where the run-time is changed: ("refused", its codes), ("raised", the error), ("passes", ""),
    ("same", "") where the change was of no group, ("hangs", "")."""
    try:
        return in_process(lambda: _changed(site, case))
    except TimeoutError:
        return "hangs", f"after {LIMIT} s"


def _traced(case: Case) -> dict[str, frozenset[int]]:
    for room in ("runtime", "torchlib"):
        package = importlib.import_module(f"shardplan.{room}")
        for one in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(one.name)
    found: dict[CodeType, set[int]] = defaultdict(set)
    rooms = tuple(str(ROOT / f"shardplan/{room}") + os.sep for room in ("runtime", "torchlib"))

    def line(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            found[frame.f_code].add(frame.f_lineno)
        return line

    def call(frame: FrameType, event: str, _: Any) -> Any:
        return line if frame.f_code.co_filename.startswith(rooms) and frame.f_code.co_name != "<module>" else None

    threading.settrace(call)
    sys.settrace(call)
    try:
        codes = _errors(case)
    finally:
        sys.settrace(None)
    assert not codes, f"{case}: {codes}"
    files: dict[str, set[int]] = defaultdict(set)
    for code, lines in found.items():
        files[os.path.relpath(code.co_filename, ROOT)] |= lines
    return {path: frozenset(lines) for path, lines in files.items()}


def _changed(site: Site, case: Case) -> tuple[str, str]:
    from . import other_groups

    setattr(builtins, OTHER, other_groups.another_group)
    assert site.module not in sys.modules
    sys.meta_path.insert(0, _Finder(site))
    try:
        codes = _errors(case)
    except Exception as error:
        return "raised", f"{type(error).__name__}: {error}"
    if codes:
        return "refused", " ".join(codes)
    if site.operator == "group" and not other_groups.used:
        return "same", ""
    return "passes", ""


def _errors(case: Case) -> list[str]:
    import shardplan

    report = shardplan.validate(*case.question, dict(case.mesh), **case.options)
    return sorted({d.code for d in report.diagnostics if d.is_error})


class _Finder(MetaPathFinder):
    """Finds the one module that is changed."""

    def __init__(self, site: Site):
        self.site = site

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != self.site.module:
            return None
        spec = PathFinder.find_spec(fullname, path)
        assert spec is not None and spec.origin is not None
        spec.loader = _Loader(self.site, fullname, spec.origin)
        return spec


class _Loader(SourceFileLoader):
    def __init__(self, site: Site, fullname: str, path: str):
        super().__init__(fullname, path)
        self.site = site

    def get_code(self, fullname: str) -> CodeType:
        return compile(self.site.tree(), self.path, "exec", dont_inherit=True)


def in_process(function: Callable[[], T], limit: float = LIMIT) -> T:
    """What a function returns in a process of its own, which ends with all that it started.

    Raises:
        TimeoutError: it takes longer than so many seconds.
        RuntimeError: it raises, or the process ends.
    """
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        os.setsid()
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        try:
            result = pickle.dumps((True, function()))
        except BaseException as error:
            result = pickle.dumps((False, f"{type(error).__name__}: {error}"))
        with os.fdopen(write, "wb") as pipe:
            pipe.write(result)
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        if not select.select([pipe], [], [], limit)[0]:
            _end(child)
            raise TimeoutError
        try:
            good, value = pickle.load(pipe)
        except EOFError:
            good, value = False, "the process ended"
    _end(child)
    if not good:
        raise RuntimeError(value)
    return value


def _end(child: int) -> None:
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)


def reaching(site: Site, lines: Mapping[Case, Mapping[str, frozenset[int]]]) -> list[Case]:
    """The cases that run a site."""
    first, last = site.lines
    return [
        case for case, files in lines.items() if any(first <= one <= last for one in files.get(site.path, frozenset()))
    ]
