"""All adversaries."""

from . import (
    afterwards,
    attention,
    branches,
    buffers,
    calls,
    constants,
    context,
    diffusion,
    dtypes,
    experts,
    functions,
    gates,
    groups,
    hooks,
    inputs,
    live,
    lower,
    meshes,
    mixtures,
    noise,
    outputs,
    own_choices,
    places,
    sequence,
    shared,
    sides,
    stages,
    strange,
    switches,
    training,
)
from .adversary import Adversary

PARTS = (
    outputs,
    own_choices,
    places,
    buffers,
    hooks,
    functions,
    gates,
    groups,
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
    strange,
    switches,
)
WITH_AXES = (meshes, mixtures, calls, stages, afterwards, constants, context, lower, sides)
ON_MESHES: tuple[Adversary, ...] = tuple(case for part in WITH_AXES for case in part.CASES)
CASES: tuple[Adversary, ...] = (*(case for part in PARTS for case in part.CASES), *ON_MESHES)
assert len({case.name for case in CASES}) == len(CASES)
