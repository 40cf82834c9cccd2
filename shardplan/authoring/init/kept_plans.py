"""A cache of derived plans, as files in the user's cache folder. Their content is parsed and proven like any plan."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import FunctionType

import torch
import transformers

from shardplan.core.data_files import data_folder
from shardplan.core.tree import ModuleTree
from shardplan.core.user_files import CannotRead, is_trusted, replace_whole
from shardplan.language.parsing import parse_text
from shardplan.language.plan_files import read_text
from shardplan.model import FoundModel

MARK = "# sha256 "  # the digest of the lines below


def cache_folder() -> Path:
    """The folder `shardplan` in the user's cache folder (`XDG_CACHE_HOME`), as for torch and huggingface_hub."""
    chosen = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(chosen, "shardplan", "derived")


def digest_of(found: FoundModel, tp: int, *, sequence_parallel: bool, expert_parallel: bool) -> str | None:
    """A digest of everything that decides which plan is derived: the code of the model's classes, the modules, parameters and
    configuration, the plan's purpose, our own code, and versions. None where code has no file, or the configuration is not data: then the
    plan is not cached.

    Args:
        tp, sequence_parallel, expert_parallel: as for `new_plan`.
    """
    model = found.module if found.module is not None else found.meta
    assert model is not None, found.name
    classes = {cls for module in model.modules() for cls in type(module).__mro__ if cls is not object}
    functions = [one for one in (found.inputs, found.reduced) if one is not None]
    try:
        code = sorted({*map(_code_of, classes), *map(_code_of_function, functions)})
        config = "" if found.config is None else json.dumps(found.config.to_dict(), sort_keys=True, default=str)
    except (OSError, TypeError):
        return None
    words = (
        (package_code(), torch.__version__, transformers.__version__),
        (tp, sequence_parallel, expert_parallel),
        code,
        config,
        tuple(_pictured(found.tree)),
    )
    return hashlib.sha256(repr(words).encode()).hexdigest()


@cache
def package_code() -> str:
    """A digest of the package's files that decide what is derived: one release has many states in a clone, and in installations from a branch."""
    files = (*Path(__file__).parents[2].rglob("*.py"), *data_folder("plans").glob("*.toml"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in sorted(files))).hexdigest()


def _code_of(cls: type) -> str:
    """The name of a class, and the text of its file.

    Raises:
        OSError, TypeError: the class has no file.
    """
    return f"{cls.__module__}.{cls.__qualname__} {_text_of(cls)}"


def _code_of_function(function: Callable[..., object]) -> str:
    """The place of a function, and the text of its file.

    Raises:
        OSError, TypeError: the function has no file, or depends on more than its code.
    """
    if not inspect.isfunction(function) or function.__closure__ is not None:
        raise TypeError(f"{function!r} is more than its code")
    return f"{function.__qualname__} {function.__code__.co_firstlineno} {_text_of(function)}"


def _text_of(thing: type | FunctionType) -> str:
    file = inspect.getsourcefile(thing)
    if file is None:
        raise OSError(f"the file of {thing.__qualname__} is not there")
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


def _pictured(tree: ModuleTree) -> Iterator[object]:
    """A tree as text that is the same in every process."""
    yield from (tree.class_names, tree.model_type, tree.base_prefix, tree.trains, tree.tied, sorted(tree.inside))
    yield from (dict(tree.numbers), dict(tree.fields), dict(tree.copies), *tree.modules.values())


def kept(digest: str) -> str | None:
    """The text of a cached plan; None where there is none, the file is damaged, or another user owns it."""
    with suppress(CannotRead, OSError):
        if not is_trusted(_file(digest)):
            return None
        mark, _, text = read_text(_file(digest)).partition("\n")
        if mark == MARK + _sum(text) and parse_text(text).plan is not None:
            return text
    return None


def keep(digest: str, text: str) -> str | None:
    """Cache a plan; the file is written completely or not at all. Returns the reason why it cannot be written, or None."""
    try:
        file = _file(digest)
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_whole(file, f"{MARK}{_sum(text)}\n{text}")
    except OSError as error:
        reason = error.strerror or error
        return f"the plan cannot be kept in {cache_folder()} ({reason}): it is derived again the next time"
    return None


def _file(digest: str) -> Path:
    """The cache file. Raises OSError where the user has no cache folder (no home, or a relative path)."""
    if not cache_folder().is_absolute():
        raise OSError("not an absolute path")
    return cache_folder() / f"{digest}.yaml"


def _sum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
