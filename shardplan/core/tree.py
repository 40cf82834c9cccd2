"""The module tree of a model that binding and the structural checks read: names, kinds, shapes, config numbers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from typing import Literal, TypeGuard

from .folded_names import brace, folded

# By structure, never by name:
#   linear     an nn.Linear, weight [out, in]            conv1d     transformers' Conv1D, weight [in, out]
#   embedding  an nn.Embedding, weight [rows, features]  norm       no children, owns parameters, all at most 1-D
#   dropout    an nn.Dropout                             list       an nn.ModuleList / ModuleDict / Sequential
#   depthwise  an nn.Conv1d of each channel by itself, weight [channels, 1, kernel]
#   other      everything else (blocks, attention, activation functions, packed experts, ...)
ModuleKind = Literal["linear", "conv1d", "depthwise", "embedding", "norm", "dropout", "list", "other"]

# The role of an adapter's parameter (LoRA, arXiv 2106.09685) in the layer that it adapts: y = W x + B A x.
#   A            nn.Linear.weight [r, in]             B                nn.Linear.weight [out, r], or its bias [out]
#   embedding_A  [r, rows]                            embedding_B      [features, r]
#   magnitude    [out], of DoRA (arXiv 2402.09353)    parameter        of an adapter that exchanges one parameter
#   other        anything else
AdapterPart = Literal["A", "B", "embedding_A", "embedding_B", "magnitude", "parameter", "other"]


LIST_OF_WORDS = "a list of words"  # the description of a field such as `layer_types`


@dataclass(frozen=True, slots=True)
class ParameterInfo:
    """A parameter as its module owns it.

    Args:
        name: its name in the module; dotted if the module is an adapted layer (`base_layer.weight`,
            `lora_A.default.weight`).
        shape, dtype: `"float32"`.
        requires_grad: whether it is trained.
        adapter: its role in the adapted layer; None for a parameter of the layer itself.
        hooked: whether the user registered hooks on it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    requires_grad: bool = True
    adapter: AdapterPart | None = None
    hooked: bool = False

    @property
    def short(self) -> str:
        """The name without the path: the one in plans and styles."""
        return self.name.rpartition(".")[2]

    @property
    def numel(self) -> int:
        n = 1
        for size in self.shape:
            n *= size
        return n


@dataclass(frozen=True, slots=True)
class ModuleInfo:
    """One module.

    Args:
        name: dotted name in the model; "" is the root.
        class_name: `LlamaAttention`.
        kind: see `ModuleKind`.
        parameters: its own; for a layer that adapters wrap, also the adapters'.
        numbers: int, float and bool attributes of the instance (`num_heads`, `padding_idx`, `p`, `attention_dropout`).
        config: the numbers of the configuration in `self.config`, empty without one; None: not known.
        buffers: the shapes of its own buffers, by name.
        arguments: the names of its forward's arguments; None: not known, or it takes any.
        training_reads: modules below it whose parameters its code passes to a function in a branch for training only.
        layer: the path to the layer itself inside this module, if adapters wrap it (`base_layer`). The module then
            represents that layer: it has its kind, its numbers and its parameters.
    """

    name: str
    class_name: str
    kind: ModuleKind
    parameters: tuple[ParameterInfo, ...] = ()
    numbers: Mapping[str, int | float] = field(default_factory=dict)
    config: Mapping[str, int | float] | None = None
    layer: str = ""
    training_reads: tuple[str, ...] = ()
    buffers: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    arguments: tuple[str, ...] | None = None

    def parameter(self, name: str) -> ParameterInfo | None:
        """The module's own parameter of that short name; an adapter's by its whole name."""
        own = (p for p in self.parameters if p.adapter is None and p.short == name)
        return next(own, next((p for p in self.parameters if p.name == name), None))


def is_count(value: object) -> TypeGuard[int]:
    """Whether an attribute or a number of the configuration counts something."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def full_name(module: str, parameter: str) -> str:
    """The name of a parameter within the model, from its owner's name (empty for the model itself) and its own."""
    return f"{module}.{parameter}" if module else parameter


