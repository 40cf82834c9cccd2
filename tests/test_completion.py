"""Completion in bash, zsh and fish: what each shell itself says when a user presses tab."""

import os
import pty
import re
import select
import shutil
import signal
import subprocess
import time

import pytest

from shardplan.cli.arguments import COMMANDS
from shardplan.cli.completion_scripts import SCRIPTS
from shardplan.cli.main import main

LINES = {
    "val": ["validate"],
    "validate llama llama --no-p": ["--no-proof"],
    "estimate --precision ": ["bf16", "fp16", "fp32"],
    "editor completion ": ["bash", "fish", "zsh"],
    "editor completion z": ["zsh"],
    "editor ": ["completion", "lsp", "schema"],
    "lint qwen3_m": ["qwen3_moe"],
}
WAIT = 60  # seconds for a shell to start, on a busy machine


def bash(line: str) -> list[str]:
    words = ["shardplan", *line.split(" ")]
    quoted = " ".join(f"'{word}'" for word in words)
    call = f'COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _shardplan; printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", f"{SCRIPTS['bash']()}\n{call}"], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_commands():
    assert set(bash("")) == {*COMMANDS, "--help", "--version"}


def test_options_after_options():
    assert bash("--debug lint --sa") == ["--sarif"]


@pytest.mark.parametrize(("line", "words"), LINES.items())
def test_bash(line, words):
    assert sorted(bash(line)) == words


def test_files(tmp_path, monkeypatch):
    (tmp_path / "plans").mkdir()
    monkeypatch.chdir(tmp_path)
    assert bash("lint plan") == bash("validate --sarif plan") == ["plans"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_scripts_name_everything(shell):
    text = SCRIPTS[shell]()
    assert all(name in text for name in COMMANDS) and "no-proof" in text and "qwen3_moe" in text


def installed(shell: str) -> str:
    path = shutil.which(shell)
    if path is None:
        pytest.skip(f"{shell} is not installed: its script was not read by it")
    return path


def test_fish(tmp_path):
    (tmp_path / "shardplan.fish").write_text(SCRIPTS["fish"]())
    asked = "; ".join(f"echo '>{line}'; complete -C 'shardplan {line}'" for line in LINES)
    environment = {**os.environ, "HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    call = [installed("fish"), "--no-config", "-c", f"source {tmp_path}/shardplan.fish; {asked}"]
    done = subprocess.run(call, capture_output=True, text=True, check=True, env=environment, cwd=tmp_path)
    assert done.stderr == ""
    for part in done.stdout.split(">")[1:]:
        line, *answers = part.splitlines()
        assert sorted(answer.split("\t")[0] for answer in answers) == LINES[line]


class Terminal:
    """An interactive zsh, which loads the script from its `fpath` as a user's does."""

    def __init__(self, zsh: str, folder):
        (folder / "_shardplan").write_text(SCRIPTS["zsh"]())
        (folder / ".zshrc").write_text(
            f"PROMPT='ready> '\nfpath=({folder} $fpath)\nautoload -Uz compinit\ncompinit -u -D\n"
        )
        self.process, self.screen = pty.fork()
        if self.process == 0:
            os.chdir(folder)
            os.execve(zsh, ["zsh", "-i"], {**os.environ, "ZDOTDIR": str(folder), "TERM": "dumb"})
        assert "ready> " in self.read(WAIT, until="ready> ")

    def read(self, seconds: float, until: str = "\0") -> str:
        text, end = "", time.monotonic() + seconds
        while time.monotonic() < end and until not in text:
            if select.select([self.screen], [], [], 0.2)[0]:
                text += re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\r|\a", "", os.read(self.screen, 65536).decode())
        return text

    def tab(self, line: str, until: str) -> str:
        os.write(self.screen, f"shardplan {line}\t".encode())
        shown = self.read(WAIT, until=until)
        os.write(self.screen, b"\x15")  # the line is emptied
        self.read(0.5)
        return shown


def test_zsh(tmp_path):
    terminal = Terminal(installed("zsh"), tmp_path)
    try:
        for line, words in LINES.items():
            shown = terminal.tab(line, until=words[-1])
            assert all(word in shown for word in words), line
            assert len(words) == 1 or "qwen3" not in shown, line
    finally:
        os.kill(terminal.process, signal.SIGKILL)
        os.waitpid(terminal.process, 0)


def test_the_command_prints_it(capsys):
    assert main(["editor", "completion", "fish"]) == 0
    assert capsys.readouterr().out == SCRIPTS["fish"]()
    assert main(["editor", "completion", "tcsh"]) == 2
