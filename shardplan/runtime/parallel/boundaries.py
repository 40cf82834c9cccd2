"""Moves at a module's boundary, as forward hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from shardplan.core.layout import I, Layout, P, R, V, in_one_row
from shardplan.core.mesh import Axis
from shardplan.core.module_program import ArgumentSlice, ContextProgram, InputMove, ModuleProgram, OutputMove
from shardplan.core.nesting import when
from shardplan.model.labels_over_cp import SEQUENCE
from shardplan.torchlib.attributes import owner_of

from .collectives import all_gather
from .forward import arguments_of
from .handed_out import hand_out, hand_out_over_cp
from .head_exchange import has_all_tokens, hollow_of, shares_of, taken
from .later_weights import Readers
from .outputs import as_dtensor, move_tail, on_first
from .reading import read
from .references import only_output
from .regather import note
from .regime import Shared
from .tensor_moves import Move, move

Programs = Mapping[str, ModuleProgram]
Moved = list[tuple[Tensor, Layout, Layout, Tensor]]  # value, source, destination, result
Shape = torch.Size | None


class Enter:
    """Forward pre-hook: moves the arguments."""

    def __init__(self, module: nn.Module, programs: Programs, shared: Shared, mesh: DeviceMesh):
        self.parameters = arguments_of(module)
        self.programs, self.shared, self.mesh = programs, shared, mesh
        self.reads = {variant: shared.reads.get(pr.reads_in) for variant, pr in programs.items()}
        # The moves of boundaries that do no more than move a value over tp, and that of the first argument where it is all there is to do.
        self.moves = {
            variant: {one: Move(mesh, one.src, one.dst) for one in pr.enter if _only_moves(pr, one)}
            for variant, pr in programs.items()
        }
        self.only_first = {
            variant: self.moves[variant].get(pr.enter[0]) if _only_first(pr, *self.parameters[:1]) else None
            for variant, pr in programs.items()
        }
        self.readers = self._readers()
        self.readers.modules.append(module)
        if not any(boundary.regather for program in programs.values() for boundary in program.enter):
            shared.readers[self.readers] = None

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        regime = self.shared.regime
        variant = regime.variant
        only = self.only_first[variant]
        if only is not None:  # the rest of this method, for most layers
            x = args[0] if args else kwargs.get(self.parameters[0])
            if isinstance(x, Tensor):
                x = self._read(x, only, variant)
                return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, self.parameters[0]: x})
        program = self.programs[variant]
        moved: Moved = []
        over_cp = program.on_cp.enter if program.on_cp is not None else ()
        if program.on_cp is not None and program.on_cp.takes:
            args, kwargs = self._exchange(self.parameters[0], partial(self._taken, program), args, kwargs, program)
        for boundary in nested(program.enter, over_cp) if over_cp else program.enter:
            args, kwargs = self._move(boundary, args, kwargs, program, moved)
        for part in program.slices:
            args, kwargs = self._exchange(part.argument, partial(_share, part, self.mesh), args, kwargs, program)
        if program.on_cp is not None:
            args, kwargs = self._exchange_heads(program.on_cp, args, kwargs, program)
        return args, kwargs

    def _read(self, x: Tensor, move: Move, variant: str) -> Tensor:
        """Move a value over tp: once for all its readers, where it moves I -> R in a block with a table of them."""
        kept_by = self.shared.regime.keeper
        if move.dst.kind != "R":
            return move(x)
        if move.src.kind == "I" and (table := self.reads[variant]) is not None:
            return table.read(x, move, self.readers, variant, kept_by)
        leaves = x.requires_grad and torch.is_grad_enabled() and not torch.compiler.is_compiling()
        return move(x, later=self.readers.later(variant, kept_by) if leaves else None)

    def _exchange_heads(
        self, on_cp: ContextProgram, args: tuple, kwargs: dict, program: ModuleProgram
    ) -> tuple[tuple, dict]:
        regime = self.shared.regime
        for part in on_cp.slices:
            args, kwargs = self._exchange(part.argument, partial(_share, part, regime.over_cp), args, kwargs, program)
        if on_cp.hollow is None:
            return args, kwargs
        hollow = partial(hollow_of, module=program.name, regime=regime)
        return self._exchange(on_cp.hollow or self.parameters[0], hollow, args, kwargs, program)

    def _taken(self, program: ModuleProgram, x: Tensor) -> Tensor:
        return taken(x, program.name, self.shared.regime)

    def _move(
        self, boundary: InputMove, args: tuple, kwargs: dict, program: ModuleProgram, moves: Moved
    ) -> tuple[tuple, dict]:
        """Move the arguments of one boundary. Returns all arguments.

        Args:
            moves: the moves of earlier boundaries in this call. Arguments that are the same tensor with the same move (keys and
                values of self-attention) share one move, and stay the same tensor after it.
        """
        regime = self.shared.regime
        mesh, over_tp = self._mesh(boundary), boundary.src.axis is Axis.TP

        def moved(x: Tensor) -> Tensor:
            if (prepared := self.moves[regime.variant].get(boundary)) is not None:
                return self._read(x, prepared, regime.variant)
            src = boundary.src
            if not over_tp and src.kind == "R":
                dim = boundary.dst.split_dim(x.ndim)
                if regime.length is None:  # only the first split is of hidden states
                    regime.seq_dim = dim
                regime.length = x.shape[dim]
            if over_tp and program.link == "block_input":
                assert self.shared.link is not None
                given = next((before for before, *_, after in moves if after is x), x)  # before its move over cp
                self.shared.link.note(given, x.shape, boundary.dst.split_dim(x.ndim))
                src = P if boundary.src == P and self.shared.link.take(given) else I
            if not boundary.regather:
                on_cp = program.on_cp
                shares = None if over_tp or on_cp is None else shares_of(on_cp, self.mesh)
                return move(x, mesh, src, boundary.dst, shares=shares)
            if torch.compiler.is_compiling():  # the partitioner recomputes a checkpoint's content
                return checkpoint(move, x, mesh, src, boundary.dst, use_reentrant=False)
            whole = move(x, mesh, src, boundary.dst)
            shard, dim = x.detach(), src.split_dim(x.ndim)
            note([whole], lambda: [all_gather(shard, mesh, dim)])
            return whole

        if boundary.argument == "*":

            def each(x: Any) -> Any:
                return moved(x) if isinstance(x, Tensor) and x.is_floating_point() else x

            return tuple(each(x) for x in args), {name: each(x) for name, x in kwargs.items()}

        def once(x: Tensor) -> Tensor:
            found = (y for one, src, dst, y in moves if one is x and (src, dst) == (boundary.src, boundary.dst))
            y = next(found, None)
            if y is None:
                y = moved(x)
                moves.append((x, boundary.src, boundary.dst, y))
            return y

        return self._exchange(boundary.argument or self.parameters[0], once, args, kwargs, program)

    def _readers(self) -> Readers:
        """The modules that read the same moved value as this one: those that the layout check saw to do so."""
        for variant, program in self.programs.items():
            table = self.reads[variant]
            for boundary in program.enter:
                if boundary.once and table is not None:
                    return table.readers_of(program.name, boundary.shared_with)
        return Readers()

    def _mesh(self, boundary: InputMove) -> DeviceMesh:
        return self.mesh if boundary.src.axis is Axis.TP else self.shared.regime.over_cp

    def _exchange(
        self, name: str, moved: Callable[[Tensor], Tensor], args: tuple, kwargs: dict, program: ModuleProgram
    ) -> tuple:
        """Replace a named argument by its moved value. Returns all arguments."""
        position = self.parameters.index(name) if name in self.parameters else len(args)
        value = args[position] if position < len(args) else kwargs.get(name)
        if not isinstance(value, Tensor):
            raise ValueError(
                f"{program.name}: style {program.style or (program.on_cp and program.on_cp.style)} moves the argument {name!r}, "
                f"but it is {'missing' if value is None else type(value).__name__} in this call"
            )
        if position < len(args):
            return (*args[:position], moved(value), *args[position + 1 :]), kwargs
        return args, {**kwargs, name: moved(value)}


class Leave:
    """Forward hook: moves the output, and adds the withheld bias."""

    def __init__(self, module: nn.Module, programs: Programs, shared: Shared, mesh: DeviceMesh):
        self.parameters = arguments_of(module)
        self.programs, self.shared, self.mesh = programs, shared, mesh
        # By variant: the sums that wait for this module, and where its own partial sum waits.
        self.waiting = {variant: shared.waiting.get((variant, pr.name)) for variant, pr in programs.items()}
        self.joins = {variant: shared.waiting.get((variant, pr.joins)) for variant, pr in programs.items()}
        self.withheld = {variant: [p for p in pr.parameters if p.withheld] for variant, pr in programs.items()}
        # The move of a partial sum, where that and the biases are all there is to do.
        self.only_sum = {
            variant: Move(mesh, pr.leave.src, pr.leave.dst, pr.leave.size)
            if pr.leave is not None and _only_sum(pr, pr.leave) and self.waiting[variant] is self.joins[variant] is None
            else None
            for variant, pr in programs.items()
        }

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
        variant, mesh = self.shared.regime.variant, self.mesh
        if (total := self.only_sum[variant]) is not None:  # the rest of this method, for most layers
            in_place = total.in_place is not None and only_output(output)
            output = total(output, only=True) if in_place else on_first(output, total)
            return self._with_biases(output, module, in_place=in_place) if self.withheld[variant] else output
        program, joins = self.programs[variant], self.joins[variant]
        over_cp = program.on_cp.leave if program.on_cp is not None else None
        moves = program.leave is not None or over_cp is not None
        read_shape = self._argument_shape(program, args, kwargs) if moves else None
        if over_cp is not None and when(over_cp.src, over_cp.dst) == "before":
            output = on_first(output, lambda x: self._over_cp(x, over_cp, program, read_shape))
            read_shape = self._own_tokens(read_shape, over_cp)
        if (waiting := self.waiting[variant]) is not None:
            output = on_first(output, waiting.take)
        if (boundary := program.leave) is not None and joins is not None and joins.puts_off():
            output = on_first(output, lambda x: joins.put(x, boundary.dst, mesh))
        elif boundary is not None:
            dst = P if self._stays_partial(program) else boundary.dst
            output = on_first(output, lambda x: _moved(x, read_shape, mesh, boundary.src, dst, size=boundary.size))
            if (link := self.shared.link) is not None and boundary.src == V(link.seq_dim):
                on_first(output, lambda x: link.gathered(x, partial=dst == R))
        output = self._with_biases(output, module)
        if program.tail:
            output = on_first(output, lambda x: move_tail(x, program.tail, mesh))
        if program.outside is not None:
            output = hand_out(output, program.outside, module, self.shared.tokens, mesh)
        if program.on_cp is not None and program.on_cp.outside is not None:
            regime = self.shared.regime
            output = hand_out_over_cp(output, program.on_cp.outside, module, regime.length, regime.over_cp)
        if over_cp is not None and when(over_cp.src, over_cp.dst) == "after" and self._tokens(program, args, kwargs):
            output = on_first(output, lambda x: self._over_cp(x, over_cp, program, read_shape))
        if program.logits is not None and not program.later:
            output = as_dtensor(output, program.logits, mesh)
        return output

    def _with_biases(self, output: Any, module: nn.Module, *, in_place: bool = False) -> Any:
        """Add the withheld biases to the output, in place where nobody else can read it."""
        for parameter in self.withheld[self.shared.regime.variant]:
            owner, leaf = owner_of(module, parameter.name)
            if (bias := owner._parameters[leaf]) is not None:
                added = read(bias, parameter, self.shared.regime)
                output = on_first(output, partial(_plus, added, in_place=in_place))
        return output

    def _over_cp(self, x: Tensor, boundary: OutputMove, program: ModuleProgram, read_shape: Shape) -> Tensor:
        assert program.on_cp is not None
        shares = shares_of(program.on_cp, self.mesh)
        return _moved(x, read_shape, self.shared.regime.over_cp, boundary.src, boundary.dst, shares=shares)

    def _own_tokens(self, shape: Shape, boundary: OutputMove) -> Shape:
        """The shape of the argument, with this rank's tokens of cp if the output has these."""
        if shape is None or boundary.dst != V(SEQUENCE).on(Axis.CP) or len(shape) <= SEQUENCE:
            return shape
        own = shape[SEQUENCE] // self.shared.regime.over_cp.size()
        return torch.Size((*shape[:SEQUENCE], own, *shape[SEQUENCE + 1 :]))

    def _tokens(self, program: ModuleProgram, args: tuple, kwargs: dict) -> bool:
        """Whether the module has read only this rank's tokens. A projection that takes a hollow argument may also get a value with all tokens."""
        if program.on_cp is None or not program.on_cp.takes:
            return True
        return not has_all_tokens(args[0] if args else kwargs[self.parameters[0]], self.shared.regime)

    def _argument_shape(self, program: ModuleProgram, args: tuple, kwargs: dict) -> Shape:
        """The shape of the argument that the module's forward read, if a rule moved it."""
        enter = program.enter or (program.on_cp.enter if program.on_cp is not None else ())
        if not enter or enter[0].argument == "*":
            return None
        name = enter[0].argument or self.parameters[0]
        position = self.parameters.index(name) if name in self.parameters else len(args)
        value = args[position] if position < len(args) else kwargs.get(name)
        return value.shape if isinstance(value, Tensor) else None

    def _stays_partial(self, program: ModuleProgram) -> bool:
        if program.link != "source":
            return False
        assert self.shared.link is not None
        return self.shared.link.keeps_partial(program.name)


