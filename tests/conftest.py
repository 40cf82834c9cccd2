"""Shared by all tests."""

import sys
from pathlib import Path

# `pytest` alone, unlike `python -m pytest`, does not put the project's root on the path.
ROOT = str(Path(__file__).parent.parent)
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)
