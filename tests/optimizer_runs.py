"""Optimizers of whole matrices on planned models, and torch's own on the unsharded one next to them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from small_models import batch, small_model
from torch import Tensor, nn
from torch.nn import functional

import shardplan
from shardplan import full_parameters
from shardplan.compiler.lower.program import Program
from shardplan.core.mesh import MeshSizes
from shardplan.optimizers import Muon
from shardplan.proof.threads import on_threads
from shardplan.runtime.apply.model_parts import parts_of
from shardplan.runtime.apply.phases import apply_program
from shardplan.runtime.apply.plan_mesh import read_mesh
from shardplan.runtime.apply.slices import like
from shardplan.runtime.apply.state import packed_parameters

# Sections `separate_matrices`, and the lengths and the dim of the matrices in each parameter [rows, columns], by the end of its name.
APART: Mapping[str, tuple[dict[str, list[str]], dict[str, tuple[Any, int]]]] = {
    "phi3": (
        {"parts": ["**.qkv_proj", "**.gate_up_proj"], "heads": ["**.o_proj"]},
        {"qkv_proj.weight": ([64, 32, 32], 0), "gate_up_proj.weight": ([96, 96], 0), "o_proj.weight": (8, 1)},
    ),
    "qwen3_moe": (
        {"parts": ["**.experts.gate_up_proj"], "heads": ["**.{q,k}_proj"]},
        {"gate_up_proj": ([32, 32], 0), "q_proj.weight": (8, 0), "k_proj.weight": (8, 0)},
    ),
    "gpt2": ({"parts": ["**.c_attn"]}, {"c_attn.weight": (64, 1)}),
}
RATES = {"lr": 0.02, "weight_decay": 0.1}
ADAMW = {"lr": 1e-3, "eps": 1e-3}


@dataclass(frozen=True)
class Run:
    """A model on a mesh.

    Args:
        sizes: of the mesh, by the names of `build_mesh`.
        options: of `apply_plan`.
        settings: of the model's configuration.
    """

    model: str
    sizes: Mapping[str, int]
    options: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return MeshSizes(**self.sizes).world_size

    @property
    def shares(self) -> int:
        """Of the batch."""
        return self.sizes.get("dp_shard", 1) * self.sizes.get("dp_replicate", 1)

    def build(self) -> nn.Module:
        return small_model(self.model, **self.settings)

    def compiled(self) -> Program:
        """For `planned` on threads, which cannot compile at the same time."""
        return shardplan.compile_plan(self.build(), dict(self.sizes), "auto", **self.options)

    def planned(self, program: Program | None = None, model: nn.Module | None = None) -> Any:
        mesh = shardplan.build_mesh(device_type="cpu", **self.sizes)
        if program is None:
            options = dict(self.options)
            if "pp" in self.sizes:
                options["pipeline"] = shardplan.PipelineOptions("1f1b", 2)
            return shardplan.apply_plan(self.build(), mesh, "auto", **options, prove=False)
        assert model is not None
        apply_program(model, read_mesh(mesh), program, src_data_rank=None)
        return model


def muon(model: Any, **options: Any) -> Muon:
    return Muon(model, rest=lambda groups: torch.optim.AdamW(groups, **ADAMW), **{**RATES, **options})


def newton_schulz(matrix: Tensor) -> Tensor:
    """What torch.optim.Muon does, in float32: in its bfloat16, gradients that differ by rounding have updates that differ by percents."""
    options = inspect.signature(torch.optim.Muon.__init__).parameters
    a, b, c = options["ns_coefficients"].default
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.norm().clamp(min=options["eps"].default)
    for _ in range(options["ns_steps"].default):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def soap(gradient: Tensor, state: dict[str, Tensor]) -> Tensor:
    """SOAP (arXiv 2409.11321, algorithm 3): Adam in the eigenbasis of Shampoo's preconditioners, which every second step turns on by one power iteration.
    As in the published code, the first step only begins them."""
    rate, eps = 0.95, 1e-8
    sides = {"left": gradient @ gradient.T, "right": gradient.T @ gradient}
    if not state:
        for side, gram in sides.items():
            state[side] = (1 - rate) * gram
            state[f"{side} basis"] = torch.linalg.eigh(gram).eigenvectors
        state |= {"step": torch.zeros((), dtype=torch.int64), "mean": torch.zeros_like(gradient)}
        state["square"] = torch.zeros_like(gradient)
        return torch.zeros_like(gradient)
    left, right = state["left basis"], state["right basis"]
    state["step"] += 1
    state["mean"].lerp_(gradient, 1 - rate)
    state["square"].lerp_((left.T @ gradient @ right).square(), 1 - rate)
    correction = 1 - rate ** state["step"].double()
    turned = (left.T @ state["mean"] @ right / correction) / ((state["square"] / correction).sqrt() + eps)
    update = left @ turned @ right.T
    for side, gram in sides.items():
        state[side].lerp_(gram, 1 - rate)
        if state["step"] % 2 == 0:
            state[f"{side} basis"] = torch.linalg.qr(state[side] @ state[f"{side} basis"]).Q
    return update.to(gradient.dtype)


SOAP = {"whole_matrix": soap, "stateful": True, "momentum": 0.0, "nesterov": False}


def drawn(name: str, value: Tensor, step: int) -> Tensor:
    """A gradient that is the same on all ranks."""
    seed = sum(map(ord, name)) * 7919 + len(name) * 31 + step
    return torch.randn(value.shape, generator=torch.Generator().manual_seed(seed)).to(value.dtype)


def set_gradients(model: Any, step: int) -> None:
    """The same gradients as another run of the same names, as each parameter is stored."""
    whole = {name: drawn(name, value, step) for name, value in full_parameters(model)}
    for part in parts_of(model):
        record = shardplan.applied(part)
        packed = packed_parameters(record.program) if record.tp > 1 else {}
        for name, parameter in part.named_parameters():
            if parameter.requires_grad:
                given = whole[name]
                parameter.grad = (
                    like(given, parameter, packed.get(name)) if hasattr(parameter, "placements") else given.clone()
                )


def in_matrices(run: Run, name: str, value: Tensor) -> list[Tensor]:
    """The matrices in a parameter of the unsharded model, as views: each of a stack, and each that the run's plan takes apart."""
    found = list(value) if value.ndim == 3 else [value]
    if "separate_matrices" not in run.options:
        return found
    ends = (split for end, split in APART[run.model][1].items() if name.endswith(end))
    split = next(ends, None)
    return found if split is None else [part for one in found for part in one.split(*split)]


