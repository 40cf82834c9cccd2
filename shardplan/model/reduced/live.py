"""What a live model has in addition to its class and configuration: forwards set on instances, hooks, replaced classes, changed
attributes, added modules and parameters.

It is found by comparing it with a model on the meta device that is built from class and configuration alone.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from shardplan.model.adapters import copies_of, is_wrapper, layer_of
from shardplan.model.build_tree import kind_of
from shardplan.model.float8 import plain_attributes, plain_class
from shardplan.model.rebinding import NotBound

from .fields import role

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
FLAGS = (  # of hooks, under the same numbers
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
    "_is_full_backward_hook",
)
# No forward reads these: for checkpoints, for bookkeeping, for adapters (which are made anew), and those that are compared separately.
IGNORED = frozenset(
    "training config generation_config name_or_path warnings_issued peft_config _hf_peft_config_loaded hf_device_map "
    "_is_hf_initialized is_quantized quantization_method hf_quantizer _parameters _buffers _modules "
    "_non_persistent_buffers_set _state_dict_hooks _state_dict_pre_hooks _load_state_dict_pre_hooks "
    "_load_state_dict_post_hooks".split()
)
NUMBERS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
DEEPEST = 5

Difference = tuple[str, Hashable]  # attribute, its value


@dataclass(frozen=True, eq=False)
class Live:
    """A model, and the plain model that its class and configuration build.

    Args:
        model: the live model.
        plain: the plain one, on the meta device.
        differences: module name -> its differences; modules without a difference are left out.
    """

    model: nn.Module
    plain: nn.Module
    differences: Mapping[str, tuple[Difference, ...]]

    def of_layer(self, lists: tuple[str, ...], index: int) -> Hashable:
        """All differences inside one layer."""
        tops = tuple(f"{name}.{index}" for name in lists)
        return frozenset(
            (name.removeprefix(top), found)
            for name, found in self.differences.items()
            for top in tops
            if name == top or name.startswith(f"{top}.")
        )


def live_of(model: nn.Module, plain: nn.Module) -> Live | None:
    """The differences; None where there are none.

    Raises:
        NotBound: a difference that no reduced model can have.
    """
    found: dict[str, tuple[Difference, ...]] = {}
    places: dict[int, str] = {}
    twice = {id(m) for m in plain.modules()} if _shares(plain) else set()
    for name, own, other in pairs(model, plain):
        first = places.setdefault(id(own), name)
        if first != name and id(other) not in twice:
            raise NotBound(f"{name}: is the same module object as {first}, but its class builds two modules")
        _adapted_alone(name, model)
        if differences := tuple(_differences(own, other)):
            found[name] = differences
    return Live(model, plain, found) if found else None


def pairs(model: nn.Module, other: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """The modules that have the same name in two models. For a layer in an adapter's wrapper, it is the layer itself."""
    model, other = inside(model), inside(other)
    yield name, model, other
    for leaf, child in model._modules.items():
        twin = other._modules.get(leaf)
        if child is not None and twin is not None:
            yield from pairs(child, twin, f"{name}.{leaf}" if name else leaf)


def inside(module: nn.Module) -> nn.Module:
    """The layer in an adapter's wrapper; the module itself without one."""
    if is_wrapper(module):
        return layer_of(module)[1]
    return inside(module.get_submodule("original_module")) if copies_of(module) else module


def _shares(model: nn.Module) -> bool:
    return sum(1 for _ in model.named_modules(remove_duplicate=False)) > sum(1 for _ in model.modules())


def _adapted_alone(name: str, model: nn.Module) -> None:
    outer = model
    for part in name.split(".") if name else ():
        outer = inside(outer).get_submodule(part)
    if inside(outer) is not outer and ("forward" in vars(outer) or any(vars(outer).get(hooks) for hooks in HOOKS)):
        raise NotBound(f"{name}: has hooks or its own forward around its adapter")


