"""`shardplan completion`: a script for a shell."""

from __future__ import annotations

import argparse

from .exits import CLEAN


def run(args: argparse.Namespace) -> int:
    from .completion_scripts import SCRIPTS

    print(SCRIPTS[args.shell](), end="")
    return CLEAN
