"""What all modules of one planned model share while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.multiprocessing.reductions import StorageWeakRef

from shardplan.core.mesh import Axis
from shardplan.core.module_program import ParameterProgram
from shardplan.torchlib.private import private

from .handed_out import Tokens
from .shared_reads import SharedReads
from .waiting_sums import Waiting

_current_graph_task_id = private("current_graph_task_id")
NOT_ALONE = "_shardplan_not_alone"  # on a module: why it cannot be called by itself
_PARTIAL = "_shardplan_partial"  # on a tensor that reached the block input: whether it was a partial sum


@dataclass(slots=True)
class Regime:
    """The switches of a planned model.

    Attributes:
        variant: which of the programs the hooks run, by the name of the last section that is laid over the plan's others.
        reduce_dtype: the dtype in which partial gradients of small parameters are summed; None is the gradients' own.
        neighbours: the ranks that compute with the same key-value heads, by their number.
        cp_neighbours: ranks of cp that have parts of one group of features, by their number.
        ep: the one-dimensional mesh over which experts are distributed; None where they are not.
        cp: the one-dimensional mesh over which the plan splits sequences; None where it does not.
        length: of the whole sequence that the forward which runs now has split over cp; None before that.
        expert_share: what the gradients of the parameters on it are multiplied by (`MeshSizes.expert_share`).
        experts: the names of all modules of experts.
        home: the variant that the plan was applied with.
        unreadable: a parameter that the variant without sequence parallelism cannot read as it is stored; empty: there is none.
        inside: whose forward runs: the model's own, one of a part that is called by itself, one that a checkpoint of the plan keeps or
            runs again; empty: none.
        recording: whether the outermost of these began with gradients.
        look: called where a part is called by itself, as the guards are in front of the model's forward.
    """

    variant: str
    reduce_dtype: torch.dtype | None = None
    neighbours: dict[int, DeviceMesh] = field(default_factory=dict)
    cp_neighbours: dict[int, DeviceMesh] = field(default_factory=dict)
    ep: DeviceMesh | None = None
    cp: DeviceMesh | None = None
    length: int | None = None
    expert_share: float = 1.0
    experts: tuple[str, ...] = ()
    home: str = ""
    unreadable: str = ""
    inside: Literal["", "model", "part", "checkpoint"] = ""
    recording: bool = False
    look: Callable[[], None] | None = None

    @property
    def over_cp(self) -> DeviceMesh:
        """The mesh of moves over cp."""
        assert self.cp is not None  # a program that has such moves is applied on a mesh with this axis
        return self.cp

    def check_alone(self, module: nn.Module) -> None:
        """Called where a module reads its parameters, and no forward around it has read them.

        Raises:
            RuntimeError: it is called by itself, and cannot be.
        """
        if self.inside or torch.compiler.is_compiling() or _current_graph_task_id() != -1:
            return
        if why := module.__dict__.get(NOT_ALONE):
            raise RuntimeError(why)

    def share(self, parameter: ParameterProgram) -> float:
        """What the gradient of a parameter is multiplied by where it is read."""
        return self.expert_share if parameter.stored.axis is Axis.EP else 1.0


@dataclass(frozen=True)
class LeftBehind:
    """What one forward of the outermost module leaves behind. It keeps no memory but that of hidden states, which are returned anyway.

    Args:
        states: hidden states, and the length of their whole sequence.
        lengths: of whole sequences, of modules around both ends that return no hidden states: modules around them do (BERT's).
        gathered: the memory of values that are whole in front of blocks, or were made so, in order, and whether their gradients are
            partial sums (R).
        sums: that of what block inputs took as partial sums.
    """

    states: list[tuple[Tensor, int]] = field(default_factory=list)
    lengths: set[int] = field(default_factory=set)
    gathered: list[tuple[StorageWeakRef, bool]] = field(default_factory=list)
    sums: list[StorageWeakRef] = field(default_factory=list)

    def is_sum(self, state: Tensor) -> bool:
        """Whether a hidden state is a partial sum: one that a block input took, or of which it took a view."""
        return reached_as_partial_sum(state) or (bool(self.sums) and memory_of(state) in self.sums)

    def is_partial(self, state: Tensor) -> bool:
        """Whether the gradient of a whole hidden state is a partial sum. One in the memory of a gathered value is that value: GPT-2 has a
        view of the last one, and a block that is a unit of FSDP2 gets one. Any other was computed of the last one."""
        memory = memory_of(state)
        same = (partial for one, partial in self.gathered if one == memory)
        return next(same, bool(self.gathered) and self.gathered[-1][1])


def memory_of(x: Tensor) -> StorageWeakRef:
    """Equal for tensors in one memory; while it lives, no other memory has its address."""
    return StorageWeakRef(x.untyped_storage())


class PartialEmbedding:
    """Knows, within one forward of the module around both ends, whether the value that reaches the
    `split_seq_input` rule is a partial sum from the plan's embeddings.

    An embedding returns its partial sum only where the block input will see it: inside that forward. A whole table's vectors
    join the partial sum only after the split tables have run (with `inputs_embeds` these do not run: the value is
    complete, so everything added to it must be complete too). Models run their tables in any order.

    Args:
        split: the names of the embeddings whose rows are split.
        seq_dim: the sequence dimension of what the block input splits.
    """

    def __init__(self, split: frozenset[str], seq_dim: int = 1):
        self.split = split
        self.seq_dim = seq_dim
        self.running = False
        self.pending: dict[str, int] = {}  # embedding -> its partial sums that no block input took yet
        self.complete = False
        self.shape: torch.Size | None = None  # of what the block input splits, noted there
        self.outermost: str | None = None  # the module whose forward holds all that runs now
        self.sources: list[
            tuple[nn.Module, frozenset[int]]
        ] = []  # the embeddings, and the hooks that they had when the plan was applied
        self.left = LeftBehind()

    def enter(self, name: str) -> None:
        """Called where the forward of the module around both ends begins, or of one around that. Not in backward, where a checkpoint
        runs it again without those around it."""
        if self.outermost is None and _current_graph_task_id() == -1:
            self.outermost = name

    def leave(self, name: str) -> LeftBehind:
        """Called where such a forward ends, by an exception too: of the outermost, what is known of the hidden states that leave it."""
        if self.outermost != name:
            return LeftBehind()
        self.outermost, left, self.left = None, self.left, LeftBehind()
        return left

    def watch(self, sources: Iterable[nn.Module]) -> None:
        """Called when the plan is applied, with the embeddings: what hooks that they get later read and change is whole."""
        self.sources = [(source, frozenset(source._forward_hooks)) for source in sources]

    def begin(self) -> None:
        self.running = True
        self.pending.clear()
        # What a hook adds to a partial sum (NEFTune's noise) would be added on each rank.
        self.complete = any(not source._forward_hooks.keys() <= known for source, known in self.sources)
        self.shape = None

    def end(self, states: Sequence[Tensor | None], gathered: bool) -> None:
        """Called with the hidden states that the forward returns: code of the model that reads them reads them split.

        Args:
            gathered: those in its tuples were made whole.
        """
        self.running = False
        self.pending.clear()
        if self.shape is None or gathered:
            return
        length = self.shape[self.seq_dim]
        self.left.states.extend((state, length) for state in states if state is not None)
        if not states:
            self.left.lengths.add(length)

    def gathered(self, x: Tensor, *, partial: bool) -> Tensor:
        """Called with a value that was made whole, and whether its readers leave it a partial sum as its gradient."""
        # In this order: a graph would be made anew for each answer of the second.
        if not torch.compiler.is_compiling() and self.outermost is not None:
            self.left.gathered.append((memory_of(x), partial))
        return x

    def keeps_partial(self, source: str) -> bool:
        """Called by an embedding with its name: whether to return its partial sum without a reduction."""
        joins = source in self.split or self.split <= self.pending.keys()
        if not self.running or self.complete or not joins:
            self.complete = True
            return False
        self.pending[source] = self.pending.get(source, 0) + 1
        return True

    def take(self, x: Tensor) -> bool:
        """Called by the block input with its value: whether it is a partial sum. One look-up of each table is taken with it: a model
        with two sequences may look up both before the first block of either runs.

        A checkpoint around the block input runs it again in backward, after that forward has ended; so the answer is stored
        on the tensor, which such a checkpoint passes in again.

        Raises:
            RuntimeError: the checkpoint passes in a copy.
        """
        if not self.running and _current_graph_task_id() != -1:
            if not hasattr(x, _PARTIAL):
                raise RuntimeError(
                    "a checkpoint around the sequence-parallel block input recomputes it from a copy of its input "
                    "(use_reentrant=True?): use the plan's activation_checkpointing, or use_reentrant=False"
                )
            return getattr(x, _PARTIAL)
        partial = bool(self.pending) and not self.complete
        setattr(x, _PARTIAL, partial)
        if partial and not torch.compiler.is_compiling() and self.outermost is not None:
            self.left.sums.append(memory_of(x))
        self.pending = {source: count - 1 for source, count in self.pending.items() if count > 1}
        return partial

    def note(self, x: Tensor, dim: int) -> None:
        """Called by each block input with what it splits, and in which dim. Its gradient is complete, for other readers too."""
        if self.running and dim == self.seq_dim:
            self.shape = x.shape
            self.gathered(x, partial=False)


@dataclass(frozen=True, slots=True)
class Shared:
    """What the styles of one program share.

    Args:
        link: where the plan has a `split_seq_input` rule.
        around: the module around both of its ends, and those around that.
        waiting: by variant and module, what is reduced with its own partial sum.
        reads: by module, what is moved once in each call of it for all that read it there.
        tokens: the shape of what runs in a block.
        noted: the modules whose arguments tell it.
    """

    regime: Regime
    link: PartialEmbedding | None = None
    around: frozenset[str] = frozenset()
    waiting: Mapping[tuple[str, str | None], Waiting] = field(default_factory=dict)
    reads: Mapping[str | None, SharedReads] = field(default_factory=dict)
    tokens: Tokens = field(default_factory=Tokens)
    noted: frozenset[str] = frozenset()


def reached_as_partial_sum(x: Tensor) -> bool:
    """Whether a tensor reached the block input as a partial sum."""
    return getattr(x, _PARTIAL, False)
