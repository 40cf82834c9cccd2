"""The files of the project that the package reads: plans, and the pages of the diagnostic codes."""

from __future__ import annotations

from pathlib import Path


def data_folder(name: str) -> Path:
    """A folder of the project: next to the package in a clone, inside it in a wheel."""
    package = Path(__file__).parents[1]
    packaged = package / "_data" / name
    return packaged if packaged.is_dir() else package.parent / name
