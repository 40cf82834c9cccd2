"""`shardplan editor`: what shells and editors ask for."""

from __future__ import annotations

import argparse

from .exits import CLEAN


def run(args: argparse.Namespace) -> int:
    if args.editor == "schema":
        from .editor_schema import run as schema

        return schema(args)
    if args.editor == "lsp":
        from .language_server import run as serve

        return serve(args)
    from .completion_scripts import SCRIPTS

    print(SCRIPTS[args.shell](), end="")
    return CLEAN
