"""transformers' own tensor-parallel plans, judged by both: `python -m tests.soundness.hf [model type ...]`."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace

warnings.filterwarnings("ignore")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: E402

from shardplan.core.diagnostics import PlanError  # noqa: E402
from shardplan.models import hf_tp_plan  # noqa: E402
from shardplan.parse import parse_plan  # noqa: E402

from .judge import Verdict, judge, subject  # noqa: E402


@dataclass(frozen=True)
class Own:
    """What was said of a model type's own plan.

    Args:
        name: the model type.
        verdict: of both judges; None where there is no small copy, or no plan.
        why: what kept it from being judged.
    """

    name: str
    verdict: Verdict | None
    why: str = ""

    @property
    def text(self) -> str:
        if self.verdict is None:
            return f"| {self.name} | - | - | {self.why} |"
        v = self.verdict
        truth = "right" if v.right else f"silently wrong: {v.worst}" if v.silent else f"wrong: {v.worst}"
        said = v.structure or v.layout.diagnostics
        refused = f"{said[0].code}: {said[0].message}" if said else "valid"
        return f"| {self.name} | {truth} | {refused} | {(said[0].help or '') if said else ''} |"


def own_plans(names: list[str], tp: int, help: bool) -> Iterator[Own]:
    """Judge the plan of each model type that has one."""
    for name in names:
        try:
            model = subject(name, tp)
            styles, prefix = hf_tp_plan(model.bench.model)
        except PlanError as error:
            yield Own(name, None, error.diagnostics[0].message)
            continue
        except Exception as error:
            yield Own(name, None, f"{type(error).__name__}: {str(error)[:100]}")
            continue
        rules = {f"{prefix}.{key}" if prefix else key: style for key, style in styles.items()}
        parsed = parse_plan({"version": "1", "name": "hf", "tensor_parallel": rules}, name="<hf>")
        if parsed.plan is None or any(d.is_error for d in parsed.diagnostics):
            yield Own(name, None, parsed.diagnostics[0].message)
            continue
        plan = replace(parsed.plan, lenient_dead_rules=True)
        yield Own(name, judge(model, plan, sequence_parallel=False, help=help))


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if not word.startswith("-")]
    for own in own_plans(words or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), 2, "--help-lines" in sys.argv):
        if own.why.startswith("hf"):
            continue
        flag = ""
        if own.verdict is not None and own.verdict.right != own.verdict.valid:
            flag = " DISAGREE"
        print(own.text + flag, flush=True)
