"""`shardplan editor lsp`, spoken to over standard input and output as an editor does."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("pygls", reason="the extra `lsp` is not installed")

ROOT = Path(__file__).parent.parent
TEXT = 'version: "1"\ntensor_parallel:\n  model.layers.*.mlp.up_proj: colwyse\n  model.lay\n'
MODEL = ["--model", "qwen3", "--set", "num_hidden_layers=2", "--set", "hidden_size=64", "--set", "intermediate_size=96"]


class Editor:
    def __init__(self, process: subprocess.Popen):
        self.process, self.number = process, 0
        self.published: list[dict] = []

    def send(self, method: str, params: dict | None, *, answer: bool = True):
        message = {"jsonrpc": "2.0", "method": method} | ({"params": params} if params is not None else {})
        if answer:
            self.number += 1
            message["id"] = self.number
        body = json.dumps(message).encode()
        self.process.stdin.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        self.process.stdin.flush()
        while answer:
            got = self.read()
            if got.get("id") == self.number:
                assert "error" not in got, got
                return got["result"]

    def read(self) -> dict:
        length = 0
        while line := self.process.stdout.readline().strip():
            name, _, value = line.partition(b":")
            length = int(value) if name.lower() == b"content-length" else length
        got = json.loads(self.process.stdout.read(length))
        if got.get("method") == "textDocument/publishDiagnostics":
            self.published.append(got["params"])
        return got

    def diagnostics(self) -> list[dict]:
        while not self.published:
            self.read()
        return self.published.pop()["diagnostics"]

    def open(self, text: str, uri: str = "file:///plans/mine.yaml") -> None:
        document = {"uri": uri, "languageId": "yaml", "version": 1, "text": text}
        self.send("textDocument/didOpen", {"textDocument": document}, answer=False)

    def change(self, text: str, uri: str = "file:///plans/mine.yaml") -> None:
        params = {"textDocument": {"uri": uri, "version": 2}, "contentChanges": [{"text": text}]}
        self.send("textDocument/didChange", params, answer=False)

    def at(self, method: str, line: int, character: int):
        params = {
            "textDocument": {"uri": "file:///plans/mine.yaml"},
            "position": {"line": line, "character": character},
        }
        return self.send(f"textDocument/{method}", params)


@contextmanager
def editor(*words: str) -> Iterator[Editor]:
    command = [sys.executable, "-m", "shardplan", "editor", "lsp", *words]
    process = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        made = Editor(process)
        made.send("initialize", {"processId": None, "rootUri": None, "capabilities": {}})
        made.send("initialized", {}, answer=False)
        yield made
        made.send("shutdown", None)
        made.send("exit", None, answer=False)
        assert process.wait(20) == 0
    finally:
        process.kill()


def test_the_language_alone():
    with editor() as one:
        one.open(TEXT.replace("  model.lay\n", ""))
        (found,) = one.diagnostics()
        assert found["code"] == "SP106" and "did you mean `colwise`" in found["message"]
        assert found["range"] == {"start": {"line": 2, "character": 30}, "end": {"line": 2, "character": 37}}
        one.change(TEXT.replace("  model.lay\n", "").replace("colwyse", "colwise"))
        assert one.diagnostics() == []
        words = [item["label"] for item in one.at("completion", 2, 30)]
        assert {"colwise", "rowwise", "none"} <= set(words)
        assert "colwise" in one.at("hover", 2, 33)["contents"]["value"]
        assert one.at("hover", 2, 5) is None and one.at("hover", 0, 2) is None


def test_with_a_model():
    with editor(*MODEL) as one:
        one.open(TEXT.replace("colwyse", "colwise"))
        one.diagnostics()
        names = [item["label"] for item in one.at("completion", 3, 11)]
        assert "model.layers.*.mlp.down_proj" in names and all(name.startswith("model.lay") for name in names)
        shown = one.at("hover", 2, 8)["contents"]["value"]
        assert "matches 2" in shown and "`model.layers.0.mlp.up_proj` Linear, weight [96, 64]" in shown
        one.change('version: "1"\ntensor_parallel:\n  model.layers.*.mlp.upproj: colwise\n')
        (found,) = one.diagnostics()
        assert found["code"] == "SP201" and found["range"]["start"] == {"line": 2, "character": 2}


def message(content: object) -> bytes:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    return b"Content-Length: %d\r\n\r\n%s" % (len(body), body)


def call(method: str, params: object, number: int | None = None) -> bytes:
    return message({"jsonrpc": "2.0", "method": method, "params": params} | ({"id": number} if number else {}))


BEGIN = call("initialize", {"processId": None, "capabilities": {}}, 1) + call("initialized", {})
END = call("shutdown", None, 99) + call("exit", None)
OPEN = call(
    "textDocument/didOpen",
    {
        "textDocument": {
            "uri": "file:///a.yaml",
            "languageId": "yaml",
            "version": 1,
            "text": TEXT.replace("colwyse", "colwise"),
        }
    },
)


def hovered(number: int, line: object = 0, character: object = 0, uri: object = "file:///a.yaml") -> bytes:
    return call(
        "textDocument/hover", {"textDocument": {"uri": uri}, "position": {"line": line, "character": character}}, number
    )


def told(sent: bytes) -> tuple[int, list[dict], str]:
    """The exit code, what is answered, and what is told on standard error."""
    ended = subprocess.run(
        [sys.executable, "-m", "shardplan", "editor", "lsp"], cwd=ROOT, input=sent, capture_output=True, timeout=300
    )
    bodies = [json.loads(part.partition(b"\r\n\r\n")[2]) for part in ended.stdout.split(b"Content-Length: ")[1:]]
    return ended.returncode, bodies, ended.stderr.decode()


def test_what_is_no_message_is_told_in_a_line_and_the_next_is_answered(tmp_path):
    pipe, folder = tmp_path / "pipe.yaml", {"uri": f"file://{tmp_path}/x.yaml", "languageId": "yaml", "version": 1}
    os.mkfifo(pipe)  # who reads it waits
    wrong = [
        hovered(2),  # before `initialize`
        BEGIN,
        OPEN,
        b"Content-Length: -5\r\n\r\n",
        b"Content-Length: many\r\n\r\n",
        *map(message, (b"hello", b"null", b"5", [1], b"[" * 100_000, b'{"jsonrpc":"2.0","id":3,"method":"\xff"}')),
        message(b'{"jsonrpc":"2.0","id":%s,"method":"x"}' % (b"9" * 10_000)),
        *(call("textDocument/hover", params, 3) for params in ("x", [1], {"textDocument": 5}, {}, None)),
        *(call("textDocument/didOpen", params) for params in ("x", {"textDocument": {"uri": 5, "text": None}})),
        *(hovered(3, *place) for place in ((10**9, 10**9), (-1, -1), (0.5, 1e308), (10**400, 0))),
        call("textDocument/didOpen", {"textDocument": {**folder, "text": "version: '1'\nextends: pipe.yaml\n"}}),
        call("textDocument/didOpen", {"textDocument": {**folder, "text": "version: \ud800\n" + "[" * 10_000}}),
        call("textDocument/didChange", {"textDocument": {"uri": "file:///b", "version": 2}, "contentChanges": [{"text": "x"}]}),
        call("no/such", {}, 3),
        call("workspace/executeCommand", {"command": "touch", "arguments": [f"{tmp_path}/run"]}, 3),
    ]  # fmt: skip
    unread = [hovered(20 + i, uri=uri) for i, uri in enumerate([f"file://{pipe}", "file:///dev/zero", "file:///a/b"])]
    code, answers, errors = told(b"".join([*wrong, *unread, hovered(30, 2, 33), END]))
    assert code == 0 and "Traceback" not in errors and max(map(len, errors.splitlines())) <= 500
    results = {one["id"]: one["result"] for one in answers if "result" in one}
    assert [results[20 + i] for i in range(3)] == [None] * 3 and "colwise" in results[30]["contents"]["value"]
    assert {*os.listdir(tmp_path)} == {"pipe.yaml"}


def test_a_message_that_is_too_long_ends_the_server():
    code, _, errors = told(BEGIN + b"Content-Length: 99999999999999999999\r\n\r\n{}" + END)
    assert code == 2 and errors.startswith(
        "shardplan editor: error: a message of 99999999999999999999 bytes is announced"
    )
    assert told(BEGIN + b"Content-Length: 50\r\n\r\n{")[0] == 0  # and then it ends
