"""From a planned model on the meta device to one with memory, buffers and weights."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardplan.core.first_few import in_a_row
from shardplan.core.tree import block, full_name
from shardplan.model.adapters import adapters_in, unwrapped
from shardplan.model.initialisation import Blank, by_model, initializer_of
from shardplan.model.stage_stubs import is_stub
from shardplan.runtime.apply.applied import applied
from shardplan.runtime.apply.slices import Packing, like
from shardplan.runtime.apply.state import packed_parameters
from shardplan.runtime.pipeline import Pipeline
from shardplan.runtime.pipeline.cut_model import Absent
from shardplan.torchlib.attributes import whole_attributes
from shardplan.torchlib.local_parts import to_local_if_dtensor


def materialize(
    model: nn.Module | Pipeline, device: str | torch.device, *, state_dict: Mapping[str, Tensor] | None = None
) -> nn.Module | Pipeline:
    """Give a planned meta-device model memory, then buffers and random weights, then the given weights, if any.

    The random weights are those of the unsharded model's own initialisation: every rank draws a whole block and keeps
    its slices. So all ranks must have the same random state (`torch.manual_seed`), and the result is the same for every
    mesh. The order matters: modules with buffers outside the state dict (rotary tables, embedding scales) compute them
    in the call that resets their weights, so weights are loaded last.

    Args:
        model: what `apply_plan` returned, on the meta device.
        device: where the memory is: "cuda", "cpu".
        state_dict: whole tensors by name, on every rank, or DTensors (what `model.state_dict()` of any mesh gives).

    Returns:
        The same model.

    Raises:
        ValueError: a parameter is not on the meta device; no initialisation gives a parameter or a buffer a value (of a model with
            `_init_weights`: a buffer that no state dict has; its parameters are NaN then, with a warning, and may be loaded later); no plan
            was applied; the model has adapters, and no `state_dict` is given.
    """
    if isinstance(model, Pipeline):
        sources = [torch] if torch.device(device).type == "cpu" else [torch, torch.get_device_module(device)]
        states = [source.get_rng_state() for source in sources]
        for stage, part in model.by_stage.items():
            for source, state in zip(sources, states, strict=True):  # each stage draws the whole model's numbers
                source.set_rng_state(state)
            _materialize(part, device, model.own_state(part, state_dict), model.absent.get(stage))
    else:
        _materialize(model, device, state_dict)
    return model


def _materialize(
    model: nn.Module,
    device: str | torch.device,
    state_dict: Mapping[str, Tensor] | None,
    absent: Absent | None = None,
) -> None:
    record = applied(model)
    filled = [name for name, p in model.named_parameters() if not p.is_meta]
    if filled:
        raise ValueError(f"{filled[0]} is not on the meta device: materialize would overwrite it")
    inner = unwrapped(model)
    if state_dict is None and next(adapters_in(inner), None) is not None:
        raise ValueError("the model has adapters, and their initial values are not known: pass a state_dict with them")
    packed = packed_parameters(record.program) if record.tp > 1 else {}
    model.to_empty(device=device)
    with torch.no_grad():
        left = initialize(inner, packed, torch.device(device), absent=absent if state_dict is None else None)
    later = inner.state_dict() if state_dict is not None or hasattr(inner, "_init_weights") else ()
    refuse_blank(inner, left, later)
    if state_dict is None and left:
        warnings.warn(
            f"{in_a_row(left, 5)}: no initialisation gives a value, NaN until weights are loaded", stacklevel=3
        )
    if state_dict is not None:
        model.load_state_dict(state_dict)


def initialize(
    model: nn.Module,
    packed: Mapping[str, Packing],
    device: torch.device,
    *,
    drawn: Collection[str] | None = None,
    absent: Absent | None = None,
) -> list[str]:
    """Initialise block by block, in the order of `nn.Module.apply`, children first.

    Args:
        absent: the parts of other pipeline stages. They are drawn too, but not kept, so that a stage gets the same values as
            in the whole model. None: they are not drawn.
        drawn: the names of the parameters that get values; None: all. The others keep their values: meta tensors replace
            them meanwhile, so that initialisation computes only buffers.

    Returns:
        The names of parameters and buffers that no initialisation gave a value.
    """
    blank, left, seen = Blank(*model.buffers()), set[str](), set[int]()
    names = {id(module): name for name, module in model.named_modules()}
    tied: dict[str, Tensor] = {}

    def act(module: nn.Module, initializer: nn.Module) -> None:
        if not is_stub(module):
            by_model(module, initializer)
        elif absent is not None and names[id(module)] in absent.modules:
            _draw(absent, names[id(module)], device, initializer, tied)

    def visit(module: nn.Module, outer: nn.Module) -> None:
        name = names[id(module)]
        whole = bool(name) and block(name) == name
        for child in () if whole else module.children():
            visit(child, initializer_of(module, outer))
        with _whole_parameters(module, name, packed, device, seen, drawn, blank, left, recurse=whole):
            blank.initialize(module, outer, ends=is_stub if whole else lambda _: True, act=act)

    with whole_attributes(model):  # initialisations compute with them (A_log: one number a head)
        visit(model, model)
    for name, value in tied.items():
        _keep(value, model.get_parameter(name), packed.get(name))
    # A module around may have computed what a block left.
    own = {name: model.get_parameter(name) for name in left} | dict(model.named_buffers())
    return [name for name, tensor in own.items() if blank.has(to_local_if_dtensor(tensor))]


def refuse_blank(model: nn.Module, names: Collection[str], loaded: Collection[str]) -> None:
    """
    Args:
        names: what no initialisation gave a value.
        loaded: the names of what gets other values.

    Raises:
        ValueError: something else has none.
    """
    classes = {
        name: type(model.get_submodule(name.rpartition(".")[0])).__name__ for name in names if name not in loaded
    }
    if classes:
        raise ValueError(
            f"{in_a_row((f'{name} of {kind}' for name, kind in classes.items()), 5)}: no value is known. Neither `_init_weights(module)` "
            "of a model around nor the module's own `reset_parameters()` computes it: add one, so that a meta-device model can be "
            "initialised, or build the model with memory"
        )


def _draw(absent: Absent, name: str, device: torch.device, initializer: nn.Module, tied: dict[str, Tensor]) -> None:
    """Draw the parameters of another stage's module as the whole model does; keep values only for a tied parameter of this stage."""
    module = copy.deepcopy(absent.modules[name]).to_empty(device=device)
    Blank(*module.parameters(), *module.buffers()).initialize(module, initializer)
    for leaf, parameter in module.named_parameters(remove_duplicate=False):
        own = absent.tied.get(full_name(name, leaf))
        if own is not None:
            tied.setdefault(own, parameter.detach())


