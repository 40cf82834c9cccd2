"""State that all modules of one planned model share while it runs."""

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
from shardplan.core.tree import ancestors
from shardplan.torchlib.private import private

from .handed_out import Tokens
from .later_weights import Keeper, Readers
from .shared_reads import SharedReads
from .waiting_sums import Waiting

_current_graph_task_id = private("current_graph_task_id")
NOT_ALONE = "_shardplan_not_alone"  # on a module: why it cannot be called directly
_PARTIAL = "_shardplan_partial"  # on a tensor at the block input: whether it was a partial sum


@dataclass(slots=True)
class Regime:
    """The switches of a planned model.

    Attributes:
        variant: the variant whose programs the hooks run, named after the last section that is laid over the plan.
        reduce_dtype: the dtype in which partial gradients of small parameters are summed; None: their own.
        neighbours: number of ranks -> the mesh of ranks that compute with the same key-value heads.
        cp_neighbours: number of ranks -> the cp ranks that have parts of one group of features.
        ep: the one-dimensional mesh over which experts are distributed; None where they are not.
        cp: the one-dimensional mesh over which the plan splits sequences; None where it does not.
        length: the length of the whole sequence that the current forward split over cp; None before that.
        seq_dim: its dim where that was split first, in hidden states.
        expert_share: the factor for the gradients of the parameters on ep (`MeshSizes.expert_share`).
        experts: the names of all modules of experts.
        home: the variant that the plan was applied with.
        unreadable: a parameter whose storage the variant without sequence parallelism cannot read; empty: none.
        inside: whose forward is running: "model": the model's own; "part": one of a part that is called directly; "checkpoint": one
            that a checkpoint of the plan keeps or runs again; empty: none.
        recording: whether the outermost of these began with gradients.
        look: called where a part is called directly, like the guards before the model's forward.
        keeper: what kept saved tensors when the running block read its parameters (`later_weights.keeper`).
    """

    variant: str
    reduce_dtype: torch.dtype | None = None
    neighbours: dict[int, DeviceMesh] = field(default_factory=dict)
    cp_neighbours: dict[int, DeviceMesh] = field(default_factory=dict)
    ep: DeviceMesh | None = None
    cp: DeviceMesh | None = None
    length: int | None = None
    seq_dim: int = 1
    expert_share: float = 1.0
    experts: tuple[str, ...] = ()
    home: str = ""
    unreadable: str = ""
    inside: Literal["", "model", "part", "checkpoint"] = ""
    recording: bool = False
    look: Callable[[], None] | None = None
    keeper: Keeper = None

    @property
    def over_cp(self) -> DeviceMesh:
        """The mesh of moves over cp."""
        assert self.cp is not None  # a program with such moves is applied on a mesh with this axis
        return self.cp

    def check_alone(self, module: nn.Module) -> None:
        """Called where a module reads its parameters, and no enclosing forward has read them.

        Raises:
            RuntimeError: the module was called directly, and must not be.
        """
        if self.inside or torch.compiler.is_compiling() or _current_graph_task_id() != -1:
            return
        if why := module.__dict__.get(NOT_ALONE):
            raise RuntimeError(why)

    def share(self, parameter: ParameterProgram) -> float:
        """The factor for a parameter's gradient where the parameter is read."""
        return self.expert_share if parameter.stored.axis is Axis.EP else 1.0


Memory = StorageWeakRef | Tensor


