"""What is found out about the export of one model type."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from shardplan import ExportedPlan, PlanError, compile_plan, export_plan
from shardplan.convert import convert_plan
from tests.model_settings import find, without_dropout

NOT_TRIED = "not tried"


@dataclass(frozen=True)
class Entry:
    """The built-in plan of a model type, in the words of transformers.

    Args:
        name: the type.
        refused: why it does not cross: the first rule without a word and its line, or what its own code made of it. Empty where it crosses.
        tensors: how many were compared with the unsharded model; 0 where it was not run.
        accumulates: whether the gradients of two steps are right too.
        back: how what `convert` makes of the export differs from the plan; empty where it is the same program, "not tried" where nothing tells.
    """

    name: str
    refused: str = ""
    tensors: int = 0
    accumulates: bool = True
    back: str = NOT_TRIED

    @property
    def right(self) -> bool:
        """Whether it crosses, was run there, and nothing else comes back."""
        return not self.refused and self.back in ("", NOT_TRIED) and self.tensors > 0

    @property
    def said(self) -> str:
        """The cell of the table."""
        if self.refused:
            return f"no: {self.refused}"
        if not self.tensors:
            return "not run"
        ran = f"{self.tensors} tensors" + ("" if self.accumulates else "; one backward a step")
        return ran + ("; and back" if not self.back else "" if self.back == NOT_TRIED else f"; not back: {self.back}")


def configured(name: str) -> PreTrainedConfig:
    """The default configuration of a type or the nearest that can be built, without dropout.

    Raises:
        PlanError: none can.
    """
    config: PreTrainedConfig = without_dropout(find(name).config)
    return config


def entry(name: str, *, run: bool) -> Entry:
    """Export the built-in plan of a type, in its own code if `run`, and convert it back."""
    try:
        config = configured(name)
    except PlanError as error:
        return Entry(name, refused=_first(error.diagnostics))
    made = export_plan(config, "auto", "transformers", run=run, derive=False)
    if made.text is None:
        return Entry(name, refused=_first(made.report.diagnostics))
    if not made.rows:
        return Entry(name)
    accumulates = not any(found.code == "SP549" for found in made.report.diagnostics)
    return Entry(name, "", len(made.rows), accumulates, there_and_back(config, made))


def there_and_back(model: Any, made: ExportedPlan) -> str:
    """How the plan that `convert` makes of an export differs from the built-in one; empty where both are the same program."""
    back = convert_plan(json.loads(str(made.text)), model=model, tp=2)
    if back.document is None:
        return _first(back.report.diagnostics)
    plan = {key: value for key, value in back.document.items() if key in ("version", "tensor_parallel")}
    again = export_plan(model, plan, "transformers", run=False)
    if again.entries != made.entries:
        differs = {key for key, _ in {*again.entries.items()} ^ {*made.entries.items()}}
        return (
            f"its export differs: {', '.join(sorted(differs))}" if again.entries else _first(again.report.diagnostics)
        )
    ours, theirs = ({*_stored(compile_plan(model, {"tp": 2}, one))} for one in ("auto", plan))
    return f"stored otherwise: {', '.join(sorted({name for name, *_ in ours ^ theirs}))}" if ours != theirs else ""


def _stored(program: Any) -> list[tuple[str, str, int]]:
    """The parameters that are split: name, how, and the dim."""
    return [
        (f"{module}.{p.name}", str(p.stored), p.dim)
        for module, what in program.modules.items()
        for p in what.parameters
        if p.dim is not None
    ]


def _first(diagnostics: Any) -> str:
    """The first error, with the rule that it is about."""
    found = next(one for one in diagnostics if one.is_error)
    place = found.primary.location.path[-1:] if found.primary is not None else ()
    said = " ".join([found.message, *found.notes]) if found.code in ("SP509", "SP523") else found.message
    text = f"{found.code}: {' '.join(said.split())}" + "".join(f" (`{name}`)" for name in place)
    return text if len(text) <= 240 else text[:237] + "..."
