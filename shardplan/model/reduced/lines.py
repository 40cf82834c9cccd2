"""Which line of the model's own code is running."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from types import FrameType

import torch

from .trace import SourceLine

TORCH = str(Path(torch.__file__).parent)
OURS = str(Path(__file__).parents[2])


def model_line() -> SourceLine | None:
    """The innermost running line that is neither torch's nor ours."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((TORCH, OURS, "<")):
            return SourceLine(file, frame.f_lineno)
        frame = frame.f_back
    return None


def raising_line(error: Exception) -> SourceLine | None:
    """The innermost line of the model's code that an exception came through; of the running call, if it is raised now."""
    lines = [
        SourceLine(frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if not frame.f_code.co_filename.startswith((TORCH, OURS, "<"))
    ]
    return lines[-1] if lines else model_line()