@dataclass(frozen=True)
class LeftBehind:
    """The records of one forward of the outermost module. They keep no memory alive but that of hidden states, which are returned anyway.

    Args:
        states: hidden states, and the lengths that their whole sequence may have; of several entries of one state, the first counts.
        lengths: lengths of whole sequences in scope modules that return no hidden states themselves, although modules around them do (BERT).
        gathered: in order, the memory of values that are whole before blocks, or were made whole, and whether their gradients are partial
            sums (R).
        sums: the memory of the partial sums that block inputs took.
    """

    states: list[tuple[Tensor, frozenset[int]]] = field(default_factory=list)
    lengths: set[int] = field(default_factory=set)
    gathered: list[tuple[Memory, bool]] = field(default_factory=list)
    sums: list[Memory] = field(default_factory=list)

    def is_sum(self, state: Tensor) -> bool:
        """Whether a hidden state is a partial sum: a block input took it, or a view of it."""
        return reached_as_partial_sum(state) or any(_has(state, one) for one in self.sums)

    def is_partial(self, state: Tensor) -> bool:
        """Whether the gradient of a whole hidden state is a partial sum. A state in the memory of a gathered value is that value: GPT-2
        has a view of the last one, and a block that is an FSDP2 unit gets one. Any other state was computed from the last one.

        Raises:
            RuntimeError: torch.compile runs the model in parts, in which nothing is recorded.
        """
        for one, partial in self.gathered:
            if _has(state, one):
                return partial
        if state.requires_grad and not self.gathered:
            raise RuntimeError(
                "torch.compile runs this model in parts, so the gradients of its hidden states are not known: compile its layers "
                "(`layer.compile()`), or call it without output_hidden_states"
            )
        return bool(self.gathered) and self.gathered[-1][1]


def memory_of(x: Tensor) -> Memory:
    """A key of a tensor's memory, equal for tensors that share the memory. While the key lives, no other memory has this address. In a graph
    of torch.compile, where tensors have no memory yet, the tensor itself."""
    return x if torch.compiler.is_compiling() else StorageWeakRef(x.untyped_storage())


def _has(state: Tensor, memory: Memory) -> bool:
    if isinstance(memory, Tensor):
        return memory is state
    return not torch.compiler.is_compiling() and memory == memory_of(state)