def _only_first(program: ModuleProgram, first: str = "") -> bool:
    arguments = [boundary.argument or first for boundary in program.enter]
    return arguments == [first] and not program.slices and program.on_cp is None


def _only_moves(program: ModuleProgram, boundary: InputMove) -> bool:
    over_tp = boundary.src.axis is Axis.TP and program.link != "block_input"
    return over_tp and (boundary.once or not boundary.regather)


def _only_sum(program: ModuleProgram, leave: OutputMove) -> bool:
    if leave.src.kind != "P" or program.enter or program.on_cp is not None or program.link == "source":
        return False
    return not acts(replace(program, leave=None, parameters=()))


def nested(over_tp: Sequence[InputMove], over_cp: Sequence[InputMove]) -> Iterator[InputMove]:
    """The moves of both axes, in order of execution."""
    yield from (one for one in over_cp if when(one.src, one.dst) == "before")
    yield from over_tp
    yield from (one for one in over_cp if when(one.src, one.dst) == "after")


def _share(part: ArgumentSlice, mesh: DeviceMesh, x: Tensor) -> Tensor:
    """The part of an argument that this rank reads."""
    times, heads = part.rows(x.shape, mesh.size())
    if times == 1:
        return move(x, mesh, R, V(part.dim))
    return move(x.unflatten(part.dim, (times, heads)), mesh, R, V(part.dim + 1)).flatten(part.dim, part.dim + 1)


def _moved(x: Tensor, read_shape: Shape, mesh: DeviceMesh, src: Layout, dst: Layout, **of_move: Any) -> Tensor:
    row = in_one_row(read_shape, x.shape, dst)
    if row is None:
        return move(x, mesh, src, dst, **of_move)
    return move(x.unflatten(0, row), mesh, src, dst).flatten(0, 1)


def _plus(bias: Tensor, x: Tensor, *, in_place: bool) -> Tensor:
    return x.add_(bias) if in_place and x.dtype == bias.dtype else x + bias


def acts(program: ModuleProgram) -> bool:
    """Whether `Leave` has anything to do."""
    return bool(
        program.leave
        or program.tail
        or program.outside is not None
        or (program.logits is not None and not program.later)
        or (program.on_cp is not None and (program.on_cp.leave or program.on_cp.outside) is not None)
        or any(p.withheld for p in program.parameters)
    )
