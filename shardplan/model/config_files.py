"""Reading a model's config.json, from a folder or from the local hub cache. Torch-free; downloads nothing."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardplan.core.diagnostics import Code
from shardplan.core.suggest import nearest_path
from shardplan.core.user_files import CannotRead, read_bytes

from .model_findings import refuse

NO_PATH = Code("SP501")
NOT_JSON = Code("SP502")
NOT_CACHED = Code("SP505")
OWN_CODE = Code("SP506")

MAX_BYTES = 16 * 2**20  # the largest configurations on the hub (long label tables) are about 2 MB
IMPLEMENTATIONS = (
    "attn_implementation",
    "_attn_implementation",
    "experts_implementation",
    "_experts_implementation",
)


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A configuration as a file stores it.

    Args:
        shown: the file's name for messages, as the user would write it.
        path: the file.
        data: the JSON object in it.
        own_code: the dotted keys whose values name code.
    """

    shown: str
    path: Path
    data: dict[str, Any]
    own_code: tuple[str, ...] = ()


def read_folder_or_file(word: str, *, trust_remote_code: bool) -> ConfigFile:
    """Reads `word`, or `word/config.json` where it is a folder.

    Raises:
        PlanError: SP501, SP502, SP506.
    """
    try:
        path = Path(word).expanduser()
        is_folder, is_file = path.is_dir(), path.is_file()
    except (OSError, RuntimeError, ValueError) as error:  # a name that is too long, an unknown home, a null character
        raise refuse(NO_PATH, f"{word!r} cannot be a path: {error}") from None
    if is_file:
        return read(path, word, trust_remote_code=trust_remote_code)
    if not is_folder:
        word = word if word.isprintable() else ascii(word)
        raise refuse(
            NO_PATH,
            f"{word} does not exist",
            help=nearest_path(path) or "name a folder with a config.json, or the file itself",
        )
    shown = f"{word.rstrip('/')}/config.json"
    if not (path / "config.json").is_file():
        raise refuse(NO_PATH, f"the folder {word} has no config.json", help="name the folder of a checkpoint")
    return read(path / "config.json", shown, trust_remote_code=trust_remote_code)


def read_cached(repository: str, *, trust_remote_code: bool) -> ConfigFile:
    """Reads the config.json of a hub repository from the local cache.

    Raises:
        PlanError: SP505, and those of `read`.
    """
    from huggingface_hub import try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(repository, "config.json")
    except ValueError:  # not a name that the hub allows (`a--b/c`)
        cached = None
    if not isinstance(cached, str):  # None, or the mark of a repository without this file
        raise refuse(
            NOT_CACHED,
            f"{repository} is not a folder here, and it is not in the local Hugging Face cache",
            help=nearest_path(Path(repository))
            or nearest_path(Path(Path(repository).name))
            or f"run `hf download {repository} config.json`, or name a folder",
        )
    return read(Path(cached), f"{repository}/config.json", trust_remote_code=trust_remote_code)


def read(path: Path, shown: str, *, trust_remote_code: bool) -> ConfigFile:
    """Reads one configuration file.

    Raises:
        PlanError: SP502 where it is not a JSON object, SP506 where it names code and that is not trusted.
    """
    data = _parse(path, shown)
    if not isinstance(data, dict):
        raise refuse(NOT_JSON, f"{shown} contains a JSON {type(data).__name__}, not an object", file=shown)
    own_code = tuple(sorted(_own_code(data)))
    if own_code and not trust_remote_code:
        raise refuse(
            OWN_CODE,
            f"{shown} brings its own code ({', '.join(own_code)}), and shardplan does not run it",
            help="read the code, then add --trust-remote-code (Model(..., trust_remote_code=True) in Python)",
            file=shown,
        )
    return ConfigFile(shown, path, data, own_code)


def _parse(path: Path, shown: str) -> Any:
    try:
        text = read_bytes(path, MAX_BYTES).decode("utf-8")
    except CannotRead as error:
        raise refuse(NOT_JSON, f"{shown} {error.reason}", file=shown) from None
    except UnicodeDecodeError as error:
        raise refuse(NOT_JSON, f"{shown} cannot be read: {error}", file=shown) from None
    if text.startswith("\ufeff"):  # transformers cannot read such a file
        help = "save it as UTF-8 without the mark"
        raise refuse(
            NOT_JSON, f"{shown} begins with a byte order mark, which JSON does not have", help=help, file=shown
        )
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        what = error.msg[:1].lower() + error.msg[1:]
        raise refuse(NOT_JSON, f"{shown} is not JSON: {what} at {where}", file=shown) from None
    except (RecursionError, ValueError):  # nested too deeply; a number with more digits than Python reads
        raise refuse(
            NOT_JSON, f"{shown} is nested too deeply or contains a number with too many digits", file=shown
        ) from None


def _own_code(data: dict[str, Any]) -> list[str]:
    found: list[str] = []
    stack: list[tuple[str, Any]] = [("", data)]
    while stack:
        prefix, node = stack.pop()
        for key, value in node.items():
            name = f"{prefix}{key}"
            if (key == "auto_map" and value) or (key in IMPLEMENTATIONS and isinstance(value, str) and "/" in value):
                found.append(name)
            elif isinstance(value, dict):
                stack.append((f"{name}.", value))
    return found