@dataclass(frozen=True)
class ModuleTree:
    """The modules of a model in the order of `named_modules()`.

    A layer that adapters wrap is one module, under its name without them. The wrapper's parts are in `inside`, and own
    nothing.

    Args:
        class_names: the model's class and its bases, nearest first, the bases up to torch's own.
        model_type: `config.model_type`, or None without a config.
        modules: by dotted name, the root ("") first.
        numbers: the numbers of the text config under their own names (`num_attention_heads`; if an `attribute_map`
            renames them, under both names), those of nested configs also dotted (`vision_config.hidden_size`). Lists of
            equal numbers count as that number.
        shared: groups of names of one module object with parameters, only the outermost such; `modules` has the first name.
        fields: all fields of the configuration under the same names: their number, None, or their type in words ("a
            text"). For a list of words also the count of each word (`layer_types.full_attention`).
        tied: groups of full parameter names that are one Parameter (or will be, by the model's own declaration).
        base_prefix: the prefix that turns a module's name into its name in the model with a head: "model" for a
            LlamaModel on its own, "" otherwise. Rules are matched against the prefixed names (`address`).
        inside: the parts of adapted layers: no rule sees them.
        copies: module -> whole copies of it that are inside it; each may run in its place (the frozen original of an
            output head, and the one that is trained). Rules for the module are rules for its copies.
        trains: whether dropout acts as configured: the module is in training mode (always, if built from a
            configuration).
    """

    class_names: tuple[str, ...]
    model_type: str | None
    modules: Mapping[str, ModuleInfo]
    numbers: Mapping[str, int | float] = field(default_factory=dict)
    tied: tuple[tuple[str, ...], ...] = ()
    base_prefix: str = ""
    inside: frozenset[str] = frozenset()
    copies: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    trains: bool = True
    fields: Mapping[str, int | float | str | None] = field(default_factory=dict)
    shared: tuple[tuple[str, ...], ...] = ()

    def address(self, name: str) -> str:
        """The name that rules see for a module or parameter."""
        if self._adapted:
            name = self._unwrapped(name)
        return f"{self.base_prefix}.{name}" if self.base_prefix and name else (self.base_prefix or name)

    def _unwrapped(self, name: str) -> str:
        """The name without adapters: that of the original for copies, that of the layer for its parameters."""
        owner = name
        if name in self.parameters:
            module, parameter = self.parameters[name]
            owner, name = (
                module.name,
                full_name(module.name, parameter.short if parameter.adapter is None else parameter.name),
            )
        for outer in (owner, *ancestors(owner)):
            if outer in self._originals:
                return self._originals[outer] + name[len(outer) :]
        return name

    @cached_property
    def _adapted(self) -> bool:
        return bool(self.inside or self.copies)

    @cached_property
    def _originals(self) -> Mapping[str, str]:
        return {copy: name for name, copies in self.copies.items() for copy in copies}

    def owner(self, parameter: str) -> str:
        """The module that owns a parameter, by its full name."""
        return self.parameters[parameter][0].name

    def seen(self, name: str) -> tuple[tuple[str, str], ...]:
        """The children of a module as rules see them: (last part of the name, the child's real name)."""
        return self._seen[name]

    @cached_property
    def _seen(self) -> Mapping[str, tuple[tuple[str, str], ...]]:
        return {
            name: tuple(
                (child.rpartition(".")[2], real)
                for child in children
                for real in self.copies.get(child, (child,))
                if real not in self.inside
            )
            for name, children in self.children.items()
        }

    def count_near(self, module: str, name: str) -> int:
        """A number of the configuration; where it has none of this name, of the nearest module around; 0 where none has."""
        around = (self.modules[one].numbers.get(name) for one in ancestors(module))
        return next(filter(is_count, (self.numbers.get(name), *around)), 0)

    def pattern(self, name: str) -> str:
        """The pattern by which a plan names it and all modules like it: its list indices are starred, except in lists
        of unlike elements (`model.layers.*.mlp.up_proj`, `blocks.*.to_out.0`)."""
        if name not in self._patterns:
            parts, above = [], ""
            for part in name.split("."):
                parts.append("*" if part.isdecimal() and above not in self._numbered else part)
                above = f"{above}.{part}" if above else part
            self._patterns[name] = ".".join(parts)
        return self._patterns[name]

    def under(self, patterns: Collection[str]) -> tuple[str, ...]:
        """The parameters with one of these patterns, or in a module with one. (That of a parametrised matrix is in a module below.)"""
        wanted = frozenset(patterns)
        return tuple(n for n in self.parameters if wanted.intersection(map(self.pattern, (n, *ancestors(n)))))

    @cached_property
    def _patterns(self) -> dict[str, str]:
        return {}

    def named(self, names: Iterable[str]) -> str:
        """As `named`, with the words of `pattern`: "blocks.*.{1,3}" for two matrices of each Sequential."""
        return named(names, self.pattern)

    @cached_property
    def _numbered(self) -> frozenset[str]:
        """The lists of unlike elements: Sequentials of several classes, and lists in which a star would name different
        things. Blocks of several classes count as alike: `having` tells them apart."""
        lists = (name for name, module in self.modules.items() if module.kind == "list" and self.children[name])
        return frozenset(name for name in lists if self._unlike(name))

    def _unlike(self, name: str) -> bool:
        elements = self.children[name]
        if not all(one.rpartition(".")[2].isdecimal() for one in elements):
            return False
        several = len({self.modules[one].class_name for one in elements}) > 1
        leaves = [one for one in elements if not self.children[one]]
        if len(leaves) == len(elements) and not several:
            return len({self._made_of(one) for one in elements}) > 1
        if self.modules[name].class_name == "Sequential":
            return several
        if element(elements[0]) and not leaves:
            return False
        if not several:  # in a list of lists, equal wrappers may hold different parts
            return name.rpartition(".")[2].isdecimal() and self._apart(elements)
        return element(name) or self._clash(elements)  # a block that is a list has parts, each of its own kind

    def _clash(self, elements: tuple[str, ...]) -> bool:
        """Whether modules with parameters at one place in two elements differ in class or shape."""
        found: dict[str, set[tuple[str, tuple[tuple[int, ...], ...]]]] = {}
        owners: set[str] = set()
        for one in elements:
            for below in self._below(one):
                place = below[len(one) :]
                found.setdefault(place, set()).add(self._made_of(below))
                if self.modules[below].parameters:
                    owners.add(place)
        return any(len(found[place]) > 1 for place in owners)

    def _apart(self, elements: tuple[str, ...]) -> bool:
        """Whether each of two elements has modules with parameters at places where the other has none."""
        places = {
            frozenset(below[len(one) :] for below in self._below(one) if self.modules[below].parameters)
            for one in elements
        }
        return any(one - other and other - one for one, other in combinations(places, 2))

    def _below(self, name: str) -> Iterator[str]:
        yield name
        for child in self.children[name]:
            yield from self._below(child)

    def _made_of(self, name: str) -> tuple[str, tuple[tuple[int, ...], ...]]:
        module = self.modules[name]
        return module.class_name, tuple(p.shape for p in module.parameters)

    @cached_property
    def parameters(self) -> Mapping[str, tuple[ModuleInfo, ParameterInfo]]:
        """Every parameter by full name, with its owner. Tied parameters appear under each of their names."""
        return {
            full_name(module.name, p.name): (module, p) for module in self.modules.values() for p in module.parameters
        }

    @cached_property
    def children(self) -> Mapping[str, tuple[str, ...]]:
        """The direct children of each module."""
        children: dict[str, list[str]] = {name: [] for name in self.modules}
        for name in self.modules:
            if name:
                children[parent(name)].append(name)
        return {name: tuple(names) for name, names in children.items()}


