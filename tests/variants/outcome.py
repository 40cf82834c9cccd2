"""What `auto` does with a configuration, where it may not derive a plan: what the built-in plans are right for."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import AutoConfig, PreTrainedConfig

import shardplan
from shardplan.core.diagnostics import Diagnostic, PlanError
from tests.code_pages import codes_in
from tests.model_settings import without_dropout

Verdict = Literal["proven", "names the switch", "gap", "not built", "wrong"]
# Of a model that transformers cannot build, or whose own code does not run.
NOT_BUILT = set(codes_in("model"))


@dataclass(frozen=True)
class Outcome:
    """What `auto` does with one configuration.

    Args:
        model_type: of transformers.
        name: of the configuration, unique in its type.
        verdict: "proven" (with the proof), "names the switch" (refused, and the finding names a changed field), "gap" (refused
            otherwise), "not built" (transformers cannot build or run the model), "wrong" (accepted without a proof).
        variants: of the plan, what was proven: "tensor_parallel", "sequence_parallel".
        about: the first finding, or transformers' error.
    """

    model_type: str
    name: str
    verdict: Verdict
    variants: tuple[str, ...] = ()
    about: str = ""

    @property
    def key(self) -> str:
        return f"{self.model_type} {self.name}"


def outcome(model_type: str, name: str, settings: Mapping[str, Any], switches: Collection[str], tp: int = 2) -> Outcome:
    """Try a configuration.

    Args:
        settings: of the configuration, all of them.
        switches: the fields that a refusal has to name one of.
        tp: the number of ranks.
    """
    torch.set_num_threads(1)
    try:
        config = configured(model_type, settings)
    except Exception as error:  # of the configuration class
        return Outcome(model_type, name, "not built", about=_short(error))
    words = {*switches} | {alias for alias, field in config.attribute_map.items() if field in switches}
    try:
        report = shardplan.validate(config, "auto", {"tp": tp}, derive=False)
    except PlanError as error:
        return _refused(model_type, name, error.diagnostics, words)
    if not report.ok:
        return _refused(model_type, name, report.diagnostics, words)
    proven = report.proof is not None and report.proof.ok
    return Outcome(model_type, name, "proven" if proven else "wrong", tuple(report.variants))


def configured(model_type: str, settings: Mapping[str, Any]) -> PreTrainedConfig:
    """The configuration of a type with some fields set, without dropout."""
    return without_dropout(AutoConfig.for_model(model_type, **settings))


def _refused(model_type: str, name: str, findings: Iterable[Diagnostic], switches: set[str]) -> Outcome:
    errors = [d for d in findings if d.is_error]
    words = {word for d in errors for word in re.findall(r"\w+", " ".join((d.message, d.help or "", *d.notes)))}
    about = f"{errors[0].code}: {errors[0].message}" + "".join(f"; {note}" for note in errors[0].notes)
    verdict: Verdict = "gap"
    if words & switches:
        verdict = "names the switch"
    elif errors[0].code in NOT_BUILT:
        verdict = "not built"
    return Outcome(model_type, name, verdict, about=about)


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
