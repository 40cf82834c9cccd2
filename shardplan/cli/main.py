"""The entry point: parse the command line, import and run the command, and turn the outcome into an exit code."""

from __future__ import annotations

import gc
import os
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from io import TextIOWrapper

from shardplan.core.version import UntestedVersionWarning

from .exits import BROKEN_PIPE, BUG, INTERRUPTED, USAGE, UsageError

NOT_IN_CORE = ("torch", "transformers", "safetensors", "tqdm", "numpy")  # not installed with `shardplan-core`


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code (`shardplan.cli.exits`)."""
    from .arguments import build_parser, misspelt, parse

    words = list(sys.argv[1:] if argv is None else argv)
    if not words:
        build_parser().print_help(sys.stderr)
        print("\nshardplan: error: name a command", file=sys.stderr)
        return USAGE
    try:
        args = parse(words)
    except SystemExit as stop:
        if stop.code and (near := misspelt(words)) is not None:
            print(f"did you mean: shardplan {near}", file=sys.stderr)
        return stop.code if isinstance(stop.code, int) else USAGE
    try:
        return import_module(f"shardplan.cli.{args.command}_command").run(args)
    except UsageError as error:
        _say(f"shardplan {args.command}: error: {error}")
        return USAGE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        return BROKEN_PIPE
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in NOT_IN_CORE:
            _say(f"shardplan {args.command}: error: this needs {error.name}: pip install shardplan")
            return USAGE
        _report_bug(error, debug=args.debug)
        return BUG
    except Exception as error:
        _report_bug(error, debug=args.debug)
        return BUG


def console() -> None:
    """Run as a program. Most of a short command's time would be garbage collection after imports and the interpreter's
    teardown, so the former is delayed and the latter skipped."""
    gc.disable()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # findings say what concerns the user
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
        warnings.simplefilter("default", UntestedVersionWarning)
        warnings.formatwarning = lambda message, *_, **__: f"shardplan: warning: {message}\n"
    # A stream that was closed outside is None.
    streams = [stream for stream in (sys.stdout, sys.stderr) if isinstance(stream, TextIOWrapper)]
    for stream in streams:
        stream.reconfigure(errors="backslashreplace")
    code = main()
    try:
        for stream in streams:
            stream.flush()
    except BrokenPipeError:
        code = BROKEN_PIPE
    os._exit(code)


def _report_bug(error: Exception, *, debug: bool) -> None:
    if debug:
        import traceback

        _say("".join(traceback.format_exception(error)).rstrip())
    hint = "" if debug else " and what it prints with --debug"
    _say(
        f"shardplan: internal error: {type(error).__name__}: {error}\n"
        f"This is a bug in shardplan. Please report it with the command line{hint}."
    )


def _say(text: str) -> None:
    from .output import say

    say(text)