@contextmanager
def _whole_parameters(
    module: nn.Module,
    name: str,
    packed: Mapping[str, Packing],
    device: torch.device,
    seen: set[int],
    drawn: Collection[str] | None,
    blank: Blank,
    left: set[str],
    *,
    recurse: bool,
) -> Iterator[None]:
    """Replace parameters by plain whole tensors in this context. At its end each gets its slice of them, and `left` the names
    of those without a value. A parameter that is not drawn is replaced by a meta tensor, and stays as it was.

    A tied parameter is drawn under each of its names, as in the unsharded model before it is tied. The values of the first
    name stay.
    """
    owners = list(module.named_modules(prefix=name, remove_duplicate=False)) if recurse else [(name, module)]
    exchanged = []
    for owner_name, owner in owners:
        for leaf, parameter in owner._parameters.items():
            if parameter is not None:
                name = full_name(owner_name, leaf)
                wanted = drawn is None or name in drawn
                whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=device if wanted else "meta")
                whole = nn.Parameter(blank.fill(whole), parameter.requires_grad)
                exchanged.append((owner, leaf, parameter, whole, name, wanted))
    for owner, leaf, _, whole, _, _ in exchanged:
        owner._parameters[leaf] = whole
    try:
        yield
    finally:
        for owner, leaf, parameter, *_ in exchanged:
            owner._parameters[leaf] = parameter
    for _, _, parameter, whole, name, wanted in exchanged:
        if wanted and id(parameter) not in seen:
            seen.add(id(parameter))
            left.update([name] if blank.has(whole) else ())
            _keep(whole.detach(), parameter, packed.get(name))


def _keep(whole: Tensor, parameter: Tensor, packing: Packing | None) -> None:
    if isinstance(parameter, DTensor):
        parameter.to_local().copy_(like(whole, parameter, packing).to_local())
    else:
        parameter.copy_(whole)
