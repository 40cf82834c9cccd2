"""Arguments that several commands share, and the forms of their values. Imports nothing heavy."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from shardplan.core.size_bounds import MOST_MICRO_BATCHES, MOST_RANKS, MOST_SEQUENCES, MOST_TOKENS
from shardplan.report.width import printable_lines

if TYPE_CHECKING:
    from shardplan.compiler.user_inputs import Model


class Parser(argparse.ArgumentParser):
    """A parser whose messages cannot control the terminal, whatever the command line contains."""

    def error(self, message: str) -> NoReturn:
        super().error(printable_lines(message))


class Versions(argparse.Action):
    """Prints the installed versions, and exits. It imports nothing."""

    def __call__(self, parser: argparse.ArgumentParser, *rest: Any) -> None:
        from shardplan.core.versions import installed_versions

        print(*(f"{name} {version}" for name, version in installed_versions().items()), sep="\n")
        parser.exit()


MODEL_HELP = (
    "a folder or config.json in Hugging Face form, a hub id (from the local cache), a Hugging Face model "
    "type (its default configuration), or module:callable returning an nn.Module"
)
PLAN_HELP = (
    "a file (a word with a path separator or a .yaml, .yml or .json ending), a built-in plan's name, `auto` "
    "(the built-in plan for this model, else one that is derived as by `shardplan init`) or `hf` (the model's own transformers "
    "tp_plan)"
)


def count_to(most: int) -> Callable[[str], int]:
    """A function that reads a positive integer up to `most`, and raises ArgumentTypeError."""

    def count(text: str) -> int:
        if not text.isdecimal() or text.strip("0") == "":
            raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
        if len(text.lstrip("0")) > len(str(most)) or int(text) > most:
            raise argparse.ArgumentTypeError(f"{text:.20} is more than {most:,}, the most that is accepted")
        return int(text)

    return count


ranks = count_to(MOST_RANKS)
tokens = count_to(MOST_TOKENS)
sequences = count_to(MOST_SEQUENCES)
micro_batches = count_to(MOST_MICRO_BATCHES)


def several(text: str) -> int:
    """An integer above 1. Raises ArgumentTypeError."""
    if ranks(text) < 2:
        raise argparse.ArgumentTypeError(f"{text!r} splits nothing: give 2 or more ranks")
    return int(text)


def setting(text: str) -> tuple[str, Any]:
    """`name=value` as a pair. Raises ArgumentTypeError."""
    from shardplan.model import parse_setting

    try:
        return parse_setting(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def shares(text: str) -> tuple[float, float]:
    """ "0.35,0.5" -> two numbers from 0 to 1."""
    try:
        low, high = map(float, text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"two numbers, as 0.35,0.5, not {text!r}") from None
    return low, high


def sizes(text: str) -> int | tuple[int, ...]:
    """`8` as a size, `1,8` as sizes without repetition. Raises ArgumentTypeError."""
    several = tuple(dict.fromkeys(ranks(part.strip()) for part in text.split(",")))
    return several if len(several) > 1 else several[0]


def debug(parser: Parser, *, default: object) -> None:
    parser.add_argument("--debug", action="store_true", default=default, help="show the trace of an internal error")


def model_and_plan(parser: Parser, *, default: str | None = None) -> None:
    """The two positional arguments.

    Args:
        default: the plan where the command line names none.
    """
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    number = None if default is None else "?"
    parser.add_argument("plan", metavar="PLAN", nargs=number, default=default, help=PLAN_HELP)
    derivation(parser)


def derivation(parser: Parser) -> None:
    text = "derive nothing: neither a plan for `auto` where no built-in one is for the model, nor rules for cp"
    parser.add_argument("--no-derive", dest="derive", action="store_false", help=text)


def sequence_parallel(parser: Parser, *, help: str) -> None:
    parser.add_argument("--sequence-parallel", action=argparse.BooleanOptionalAction, default=None, help=help)


def configuration(parser: Parser) -> None:
    parser.add_argument(
        "--set",
        dest="settings",
        type=setting,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a number of the model's configuration to change; may be repeated",
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code from the model's folder")


def model_options(parser: Parser) -> None:
    configuration(parser)
    parser.add_argument(
        "--inputs",
        metavar="MODULE:CALLABLE",
        help="inputs of the reduced model: a function from a seed to keyword arguments of its forward",
    )
    parser.add_argument(
        "--reduced",
        metavar="MODULE:CALLABLE",
        help="builds a reduced model of the same structure, for a model that is too large or cannot be reduced",
    )


def model_of(args: argparse.Namespace) -> Model:
    """The model that a command line names."""
    from shardplan.compiler.user_inputs import Model

    return Model(args.model, dict(args.settings), args.inputs, args.reduced, args.trust_remote_code)


def allow_unproven(parser: Parser) -> None:
    text = "report what cannot be proven (a model that cannot be reduced or called, a part that no run reaches) as a warning"
    parser.add_argument("--allow-unproven", action="store_true", help=text)


def findings_output(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--sarif", metavar="FILE", help="also write the findings to FILE as SARIF 2.1.0")
    parser.add_argument("--strict", action="store_true", help="treat warnings as errors")
    text = "also print the findings as annotations of a GitHub workflow, which shows them at the plan's lines"
    parser.add_argument("--github", action="store_true", help=text)
