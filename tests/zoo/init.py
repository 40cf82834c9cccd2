"""What `init` finds for one model type, without looking at the built-in plans, judged as these are."""

from __future__ import annotations

import torch

from shardplan.core.diagnostics import PlanError
from shardplan.parse import parse_plan
from shardplan.synth.derive import derive
from shardplan.synth.new import written
from tests.model_settings import find
from tests.soundness.judge import subject

from .entry import SIZES, judged


def init_verdicts(name: str) -> dict[str, str]:
    """As `Entry.verdicts`, of the plan that `init` writes at tp 2; "none" where it says that it cannot."""
    torch.set_num_threads(1)
    try:
        found = find(name)
        derived = derive(found, sequence_parallel=True)
    except PlanError as error:
        return {"tp2": f"none: {error.diagnostics[0].message}"}
    except Exception as error:  # of the model's own code
        return {"tp2": f"none: {type(error).__name__}: {error}"}
    if not derived.draft.tensor_parallel:
        return {"tp2": "none: nothing can be split"}
    plan = parse_plan(dict(written(found, derived).document), name="init").plan
    small = {tp: subject(name, tp) for tp in SIZES}
    return {f"{word}{tp}": said for (word, tp), (said, _) in judged(found.tree, plan, small).items()}
