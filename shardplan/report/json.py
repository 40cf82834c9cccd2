"""Reports as JSON: the fields of their dataclasses, under the names that they have in Python."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from itertools import pairwise
from types import NoneType
from typing import Any, Final, Literal

from shardplan.core.coverage import Coverage, Listing
from shardplan.core.diagnostics import Diagnostic, Location
from shardplan.core.estimates import Bound, Estimate, Memory
from shardplan.core.fits import Fit, Fitted
from shardplan.core.layout import Layout
from shardplan.core.mesh import MeshSizes
from shardplan.core.plan_changes import PlanDiff
from shardplan.core.plan_lock import LockCheck
from shardplan.core.report import NumericProof, PipelineProof, Report, VariantProof
from shardplan.core.sources import SourceMap

from .fit_script import launch_lines
from .fit_text import why
from .shown_program import ShownProgram
from .width import is_hidden

VERSION: Final = "2"  # raised when a field is removed or changes its meaning; new fields do not raise it


def to_json(report: object, *, proof: bool = False) -> dict[str, Any]:
    """A report as JSON data, in the form of schemas/report.schema.json: its `kind`, the `version` of the schema, and its fields.

    Args:
        proof: include everything that the proof of a plan compared.

    Raises:
        TypeError: an object that no command reports.
    """
    form = form_of(type(report))
    if not form.kind:
        raise TypeError(f"{type(report).__name__} is no report")
    data = {"kind": form.kind, "version": VERSION, **_data(report, SourceMap())}
    return data | {"proof": None} if isinstance(report, Report) and not proof else data


def json_text(data: Any) -> str:
    """JSON data as indented text; characters that a terminal would obey are escaped. Raises ValueError for a number that JSON
    does not have."""
    text = json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False)
    return text if text.isascii() and "\x7f" not in text else "".join(map(_escaped, text))


def _escaped(char: str) -> str:
    if char == "\n" or not is_hidden(char):
        return char
    return "\\u007f" if char == "\x7f" else json.dumps(char)[1:-1]


def _data(value: Any, sources: SourceMap) -> Any:
    """A value as JSON data.

    Args:
        sources: the sources of its report, which give the lines of places.
    """
    match value:
        case Enum():
            return value.value
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {str(key): _data(one, sources) for key, one in value.items()}
        case tuple() | list():
            return [_data(one, sources) for one in value]
        case Location():
            value = sources.placed(value)
    if isinstance(value, AS_TEXT):
        return str(value)
    if not is_dataclass(value):
        assert isinstance(value, PLAIN), value
        return value
    form, sources = form_of(type(value)), getattr(value, "sources", sources)
    computed = {name: of(value) for name, of in form.computed.items()}
    stored = {f.name: getattr(value, f.name) for f in fields(value) if f.name not in form.without}
    return {name: _data(one, sources) for name, one in (computed | stored).items()}


# The differences between a report's JSON form and the fields of its dataclasses.
PLAIN = (str, int, bool, NoneType)
AS_TEXT = (Layout,)  # written as its `str`: V(0)


@dataclass(frozen=True, slots=True)
class Form:
    """How the JSON form of a dataclass differs from its fields.

    Args:
        kind: the value of `kind` in a report; empty where no command prints one.
        more: properties of the class, and functions of its objects, that JSON has too, under their names.
        without: fields that JSON does not have.
    """

    kind: str = ""
    more: tuple[Callable[[Any], Any] | property, ...] = ()
    without: tuple[str, ...] = ()

    @property
    def computed(self) -> dict[str, Callable[[Any], Any]]:
        """Name -> the function that computes its value."""
        getters = [one.fget if isinstance(one, property) else one for one in self.more]
        return {one.__name__: one for one in getters if one is not None}


def count(report: Report) -> Mapping[Literal["errors", "warnings"], int]:
    """The number of errors and of warnings."""
    return {"errors": len(report.errors), "warnings": len(report.warnings)}


def unreached(report: Report) -> tuple[str, ...]:
    """Parameters and modules that no run of the proof reached, and the plan does not touch."""
    proofs = report.proof.variants if report.proof is not None else ()
    return tuple(dict.fromkeys(name for proof in proofs for name in proof.unreached))


def reasons(fit: Fit) -> tuple[str, ...]:
    """Why each row but the last is before the next one."""
    return tuple(why(one, other) for one, other in pairwise(fit.rows))


def days(fit: Fit) -> tuple[float | None, ...]:
    """Of each row, the days of the whole training at the bound; null where its tokens were not given."""
    return tuple(map(fit.days, fit.rows))


def launch(fit: Fit) -> Mapping[str, str]:
    """Launcher -> the command for the first row, with a script train.py."""
    return dict(launch_lines(fit.rows[0], "train.py"))


FORMS: dict[type, Form] = {
    Report: Form("findings", (Report.ok, Report.proven, count, unreached), without=("sources",)),
    Diagnostic: Form(without=("edits", "proposals")),
    MeshSizes: Form(without=("shards",)),
    NumericProof: Form(more=(NumericProof.ok,)),
    VariantProof: Form(more=(VariantProof.ok,)),
    PipelineProof: Form(more=(PipelineProof.ok,)),
    Estimate: Form("estimate", (Estimate.fits, Estimate.tokens, Estimate.tokens_per_second)),
    Memory: Form(more=(Memory.total,)),
    Bound: Form(more=(Bound.by, Bound.seconds)),
    Fit: Form("fit", (reasons, days, launch)),
    Fitted: Form(more=(Fitted.seconds, Fitted.mfu)),
    PlanDiff: Form("diff", (PlanDiff.differs,)),
    LockCheck: Form("lock", (LockCheck.ok, LockCheck.unexplained, LockCheck.asked), without=("lock", "now", "sources")),
    ShownProgram: Form("program"),
    Coverage: Form("coverage"),
    Listing: Form("plans"),
}


def form_of(kind: type) -> Form:
    """The JSON form of a dataclass."""
    return FORMS.get(kind, Form())
