"""Scripts for shells that complete commands, options and built-in plans, made from the parser."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping

from shardplan.language import builtin_plans

from .arguments import COMMANDS, EDITOR, build_parser, commands_of

PLANS = ("auto", "hf")


def bash() -> str:
    """The script for bash: `complete -F`."""
    options = "\n".join(f"    {name}) options='{' '.join(_flags(parser))}' ;;" for name, parser in _parsers().items())
    choices = "\n".join(
        f"    {option}) COMPREPLY=($(compgen -W '{words}' -- \"$current\")); return ;;" for option, words in _choices()
    )
    return f"""\
# bash completion of shardplan: shardplan editor completion bash
_shardplan() {{
  local current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}" command="" options="" word
  for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
    case "$word" in {"|".join(COMMANDS)}) command="$word"; break ;; esac
  done
  if [[ -z "$command" ]]; then
    COMPREPLY=($(compgen -W "{" ".join(COMMANDS)} --help --version" -- "$current"))
    return
  fi
  case "$command:$previous" in
{choices}
    editor:editor) COMPREPLY=($(compgen -W "{" ".join(EDITOR)}" -- "$current")); return ;;
    editor:completion) COMPREPLY=($(compgen -W "bash zsh fish" -- "$current")); return ;;
  esac
  case "$command" in
{options}
  esac
  if [[ "$current" == -* ]]; then
    COMPREPLY=($(compgen -W "$options" -- "$current"))
  else
    compopt -o filenames 2>/dev/null
    COMPREPLY=($(compgen -f -- "$current") $(compgen -W "{" ".join(_plans())}" -- "$current"))
  fi
}}
complete -F _shardplan shardplan
"""


def zsh() -> str:
    """The script for zsh: a file in `fpath`, or for `eval`."""
    commands = "\n".join(f"    {_zsh_item(name, summary)}" for name, (summary, *_) in COMMANDS.items())
    options = "\n".join(
        f"    {name}) options=(\n" + "\n".join(f"      {_zsh_item(*one)}" for one in _described(parser)) + "\n    ) ;;"
        for name, parser in _parsers().items()
    )
    choices = "\n".join(f"    {option}) compadd -- {words}; return ;;" for option, words in _choices())
    return f"""\
#compdef shardplan
# zsh completion of shardplan: shardplan editor completion zsh
_shardplan() {{
  local -a commands options
  commands=(
{commands}
  )
  if (( CURRENT == 2 )); then
    _describe command commands
    return
  fi
  case "$words[2]:$words[CURRENT-1]" in
{choices}
  esac
  case "$words[2]" in
{options}
  esac
  if [[ "$words[2]" == editor && "$words[CURRENT-1]" == editor ]]; then
    compadd {" ".join(EDITOR)}
  elif [[ "$words[2]" == editor && "$words[CURRENT-1]" == completion ]]; then
    compadd bash zsh fish
  elif [[ "$PREFIX" == -* ]]; then
    _describe -o option options
  else
    compadd -- {" ".join(_plans())}
    _files
  fi
}}
if [[ "$funcstack[1]" == _shardplan ]]; then _shardplan "$@"; else compdef _shardplan shardplan; fi
"""


def fish() -> str:
    """The script for fish: a file in ~/.config/fish/completions."""
    lines = ["# fish completion of shardplan: shardplan editor completion fish"]
    for name, (summary, *_) in COMMANDS.items():
        lines.append(f"complete -c shardplan -f -n __fish_use_subcommand -a {name} -d {_fish(summary)}")
    for name, parser in _parsers().items():
        seen = f"-n '__fish_seen_subcommand_from {name}'"
        for action in _options(parser):
            flags = " ".join(
                f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}" for flag in action.option_strings
            )
            values = (
                f" -x -a '{' '.join(map(str, action.choices))}'"
                if action.choices
                else " -r"
                if action.nargs != 0
                else ""
            )
            lines.append(f"complete -c shardplan {seen} {flags}{values} -d {_fish(_first(action))}")
    below = " ".join(EDITOR)
    seen = f"__fish_seen_subcommand_from editor; and not __fish_seen_subcommand_from {below}"
    lines.append(f"complete -c shardplan -f -n '{seen}' -a '{below}'")
    lines.append("complete -c shardplan -f -n '__fish_seen_subcommand_from completion' -a 'bash zsh fish'")
    taking = " ".join(name for name in COMMANDS if name not in ("explain", "editor"))
    lines.append(f"complete -c shardplan -n '__fish_seen_subcommand_from {taking}' -a '{' '.join(_plans())}'")
    return "\n".join(lines) + "\n"


SCRIPTS: Mapping[str, Callable[[], str]] = {"bash": bash, "zsh": zsh, "fish": fish}


def _parsers() -> dict[str, argparse.ArgumentParser]:
    return commands_of(build_parser())


def _options(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """The options of a command and of its subcommands, each once."""
    every = [action for one in (parser, *commands_of(parser).values()) for action in one._actions]
    return iter({action.option_strings[-1]: action for action in every if action.option_strings}.values())


def _flags(parser: argparse.ArgumentParser) -> list[str]:
    return [flag for action in _options(parser) for flag in action.option_strings]


def _choices() -> Iterator[tuple[str, str]]:
    """The options whose values are words from a list: (`command:--option`, the words)."""
    for name, parser in _parsers().items():
        for action in _options(parser):
            for flag in action.option_strings if action.choices else ():
                yield f"{name}:{flag}", " ".join(map(str, action.choices or ()))


def _described(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    return ((flag, _first(action)) for action in _options(parser) for flag in action.option_strings)


def _first(action: argparse.Action) -> str:
    """The beginning of an option's help, for a line of a menu."""
    return (action.help or "").split(";")[0].split(": ")[0][:80]


def _plans() -> list[str]:
    return [*PLANS, *builtin_plans()]


def _zsh_item(name: str, text: str) -> str:
    shown = text.replace("'", "'\\''").replace(":", "\\:")
    return f"'{name}:{shown}'"


def _fish(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
