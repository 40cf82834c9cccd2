"""Many findings in one line of a plan: the line is measured once, and the part that is shown is found by bisection."""

from __future__ import annotations

import json
import random
import re

from shardplan.cli.main import main
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
