"""Building the ModuleTree of an nn.Module."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, cast

from torch import nn

from shardplan.core.by_key import by_key
from shardplan.core.tree import ModuleInfo, ModuleKind, ModuleTree, ParameterInfo, ancestors, full_name

from .adapters import adapters_in, copies_of, layer_of, part_of, unwrapped
from .config_numbers import Number, config_fields, config_numbers, own_numbers
from .float8 import is_float8, plain_class
from .forward_code import only_arguments
from .module_numbers import module_numbers
from .ties import tied_groups
from .training_code import training_reads

KINDS: tuple[tuple[tuple[type[nn.Module], ...], ModuleKind], ...] = (
    ((nn.Linear,), "linear"),
    ((nn.Embedding,), "embedding"),
    (
        (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout),
        "dropout",
    ),
    ((nn.ModuleList, nn.ModuleDict, nn.Sequential), "list"),
    ((nn.ParameterList, nn.ParameterDict), "other"),
)


def tree_of(module: nn.Module) -> ModuleTree:
    """The ModuleTree of a model on any device.

    A module object with several names appears under the first of its names, as in
    `named_modules()`; a Parameter with several names appears under each, and these names are one
    group of `tied`. Where peft wraps the model, the tree is that of the model inside.

    Raises:
        PlanError: SP516: the wrapper has parameters of its own.
    """
    module = unwrapped(module)
    wrappers = dict(adapters_in(module))
    inside = frozenset(
        name for name, _ in module.named_modules() if any(above in wrappers for above in ancestors(name))
    )
    known: dict[int, Mapping[str, Number]] = {}  # by configuration; most modules share one
    modules: dict[str, ModuleInfo] = {}
    for name, child in module.named_modules():
        own = None if is_float8(child) else getattr(child, "config", None)
        if id(own) not in known:
            known[id(own)] = own_numbers(own)
        modules[name] = _info(name, child, known[id(own)], wrapper=name in wrappers, inside=name in inside)
    copies = {
        name: tuple(full_name(name, copy) for copy in copies)
        for name, child in module.named_modules()
        if (copies := copies_of(child))
    }
    names = dict.fromkeys(full_name(name, p.name) for name, info in modules.items() for p in info.parameters)
    config = getattr(module, "config", None)
    model_type = getattr(config, "model_type", None)
    plain = ModuleTree((), None, modules, inside=inside, copies=copies)
    later = tuple(full_name(copy, "") for own in copies.values() for copy in own[1:])  # never tied by declaration
    declared = {name: name if name.startswith(later) else plain.address(name) for name in names}
    return ModuleTree(
        class_names=class_names(type(module)),
        model_type=model_type if isinstance(model_type, str) and model_type else None,
        modules=modules,
        numbers=config_numbers(config),
        fields=config_fields(config),
        tied=tied_groups(module, declared),
        base_prefix=base_prefix(module),
        inside=inside,
        copies=copies,
        trains=module.training,
        shared=shared_modules(module),
    )


def shared_modules(module: nn.Module) -> tuple[tuple[str, ...], ...]:
    """The groups of names of one module object with parameters; names of the modules inside it are left out."""
    names = by_key((id(child), name) for name, child in module.named_modules(remove_duplicate=False))
    groups = {tuple(group) for group in names.values() if len(group) > 1}
    inside = {name for group in groups for name in group}
    return tuple(
        group
        for group in sorted(groups)
        if not inside & {above for name in group for above in ancestors(name)}
        and next(module.get_submodule(group[0]).parameters(), None) is not None
    )


def class_names(cls: type) -> tuple[str, ...]:
    """The class and its bases, nearest first, without the bases of torch and Python."""
    foreign = ("torch", "builtins", "abc", "typing")
    bases = (c.__name__ for c in cls.__mro__[1:] if c.__module__.partition(".")[0] not in foreign)
    return (cls.__name__, *bases)


def kind_of(module: nn.Module) -> ModuleKind:
    """The kind by structure: see `ModuleKind`."""
    for classes, kind in KINDS:
        if isinstance(module, classes):
            return kind
    # Only a process that has imported transformers can have one of its modules.
    utils: Any = sys.modules.get("transformers.pytorch_utils")
    if utils is not None and isinstance(module, utils.Conv1D):
        return "conv1d"
    if isinstance(module, nn.Conv1d) and module.groups == module.in_channels == module.out_channels:
        return "depthwise"
    own = list(module.parameters(recurse=False))
    if own and next(module.children(), None) is None and all(p.ndim <= 1 for p in own):
        return "norm"
    return "other"


def base_prefix(module: nn.Module) -> str:
    """`base_model_prefix` of a transformers model that is itself the base model of classes with a head, else
    ""."""
    prefix = getattr(type(module), "base_model_prefix", "")
    if not isinstance(prefix, str) or not prefix or hasattr(module, prefix):
        return ""
    # Some classes with a head store their base model under a name other than their prefix.
    get_head = getattr(module, "get_output_embeddings", None)
    return "" if get_head is not None and get_head() is not None else prefix


def _info(name: str, module: nn.Module, config: Mapping[str, Number], *, wrapper: bool, inside: bool) -> ModuleInfo:
    path, layer = layer_of(module) if wrapper else ("", module)
    kind, cls = kind_of(layer), cast(type, type(layer))
    parameters = () if inside else module.named_parameters(recurse=wrapper, remove_duplicate=False)
    return ModuleInfo(
        name=name,
        class_name=plain_class(layer).__name__,
        kind=kind,
        parameters=tuple(
            ParameterInfo(
                own,
                tuple(p.shape),
                str(p.dtype).removeprefix("torch."),
                p.requires_grad,
                part_of(own, module, kind, p, layer) if wrapper and not own.startswith(f"{path}.") else None,
                has_hooks(p),
            )
            for own, p in parameters
        ),
        numbers=module_numbers(layer),
        config=config,
        layer=path,
        training_reads=training_reads(cls),
        buffers={leaf: tuple(buffer.shape) for leaf, buffer in layer.named_buffers(recurse=False)},
        arguments=only_arguments(layer),
    )


def has_hooks(parameter: nn.Parameter) -> bool:
    """Whether `register_hook` or `register_post_accumulate_grad_hook` was called on it."""
    return bool(parameter._backward_hooks) or bool(parameter._post_accumulate_grad_hooks)
