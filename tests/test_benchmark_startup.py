"""Benchmarks have what they measure: all are imported, and start-up is measured against the parser's parts alone."""

from __future__ import annotations

import os
import pkgutil
import subprocess
import sys
from importlib import import_module
from unittest.mock import patch

import torch

import benchmarks
from benchmarks.startup import PARSER


@patch.dict(os.environ)  # some set variables when they are imported, and the number of threads
def test_every_benchmark_finds_what_it_imports():
    names = [found.name for found in pkgutil.iter_modules(benchmarks.__path__)]
    assert {"proving", "refusing"} <= {*names}
    threads = torch.get_num_threads()
    try:
        for name in names:
            import_module(f"benchmarks.{name}")
    finally:
        torch.set_num_threads(threads)


def test_the_parser_is_imported_without_the_rest_of_the_package():
    script = PARSER + "assert not any(name.startswith(('torch', 'shardplan.compiler')) for name in sys.modules)\n"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
