"""The meaning of a MODEL word. Torch-free."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

WordKind = Literal["path", "hub", "callable", "type"]

# `org/name` as the hub allows it; https://huggingface.co/docs/huggingface_hub/package_reference/utilities
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
# It also matches a file in place of the module; this is refused with the word to write.
CALLABLE = re.compile(r"([A-Za-z_]\w*(\.[A-Za-z_]\w*)*|[^:]*\.py):[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


@dataclass(frozen=True, slots=True)
class Word:
    """A MODEL word and what it names: a folder or file, a hub repository, `module:callable`, or a model
    type."""

    text: str
    kind: WordKind


def classify(text: str) -> Word:
    """Classify a word by its form. For a word with a slash, an existing path wins over a hub id."""
    if _is_path(text) and not CALLABLE.fullmatch(text):
        return Word(text, "path")
    if HUB_ID.fullmatch(text):
        return Word(text, "hub")
    if CALLABLE.fullmatch(text):
        return Word(text, "callable")
    return Word(text, "path" if os.sep in text or "/" in text else "type")


def _is_path(text: str) -> bool:
    if text in (".", "..") or text.endswith(".json"):
        return True
    has_separator = os.sep in text or "/" in text
    return has_separator and (text.startswith((".", "/", "~")) or text.endswith("/") or _exists(text))


def _exists(text: str) -> bool:
    try:
        return Path(text).expanduser().exists()
    except (OSError, ValueError):  # a name too long for the file system, a null character
        return False
