"""The built-in plan of one model type where its experts are distributed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig

from shardplan import Report, validate
from shardplan.compiler.automatic import auto_plan
from shardplan.compiler.bind import bind
from shardplan.core.diagnostics import PlanError
from shardplan.core.mesh import MeshSizes
from shardplan.core.plan import PlanFile, overlays_of
from shardplan.core.tree import ModuleTree
from shardplan.model import find_any
from tests.model_settings import SETTINGS, find, without_dropout

from .entry import Entry

SIZES = {"tp": 2, "ep": 2}
GEMMA4 = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 64}
# Where the default configuration has no experts, or a number of them that ep does not divide.
EXPERTS: dict[str, dict[str, Any]] = {
    "flex_olmo": {"num_experts": 8},
    "gemma4": {"text_config": GEMMA4},
    "gemma4_text": GEMMA4,
    "hunyuan_v1_moe": {"num_experts": 8, "moe_topk": 2},
}


def config_of(name: str) -> PreTrainedConfig:
    """The default configuration of a type or the nearest with experts, without dropout."""
    if name not in EXPERTS:
        return without_dropout(find(name).config)
    return without_dropout(AutoConfig.for_model(name, **SETTINGS.get(name, {}), **EXPERTS[name]))


def checked(name: str, plan: str | PlanFile, sizes: Mapping[str, int], *, proof: bool) -> Report:
    """What `validate` says of all variants of a plan."""
    return validate(config_of(name), plan, sizes, proof=proof)


def distributes(plan: PlanFile, tree: ModuleTree) -> bool:
    """Whether a plan distributes experts of a model."""
    sizes = MeshSizes(ep=2)
    return bool(bind(plan, tree, sizes, overlays_of(False, sizes))[0].dp_experts)


def with_experts(before: Entry) -> Entry:
    """The entry of a type with what was found out about its plan where the experts are distributed."""
    torch.set_num_threads(1)
    try:
        tree = find_any(config_of(before.name)).tree
    except PlanError:  # why is in the entry
        return replace(before, experts="")
    plan = auto_plan(tree).plan
    if plan is None or not distributes(plan, tree):
        return replace(before, experts="")
    report = checked(before.name, plan.name, SIZES, proof=True)
    wrong = [f"{d.code}: {d.message}" for d in report.diagnostics if d.is_error]
    return replace(before, experts=wrong[0] if wrong else "right" if report.ok else "not proven")
