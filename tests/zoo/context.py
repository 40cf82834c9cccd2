"""The rules for the axis cp that `auto` derives from the built-in plan of one model type, with as many ranks as the mesh has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import yaml
from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import shardplan
from shardplan.authoring.context_section import MIXERS
from shardplan.compiler.layout import model as layouts
from shardplan.core.diagnostics import Diagnostic, PlanError
from shardplan.core.mesh import MeshSizes
from shardplan.proof import prove

from .entry import SIZE_CODES, Entry
from .experts import config_of

# In the order in which they are judged, over all types.
MESHES = ({"cp": 2, "tp": 1}, {"cp": 2, "tp": 2}, {"cp": 4, "tp": 1}, {"cp": 4, "tp": 2})
PLANS = Path(__file__).parents[2] / "plans"
WORDS = {"exchange_heads": "heads", "replicate_seq": "whole"}
OTHERS = "; whole: "  # after "right": mixers that have all heads on this mesh, and shares of them on the first


def name_of(mesh: dict[str, int]) -> str:
    return " ".join(f"{axis} {n}" for axis, n in mesh.items())


def with_context(before: Entry, mesh: dict[str, int]) -> Entry:
    """The entry of a type with what was found out about its plan on a mesh with an axis cp."""
    torch.set_num_threads(1)
    if before.plan is None:
        return replace(before, context={}, mixers={})
    found, ways = judged(before, mesh)
    known = ways if mesh == MESHES[0] else before.mixers
    whole = [part for part, way in ways.items() if way != known.get(part, way)]
    said = f"{found}{OTHERS}{', '.join(whole)}" if found == "right" and whole else found
    return replace(before, context={**before.context, name_of(mesh): said}, mixers=known)


def judged(e: Entry, mesh: dict[str, int]) -> tuple[str, dict[str, str]]:
    """ "right", "size SPnnn", or what is wrong; and what the module of each kind that mixes tokens has."""
    try:
        with every_rank():
            model, sequence_parallel = model_of(e.name), True if mesh["tp"] > 1 else None
            report = shardplan.validate(model, e.plan, mesh, sequence_parallel=sequence_parallel)
    except PlanError as error:
        return _said(error.diagnostics[0]), {}
    file = PLANS / f"{e.plan}.yaml"
    text = file.read_text("utf-8") if report.derived is None else report.derived.text
    ways = mixers(yaml.safe_load(text).get("context_parallel", {}))  # none is derived for sizes that do not fit
    if report.ok:
        return ("right" if report.proven and report.proof is not None else "nothing was compared"), ways
    errors = [d for d in report.diagnostics if d.is_error]
    size = next((d.code for d in errors if d.code in SIZE_CODES), None)
    return (f"size {size}" if size is not None else _said(errors[0])), ways


def model_of(name: str) -> PreTrainedConfig | str:
    """The configuration of a type; the type itself where that is a part's, of which transformers has no automatic class."""
    config = config_of(name)
    return config if config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES else name


@contextmanager
def every_rank() -> Iterator[None]:
    """The proof runs all ranks of the mesh, a thread each, in place of the fewest that tell."""

    def asked(sizes: MeshSizes, *, over_cp: int = 2) -> tuple[MeshSizes, ...]:
        return (sizes,)

    with patch.object(prove, "proof_meshes", asked), patch.object(layouts, "proof_meshes", asked):
        yield


def mixers(section: dict[str, Any]) -> dict[str, str]:
    """What mixes tokens -> "heads" or "whole"."""
    styles = {key: rule if isinstance(rule, str) else rule["style"] for key, rule in section.items()}
    return {key.split("*.", 1)[-1]: WORDS[style] for key, style in styles.items() if style in MIXERS}


def cell(e: Entry) -> str:
    """What the table says of a type."""
    if not e.context:
        return "not run"
    if wrong := [f"{mesh}: {text}" for mesh, text in e.context.items() if not fits(text)]:
        return wrong[0].replace("|", "\\|")[:160]
    ways = ", ".join(f"`{part}` {way}" for part, way in e.mixers.items())
    sizes = [f"{mesh}: {text.removeprefix('right; ')}" for mesh, text in e.context.items() if text != "right"]
    return "; ".join([ways or "what mixes tokens is not among what is split", *sizes])


def proven(e: Entry) -> bool:
    """Whether the type is right on a mesh with cp, and wrong on none."""
    return any(map(is_right, e.context.values())) and all(map(fits, e.context.values()))


def counted(found: Iterable[Entry]) -> Iterator[str]:
    """How many types are right on each mesh."""
    for mesh in map(name_of, MESHES):
        texts = [e.context[mesh] for e in found if mesh in e.context]
        yield f"{mesh} {sum(map(is_right, texts))} of {len(texts)}"


def is_right(text: str) -> bool:
    return text == "right" or text.startswith("right" + OTHERS)


def fits(text: str) -> bool:
    return is_right(text) or text.startswith("size ")


def _said(d: Diagnostic) -> str:
    return " ".join(": ".join((d.code, d.message, *d.notes[:1])).split())
