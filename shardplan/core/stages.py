"""How a model is cut into pipeline stages: an interval of its repeated blocks for each stage, and the modules before
and after them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HandedOn:
    """The part of a module's output that later stages get.

    Args:
        module: its full name.
        positions: the positions of the tensors in its output, if it is a tuple; else (0,).
        length: the tuple's; 0: the output is one tensor.
        unread: no code was seen to read it: it is handed on if a hook reads it (of transformers, for an auxiliary loss).
    """

    module: str
    positions: tuple[int, ...] = (0,)
    length: int = 0
    unread: bool = False


@dataclass(frozen=True, slots=True)
class PipelineCut:
    """Stages 0, 1, ... in the order in which a batch runs through them; each module with parameters belongs to one.

    A stage is the whole model with stubs in place of the modules of other stages, so that its own forward runs there. A
    module without parameters outside of the blocks (masks, rotary tables) runs in every stage.

    Args:
        blocks: the repeated blocks by full name, in the order in which they run.
        sizes: the number of blocks in each stage; one or more.
        first, last: modules and parameters outside of the blocks that belong to the first and to the last stage.
        handed: for each carried module, what later stages read of its output, besides the block's first result. It is
            handed on to them, and their stubs of the module return it.
        ties: the names of each parameter that is in several stages; each has a copy, and their gradients are added.
        results: the length of a block's result tuple or list; 0: one tensor.
        written: modules of the first stage whose result the model's code changes in place; their stubs return zeros with memory.
    """

    blocks: tuple[str, ...]
    sizes: tuple[int, ...]
    first: tuple[str, ...]
    last: tuple[str, ...]
    handed: tuple[HandedOn, ...] = ()
    ties: tuple[tuple[str, ...], ...] = ()
    results: int = 0
    written: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert sum(self.sizes) == len(self.blocks) and min(self.sizes) >= 1, self

    @property
    def stages(self) -> int:
        return len(self.sizes)

    @property
    def carried(self) -> tuple[str, ...]:
        """The modules whose output is handed on, whoever reads it."""
        return tuple(one.module for one in self.handed if not one.unread)

    def handed_at(self, stage: int) -> tuple[HandedOn, ...]:
        """What a stage hands to the next besides its last block's first result: from its own modules and earlier ones."""
        stages = ((self.stage_of(one.module), one) for one in self.handed)
        return tuple(one for at, one in stages if at is not None and at <= stage)

    def blocks_of(self, stage: int) -> tuple[str, ...]:
        """The blocks of a stage, in the order in which they run."""
        start = sum(self.sizes[:stage])
        return self.blocks[start : start + self.sizes[stage]]

    def roots_of(self, stage: int) -> tuple[str, ...]:
        """The modules and parameters that a stage has, by full name; those below them are its own too."""
        first = self.first if stage == 0 else ()
        last = self.last if stage == self.stages - 1 else ()
        return (*first, *self.blocks_of(stage), *last)

    def absent_from(self, stage: int) -> tuple[str, ...]:
        """The modules and parameters of the other stages, each replaced by a stub (a module) or None (a parameter)."""
        own = set(self.roots_of(stage))
        return tuple(name for name in (*self.first, *self.blocks, *self.last) if name not in own)

    def stage_of(self, name: str) -> int | None:
        """The stage that has a module or parameter; None for one that runs in every stage."""
        for stage in range(self.stages):
            if any(f"{name}.".startswith(f"{root}.") for root in self.roots_of(stage)):
                return stage
        return None
