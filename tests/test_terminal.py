"""Nothing that a file or an argument names can write to the terminal: cursor moves, titles, colours, text in another order."""

from __future__ import annotations

import ast
import io
import json
import sys
from pathlib import Path

import pytest

from shardplan.cli.main import main
from shardplan.report.json import json_text
from shardplan.report.width import is_hidden, printable_lines

CLI = Path(__file__).parents[1] / "shardplan" / "cli"
EVIL = "\x1b[31m\x1b]0;t\x07\x9b2J\r\x7f\u202e\u2066\u200f\x00"
NAMED = EVIL.replace("\x00", "")  # what a path can hold
DEVICE = {"memory": 8e9, "flops": {"bfloat16": 1e12}, "memory_bandwidth": 1e11, "node_gpus": 1}
DEVICE |= {"node_bandwidth": 1e9, "network_bandwidth": 1e9}
LOCK = {"lock": "1", "asked": {"model": "x", "plan": "y", "mesh": {}}, "versions": {}, "files": {}, "parameters": {}}
LOCK |= {"variants": {}, "sections": {}, "digest": ""}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(words: list[str], monkeypatch: pytest.MonkeyPatch, *, terminal: bool = True) -> str:
    """What a command prints, without the colours of a report and what progress writes."""
    streams = [Terminal() if terminal else io.StringIO() for _ in range(2)]
    monkeypatch.setattr(sys, "stdout", streams[0])
    monkeypatch.setattr(sys, "stderr", streams[1])
    monkeypatch.setenv("NO_COLOR", "1")
    assert main(words) in (0, 1, 2)
    text = "".join(stream.getvalue() for stream in streams)
    return text.replace("\r\x1b[K", "")


@pytest.mark.parametrize(
    "words",
    [
        ["explain", EVIL],
        [EVIL],
        ["lint", f"{NAMED}.yaml"],
        ["lint", f"--{EVIL}"],
        ["lint", "llama", "--sarif", f"no/{NAMED}"],
        ["lint", f"folder{NAMED}"],
        ["fmt", f"{NAMED}.yaml", f"{NAMED}.json"],
        ["fmt", f"loose{NAMED}.yaml", "--check"],
        ["fmt", f"loose{NAMED}.yaml", "--diff"],
        ["fmt", f"loose{NAMED}.yaml"],
        ["lint", f"loose{NAMED}.yaml", "--github"],
        ["validate", NAMED, "llama"],
        ["validate", f"./{NAMED}", "llama"],
        ["validate", f"a:{NAMED}", "llama"],
        ["validate", "llama", f"{NAMED}"],
        ["validate", "llama", "llama", "--set", f"{EVIL}=1"],
        ["validate", "llama", "llama", "--mesh", f"{EVIL}=1"],
        ["validate", "llama", "llama", "--tp", EVIL],
        ["validate", "llama", "llama", EVIL],
        ["diff", "--against", NAMED],
        ["diff", "--against", f"lock{NAMED}"],
        ["diff", "--against", f"named{NAMED}"],
        ["diff", NAMED, "--against", f"named{NAMED}"],
        ["fit", "llama", "--gpus", "8", "--global-batch", "8", "--seq-len", "8", "--device", NAMED],
        ["fit", "llama", "--gpus", "8", "--global-batch", "8", "--seq-len", "8", "--device", f"{NAMED}.json"],
        ["fit", "llama", "--gpus", "8", "--global-batch", "8", "--seq-len", "8", "--device", f"device{NAMED}.json"],
        ["convert", f"{NAMED}.json"],
        ["convert", f"loose{NAMED}.yaml"],
        ["editor", "schema", "--install", NAMED],
        ["show", "llama", "llama", "--html", "x", "--device", NAMED],
    ],
    ids=lambda words: " ".join(words).encode("unicode_escape").decode(),
)
@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "pipe"])
def test_no_command_prints_what_a_terminal_obeys(words, terminal, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / f"folder{NAMED}").mkdir()
    (tmp_path / f"loose{NAMED}.yaml").write_text('version: "1"\ntensor_parallel:\n    "a\u202eb":   colwise\n')
    (tmp_path / f"lock{NAMED}").write_text(json.dumps({**LOCK, "asked": {**LOCK["asked"], "mesh": {EVIL: 2}}}))
    named = {"model": f"a{NAMED}", "plan": NAMED, "mesh": {"tp": 2}, "inputs": f"b:{EVIL}"}
    (tmp_path / f"named{NAMED}").write_text(json.dumps({**LOCK, "asked": named}))
    (tmp_path / f"device{NAMED}.json").write_text(json.dumps({**DEVICE, EVIL: 1}))
    text = shown(words, monkeypatch, terminal=terminal)
    if words[-1] == "--diff" and not terminal:
        return  # a patch for a file has the bytes of the plan and its name
    assert text and [char for char in text if is_hidden(char) and char not in "\n\t"] == []


def test_a_document_is_itself_in_a_pipe_and_visible_on_a_terminal(tmp_path, monkeypatch):
    plan = tmp_path / "plan.yaml"
    plan.write_text('version: "1"\ntensor_parallel:\n    "a\u202eb":   colwise\n', "utf-8")
    assert "\u202e" in shown(["fmt", str(plan), "--diff"], monkeypatch, terminal=False)
    assert "\u202e" not in shown(["fmt", str(plan), "--diff"], monkeypatch)


def test_lines_tabs_and_colours():
    assert printable_lines("a\tb\n\x1b[1;31mc") == "a\tb\n␛[1;31mc"
    assert printable_lines("\x1b[1;31mc\x1b[0m\x1b]0;\x07", colors=True) == "\x1b[1;31mc\x1b[0m␛]0;␇"


def test_json_escapes_what_a_terminal_obeys():
    data = {EVIL: [EVIL, "é 漢 \U000e0041"]}
    text = json_text(data)
    assert json.loads(text) == data and "é 漢" in text
    assert [char for char in text if is_hidden(char) and char != "\n"] == []


def test_commands_print_through_one_place():
    """`say`, `show` and `put` of shardplan/cli/output.py; what else prints has fixed words."""
    printing = [
        f"{path.name}:{node.lineno}"
        for path in CLI.glob("*.py")
        if path.name != "output.py"
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call)
        and (getattr(node.func, "id", "") == "print" or getattr(node.func, "attr", "") in ("write", "writelines"))
    ]
    fixed = ("editor_command", "main", "argument_parts")
    assert [place for place in printing if not place.startswith(fixed)] == []
