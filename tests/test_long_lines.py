"""Many findings: of a plan for a model the first ones are shown; a line that has many is measured once, and its part that is shown is
found by bisection."""

from __future__ import annotations

import copy
import json
import random
import re

import pytest

import shardplan
from shardplan.cli.main import main
from shardplan.compiler.bind import section_globs
from shardplan.language import globs, parse_plan
from shardplan.language.limits import MAX_FINDINGS, MAX_VALUES
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


LISTS = {
    "units": {"data_parallel": {"units": []}},
    "ignored": {"data_parallel": {"units": ["model.layers.*"], "ignored": []}},
    "modules": {"activation_checkpointing": {"modules": []}},
    "parts": {"separate_matrices": {"parts": []}},
    "carry": {"pipeline_parallel": {"layers": "model.layers.*", "carry": []}},
}


@pytest.mark.parametrize("field", LISTS)
def test_thousands_of_modules_that_are_not_there_are_reported_in_part(field, monkeypatch):
    section = copy.deepcopy(LISTS[field])
    next(iter(section.values()))[field] = [f"**.*{i}*" for i in range(1_000, 16_000)]
    read, parse = [], globs.parse_glob
    monkeypatch.setattr(section_globs, "parse_glob", lambda pattern: read.append(pattern) or parse(pattern))
    report = shardplan.validate("llama", {"version": "1", "name": "mine", **section}, {"tp": 2})
    assert sum(one.code == "SP201" for one in report.diagnostics) == MAX_FINDINGS
    (more,) = (one.message for one in report.diagnostics if one.code == "SP111")
    assert more == f"there are more than {MAX_FINDINGS} findings about the sections"
    assert MAX_FINDINGS <= len(read) < 10 * MAX_FINDINGS, "patterns behind those that are shown are not looked for"


@pytest.mark.parametrize("option", ["shares", "packed", "divides", "heads"])
def test_an_option_has_a_bounded_number_of_values(option):
    for count in (MAX_VALUES, MAX_VALUES + 1, 40_000):
        names = [f"x{i}" for i in range(count)]
        values = {"shares": [{name: name for name in names}]} if option == "shares" else {option: names}
        plan = parse_plan({"version": "1", "tensor_parallel": {"a": {"style": "colwise", **values}}})
        large = [one.message for one in plan.diagnostics if one.code == "SP111"]
        assert large == [f"`{option}` has {count} values, and at most {MAX_VALUES} are allowed"] * (count > MAX_VALUES)


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
