"""All adversaries."""

from . import (
    attention,
    branches,
    buffers,
    diffusion,
    dtypes,
    experts,
    functions,
    gates,
    hooks,
    inputs,
    live,
    meshes,
    mixtures,
    noise,
    outputs,
    sequence,
    shared,
    training,
)
from .adversary import Adversary

PARTS = (
    outputs,
    buffers,
    hooks,
    functions,
    gates,
    branches,
    dtypes,
    noise,
    attention,
    diffusion,
    shared,
    experts,
    training,
    sequence,
    inputs,
    live,
    meshes,
    mixtures,
)
CASES: tuple[Adversary, ...] = tuple(case for part in PARTS for case in part.CASES)
assert len({case.name for case in CASES}) == len(CASES)
