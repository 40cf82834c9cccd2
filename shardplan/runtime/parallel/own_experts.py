"""A module of experts; each rank has some whole experts. The module's own forward runs on the tokens routed to these."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from shardplan.core.layout import I, V
from shardplan.core.module_program import ModuleProgram
from shardplan.torchlib.attributes import owner_of

from .expert_calls import expert_call
from .expert_exchange import BACKENDS, ExchangeBackend
from .expert_routes import Ranks, columns, every_pair, once_a_rank, own_part
from .expert_rows import OwnRows
from .expert_turns import Turn
from .read_once import once
from .reading import Place, call_with
from .regime import Regime
from .tensor_moves import move, sum_gradients

_ROUTES = {"pairs": every_pair, "once": once_a_rank}


class OwnExperts:
    """Wraps the forward of a module of experts, inside of the wrapper that reads its parameters as local tensors.

    Without an exchange, every tp rank has all tokens, and the result is a partial sum over tp. With an exchange, tokens go to the
    ranks of the ep mesh that have their experts, and the results come back: each rank has its own tokens, and the exchange sums its
    experts' gradients over ep. Tokens that are the same on all tp ranks (`sliced`) are first cut into ceil-chunks, which may be
    empty, and gathered at the end; then the gradients of parameters below the module, which all experts share, are summed over tp.

    Numbers of rows depend on data: torch.compile breaks its graph here, and does not compile the module's forward.

    Args:
        programs: variant -> program; each has experts.
        regime: its variant is used.
        tp: the tp mesh; None: one rank.
        ep: the mesh of the ranks that have the experts, if there is an exchange.
        turn: its position among its model's modules of experts; None: it is the only one.
        backend: exchanges rows.

    Attributes:
        calls: how often it took part in an exchange, with rows or absent.
    """

    uncompiled = "how many rows an expert has depends on data"

    def __init__(
        self,
        programs: Mapping[str, ModuleProgram],
        regime: Regime,
        tp: DeviceMesh | None,
        ep: DeviceMesh | None,
        turn: Turn | None = None,
        backend: ExchangeBackend = BACKENDS["torch"],
    ):
        for program in programs.values():
            experts = program.experts
            assert experts is not None, program
            mesh = tp if experts.exchange is None else ep
            assert mesh is not None or experts.exchange is None, "an exchange without an ep mesh"
            assert experts.count % (mesh.size() if mesh is not None else 1) == 0, experts
        assert backend.available(), backend.name
        self.programs, self.regime, self.tp, self.ep, self.backend = programs, regime, tp, ep, backend
        self.turn = turn or Turn(0, (next(iter(programs.values())).name,))
        self.calls = 0

    def __call__(
        self, forward: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor:
        """
        Raises:
            ValueError: the call has no tokens, ids and weights, or ids without an expert; or the result's shape differs from
                the tokens'.
            RuntimeError: another rank of the exchange does not call the module.
        """
        program = self.programs[self.regime.variant]
        experts = program.experts
        assert experts is not None, program.name
        call = expert_call(program.name, args, kwargs)
        mesh = self.tp if experts.exchange is None else self.ep
        n, own = (mesh.size(), mesh.get_local_rank()) if mesh is not None else (1, 0)
        run = OwnRows(forward, module, call, experts.count, experts.count // n)
        ids = once(call.ids.long)  # the sizes that a checkpoint has kept are of these
        tokens, weights, number = call.tokens, call.weights, call.tokens.shape[0]
        if experts.exchange is None:
            return _shaped(own_part(run, own, tokens, ids, weights), call.shape)

        assert mesh is not None
        tp = self.tp if experts.sliced and self.tp is not None and self.tp.size() > 1 else None
        self.calls += 1
        ranks = Ranks(mesh.get_group(), own, self.backend, self.turn)
        if tp is None:
            return _shaped(_ROUTES[experts.exchange](run, ranks, tokens, ids, weights), call.shape)
        shared = self._summed_after(
            tp, module, program
        )  # before the moves, so that its sum comes last in every rank's backward
        tokens, ids, weights = (move(x, tp, I, V(0), size=number) for x in (tokens, ids, weights))
        result = call_with(_ROUTES[experts.exchange], *shared, (run, ranks, tokens, ids, weights), {})
        return _shaped(move(result, tp, V(0), I, size=number), call.shape)

    def say_absent(self, module: nn.Module) -> None:
        """Tell the other ranks that this one does not call the module, if the current program exchanges tokens.

        Raises:
            RuntimeError: another rank calls it.
        """
        experts = self.programs[self.regime.variant].experts
        assert experts is not None
        if experts.exchange is None or self.ep is None or self.ep.size() == 1:
            return
        self.calls += 1
        if isinstance(module, FSDPModule):  # a rank that calls it waits for its parameters first
            module.unshard()
        ranks = Ranks(self.ep.get_group(), self.ep.get_local_rank(), self.backend, self.turn)
        device = next(module.parameters()).device
        ranks.say_absent(columns(experts.exchange, experts.count // self.ep.size()), device)
        if isinstance(module, FSDPModule):
            module.reshard()

    def _summed_after(
        self, tp: DeviceMesh, module: nn.Module, program: ModuleProgram
    ) -> tuple[list[Place], list[Tensor | None]]:
        """The places of the parameters that all experts share, and these parameters, whose gradients are partial sums."""
        owners = (owner_of(module.get_submodule(owner), parameter.name) for owner, parameter in program.also_reads)
        places: list[Place] = [(owner._parameters, name, owner._parameters[name]) for owner, name in owners]
        trained = [x for *_, x in places if x is not None and x.requires_grad]
        sums = iter(sum_gradients(tp, trained, self.regime.reduce_dtype) if trained else ())
        return places, [next(sums) if x is not None and x.requires_grad else x for *_, x in places]


def _shaped(result: Tensor, shape: torch.Size) -> Tensor:
    """Give a result a shape without a view: FSDP2 puts a hook on its unit's output; an in-place change of a view would drop it."""
    if result.shape == shape and not result._is_view():
        return result
    return result.reshape(shape).clone()
