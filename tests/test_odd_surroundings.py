"""Errors are told with the same words where Python leaves out assertions, without a home, without a locale, and where no cache can be written."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.case_tree import ROOT, cases, run_case

QUICK = ("SP1", "SP2", "SP3")  # codes of the language, of patterns and of structure: a second each


def differing(count: int, seed: int) -> list[str]:
    """The drawn cases whose output or exit code is another here. No assertion is needed."""
    every = [case for case in cases() if case.code and case.code.startswith(QUICK)]
    return [
        case.name
        for case in random.Random(seed).sample(every, min(count, len(every)))
        if run_case(case) != (case.exit_code, case.expected)
    ]


def told(count: int, *flags: str, **environment: str) -> str:
    kept = {key: value for key, value in os.environ.items() if key in ("PATH", "LD_LIBRARY_PATH")}
    code = f"from tests.test_odd_surroundings import differing; print(differing({count}, 0), __debug__)"
    ended = subprocess.run(
        [sys.executable, *flags, "-c", code], cwd=ROOT, env={**kept, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", **environment},
        capture_output=True, text=True, timeout=1500,
    )  # fmt: skip
    assert not ended.returncode, ended.stderr
    return ended.stdout.splitlines()[-1]


@pytest.mark.parametrize("count", [8, pytest.param(1000, marks=pytest.mark.exhaustive)])
@pytest.mark.slow
def test_without_assertions_home_locale_and_cache(count: int, tmp_path: Path):
    closed = tmp_path / "cache"
    closed.write_text("no folder: nothing can be kept, whoever asks")
    assert told(count, "-O", LC_ALL="C", LANG="C", XDG_CACHE_HOME=str(closed)) == "[] False"
