"""`shardplan explain CODE`: the page of a diagnostic code."""

from __future__ import annotations

import argparse
from difflib import get_close_matches

from shardplan.report.pages import pages

from .exits import CLEAN, UsageError
from .output import show


def run(args: argparse.Namespace) -> int:
    word = args.code.upper()
    word = f"SP{word}" if word.isdecimal() else word
    page = pages().get(word)
    if page is None:
        near = [known for known in pages() if known.startswith(word)][:3]
        near = near or get_close_matches(word, pages(), cutoff=0.5)
        hint = f"; the nearest are {', '.join(near)}" if near else "; codes look like SP301"
        raise UsageError(f"there is no code {args.code}{hint}")
    show(str(page))
    return CLEAN
