"""The numbers of configurations that rules and checks read."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from types import SimpleNamespace
from typing import Any

from shardplan.core.tree import LIST_OF_WORDS

Number = int | float  # a bool is an int

LABELS = frozenset({"id2label", "label2id"})  # names of classes, not sizes
WORDS: Mapping[type, str] = {str: "a text", list: "a list", tuple: "a list", Mapping: "a mapping", int: "a number"}


def config_numbers(config: Any) -> dict[str, Number]:
    """The numbers of a configuration: see `ModuleTree.numbers`.

    Numbers of the text part win over numbers of the same name in the whole configuration. `head_dim`, where the configuration leaves it
    out, is hidden_size // num_attention_heads, as attention modules of transformers compute it.
    """
    if config is None:
        return {}
    text = text_config(config)
    numbers = dict(_dotted(config))
    numbers.update(_plain(text))
    if "head_dim" not in numbers and config_value(text, "head_dim") is None:
        hidden, heads = numbers.get("hidden_size"), numbers.get("num_attention_heads")
        if isinstance(hidden, int) and isinstance(heads, int) and heads > 0 and hidden % heads == 0:
            numbers["head_dim"] = hidden // heads
    return numbers


def config_fields(config: Any) -> dict[str, Number | str | None]:
    """The fields of a configuration: see `ModuleTree.fields`."""
    if config is None:
        return {}
    return dict(_described(config)) | dict(_described(text_config(config))) | config_numbers(config)


def text_config(config: Any) -> Any:
    """The part of a configuration that describes the (decoding) text model. For most configurations, and for
    foreign objects, it is the object itself."""
    get = getattr(config, "get_text_config", None)
    if get is None:
        return config
    try:
        return get()
    except ValueError:  # the encoder and the decoder each have a text configuration
        return get(decoder=True)


def config_value(config: Any, name: str, default: Any = None) -> Any:
    """A field under either of its names. It also reads fields that differ between layers, which such configurations
    guard."""
    stored = getattr(config, "attribute_map", {}).get(name, name)
    attributes = attributes_of(config)
    return attributes.get(stored, default)


def _dotted(config: Any, prefix: str = "") -> Iterator[tuple[str, Number]]:
    for name, value in _plain(config).items():
        yield f"{prefix}{name}", value
    for name, value in attributes_of(config).items():
        if name.startswith("_") or name in LABELS:
            continue
        if hasattr(value, "attribute_map"):  # a nested configuration
            yield from _dotted(value, f"{prefix}{name}.")
        elif isinstance(value, Mapping):
            for key, item in value.items():
                if isinstance(key, str) and (number := _number(item)) is not None:
                    yield f"{prefix}{name}.{key}", number


def _plain(config: Any) -> dict[str, Number]:
    """A configuration's own numbers, under the names of its `attribute_map` too."""
    vary = getattr(config, "per_layer_attributes", None) or ()  # there is no single number for all layers
    numbers = {
        name: number
        for name, value in attributes_of(config).items()
        if not name.startswith("_") and name not in vary and (number := _number(value)) is not None
    }
    for alias, stored in getattr(config, "attribute_map", {}).items():
        if stored in numbers:
            numbers.setdefault(alias, numbers[stored])
    return numbers


def _described(config: Any, prefix: str = "") -> Iterator[tuple[str, Number | str | None]]:
    """The fields of a configuration: None, or the value in words; and for lists of words, the count of each word."""
    attributes = {name: value for name, value in attributes_of(config).items() if not name.startswith("_")}
    aliases = getattr(config, "attribute_map", {}).items()
    attributes = {alias: attributes[name] for alias, name in aliases if name in attributes} | attributes
    for name, value in attributes.items():
        words = next((words for kind, words in WORDS.items() if isinstance(value, kind)), "an object")
        counts = _counts(value)
        yield f"{prefix}{name}", None if value is None else LIST_OF_WORDS if counts else words
        for word, count in counts.items():
            yield f"{prefix}{name}.{word}", count
        if hasattr(value, "attribute_map"):
            yield from _described(value, f"{prefix}{name}.")


def _counts(value: Any) -> Mapping[str, int]:
    """How often each word is in a list of words; nothing for anything else."""
    words = isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value)
    return Counter(value) if words else {}


def own_numbers(config: Any) -> dict[str, Number]:
    """The numbers of one configuration, without those nested in it; of a dataclass also its properties. An object that is not a
    configuration (of transformers, a dataclass, a namespace) has none."""
    if is_record(config):
        return _properties(config) | _plain(config)
    return _plain(config) if hasattr(config, "attribute_map") else {}


def _properties(config: Any) -> dict[str, Number]:
    """The numbers that a configuration's properties compute; a property that raises has none."""
    found: dict[str, Number] = {}
    for name, one in inspect.getmembers_static(type(config), lambda one: isinstance(one, property)):
        with suppress(Exception):  # the user's own code
            if isinstance(value := one.__get__(config), (int, float)):
                found[name] = value
    return found


def is_record(value: Any) -> bool:
    """Whether a value is a dataclass's instance or a namespace."""
    return isinstance(value, SimpleNamespace) or (is_dataclass(value) and not isinstance(value, type))


def attributes_of(config: Any) -> Mapping[str, Any]:
    """What a configuration, a mapping, or a record holds, by name."""
    if isinstance(config, Mapping):
        return config
    if hasattr(config, "__dict__") or not is_record(config):
        return getattr(config, "__dict__", {})
    return {one.name: getattr(config, one.name) for one in fields(config)}  # a dataclass with slots


def _number(value: Any) -> Number | None:
    """A number, or the number that all elements of a list are."""
    if isinstance(value, (list, tuple)) and value and all(item == value[0] for item in value):
        value = value[0]
    return value if isinstance(value, (int, float)) else None
