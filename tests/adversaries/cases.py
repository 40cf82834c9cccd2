"""All adversaries."""

from . import buffers, functions, hooks, outputs
from .adversary import Adversary

PARTS = (outputs, buffers, hooks, functions)
CASES: tuple[Adversary, ...] = tuple(case for part in PARTS for case in part.CASES)
assert len({case.name for case in CASES}) == len(CASES)