class PartialEmbedding:
    """Knows, within one forward of the scope (the module around embeddings and block input), whether the value that reaches
    the `split_seq_input` rule is a partial sum of the plan's embeddings.

    An embedding returns its partial sum only inside that forward, where the block input will see it. The first split table of a
    module begins a sum; its other tables, and whole ones, join it only after that. (With `inputs_embeds` it does not run: the value
    is complete, so everything added to it must be complete too.) Models run their tables in any order.

    Args:
        first: the names of the embeddings whose rows are split -> the first of them in the same module.
        seq_dim: the sequence dimension of the block input's value.
    """

    def __init__(self, first: Mapping[str, str], seq_dim: int = 1):
        self.first = first
        self.seq_dim = seq_dim
        self.running = False
        self.pending: dict[str, int] = {}  # embedding -> its partial sums that no block input has taken yet
        self.complete = False
        self.shape: torch.Size | None = None  # of the last block input's value, noted there
        self.lengths: set[int] = set()  # of those noted since hidden states were returned last
        self.outermost: str | None = None  # the outermost module whose forward is running
        self.in_graph = False  # whether a graph of torch.compile has its beginning
        self.sources: list[
            tuple[nn.Module, frozenset[int]]
        ] = []  # the embeddings, and their hooks when the plan was applied
        self.left = LeftBehind()

    def enter(self, name: str) -> None:
        """Called when the forward of the scope, or of a module around it, begins. It does nothing in backward, where a checkpoint runs
        the scope again without the outer modules. What ends a forward by no Exception (the end of a stage, an interrupt) runs no hook
        after it; then what was known of that forward goes when the same module, or one around it, begins another."""
        ended = self.outermost is None or name in (self.outermost, *ancestors(self.outermost))
        if ended and _current_graph_task_id() == -1:
            self.outermost, self.running, self.left = name, False, LeftBehind()
            self.in_graph = torch.compiler.is_compiling()

    def leave(self, name: str) -> LeftBehind:
        """Called when such a forward ends, also by an exception. Gives the outermost module the records about the hidden states it returns."""
        if self.outermost != name:
            return LeftBehind()
        self.outermost, left, self.left = None, self.left, LeftBehind()
        return left

    def watch(self, sources: Iterable[nn.Module]) -> None:
        """Called with the embeddings when the plan is applied: hooks added later read and change whole values."""
        self.sources = [(source, frozenset(source._forward_hooks)) for source in sources]

    def begin(self) -> None:
        self.running = True
        self.pending.clear()
        # A hook's addition to a partial sum (NEFTune's noise) would be added on each rank.
        self.complete = any(not source._forward_hooks.keys() <= known for source, known in self.sources)
        self.shape = None
        self.lengths.clear()

    def returned(self, states: Sequence[Tensor | None]) -> None:
        """Called with the hidden states that the scope, or a module inside of it around blocks, returns: an encoder's have another length
        than a decoder's, and those of layers over patches another one than those of layers over frames (VideoPrism). The model's code
        still reads them split."""
        if self.shape is not None and states:
            lengths = self._whole_lengths(self.shape)
            self.left.states.extend((state, lengths) for state in states if state is not None)
            self.lengths.clear()

    def _whole_lengths(self, last: torch.Size) -> frozenset[int]:
        return frozenset(self.lengths or (last[self.seq_dim],))

    def end(self, states: Sequence[Tensor | None], gathered: bool) -> None:
        """Called with the hidden states that the scope's forward returns.

        Args:
            gathered: whether those in its tuples were made whole.
        """
        self.running = False
        self.pending.clear()
        if self.shape is None or gathered:
            return
        if states:
            self.returned(states)
        else:
            self.left.lengths.update(self._whole_lengths(self.shape))

    @property
    def _records(self) -> bool:
        # In this order: otherwise a layer that is compiled alone would need a new graph for each outermost module.
        return (self.in_graph or not torch.compiler.is_compiling()) and self.outermost is not None

    def gathered(self, x: Tensor, *, partial: bool) -> Tensor:
        """Called with a value that was made whole, and whether its readers give it a partial sum as gradient."""
        if self._records:
            self.left.gathered.append((memory_of(x), partial))
        return x

    def keeps_partial(self, source: str) -> bool:
        """Called by an embedding with its name: whether it returns its partial sum without a reduction."""
        begins = self.first.get(source)
        joins = begins in (source, *self.pending) if begins is not None else bool(self.pending)
        if not self.running or self.complete or not joins:
            self.complete = True
            return False
        self.pending[source] = self.pending.get(source, 0) + 1
        return True

    def take(self, x: Tensor) -> bool:
        """Called by the block input with its value: whether it is a partial sum. This uses up one look-up of each table: a model
        with two sequences may look up both before the first block of either runs.

        A checkpoint around the block input runs it again in backward, after that forward has ended. So the answer is stored on the
        tensor, which the checkpoint passes in again.

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
        if partial and self._records:
            self.left.sums.append(memory_of(x))
        self.pending = {source: count - 1 for source, count in self.pending.items() if count > 1}
        return partial

    def note(self, x: Tensor, shape: torch.Size, dim: int) -> None:
        """Called by each block input with the value that the model's code gave it, and the shape and the dim that it splits. The value's
        gradient is complete, for other readers too.

        Args:
            shape: that of `x`, or of this rank's slice of it over cp.
        """
        if self.running and dim == self.seq_dim:
            self.shape = shape
            self.lengths.add(shape[dim])
            self.gathered(x, partial=False)


@dataclass(frozen=True, slots=True)
class Shared:
    """State that the styles of one program share.

    Args:
        link: the partial embeddings, if the plan has a `split_seq_input` rule.
        around: the scope (the module around embeddings and block input), and the modules around it.
        inner: the modules inside of the scope around a block input.
        waiting: (variant, module) -> the partial sums that are reduced with its own.
        reads: module -> the values that are moved once in each of its calls, for all readers in it.
        tokens: the batch and sequence length in a block.
        noted: the modules whose arguments show that size.
        readers: the modules that read each moved value; an ordered set.
        overlapped: by variant, the layers that leave their weights' gradients to a move (`leave_weights`).
    """

    regime: Regime
    link: PartialEmbedding | None = None
    around: frozenset[str] = frozenset()
    inner: frozenset[str] = frozenset()
    waiting: Mapping[tuple[str, str | None], Waiting] = field(default_factory=dict)
    reads: Mapping[str | None, SharedReads] = field(default_factory=dict)
    tokens: Tokens = field(default_factory=Tokens)
    noted: frozenset[str] = frozenset()
    readers: dict[Readers, None] = field(default_factory=dict)
    overlapped: dict[str, list[str]] = field(default_factory=dict)


def reached_as_partial_sum(x: Tensor) -> bool:
    """Whether a tensor reached the block input as a partial sum."""
    return getattr(x, _PARTIAL, False)
