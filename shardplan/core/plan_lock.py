"""A plan as bound to a model, for comparison with a later binding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .diagnostics import Diagnostic
from .plan import Variant
from .sources import SourceMap

Facts = Mapping[str, tuple[str, ...]]  # folded names of modules -> their program's facts


@dataclass(frozen=True, slots=True)
class LockedQuestion:
    """What was bound, in the words of the command line.

    Args:
        model, plan: the names. A file is named from the folder in which the command ran.
        mesh: axis -> its size.
        sequence_parallel: None: every variant of the plan.
        settings: changed numbers of the model's configuration.
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
        asked: the plan and the model that were bound.
        versions: those of Python and of the packages, for readers of a difference.
        files: SHA-256 of the text of each plan file read, by its name.
        parameters: folded names -> shape and dtype.
        variants: for each variant, the facts about its modules.
        sections: fields of the sections, with module names folded.
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
        lock: the saved lock.
        now: today's binding; None if the plan has errors with today's model.
        parameters: parameters of the model that are gone or new, or have another shape or dtype, as lines.
        modules: for each variant, the modules that are stored or run differently, as lines.
        sections: fields that differ, as lines.
        about: versions and plan files that differ from the lock's; they decide nothing.
        findings: the findings about the plan with today's model.
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
        """Whether the plan is bound as before: neither what the lock lists nor the digest differs."""
        listed = self.parameters or self.modules or self.sections
        return self.now is not None and not listed and self.now.digest == self.lock.digest

    @property
    def unexplained(self) -> bool:
        """Whether only the digest differs: it, or its content, was edited, or the lock is of another shardplan."""
        listed = self.parameters or self.modules or self.sections
        return self.now is not None and not listed and self.now.digest != self.lock.digest
