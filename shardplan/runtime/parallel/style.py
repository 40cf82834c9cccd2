"""`ModuleStyle`: a ParallelStyle that carries out a `ModuleProgram` on one module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from shardplan.core.module_program import ModuleProgram, ParameterProgram
from shardplan.torchlib.attributes import divide_attributes, owner_of, set_attributes
from shardplan.torchlib.heads_of_weights import HeadsOfWeights

from .boundaries import Enter, Leave, acts
from .dim_exchange import pieces_of
from .expert_turns import Turn
from .failures import at_module
from .forward import wrap_forward
from .head_exchange import HeadShares
from .means import Means
from .outputs import HiddenStates, hidden_states_of, whole_over_cp
from .own_experts import OwnExperts
from .parameters import LocalParameters, ParametersBelow, distribute
from .reading import Place, Reads, call_with
from .regather import Regather
from .regime import Regime, Shared
from .shared_reads import ReadsOnce
from .shared_rows import neighbours
from .vocabulary_lookup import VocabularyLookup
from .waiting_sums import Collects


class ModuleStyle(ParallelStyle):
    """One module's part of a program; apply it once, to that module.

    Args:
        programs: variant -> program, for the plan's variants. All store the parameters the same way; moves and gradients differ.
        shared: the state shared with the other modules' styles.
        reads: variant -> the parameters of this block and its modules that are read together, with the names of their modules relative
            to the block.
        ready: called before a parameter's values are sent to other ranks; raises where one of them failed.
    """

    def __init__(
        self,
        programs: Mapping[str, ModuleProgram],
        shared: Shared,
        reads: Mapping[str, Sequence[tuple[str, ParameterProgram]]] = MappingProxyType({}),
        ready: Callable[[], None] = lambda: None,
    ):
        super().__init__()
        self.programs = programs
        self.reads = reads
        self.shared = shared
        self.ready = ready

    @property
    def program(self) -> ModuleProgram:
        """The current program."""
        return self.programs[self.shared.regime.variant]

    def __repr__(self) -> str:
        return f"ModuleStyle({self.program.name!r}, {self.program.style})"

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        with at_module(self.program.name):
            self._store(module, device_mesh)
            self._read(module, device_mesh)
            self._hook(module, device_mesh)
        return module

    def _store(self, module: nn.Module, mesh: DeviceMesh) -> None:
        layer = module.get_submodule(self.program.layer)
        divide_attributes(layer, self.program.divide)
        set_attributes(layer, self.program.settings)
        for parameter in self.program.parameters:
            distribute(module, parameter, mesh, self.src_data_rank, self.ready, self.shared.regime.ep)
            for _, copies in parameter.pieces(mesh.size(), 0) if parameter.shared else ():
                if copies > 1:
                    self._neighbours(mesh, copies)

    def _neighbours(self, mesh: DeviceMesh, ranks: int) -> DeviceMesh:
        """The group of this many ranks of the axis that includes this rank; made once."""
        regime = self.shared.regime
        groups = regime.cp_neighbours if mesh is regime.cp else regime.neighbours
        if ranks not in groups:
            groups[ranks] = neighbours(mesh, ranks)
        return groups[ranks]

    def _read(self, module: nn.Module, mesh: DeviceMesh) -> None:
        program, regime = self.program, self.shared.regime
        if program.experts is not None:
            turn = Turn(regime.experts.index(program.name), regime.experts)
            wrap_forward(module, OwnExperts(self.programs, regime, mesh, regime.ep, turn))
        if isinstance(module, nn.MultiheadAttention) and any(p.computed.kind == "V" for p in program.parameters):
            wrap_forward(module, own_heads)
        if program.parameters:
            parameters = {variant: pr.parameters for variant, pr in self.programs.items()}
            wrap_forward(module, LocalParameters(parameters, regime))
        buffers = {variant: pr.buffers for variant, pr in self.programs.items()}
        if any(buffers.values()):
            wrap_forward(module.get_submodule(program.layer), OwnBuffers(buffers, regime, mesh))
        if program.vocabulary is not None:
            wrap_forward(module.get_submodule(program.layer), VocabularyLookup(program.vocabulary, mesh))
        on_cp = {variant: pr.on_cp for variant, pr in self.programs.items()}
        if any(one is not None and one.shares for one in on_cp.values()):
            wrap_forward(module, HeadShares(on_cp, regime, mesh))
        if not program.fused:
            wrap_forward(module, unfused)
        means = program.on_cp.means if program.on_cp is not None else None
        if means is not None:
            over_tp = () if program.means is None else (self._neighbours(mesh, program.means.ranks),)
            wrap_forward(module, Means(means, *over_tp, self._neighbours(regime.over_cp, means.ranks)))
        elif program.means is not None:
            wrap_forward(module, Means(program.means, self._neighbours(mesh, program.means.ranks)))
        shared = [owner_of(module, p.name) for p in program.parameters if p.shared]
        if shared or any(boundary.regather for pr in self.programs.values() for boundary in pr.enter):
            wrap_forward(module, Regather(shared))
        if program.also_reads:
            members = {
                variant: tuple((*owner_of(module.get_submodule(owner), p.name), p) for owner, p in pr.also_reads)
                for variant, pr in self.programs.items()
            }
            wrap_forward(module, ParametersBelow(members, regime))
        waiting = [self.shared.waiting[variant, name] for variant, pr in self.programs.items() for name in pr.collects]
        if waiting:
            wrap_forward(module, Collects(waiting))
        if program.name in self.shared.reads:
            wrap_forward(module, ReadsOnce(self.shared.reads[program.name]))
        if self.reads:
            members = {
                variant: tuple((*owner_of(module.get_submodule(owner), p.name), p) for owner, p in reads)
                for variant, reads in self.reads.items()
            }
            wrap_forward(module, Reads(members, regime))

    def _hook(self, module: nn.Module, mesh: DeviceMesh) -> None:
        programs = self.programs.values()
        if any(pr.link == "scope" for pr in programs):
            self._hook_scope(module, mesh)
        if self.program.name in self.shared.around:
            self._hook_around(module, mesh)
        if self.program.name in self.shared.inner:
            module.register_forward_hook(self._note_states)
        if any(pr.enter or pr.slices or (pr.on_cp and pr.on_cp.enters) for pr in programs):
            module.register_forward_pre_hook(Enter(module, self.programs, self.shared, mesh), with_kwargs=True)
        if any(acts(pr) for pr in programs):
            # Before the module's earlier hooks: these see what a reader sees.
            leave = Leave(module, self.programs, self.shared, mesh)
            module.register_forward_hook(leave, with_kwargs=True, prepend=True)
        if not self.program.name and self.shared.regime.cp is not None:
            self._hook_context(module)
        if self.program.name in self.shared.noted:
            module.register_forward_pre_hook(self.shared.tokens.note, with_kwargs=True)

    def _hook_context(self, module: nn.Module) -> None:
        """Make hidden states that the model returns whole over cp. This comes after the hooks of `_hook_around`, as tp has the finer slices."""
        regime = self.shared.regime

        def begin(module: nn.Module, args: Any) -> None:
            regime.length = None

        def end(module: nn.Module, args: Any, output: Any) -> Any:
            if regime.length is None:
                return output
            return whole_over_cp(output, regime.length, regime.seq_dim, regime.over_cp)

        module.register_forward_pre_hook(begin)
        module.register_forward_hook(end)

    def _hook_scope(self, module: nn.Module, mesh: DeviceMesh) -> None:
        link = self.shared.link
        assert link is not None

        def begin(module: nn.Module, args: Any) -> None:
            link.begin()

        def end(module: nn.Module, args: Any, output: Any) -> Any:
            before = output
            if link.shape is not None:
                states = HiddenStates(link.left, link.seq_dim, mesh, self.shared.regime.length)
                output = states.of_part(output, link.shape, self.program.read)
            link.end(_states_in(output), output is not before)
            return output

        module.register_forward_pre_hook(begin)
        module.register_forward_hook(end, always_call=True)

    def _note_states(self, module: nn.Module, args: Any, output: Any) -> None:
        assert self.shared.link is not None
        self.shared.link.returned(_states_in(output))

    def _hook_around(self, module: nn.Module, mesh: DeviceMesh) -> None:
        link, name = self.shared.link, self.program.name
        assert link is not None

        def begin(module: nn.Module, args: Any) -> None:
            link.enter(name)

        def end(module: nn.Module, args: Any, output: Any) -> Any:
            return HiddenStates(link.leave(name), link.seq_dim, mesh, self.shared.regime.length).of_model(output)

        module.register_forward_pre_hook(begin, prepend=True)  # before the scope's own
        module.register_forward_hook(end, always_call=True)


def _states_in(output: Any) -> list[Tensor | None]:
    return [state for states in hidden_states_of(output).values() for state in states]


def own_heads(forward: Callable[..., Any], module: nn.Module, args: tuple, kwargs: dict) -> Any:
    """Wraps the forward of nn.MultiheadAttention: it computes with the heads that its matrices have."""
    with HeadsOfWeights():
        return forward(*args, **kwargs)


def unfused(forward: Callable[..., Any], module: nn.Module, args: tuple, kwargs: dict) -> Any:
    """Wraps a module's forward: the module sees its `training` as False. If it is true and nothing is cached, transformers' state
    space layers call the kernel (`mamba_inner_fn`, `mamba2_split_conv1d_scan_combined`). The functions of the other path are
    differentiable too. The modules below keep their own `training`."""
    training = module.training
    module.training = False
    try:
        return forward(*args, **kwargs)
    finally:
        module.training = training


class OwnBuffers:
    """Wraps a module's forward: it reads this rank's share of some buffers, which are stored whole.

    Args:
        programs: variant -> how each buffer is read.
        regime: its variant is used.
        mesh: the tp mesh.
    """

    def __init__(self, programs: Mapping[str, Sequence[ParameterProgram]], regime: Regime, mesh: DeviceMesh):
        self.programs, self.regime, self.mesh = programs, regime, mesh

    def __call__(self, forward: Callable[..., Any], module: nn.Module, args: tuple, kwargs: dict) -> Any:
        places: list[Place] = []
        own = []
        for program in self.programs[self.regime.variant]:
            buffer = module._buffers[program.name]
            places.append((module._buffers, program.name, buffer))
            own.append(
                share(buffer, program, self.mesh.size(), self.mesh.get_local_rank()) if buffer is not None else None
            )
        return call_with(forward, places, own, args, kwargs)


def share(whole: Tensor, program: ParameterProgram, ranks: int, rank: int) -> Tensor:
    """A rank's part of a buffer, which may have any shape with the program's dim."""
    dim = program.computed.dim
    assert isinstance(dim, int), program
    return pieces_of(whole, dim, program.ranges(whole.shape[dim], ranks, rank))
