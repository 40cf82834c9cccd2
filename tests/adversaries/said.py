"""What `validate` says of an adversary."""

from __future__ import annotations

import time
from dataclasses import dataclass

import shardplan

from .adversary import Adversary

UNPROVEN = ("SP421", "SP520", "SP521", "SP522", "SP523")


@dataclass(frozen=True)
class Said:
    """What `validate` says.

    Args:
        codes: of the errors.
        text: the first error, or what was raised.
        seconds: of processor time.
    """

    codes: tuple[str, ...]
    text: str
    seconds: float

    @property
    def passed(self) -> bool:
        return not self.codes


def validate(adversary: Adversary, *, allow_unproven: bool = False) -> Said:
    """Ask for one variant, at the adversary's size. What it raises is the code "RAISED"."""
    start = time.process_time()
    try:
        with adversary.around():
            report = shardplan.validate(
                shardplan.Model(adversary.model(validated=True), inputs=adversary.given_inputs),
                adversary.plan,
                {"tp": 1, **adversary.mesh},
                sequence_parallel=adversary.sequence_parallel,
                allow_unproven=allow_unproven,
            )
    except Exception as error:
        return Said(("RAISED",), f"{type(error).__name__}: {error}", time.process_time() - start)
    errors = [d for d in report.diagnostics if d.is_error]
    codes = tuple(sorted({d.code for d in errors}))
    return Said(codes, errors[0].message if errors else "", time.process_time() - start)


def as_expected(adversary: Adversary, said: Said) -> bool:
    """Whether `validate` says what it must."""
    if "RAISED" in said.codes:
        return False
    if adversary.verdict in ("right", "raises"):
        return said.passed or (bool(adversary.codes) and set(said.codes) <= set(adversary.codes))
    expected = adversary.codes or (UNPROVEN if adversary.verdict == "unproven" else said.codes)
    return not said.passed and bool(set(said.codes) & set(expected))