def unsharded_steps(run: Run, chosen: set[str], steps: int) -> dict[str, Tensor]:
    """torch.optim.Muon and AdamW of the unsharded model, where each matrix is a parameter of its own."""
    model = run.build()
    named = dict(model.named_parameters())
    own: dict[str, list[tuple[Tensor, nn.Parameter]]] = {}
    for name in chosen:
        own[name] = [(piece, nn.Parameter(piece.clone())) for piece in in_matrices(run, name, named[name].data)]
    matrices = torch.optim.Muon([p for rows in own.values() for _, p in rows], **RATES)
    rest = torch.optim.AdamW([p for name, p in named.items() if name not in chosen], **ADAMW)
    for step in range(steps):
        for name, parameter in named.items():
            gradient = drawn(name, parameter, step)
            if name not in chosen:
                parameter.grad = gradient
                continue
            for (_, p), g in zip(own[name], in_matrices(run, name, gradient), strict=True):
                p.grad = g.clone()
        matrices.step()
        rest.step()
    with torch.no_grad():
        for rows in own.values():
            for piece, p in rows:
                piece.copy_(p)
    return {name: p.detach() for name, p in named.items()}


def given_gradients(model: Any, run: Run, steps: int = 2) -> tuple[set[str], dict[str, Tensor]]:
    """Steps of a planned model with drawn gradients: the names of the matrices, and all values, as far as this rank has them."""
    optimizer = muon(model)
    for step in range(steps):
        set_gradients(model, step)
        optimizer.step()
    return {one.name for one in optimizer.stacks}, {name: value.clone() for name, value in full_parameters(model)}


def same_given_gradients(run: Run) -> None:
    """On threads: equal to the last bit."""
    program, models = run.compiled(), [run.build() for _ in range(run.ranks)]
    found = on_threads(run.ranks, lambda rank: given_gradients(run.planned(program, models[rank]), run))
    same(run, found)


def same(run: Run, found: list[tuple[set[str], dict[str, Tensor]]]) -> None:
    chosen = set().union(*(names for names, _ in found))
    assert len(chosen) >= 4, chosen
    expected = unsharded_steps(run, chosen, 2)
    before = dict(run.build().named_parameters())
    for rank, (_, values) in enumerate(found):
        assert values.keys() >= expected.keys()
        for name, value in expected.items():
            assert not torch.equal(value, before[name]), name
            assert torch.equal(values[name], value), (run, rank, name, (values[name] - value).abs().max())


@contextmanager
def sums_of_pieces(pieces: int) -> Iterator[None]:
    """Linear layers whose output and gradients are sums of `pieces` products each, as ranks of tp add them up: another order of rounding."""
    whole = functional.linear

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        rows = []
        for block in weight.chunk(pieces, 0):
            columns = block.chunk(pieces, 1)
            parts = x.split([part.shape[1] for part in columns], -1)
            rows.append(sum(whole(part, column) for part, column in zip(parts, columns, strict=True)))
        found = torch.cat(rows, -1)
        return found if bias is None else found + bias

    functional.linear = linear
    try:
        yield
    finally:
        functional.linear = whole


def trained(
    model: Any, optimizer: Any, run: Run, share: int, shares: int, pipeline: bool = False, apart: bool = False
) -> dict[str, Tensor]:
    """Three real steps. A model without a plan has all shares of the batch.

    Args:
        apart: one share after the other.
    """
    for step in range(3):
        own = [share] if shares else list(range(run.shares))
        for some in [[one] for one in own] if apart else [own]:
            ids = torch.cat([batch(step, one) for one in some])
            if pipeline:
                model.step(input_ids=ids, labels=ids)
            else:
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
                (loss * len(some) / len(own)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {
        name: value.detach().clone() for name, value in (full_parameters(model) if shares else model.named_parameters())
    }
