"""`shardplan editor lsp`, spoken to over standard input and output as an editor does."""

import json
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
