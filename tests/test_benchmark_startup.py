"""What start-up is measured against runs: importing the parser's parts alone."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.startup import PARSER


def test_the_parser_is_imported_without_the_rest_of_the_package():
    script = PARSER + "assert not any(name.startswith(('torch', 'shardplan.compiler')) for name in sys.modules)\n"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
