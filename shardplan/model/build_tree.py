"""Building the ModuleTree of an nn.Module."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import product
from types import FunctionType
from typing import Any, cast

from torch import nn

from shardplan.core.by_key import by_key
from shardplan.core.tree import ModuleInfo, ModuleKind, ModuleTree, ParameterInfo, ancestors, full_name

from .adapters import adapters_in, copies_of, layer_of, part_of, unwrapped
from .config_numbers import Number, attributes_of, config_fields, config_numbers, is_record, own_numbers
from .float8 import is_float8, plain_class
from .forward_code import forward_reads, only_arguments
from .source_code import methods, of_self, parsed

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


# The numbers of modules that rules and checks read.

# On every nn.Module; they do not tell its shape.
STATE = frozenset({"training", "call_super_init", "dump_patches", *vars(nn.Module())})
DEPTH, PARTS = 3, 64  # of lists and mappings whose numbers count; longer ones are tables


def module_numbers(module: nn.Module) -> dict[str, Number]:
    """The int, float and bool attributes of the instance; of what its forward reads, also private counts, and counts in lists, mappings,
    dataclasses and namespaces, by their path (`args.n_heads`, `lengths.0`)."""
    found: dict[str, Number] = {}
    reads: frozenset[str] | None = None  # of few modules: to look for it takes longer than all else
    for name, value in vars(module).items():
        if name in STATE:
            continue
        if isinstance(value, (int, float)) and not name.startswith("_"):
            found[name] = value
        elif name != "config" and (type(value) is int or _parts(value) is not None):  # a configuration's are told apart
            reads = forward_reads(type(module)) if reads is None else reads
            found |= _counts_in(value, name) if name in reads else {}
    return found


def _counts_in(value: Any, path: str, depth: int = DEPTH) -> Iterator[tuple[str, int]]:
    if type(value) is int:
        yield path, value
    elif depth and (parts := _parts(value)) is not None:
        for name, part in parts:
            yield from _counts_in(part, f"{path}.{name}", depth - 1)


def _parts(value: Any) -> Iterable[tuple[Any, Any]] | None:
    """The parts of a list, a mapping, a dataclass or a namespace: (name or position, part). None for other values, and for tables."""
    held = attributes_of(value) if is_record(value) else value
    if not isinstance(held, (Mapping, list, tuple)) or len(held) > PARTS:
        return None
    if not isinstance(held, Mapping):
        return enumerate(held)
    return [(key, part) for key, part in held.items() if isinstance(key, (str, int)) and "." not in str(key)]


# Which parameters are tied.
def tied_groups(module: nn.Module, names: Mapping[str, str]) -> tuple[tuple[str, ...], ...]:
    """Groups of names that are one Parameter, or that the model declares tied.

    The declaration is transformers' `all_tied_weights_keys`. It counts while the parameters are on the meta
    device; two different materialised Parameters are not tied, even if declared so.

    Args:
        module: the model.
        names: the full names to group -> the names without adapters, which the declaration uses. The groups, and the names in
            each group, keep this order.
    """
    actual = by_key((declared, name) for name, declared in names.items())
    parameters = {name: p for name, p in module.named_parameters(remove_duplicate=False) if name in names}
    leader: dict[str, str] = {name: name for name in parameters}

    def find(name: str) -> str:
        while leader[name] != name:
            name = leader[name]
        return name

    by_identity: dict[int, str] = {}
    for name, parameter in parameters.items():
        leader[name] = by_identity.setdefault(id(parameter), name)
    declared_pairs = (
        pair for target, source in _declared(module) for pair in product(actual.get(target, ()), actual.get(source, ()))
    )
    for target, source in declared_pairs:
        if target in parameters and source in parameters:
            unbuilt = parameters[target].is_meta and parameters[source].is_meta
            if unbuilt and parameters[target].shape == parameters[source].shape:
                leader[find(target)] = find(source)

    groups = by_key((find(name), name) for name in names if name in parameters)
    return tuple(tuple(group) for group in groups.values() if len(group) > 1)


def _declared(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Pairs of full parameter names (target, source) from the outermost models of transformers inside
    `module`."""
    for prefix, child in module.named_modules():
        declared = vars(child).get("all_tied_weights_keys")
        if isinstance(declared, dict):
            dot = f"{prefix}." if prefix else ""
            for target, source in declared.items():
                yield f"{dot}{target}", f"{dot}{source}"


# Parameters of submodules that a module's code reads only in a branch for training.
#
# A kernel that computes a layer together with its submodules takes their parameters as arguments (`mamba_inner_fn` and
# `mamba_split_conv1d_scan_combined` of mamba_ssm); their own forwards do not run.
PARAMETERS = ("weight", "bias")


@cache
def training_reads(cls: type) -> tuple[str, ...]:
    """The submodules of this class whose parameters its code passes to a function in a training-only branch: their
    names in it, sorted."""
    reads = (_read(one) for one in methods(cls) if _may_read(one))
    return tuple(sorted(set().union(*reads)))


def _may_read(function: FunctionType) -> bool:
    names = function.__code__.co_names
    return "training" in names and any(one in names for one in PARAMETERS)


def _read(function: FunctionType) -> set[str]:
    branches = (
        node.body for node in ast.walk(parsed(function)) if isinstance(node, ast.If) and _is_training(node.test)
    )
    calls = (node for body in branches for one in body for node in ast.walk(one) if isinstance(node, ast.Call))
    arguments = (one for call in calls for one in (*call.args, *(keyword.value for keyword in call.keywords)))
    return {child for argument in arguments for child in _children(argument)}


def _is_training(test: ast.expr) -> bool:
    """Whether a condition holds only in training: `self.training`, also together with further conditions."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return any(map(_is_training, test.values))
    return of_self(test) == "training"


def _children(argument: ast.expr) -> Iterator[str]:
    """The submodules whose parameters an argument reads: `self.out_proj.weight`."""
    for node in ast.walk(argument):
        if isinstance(node, ast.Attribute) and node.attr in PARAMETERS and (child := of_self(node.value)) is not None:
            yield child
