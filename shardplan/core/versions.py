"""Versions of Python and of the packages that decide what a plan means, found without importing any."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

from .version import __version__

PACKAGES = ("torch", "transformers")
MISSING = "not installed"


def installed_versions() -> dict[str, str]:
    """Package -> its version, or the words that it is not installed."""
    return {
        "shardplan": __version__,
        **{name: _version(name) for name in PACKAGES},
        "Python": platform.python_version(),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return MISSING
