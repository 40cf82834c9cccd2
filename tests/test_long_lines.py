"""Many findings in one line of a plan: the line is measured once, and the part that is shown is found by bisection."""

from __future__ import annotations

import json
import random
import re

import pytest

from shardplan.cli.main import main
from shardplan.language.limits import MAX_FINDINGS
from shardplan.report import snippet
from shardplan.report.snippet import CUT, LEAD, WIDTH, _window
from shardplan.report.width import cells


def test_a_line_of_a_megabyte_is_measured_once(tmp_path, monkeypatch, capsys):
    rules = {f"model.layers.{i}.{'x' * 30}": "colwize" for i in range(300)}
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"version": "1", "name": "mine", "tensor_parallel": rules}))
    measured = []
    monkeypatch.setattr(snippet, "cells", lambda text: measured.append(text) or cells(text))
    snippet._cells.cache_clear()
    assert main(["validate", "llama", str(plan)]) == 1
    assert len(re.findall("colwize", capsys.readouterr()[0])) > 100
    assert len(measured) == 1
    snippet._cells.cache_clear()


@pytest.mark.parametrize("key", ["model.layers.*.x{}", "model.layers.*.mlp.[!{}]*"])
def test_thousands_of_wrong_rules_for_a_model_is_reported_in_part(tmp_path, capsys, key):
    """Of 6,000 keys each matches nothing, or all layers as the key before it does: every finding would name all of them."""
    plan, sarif = tmp_path / "plan.json", tmp_path / "found.sarif"
    rules = {key.format(chr(0x4E00 + i)): "colwise" for i in range(6_000)}
    plan.write_text(json.dumps({"version": "1", "name": "mine", "tensor_parallel": rules}))
    assert main(["validate", "llama", str(plan), "--json", "--sarif", str(sarif)]) == 1
    text = capsys.readouterr()[0]
    found = json.loads(text)["diagnostics"]
    more = [one["message"] for one in found if one["code"] == "SP111"]
    assert more == [f"there are more than {MAX_FINDINGS} findings about the rules"]
    assert len(found) < MAX_FINDINGS + 5
    assert len(json.loads(sarif.read_text())["runs"][0]["results"]) == len(found)
    assert max(len(text), sarif.stat().st_size) < 4 * 2**20


def test_the_window_is_what_a_search_from_the_left_finds():
    draw = random.Random(0)
    for _ in range(200):
        text = "".join(draw.choices("ab\t\u0301\u4e00", k=draw.randint(0, 400)))
        _, starts = cells(text)
        length, first = len(text), draw.randint(0, len(text))
        left, right = 0, length
        if starts[length] > WIDTH:
            if starts[first] > WIDTH // 2:
                left = next(i for i in range(length + 1) if starts[i] >= starts[first] - LEAD)
            room = starts[left] + WIDTH - 2 * len(CUT)
            right = next((i for i in range(left, length) if starts[i + 1] > room), length)
        assert _window(starts, first) == (left, right)
