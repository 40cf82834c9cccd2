"""`sum_outputs`: as a plan declares it, and bound to a model."""

from __future__ import annotations

from dataclasses import dataclass

from .diagnostics import Location


@dataclass(frozen=True, slots=True)
class SumRule:
    """The `sum_outputs` of a rule. It is independent of the rule's style, and overrides only other `sum_outputs`.

    Args:
        pattern: the glob of the modules in whose forward the outputs are added up: blocks.
        outputs: globs of the modules below such a block, named from it, in running order; none: an earlier rule's list
            no longer applies.
        location: the list's.
        styled: whether the same rule has a style.
        optional: whether it need not fit the model. Each output is then reduced by itself if the rule matches
            nothing, or if the layout check does not see that the block only adds up the outputs.
        when, having: as of `Rule`.
    """

    pattern: str
    outputs: tuple[str, ...]
    location: Location
    styled: bool = False
    optional: bool = False
    when: str | bool = True
    having: str | None = None

    @property
    def text(self) -> str:
        """As a plan has it."""
        return f"sum_outputs: [{', '.join(self.outputs)}]"


@dataclass(frozen=True, slots=True)
class SummedOutputs:
    """Modules of one block whose partial sums are added up and reduced by one collective.

    Args:
        block: the module in whose forward they are added up.
        members: their full names, in running order; the sum is reduced at the last.
        rule: the rule that declares it.
    """

    block: str
    members: tuple[str, ...]
    rule: SumRule

    @property
    def carriers(self) -> tuple[str, ...]:
        """The members whose partial sums wait for the last one's."""
        return self.members[:-1]

    @property
    def closer(self) -> str:
        """The last one."""
        return self.members[-1]
