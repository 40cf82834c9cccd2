"""A plan as it was bound to a model, to be compared with what it is bound to later."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .diagnostics import Diagnostic
from .plan import Variant
from .sources import SourceMap

Facts = Mapping[str, tuple[str, ...]]  # folded names of modules -> what happens there


@dataclass(frozen=True, slots=True)
class LockedQuestion:
    """What was bound: the words of the command line.

    Args:
        model, plan: the names. A file is named from the folder in which the command ran.
        mesh: axis -> its size.
        sequence_parallel: None: every variant that the plan has.
        settings: numbers of the model's configuration that were changed.
        inputs, reduced: `module:callable`.
    """

    model: str
    plan: str
    mesh: Mapping[str, int]
    sequence_parallel: bool | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    inputs: str | None = None
    reduced: str | None = None
    trust_remote_code: bool = False
    derive: bool = True


@dataclass(frozen=True, slots=True)
class PlanLock:
    """A plan bound to a model.

    Args:
        asked: what was bound.
        versions: of Python and of the packages, for whoever reads a difference.
        files: SHA-256 of the text of each plan file that was read, by its name.
        parameters: folded names -> shape and dtype.
        variants: of each variant, what happens at its modules.
        sections: fields of the sections, the modules that they name folded.
        digest: SHA-256 of parameters, variants and sections.
    """

    asked: LockedQuestion
    versions: Mapping[str, str]
    files: Mapping[str, str]
    parameters: Mapping[str, str]
    variants: Mapping[Variant, Facts]
    sections: Mapping[str, str]
    digest: str


@dataclass(frozen=True, slots=True)
class LockCheck:
    """What `check_lock` returns.

    Args:
        lock: as it was.
        now: what is bound today; None where the plan has errors with the model of today.
        parameters: parameters of the model that are gone or new, or have another shape or dtype, as lines.
        modules: of each variant the modules that are stored or run differently, as lines.
        sections: fields that differ, as lines.
        about: versions and plan files that are not those of the lock; they decide nothing.
        findings: of the plan with the model of today.
        sources: the texts that these point into.
    """

    lock: PlanLock
    now: PlanLock | None
    parameters: tuple[str, ...] = ()
    modules: Mapping[Variant, tuple[str, ...]] = field(default_factory=dict)
    sections: tuple[str, ...] = ()
    about: tuple[str, ...] = ()
    findings: tuple[Diagnostic, ...] = ()
    sources: SourceMap = field(default_factory=SourceMap)

    @property
    def asked(self) -> LockedQuestion:
        """What was bound."""
        return self.lock.asked

    @property
    def ok(self) -> bool:
        """Whether the plan is bound as it was: nothing that the lock lists differs, nor the digest."""
        listed = self.parameters or self.modules or self.sections
        return self.now is not None and not listed and self.now.digest == self.lock.digest

    @property
    def unexplained(self) -> bool:
        """Whether the digest alone differs: that, or what it is of, was edited, or the lock is of another shardplan."""
        listed = self.parameters or self.modules or self.sections
        return self.now is not None and not listed and self.now.digest != self.lock.digest
