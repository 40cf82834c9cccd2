"""Making docs/cli.md and the pages of docs/cli/ from the parser."""

from __future__ import annotations

import argparse

from .arguments import COMMANDS, EDITOR, Table, build_parser, commands_of

EXIT_CODES = """\
## Exit codes

| code | meaning |
|---|---|
| 0 | clean; warnings alone are clean, unless `--strict` is given |
| 1 | findings, also a plan or a model that cannot be read or built |
| 2 | wrong command line |
| 3 | a bug of shardplan; please report it with what the command prints with `--debug` |

Findings go to standard output, progress and errors of the command line to standard error. Colours are used on
a terminal; `NO_COLOR` turns them off, `FORCE_COLOR=1` on. Tables are folded to the terminal's width; elsewhere `show` has
120 columns, and other tables have a line for each row.
"""


def cli_document() -> str:
    """The command line in one table, with the exit codes, as Markdown."""
    parser = build_parser()
    rows = [f"| [{name}](cli/{name}.md) | {COMMANDS[name][0]} |" for name in commands_of(parser)]
    commands = "\n".join(["| command | what it does |", "|---|---|", *rows])
    return "\n\n".join(["# Command line", parser.description or "", commands, _table(parser), EXIT_CODES])


def command_document(name: str) -> str:
    """The page of a command and its subcommands, as Markdown."""
    command = commands_of(build_parser())[name]
    below = [_command(f"## shardplan {name} {one}", sub, EDITOR, one) for one, sub in commands_of(command).items()]
    return "\n\n".join([_command(f"# shardplan {name}", command, COMMANDS, name), *below]) + "\n"


def _command(heading: str, parser: argparse.ArgumentParser, table: Table, name: str) -> str:
    summary, example = table[name][:2]
    return "\n\n".join([heading, summary, _table(parser), f"```console\n$ {example}\n```"])


def _table(parser: argparse.ArgumentParser) -> str:
    """The table of arguments and options; `--debug` is described once, with the exit codes."""
    rows = [(_spelling(action), _help(action)) for action in parser._actions if _is_shown(action)]
    if not rows:
        return "No arguments."
    return "\n".join(["| | |", "|---|---|", *(f"| `{spelling}` | {text} |" for spelling, text in rows)])


def _is_shown(action: argparse.Action) -> bool:
    return not isinstance(action, (argparse._SubParsersAction, argparse._HelpAction)) and action.dest != "debug"


def _spelling(action: argparse.Action) -> str:
    """`--tp N`, `MODEL`, `PLAN ...`."""
    metavar = str(action.metavar or action.dest.upper())
    if not action.option_strings:
        return metavar + (" ..." if action.nargs == "+" else "")
    takes_value = action.nargs != 0
    return ", ".join(action.option_strings) + (f" {metavar}" if takes_value else "")


def _help(action: argparse.Action) -> str:
    return (action.help or "") + (" (required)" if action.required and action.option_strings else "")
