"""Facts that several checks read: how each parameter is stored, what tp must divide, which modules have rules. Computed
once per bound plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from shardplan.compiler.bind.units import unit_of
from shardplan.core.mesh import Axis
from shardplan.core.tree import parent
from shardplan.styles import Style
from shardplan.styles.boundary import Boundary, boundary
from shardplan.styles.style_record import WHOLE

from .requirements import Requirement, allowed_sizes, requirements
from .stored_by_rules import StorageFacts


@dataclass(frozen=True)
class Facts(StorageFacts):
    """A bound plan and what the checks derive from it.

    Args:
        resolved: the bound plan.
        seq_len: the sequence length in training, in tokens, if it is known.
    """

    seq_len: int | None = None

    @cached_property
    def requirements(self) -> tuple[Requirement, ...]:
        """Every count that the number of ranks on an axis must divide."""
        return tuple(requirements(self))

    @cached_property
    def allowed(self) -> tuple[int, ...]:
        """The tp sizes that the model allows with this plan and the ranks of cp, ascending, 1 included."""
        sizes = allowed_sizes(self, self.requirements, Axis.TP)
        return tuple(size for size in sizes if size == 1 or self.exchanges(size, self.resolved.sizes.cp))

    @cached_property
    def shared_with_cp(self) -> tuple[Requirement, ...]:
        """Every count that the ranks of tp and cp together must divide: those of what is split below modules whose heads are exchanged."""
        on_cp = self.resolved.on_cp
        return () if on_cp is None else tuple(requirements(StorageFacts(on_cp)))

    def exchanges(self, tp: int, cp: int) -> bool:
        """Whether every count in `shared_with_cp` allows these sizes."""
        return all(one.allows(tp * cp) for one in self.shared_with_cp)

    @cached_property
    def tp(self) -> int | None:
        """The tp size to check: the requested one, else the smallest allowed one above 1, if any; 1 for a plan that
        splits nothing."""
        if self.resolved.sizes.tp is not None or not self.splits:
            return self.resolved.sizes.tp or 1
        return next((size for size in self.allowed if size > 1), None)

    @cached_property
    def boundaries(self) -> Mapping[str, Boundary]:
        """The boundary of each module that has a rule; a slice of the sequence is V(SEQ)."""
        return {name: boundary(assignment.rule) for name, assignment in self.resolved.modules.items()}

    @cached_property
    def unit_of(self) -> Mapping[str, str]:
        """The innermost FSDP unit that each module belongs to; "" is the root's."""
        return unit_of(self.resolved.tree, frozenset(self.resolved.fsdp_units))

    def claimed(self, module: str) -> bool:
        """Whether a rule names the module, one of its parameters or, to keep it whole, a module around it."""
        return module in self._claimed or module in self.whole

    @cached_property
    def _claimed(self) -> frozenset[str]:
        owners = (name for name, a in self.resolved.modules.items() if not self.style(a).is_block_input)
        return frozenset(owners) | {self.resolved.tree.owner(name) for name in self.resolved.parameters}

    @cached_property
    def whole(self) -> frozenset[str]:
        """The modules inside one that a rule keeps whole."""
        keeps = {name for name, a in self.resolved.modules.items() if _keeps_whole(self.style(a))}
        inside: set[str] = set()
        for name in self.resolved.tree.modules if keeps else ():
            if name and (parent(name) in keeps or parent(name) in inside):
                inside.add(name)
        return frozenset(inside)


def _keeps_whole(style: Style) -> bool:
    return style.owns_parameters and style.weight == WHOLE and not style.input_sources and style.features.tail is None
