"""A sharded run that raises: a finding, unless the exception is an error in shardplan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb

from shardplan.core.diagnostics import Code, Diagnostic, PlanError, Severity
from shardplan.model.model_findings import reason
from shardplan.model.reduced.lines import raising_line
from shardplan.runtime.parallel.chunks import UnevenSequence

RAISES = Code("SP422")
# Whisper's encoder reads as many positions as its settings say.
NO_SEQUENCE_PARALLELISM = (
    "where inputs decide the length, give others; where the model does (patches, frames), leave the sequence whole: "
    "`--no-sequence-parallel` (`sequence_parallel=False`)"
)


PACKAGE = str(Path(__file__).parent.parent)


@contextmanager
def sharded_run(known: Sequence[Diagnostic] = ()) -> Iterator[None]:
    """Wraps the sharded run of a reduced model whose unsharded run succeeded.

    Args:
        known: the findings of the layout check; they explain more than the exception.

    Raises:
        PlanError: SP422: the run raised; or the findings of the layout check, if there are any.
        AssertionError: an error in shardplan.
    """
    try:
        yield
    except PlanError:
        raise
    except Exception as error:
        if isinstance(error, AssertionError) and is_ours(error):
            raise
        raise PlanError(tuple(known) or (raised(error),)) from error


def raised(error: Exception) -> Diagnostic:
    """The finding for an exception of the sharded run."""
    cause, where = cause_of(error)
    return Diagnostic(
        code=RAISES,
        severity=Severity.ERROR,
        message=f"the sharded reduced model raises {reason(cause)}",
        notes=where,
        help=NO_SEQUENCE_PARALLELISM if isinstance(cause, UnevenSequence) else None,
    )


def cause_of(error: Exception) -> tuple[Exception, tuple[str, ...]]:
    """The original exception of a chain, and a note with the line of the model's code that raised it, if there is one."""
    cause = error
    while isinstance(cause, RuntimeError) and isinstance(cause.__cause__, Exception):
        cause = cause.__cause__
    line = raising_line(cause)
    return cause, (line.shown,) if line is not None else ()


def is_ours(error: Exception) -> bool:
    """Whether code of this package raised an exception."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].f_code.co_filename.startswith(PACKAGE)
