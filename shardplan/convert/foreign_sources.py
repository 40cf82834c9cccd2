"""Reading the source of a conversion from a file, a dictionary or an import."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from shardplan import PlanError
from shardplan.core.diagnostics import Diagnostic
from shardplan.core.sources import SourceMap
from shardplan.language import read_data

from .distributed_config import config_of
from .entries import NEEDS_MODEL, NO_IMPORT, finding, quoted

Form = Literal["transformers", "automodel", "torch", "deepspeed"]
FORMS: tuple[Form, ...] = get_args(Form)


@dataclass(frozen=True, slots=True)
class Source:
    """The content of a source.

    Args:
        name: its name in findings and in the plan's comment.
        data: the content; None where it could not be read.
        sequence_parallel: the content with sequence parallelism, where the source has both.
        experts: the entries for distributed experts, where the source has them apart; its other entries for the same modules are
            for experts that are not distributed.
        sources: its text, where it has one.
        diagnostics: the findings from reading it.
    """

    name: str
    data: Any
    sequence_parallel: Any = None
    experts: Mapping[str, Any] = field(default_factory=dict)
    sources: SourceMap = field(default_factory=SourceMap)
    diagnostics: tuple[Diagnostic, ...] = ()


def read_source(source: Any) -> Source:
    """Read a JSON or YAML file, a dictionary, or transformers' `DistributedConfig`. Findings say why it cannot be read (SP101 to SP103, SP111).

    Raises:
        TypeError: the source is something else.
    """
    if isinstance(source, Mapping) or config_of(source) is not None:
        return Source("<dict>", config_of(source) or source)
    if not isinstance(source, (str, os.PathLike)):
        raise TypeError(f"a source is a file or a dictionary, not {type(source).__name__}")
    data, sources, findings = read_data(os.fspath(source))
    return Source(os.fspath(source), data, sources=sources, diagnostics=findings)


def import_source(path: str, model: Callable[[], Any] | None) -> Source:
    """Import `module:name` or `module.name`: a dictionary of styles, or a function that returns one. This runs the module's code.

    Args:
        path: `module:name` or `module.name`.
        model: builds the model, for a function that takes one.

    Raises:
        PlanError: SP544, SP547.
    """
    found = import_object(path)
    if not callable(found):
        return Source(path, _styles(found, path))
    try:
        parameters = inspect.signature(found).parameters
    except (TypeError, ValueError):
        raise _refused(f"the parameters of {path} cannot be read") from None
    arguments: dict[str, Any] = {}
    if "model" in parameters:
        if model is None and parameters["model"].default is inspect.Parameter.empty:
            message = f"{path} needs the model"
            raise PlanError((finding(NEEDS_MODEL, message, None, help="name the model: --model"),))
        if model is not None:
            arguments["model"] = model()
    missing = [
        name
        for name, p in parameters.items()
        if p.default is p.empty
        and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        and name not in (*arguments, "sequence_parallel")
    ]
    if missing:
        raise _refused(f"{path} has more parameters than `model` and `sequence_parallel`: {', '.join(missing)}")
    if "sequence_parallel" not in parameters:
        return Source(path, _styles(_called(found, path, arguments), path))
    whole, sliced = (
        _styles(_called(found, path, {**arguments, "sequence_parallel": on}), path) for on in (False, True)
    )
    return Source(path, whole, sliced)


def import_object(path: str) -> Any:
    """The object that `module:name` or `module.name` names.

    Raises:
        PlanError: SP547.
    """
    separator = ":" if ":" in path else "."
    module_name, _, name = path.partition(":") if separator == ":" else path.rpartition(".")
    if not module_name or not name:
        raise _refused(f"{quoted(path)} names nothing to import", help="write `module:name`")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # imported code may do anything, even exit
        raise _refused(
            f"the module {module_name} cannot be imported: {_reason(error)}",
            help="run from the folder that holds the module, or set PYTHONPATH",
        ) from error
    try:
        return getattr(module, name)
    except AttributeError:
        raise _refused(f"the module {module_name} has no {name}") from None


def _called(function: Callable[..., Any], path: str, arguments: Mapping[str, Any]) -> Any:
    try:
        return function(**arguments)
    except (Exception, SystemExit) as error:
        raise _refused(f"{path} raised {_reason(error)}") from error


def _styles(found: Any, path: str) -> Mapping[str, Any]:
    if not isinstance(found, Mapping) or not found:
        kind = "an empty dictionary" if isinstance(found, Mapping) else f"a {type(found).__name__}"
        raise _refused(f"{path} is, or returns, {kind}, not a dictionary from names to styles")
    return found


def _reason(error: BaseException) -> str:
    first = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first[:300]}" if first else type(error).__name__


def _refused(message: str, help: str | None = None) -> PlanError:
    return PlanError((finding(NO_IMPORT, message, None, help=help),))
