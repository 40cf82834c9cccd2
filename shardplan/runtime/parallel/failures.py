"""The module in which an exception occurred."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_PREFIX = "at module "


@contextmanager
def at_module(name: str) -> Iterator[None]:
    """Note the module's name on an exception that passes through."""
    try:
        yield
    except Exception as error:
        if module_of(error) is None:
            error.add_note(_PREFIX + (name or "<model>"))
        raise


def module_of(error: BaseException) -> str | None:
    """The module that was noted on an exception."""
    notes = getattr(error, "__notes__", ())
    return next((note.removeprefix(_PREFIX) for note in notes if note.startswith(_PREFIX)), None)