def _differences(own: nn.Module, plain: nn.Module) -> Iterator[Difference]:
    if plain_class(own) is not plain_class(plain):
        yield "class", f"{type(own).__module__}.{type(own).__qualname__}"
    configs = [one for one in (getattr(own, "config", None), getattr(plain, "config", None)) if hasattr(one, "to_dict")]
    if len(configs) == 2 and not same_config(*configs):
        raise NotBound(f"{type(own).__name__} has a configuration that is not the model's")
    here = plain_attributes(own)
    for key in changed_attributes(own, plain):
        yield key, signature(_values(key, here[key])) if key in here else "deleted"
    for kind in ("_parameters", "_buffers", "_modules"):
        mine, others = ({n: v for n, v in vars(m)[kind].items() if v is not None} for m in (own, plain))
        for key in (*mine, *(key for key in others if key not in mine)):
            if key not in mine or key not in others:
                yield f"{kind}.{key}", type(mine[key]).__name__ if key in mine else "deleted"
            elif isinstance(mine[key], Tensor) and mine[key].shape != others[key].shape:
                yield f"{kind}.{key}", tuple(mine[key].shape)


def changed_attributes(own: nn.Module, plain: nn.Module) -> Iterator[str]:
    """The attributes that a live module has otherwise than the plain one, or that one of them lacks; without those that no forward reads, and
    without dropout's, which every reduced model turns off."""
    here, there = plain_attributes(own), plain_attributes(plain)
    for key in dict.fromkeys((*here, *there)):
        if key in IGNORED or key in FLAGS or role(key) == "dropout" or (key == "p" and kind_of(own) == "dropout"):
            continue
        if key not in here or key not in there or not same(key, here[key], there[key]):
            yield key


def same_config(one: Any, other: Any) -> bool:
    if one is other or type(one) is not type(other) or not hasattr(one, "to_dict"):
        return type(one) is type(other)
    chosen = ("dtype", "torch_dtype", "use_cache", "architectures", "transformers_version")  # as a model is built

    def read(config: Any) -> dict[str, Any]:
        return {k: v for k, v in vars(config).items() if not k.startswith("_") and k not in chosen}

    here, there = read(one), read(other)
    return here.keys() == there.keys() and all(
        same_config(here[k], there[k]) if hasattr(here[k], "to_dict") else here[k] == there[k] for k in here
    )


def _values(key: str, value: Any) -> Any:
    """The value; for hooks, without the numbers under which they were registered."""
    return list(value.values()) if key in HOOKS else value


def same(key: str, one: Any, other: Any) -> bool:
    """Whether two attributes are the same, as far as code can see."""
    if one is other:
        return True
    if type(one) is type(other) and isinstance(one, NUMBERS):
        return one == other or one != one
    if isinstance(one, dict) and isinstance(other, dict) and not one and not other:
        return True
    return signature(_values(key, one)) == signature(_values(key, other))


def signature(value: Any, depth: int = 0) -> Hashable:
    """A value that is equal for values with the same behaviour."""
    if isinstance(value, (float, complex)):
        return repr(value)
    if isinstance(value, (*NUMBERS, type)) or depth > DEEPEST:
        return value if isinstance(value, (*NUMBERS, type)) else type(value)
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != type(cell)()]
        parts = (*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        return "function", value.__code__, tuple(signature(part, depth + 1) for part in parts)
    if isinstance(value, MethodType):
        return "method", signature(value.__func__, depth + 1)
    if isinstance(value, partial):
        parts = (value.func, *value.args, *value.keywords.values())
        return "partial", tuple(signature(part, depth + 1) for part in parts)
    if isinstance(value, dict):
        return "dict", tuple((str(key), signature(item, depth + 1)) for key, item in value.items())
    if isinstance(value, (set, frozenset)):
        return "set", frozenset(signature(item, depth + 1) for item in value)
    if isinstance(value, (list, tuple)):
        return "list", tuple(signature(item, depth + 1) for item in value)
    if isinstance(value, Tensor):
        return "tensor", tuple(value.shape), value.dtype
    if isinstance(value, nn.Module) or hasattr(value, "to_dict"):
        return "object", type(value)
    attributes = getattr(value, "__dict__", {})
    return type(value), tuple((name, signature(item, depth + 1)) for name, item in sorted(attributes.items()))
