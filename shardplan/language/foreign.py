"""Plans of other projects, as ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from shardplan.core.sources import SourceFile

from .parents import Origin
from .parsing import Parsed, compile_document
from .python_reader import read_python

HF = "<hf>"


def from_hf_tp_plan(plan: Mapping[str, str], base_prefix: str | None = None) -> Parsed:
    """A tensor-parallel plan of transformers (`model.tp_plan`, or a configuration's `base_model_tp_plan`).

    Its style names are ours or aliases of ours; any other is a finding. It is written for a family of models, so when
    it is bound, a rule that matches nothing is a warning (`PlanFile.lenient_dead_rules`).

    Args:
        plan: names, with `*` for a layer's number -> style names.
        base_prefix: the prefix that the entries of a class-level plan omit ("model"). It is put before names that lack it.

    Raises:
        TypeError: not a mapping from text to text.
    """
    parts = [part for item in plan.items() for part in item] if isinstance(plan, Mapping) else [None]
    if not all(isinstance(part, str) for part in parts):
        raise TypeError("a tp_plan maps names to style names")
    prefix = f"{base_prefix}." if base_prefix else ""
    rules = {name if name.startswith(prefix) else prefix + name: style for name, style in plan.items()}
    document = read_python({"version": "1", "name": "hf", "tensor_parallel": rules}, HF)
    parsed = compile_document(document, SourceFile(HF), (Origin(HF, "hf"),))
    if parsed.plan is None:
        return parsed
    return replace(parsed, plan=replace(parsed.plan, lenient_dead_rules=True))
