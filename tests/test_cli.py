"""The command line's frame: help, exit codes, output streams."""

import io
import json
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

import shardplan
from shardplan.cli.arguments import COMMANDS, build_parser
from shardplan.cli.main import main

ROOT = Path(__file__).parent.parent


def run(*words: str, **options) -> subprocess.CompletedProcess:
    """A real process: the program as installed."""
    return subprocess.run(
        [sys.executable, "-m", "shardplan", *words], cwd=ROOT, capture_output=True, text=True, **options
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_help_ends_with_an_example_that_the_parser_takes(command, capsys):
    assert main([command, "--help"]) == 0
    *_, marker, example = capsys.readouterr().out.strip().split("\n")
    assert marker == "example:"
    words = example.partition(" > ")[0].split()
    assert words[:2] == ["shardplan", command]
    assert build_parser().parse_args(words[1:]).command == command


@pytest.mark.parametrize("command", COMMANDS)
def test_an_option_that_takes_a_number_refuses_a_word(command, capsys):
    (commands,) = (one for one in build_parser()._actions if isinstance(one.choices, dict))
    for option in commands.choices[command]._actions:
        if option.option_strings and option.metavar in ("N", "X", "LOW,HIGH", "N[,N...]"):
            assert main([command, option.option_strings[0], "many"]) == 2
            assert option.option_strings[0] in capsys.readouterr().err.splitlines()[-1], option.option_strings


def test_the_number_at_the_end_of_a_help_is_the_default():
    (commands,) = (one for one in build_parser()._actions if isinstance(one.choices, dict))
    options = [(name, option) for name, command in commands.choices.items() for option in command._actions]
    found = 0
    for name, option in options:
        said = re.search(r"\((\d[\d.]*)\)$", option.help or "")
        if said and option.default is not None:  # others depend on more than the option
            assert float(said[1]) == option.default, (name, option.option_strings)
            found += 1
    assert found >= 5


@pytest.mark.parametrize(("flags", "shown"), [((), False), (("-W", "default"), True)])
def test_warnings_of_other_packages_are_shown_to_those_who_ask(flags, shown):
    code = "import warnings, shardplan.cli.main as m; m.main = lambda: warnings.warn('old') or 0; m.console()"
    ended = subprocess.run([sys.executable, *flags, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0 and ("old" in ended.stderr) == shown


def test_every_command_has_its_module():
    for command in COMMANDS:
        assert (ROOT / "shardplan" / "cli" / f"{command}_command.py").exists()


def test_version_is_the_package_s(capsys):
    assert main(["--version"]) == 0
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"shardplan {declared}" == f"shardplan {shardplan.__version__}"
    assert [line.split()[0] for line in lines[1:]] == ["torch", "transformers", "Python"]
    for line, package in zip(lines[1:], ("torch", "transformers"), strict=False):
        try:
            assert line == f"{package} {version(package)}"
        except PackageNotFoundError:
            assert line == f"{package} not installed"


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["frobnicate"],
        ["lint"],
        ["validate", "llama"],
        ["validate", "llama", "llama", "--tp", "0"],
        ["validate", "llama", "llama", "--tp", "two"],
        ["validate", "llama", "llama", "--set", "hidden_size"],
        ["validate", "llama", "llama", "--tp", "2", "--seq-len", "0"],
        ["validate", "llama", "llama", "--tp", "2", "--seq-len", "many"],
        ["verify", "llama", "llama"],
        ["verify", "llama", "llama", "--pp", "2", "--schedule", "gpipe"],
        ["verify", "llama", "llama", "--tp", "2", "--processes", "--micro-batches", "4"],
        ["verify", "llama", "llama", "--pp", "2", "--processes", "--micro-batches", "1"],
        ["explain", "SP999"],
        ["explain", "nonsense"],
    ],
    ids=" ".join,
)
def test_a_wrong_command_line_is_2(words, capsys):
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "error: " in captured.err


def test_an_unknown_code_names_the_nearest(capsys):
    assert main(["explain", "SP20"]) == 2
    assert "SP201" in capsys.readouterr().err


def test_explain_prints_the_page_whatever_the_case(capsys):
    assert main(["explain", "sp301"]) == 0
    assert capsys.readouterr().out.startswith("SP301: ")


def raising(error: BaseException):
    def run(args):
        raise error

    return run


def test_our_own_bug_is_3_and_asks_for_a_report(monkeypatch, capsys):
    monkeypatch.setattr("shardplan.cli.editor_schema.run", raising(AssertionError("that cannot be")))
    assert main(["editor", "schema"]) == 3
    shown = capsys.readouterr().err
    assert "AssertionError: that cannot be" in shown and "Traceback" not in shown
    assert shown.endswith("Please report it with the command line and what it prints with --debug.\n")
    for words in (["--debug", "editor", "schema"], ["editor", "schema", "--debug"]):
        assert main(words) == 3
        shown = capsys.readouterr().err
        assert "Traceback" in shown and shown.endswith("Please report it with the command line.\n")


@pytest.mark.parametrize("name", ["torch", "transformers.models.llama"])
def test_what_the_core_lacks_is_2_and_named(name, monkeypatch, capsys):
    monkeypatch.setattr("shardplan.cli.editor_schema.run", raising(ModuleNotFoundError(name=name)))
    assert main(["editor", "schema"]) == 2
    shown = capsys.readouterr().err
    assert shown == f"shardplan editor: error: this needs {name}: pip install shardplan\n"


@pytest.mark.parametrize("name", ["json", "shardplan.cli.editor_schema", None])
def test_a_module_of_the_core_that_is_missing_is_our_own_bug(name, monkeypatch, capsys):
    monkeypatch.setattr("shardplan.cli.editor_schema.run", raising(ModuleNotFoundError(name=name)))
    assert main(["editor", "schema"]) == 3
    assert "This is a bug in shardplan" in capsys.readouterr().err


def test_an_interrupt_is_130(monkeypatch, capsys):
    monkeypatch.setattr("shardplan.cli.editor_schema.run", raising(KeyboardInterrupt()))
    assert main(["editor", "schema"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_as_a_program():
    result = run("editor", "schema", "--report")
    assert result.returncode == 0 and result.stderr == ""
    assert json.loads(result.stdout)["title"] == "shardplan report"


def test_a_reader_that_goes_away_is_no_error():
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as closed:
        result = subprocess.run(
            [sys.executable, "-m", "shardplan", "editor", "schema", "--report"],
            cwd=ROOT,
            stdout=closed,
            stderr=subprocess.PIPE,
        )
    assert result.stderr == b"" and result.returncode == 141


def test_output_that_the_terminal_cannot_encode_is_escaped():
    plan = "/no/such/plán.yaml"
    result = run("lint", plan, env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"})
    assert result.returncode == 1 and result.stderr == ""
    assert "pl\\xe1n.yaml" in result.stdout


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_tables_fit_a_terminal_and_have_a_line_for_each_row_elsewhere(monkeypatch):
    monkeypatch.setenv("COLUMNS", "70")
    monkeypatch.setenv("NO_COLOR", "1")
    shown = {}
    for stream in (Terminal(), io.StringIO()):
        monkeypatch.setattr(sys, "stdout", stream)
        assert main(["list"]) == 0
        shown[stream.isatty()] = stream.getvalue().splitlines()
    assert max(map(len, shown[True])) <= 70 < max(map(len, shown[False]))
    assert sorted("".join(shown[True]).replace(" ", "")) == sorted("".join(shown[False]).replace(" ", ""))


def test_what_newcomers_type(capsys, tmp_path, monkeypatch):
    """No command, one that is misspelt, a code without its letters, a plan on standard input, JSON to format."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.json").write_text('{"version": "1"}')
    for words, code, said in (
        ([], 2, "Check a plan against a model".lower()),
        (["validat", "llama", "llama"], 2, "did you mean: shardplan validate"),
        (["--debug", "verifi", "llama"], 2, "did you mean: shardplan verify"),
        (["explain", "401"], 0, "SP401: "),
        (["lint", "-"], 1, "write /dev/stdin"),
        (["fmt", "plan.json"], 2, "plan.json is JSON: only plans in YAML are formatted"),
    ):
        assert main(words) == code, words
        printed = capsys.readouterr()
        assert said in printed.out + printed.err or said in (printed.out + printed.err).lower(), words
