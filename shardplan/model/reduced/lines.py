"""The running line of the model's own code.

A torch module that is made of other modules (nn.MultiheadAttention, nn.TransformerEncoderLayer) is model code like the
user's: its lines decide the layout of a value. A module that only calls its children (nn.Sequential) is not.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType

import torch
from torch import nn

from .trace import SourceLine

TORCH = str(Path(torch.__file__).parent)
OURS = str(Path(__file__).parents[2])
MODULES = str(Path(TORCH, "nn", "modules"))
CALL = str(Path(MODULES, "module.py"))

Running = tuple[FrameType, int]  # a frame, and the line in it


def model_line() -> SourceLine | None:
    """The innermost running line of the model's code."""
    return _line(_outwards(sys._getframe(1)))


def raising_line(error: Exception) -> SourceLine | None:
    """The innermost line of the model's code that an exception passed through, or that runs now if it is being raised."""
    return _line(reversed(list(traceback.walk_tb(error.__traceback__)))) or model_line()


def _outwards(frame: FrameType | None) -> Iterator[Running]:
    while frame is not None:
        yield frame, frame.f_lineno
        frame = frame.f_back


def _line(frames: Iterable[Running]) -> SourceLine | None:
    """The line of the innermost frame in the model's code."""
    inner: SourceLine | None = None  # in the code of a torch module
    container: SourceLine | None = None
    for frame, number in frames:
        file = frame.f_code.co_filename
        if file == CALL:
            inner = None
            if container is not None and frame.f_back is not None and frame.f_back.f_code.co_filename.startswith(OURS):
                return container  # the model itself is a torch module
        elif file.startswith(MODULES):
            inner = inner or SourceLine(file, number)
            made_of_others = _made_of_others(frame)
            if made_of_others == "container":
                container = container or inner
            elif made_of_others:
                return inner
        elif not file.startswith((TORCH, OURS, "<")):
            return SourceLine(file, number)
    return container


def _made_of_others(frame: FrameType) -> str:
    """Whether a frame runs the forward of a torch module that holds other modules; "container" where it only calls them."""
    if frame.f_code.co_name != "forward":
        return ""
    module = frame.f_locals.get("self")
    if not isinstance(module, nn.Module) or not module._modules:
        return ""
    return "container" if isinstance(module, nn.Sequential) else "module"
