"""The message about a word that a command does not know: it gives the nearest option, or the form to use."""

from __future__ import annotations

import re
from argparse import ArgumentParser
from collections.abc import Container, Iterator, Sequence

from shardplan.core.mesh import Axis, canonical_axis
from shardplan.core.suggest import closest

from .mesh_arguments import axis_option

NUMBER = re.compile(r"-\.?\d")


def unknown_option(name: str, parser: ArgumentParser, words: Sequence[str]) -> str | None:
    """The message about the first unknown option among a command's words; None where all are known."""
    options = parser._option_string_actions
    if "-h" in words or "--help" in words:
        return None
    return next((_about(word, name, list(options)) for word in _options(words) if not _is_known(word, options)), None)


def unexpected_words(name: str, parser: ArgumentParser, words: Sequence[str]) -> str:
    """The message about words that are left over."""
    word = words[0]
    key, equals, _ = word.partition("=")
    options = parser._option_string_actions
    if equals and canonical_axis(key) is not None and "--mesh" in options:
        return f"unexpected word {word}: write --mesh {word}, several as --mesh dp_shard=8,tp=8"
    if equals and "--set" in options:
        return f"unexpected word {word}: a number of the configuration is written --set {word}"
    return f"unexpected word {word}: write {name} {_usage(parser)}, and options after that"


def _options(words: Sequence[str]) -> Iterator[str]:
    """The words that are options, without their values: `--name` for `--name=value`."""
    for word in words:
        if word == "--":
            return
        if word.startswith("-") and word != "-" and not NUMBER.match(word):
            yield word.partition("=")[0]


def _is_known(word: str, options: Container[str]) -> bool:
    return word in options or (not word.startswith("--") and word[:2] in options)


def _about(word: str, name: str, options: list[str]) -> str:
    axis = _axis_of(word)
    if axis is not None and axis_option(axis) in options:
        return f"unknown option {word}: write {axis_option(axis)} N or --mesh {axis}=N"
    if axis is not None and "--mesh" not in options:
        return f"unknown option {word}: {name} takes no mesh"
    if axis is not None:
        known = ", ".join(axis for axis in Axis if axis_option(axis) in options)
        return f"unknown option {word}: {name} has no axis {axis}, its axes are {known}"
    if (near := closest(word, options)) is not None:
        return f"unknown option {word}: did you mean {near}?"
    return f"unknown option {word}: `shardplan {name} --help` lists those of {name}"


def _axis_of(word: str) -> Axis | None:
    """The axis that an option means in some project's spelling: `--tensor-parallel-size`, `--fsdp`, `--tp_size`."""
    key = word.lstrip("-").lower().replace("-", "_")
    return canonical_axis(key) or canonical_axis(key.removesuffix("_size").removesuffix("_degree"))


def _usage(parser: ArgumentParser) -> str:
    shown = {"?": "[{}]", "+": "{} ..."}
    positional = (a for a in parser._actions if not a.option_strings)
    return " ".join(shown.get(str(a.nargs), "{}").format(a.metavar or a.dest.upper()) for a in positional)