WITHOUT_FORWARD = ("ModuleList", "ModuleDict")  # classes of lists: calling them would do nothing


def parent(name: str) -> str:
    """The name of the module that contains this one; "" for a module at the root."""
    return name.rpartition(".")[0]


def ancestors(name: str) -> tuple[str, ...]:
    """The names of the enclosing modules, nearest first, the root ("") last; empty for the root."""
    result = []
    while name:
        name = parent(name)
        result.append(name)
    return tuple(result)


def innermost(name: str, modules: Container[str]) -> str:
    """The nearest of some modules that a module or parameter is or is in; "" where there is none."""
    return next((one for one in (name, *ancestors(name)) if one in modules), "")


def home_of(name: str, units: Container[str]) -> str:
    """A module around a module, or itself, that has all its parameters present while it runs: the nearest FSDP unit or block; outside of
    these, the module itself."""
    return next(m for m in (name, *ancestors(name)) if m in units or m == block(name))


def block(name: str) -> str:
    """The outermost list element that contains a module (`model.layers.3`), else the module itself."""
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return name


def element(name: str) -> bool:
    """Whether a module is a block: an element of an outermost list."""
    return block(name) == name and name.rpartition(".")[2].isdigit()


def part(name: str) -> str | None:
    """The child of a block that a module is or is in (`model.layers.3.mlp`); None outside of these."""
    return next((one for one in (name, *ancestors(name)) if element(parent(one))), None)


def starred(name: str) -> str:
    """The name with its list indices as a plan would write them: `model.layers.*.mlp.up_proj`."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def named(names: Iterable[str], pattern: Callable[[str], str] = starred) -> str:
    """Words for names of repeated layers: the name itself, if it is one; else the distinct starred ones, with those
    that differ in one part written as one: "model.layers.*.mlp.{gate_proj,up_proj} and lm_head"."""
    names = tuple(dict.fromkeys(names))
    if len(names) == 1:
        return names[0]
    texts = list(folded(map(pattern, names), lambda row, at: len(row) > 1, brace))
    return f"{', '.join(texts[:-1])} and {texts[-1]}" if len(texts) > 1 else texts[0]


def homes(tree: ModuleTree, names: Iterable[str]) -> dict[str, str]:
    """Module -> its home, the block around it. The home of modules in no block is the innermost module around all of
    them. Blocks and the root have none.

    Args:
        names: modules of the tree.
    """

    def runs(name: str) -> bool:
        return tree.modules[name].class_name not in WITHOUT_FORWARD

    found: dict[str, str] = {}
    outside: list[str] = []
    for name in names:
        around = [one for one in reversed(ancestors(name)) if one.rpartition(".")[2].isdigit() and runs(one)]
        if around:
            found[name] = around[0]
        elif name and not element(name):
            outside.append(name)
    if outside:
        shared = [set(ancestors(name)) for name in outside]
        common = next(one for one in ancestors(outside[0]) if runs(one) and all(one in others for others in shared))
        found |= dict.fromkeys(outside, common)
    return found
