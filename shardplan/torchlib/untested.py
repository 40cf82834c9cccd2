"""Releases of torch and transformers newer than those that the package was tested with: they are used, with a warning."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping

from shardplan.core.version import UntestedVersionWarning, __version__
from shardplan.core.versions import PACKAGES, installed_versions

from .private_attributes import SEEN


def warn_of_untested() -> None:
    """Warn of installed packages that are newer than the tested ones."""
    if text := untested(installed_versions()):
        warnings.warn(text, UntestedVersionWarning, stacklevel=2)


def untested(installed: Mapping[str, str]) -> str:
    """The packages newer than the newest tested release, and what to report; empty if there are none.

    Args:
        installed: package -> its version. The first two numbers of a version count: 2.13.1 is no newer than 2.13.0.
    """
    newer = [name for name in PACKAGES if _series(installed[name]) > _series(SEEN[name][-1])]
    if not newer:
        return ""
    have = " and ".join(f"{name} {installed[name]}" for name in newer)
    tested = " and ".join(f"{name} {_text(SEEN[name][0])} to {_text(SEEN[name][-1])}" for name in newer)
    return (
        f"{have}: shardplan {__version__} was tested with {tested}. If something fails that worked there, report it with the "
        "message and the output of `shardplan --version`"
    )


def _series(version: str) -> tuple[int, ...]:
    """The first two numbers of a version; empty for a package that is not installed."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return tuple(map(int, found.groups())) if found else ()


def _text(version: str) -> str:
    return ".".join(map(str, _series(version)))
