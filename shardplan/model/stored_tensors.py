"""A checkpoint's names and shapes, from its index and the headers of its files. Torch-free; reads no weights.

The result is None for a checkpoint in a form that the Hugging Face libraries do not write: a plan is not refused because
its checkpoint cannot be loaded.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from shardplan.core.by_key import by_key
from shardplan.core.tree import ModuleInfo, ModuleKind, ModuleTree, ParameterInfo

from .config_numbers import config_fields, config_numbers

ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
# The largest checkpoints have some 200 files and 100,000 tensors, with about 150 bytes of header each.
MAX_FILES = 2_000
MAX_HEADER = 32 * 2**20  # bytes of one header or index
MAX_HEADERS = 128 * 2**20  # bytes of all headers
MAX_TENSORS = 500_000
MAX_DEPTH = 24  # segments of a name
MAX_DIMS = 8
MAX_DIGITS = 9  # of an index

DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}
Shape = tuple[str, tuple[int, ...]]  # a dtype (empty for one that no parameter has: integers, flags), and a shape
_ELEMENT = re.compile(r"(?:.*\.)?\d+(?=\.)")  # a name up to the last index in it


@dataclass(slots=True, eq=False)
class Element:
    """An element of a list of modules, or a whole model. Most names in a checkpoint differ only in their indices.

    Args:
        tensors: name within the element -> tensor, without those in its lists.
        lists: list name within the element -> index -> element.
        kind: equal for equal elements.
    """

    tensors: dict[str, Shape] = field(default_factory=dict)
    lists: dict[str, dict[str, Element]] = field(default_factory=dict)
    kind: int = -1

    def nested(self) -> dict[str, Any]:
        """Names as nested dictionaries of their segments, with a Shape or an Element at the end.

        Raises:
            ValueError: a name is empty, or one name is a prefix of another.
        """
        found: dict[str, Any] = {}
        elements = {f"{name}.{i}" if name else i: one for name, inner in self.lists.items() for i, one in inner.items()}
        for name, end in (*self.tensors.items(), *elements.items()):
            *above, last = name.split(".")
            if len(above) > MAX_DEPTH:
                raise ValueError
            at = found
            for part in above:
                at = at.setdefault(part, {})
                if type(at) is not dict or not part:
                    raise ValueError
            if not last or at.setdefault(last, end) is not end:
                raise ValueError
        return found


def stored_tensors(folder: Path) -> Element | None:
    """The tensors of a checkpoint. None where there is no complete safetensors checkpoint, or it exceeds the limits."""
    try:
        files, expected = _files(folder)
        elements = {"": Element()}
        known: dict[tuple[Any, ...], Shape] = {}
        bytes_read = tensors = 0
        for name in files:
            header, size = _header(folder / name)
            header.pop("__metadata__", None)
            bytes_read, tensors = bytes_read + size, tensors + len(header)
            if bytes_read > MAX_HEADERS or tensors > MAX_TENSORS:
                return None
            if expected is not None:
                expected.difference_update(header)
            _add(elements, header, known)
        for one in _classify(elements[""]):
            one.nested()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return None if expected else elements[""]


def _files(folder: Path) -> tuple[list[str], set[str] | None]:
    """The names of a checkpoint's files, and the names of the tensors in its index."""
    if (folder / ONE_FILE).is_file():
        return [ONE_FILE], None
    placed = json.loads(_read(folder / INDEX))["weight_map"]
    files = sorted(set(placed.values()))
    if len(files) > MAX_FILES or any(os.path.basename(name) != name for name in files):
        raise ValueError
    return files, set(placed)


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """A safetensors header, and its length: eight bytes of length, little-endian, then JSON of that length
    (https://huggingface.co/docs/safetensors)."""
    with open(_regular(path), "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if not 2 <= size <= MAX_HEADER:
            raise ValueError
        text = file.read(size)
    if len(text) != size:
        raise ValueError
    header = json.loads(text)
    if not isinstance(header, dict):
        raise TypeError
    return header, size


def _read(path: Path) -> bytes:
    with open(_regular(path), "rb") as file:
        text = file.read(MAX_HEADER + 1)
    if len(text) > MAX_HEADER:
        raise ValueError
    return text


def _regular(path: Path) -> Path:
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError
    return path


def _add(elements: dict[str, Element], header: Mapping[str, Any], known: dict[tuple[Any, ...], Shape]) -> None:
    """Put the tensors of a file into their elements. Raises KeyError, TypeError or ValueError for a malformed header."""
    for name, entry in header.items():
        key = (entry["dtype"], *entry["shape"])
        shape = known.get(key)
        if shape is None:
            shape = known[key] = _checked(*key)
        match = _ELEMENT.match(name)
        place, rest = (match[0], name[match.end() + 1 :]) if match else ("", name)
        element = elements.get(place)
        if element is None:
            element = _element(elements, place)
        if element.tensors.setdefault(rest, shape) is not shape:
            raise ValueError  # two files have the tensor


def _element(elements: dict[str, Element], place: str) -> Element:
    """Get or create an element and the elements around it."""
    name, _, index = place.rpartition(".")
    if place.count(".") > MAX_DEPTH or len(index) > MAX_DIGITS:
        raise ValueError
    match = _ELEMENT.match(f"{name}.")
    outer, rest = (match[0], name[match.end() + 1 :]) if match else ("", name)
    around = elements[outer] if outer in elements else _element(elements, outer)
    found = elements[place] = around.lists.setdefault(rest, {})[index] = Element()
    return found


def _classify(element: Element) -> list[Element]:
    """Set the kind of an element and of all elements inside it. Returns one element of each kind."""
    kinds: dict[tuple[Any, ...], Element] = {}

    def visit(one: Element) -> int:
        lists = [(name, tuple([(i, visit(e)) for i, e in inner.items()])) for name, inner in one.lists.items()]
        first = kinds.setdefault((tuple(sorted(one.tensors.items())), *lists), one)
        if first is one:
            one.kind = len(kinds)
        one.kind = first.kind
        return one.kind

    visit(element)
    return list(kinds.values())


def _checked(dtype: str, *shape: int) -> Shape:
    if len(shape) > MAX_DIMS or any(type(n) is not int or n < 0 for n in shape):
        raise ValueError
    return DTYPES.get(dtype, ""), shape


@dataclass(slots=True)
class Folded:
    """A checkpoint as a tree with only the first and the last of equal list elements.

    Args:
        tree: the tree of these elements.
        members: an element that represents others -> the indices of all elements that it represents.
    """

    tree: ModuleTree
    members: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def all_of(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """The checkpoint's names that names of the tree represent."""
        return tuple(full for name in names for full in self._unfolded(name))

    def _unfolded(self, name: str) -> list[str]:
        parts = name.split(".")
        above = (".".join(parts[: i + 1]) for i in range(len(parts)))
        choices = [self.members.get(place, (part,)) for place, part in zip(above, parts, strict=True)]
        return [".".join(choice) for choice in product(*choices)]


def fold(
    stored: Element,
    config: Mapping[str, Any],
    order: Mapping[str, int],
    *,
    heads: str | None = None,
    apart: Callable[[str], bool] = lambda index: False,
) -> Folded:
    """A model's ModuleTree as far as its checkpoint shows it: the modules that own parameters and those around them.

    Kinds are guessed from shapes: a two-dimensional `weight` is a linear module's. Modules without parameters and the
    numbers on modules are not known.

    Args:
        stored: what `stored_tensors` returned.
        config: the content of config.json.
        order: words of names -> their order.
        heads: the attribute for the features of a head, set on modules that look like attention.
        apart: index -> whether this list element must represent only itself.
    """
    numbers = config_numbers(config)
    modules: dict[str, ModuleInfo] = {}
    members: dict[str, tuple[str, ...]] = {}

    def add(name: str, node: dict[str, Any]) -> None:
        children = {part: inner for part, inner in node.items() if type(inner) is not tuple}
        own = tuple(ParameterInfo(part, one[1], one[0]) for part, one in node.items() if type(one) is tuple and one[0])
        elements = {part: inner for part, inner in children.items() if type(inner) is Element}
        is_list = bool(elements) and len(elements) == len(children) and not own
        numbers_of = {heads: numbers["head_dim"]} if heads is not None and _attends(children, numbers) else {}
        modules[name] = ModuleInfo(name, "ModuleList" if is_list else "", _kind(children, own), own, numbers_of)
        base = f"{name}." if name else ""
        for part in sorted(children.keys() - elements.keys(), key=lambda part: (order.get(part, -1), part)):
            add(base + part, children[part])
        kept = _kept(elements, apart)
        members.update({base + index: indices for index, indices in kept.items()})
        for index in sorted(kept, key=int):
            add(base + index, elements[index].nested())

    add("", stored.nested())
    names, model_type = config.get("architectures"), config.get("model_type")
    tree = ModuleTree(
        class_names=tuple(map(str, names[:1])) if isinstance(names, list) else (),
        model_type=model_type if isinstance(model_type, str) else None,
        modules=modules,
        numbers=numbers,
        fields=config_fields(config),
    )
    return Folded(tree, members)


def _kept(elements: Mapping[str, Element], apart: Callable[[str], bool]) -> dict[str, tuple[str, ...]]:
    """The elements that represent all elements, and the indices that each one represents."""
    indices = sorted(elements, key=int)
    groups = by_key(((apart(index), index if apart(index) else elements[index].kind), index) for index in indices)
    kept: dict[str, tuple[str, ...]] = {}
    for *others, last in groups.values():
        kept |= {others[0]: tuple(others)} if others else {}
        kept[last] = (last,)
    return kept


def _kind(children: Mapping[str, Any], own: tuple[ParameterInfo, ...]) -> ModuleKind:
    dims = {info.name: len(info.shape) for info in own}
    if children or not own:
        return "other"
    if dims.get("weight") == 2:
        return "linear"
    return "norm" if all(n <= 1 for n in dims.values()) else "other"


def _attends(children: Mapping[str, Any], numbers: Mapping[str, int | float]) -> bool:
    """Whether the matrices in a module have the sizes of queries, keys, values and output of the configured heads."""
    heads, width = numbers.get("num_attention_heads"), numbers.get("head_dim")
    if len(children) < 4 or not isinstance(heads, int) or not isinstance(width, int):
        return False
    fewer = numbers.get("num_key_value_heads", heads)
    inner = [child for child in children.values() if type(child) is dict]
    weights = [child["weight"][1] for child in inner if type(child.get("weight")) is tuple]
    shapes = [shape for shape in weights if len(shape) == 2]
    out = [shape[0] for shape in shapes]
    wanted = [heads * width, fewer * width, fewer * width]
    return all(out.count(n) >= wanted.count(n) for n in wanted) and any(i == heads * width for _, i in shapes)
