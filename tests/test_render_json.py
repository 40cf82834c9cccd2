"""JSON and SARIF output."""

import json
import math
from pathlib import Path

import jsonschema
import pytest

from shardplan import __version__
from shardplan.core.mesh import MeshSizes
from shardplan.core.report import Comparison, NumericProof, Report, VariantProof
from shardplan.report import json_text, to_json, to_sarif
from shardplan.report.pages import pages
from shardplan.report.report_schema import report_schema
from tests.render_samples import IN_DICT, NO_PLACE, PARTIAL, SOURCES

REPORTS = {
    "empty": Report(),
    "lint": Report(diagnostics=(PARTIAL, IN_DICT, NO_PLACE), sources=SOURCES, plans=("my.yaml",)),
    "validate": Report(
        diagnostics=(IN_DICT,),
        sources=SOURCES,
        plans=("llama",),
        model="meta-llama/Llama-3.1-8B",
        sizes=MeshSizes(tp=None, dp_shard=2),
        checked_tp=2,
        variants=("tensor_parallel", "sequence_parallel"),
        allowed_tp=(1, 2, 4, 8),
    ),
    "verify": Report(
        plans=("llama",),
        model="llama",
        sizes=MeshSizes(tp=2),
        proof=NumericProof(
            MeshSizes(tp=2),
            (
                VariantProof("tensor_parallel", (Comparison("loss", "output", 1e-7, "rank 1", "equal"),), 10, 5),
                VariantProof("sequence_parallel", (Comparison("w", "gradient", math.nan, "rank 0", "differs"),), 10, 5),
            ),
        ),
    ),
}


@pytest.mark.parametrize("name", REPORTS)
def test_json_is_what_the_schema_says(name):
    data = json.loads(json_text(to_json(REPORTS[name], proof=name == "verify")))
    assert (data["proof"] is not None) == (name == "verify")
    validator = jsonschema.Draft202012Validator(report_schema())
    validator.check_schema(report_schema())
    assert [error.message for error in validator.iter_errors(data)] == []


def test_the_schema_refuses_what_is_not_a_report():
    validator = jsonschema.Draft202012Validator(report_schema())
    good = json.loads(json_text(to_json(REPORTS["lint"])))
    for change in (
        {"version": "1"},
        {"kind": "estimate"},
        {"ok": "yes"},
        {"count": {"error": 1}},
        {"extra": 1},
        {"diagnostics": [{}]},
    ):
        assert not validator.is_valid({**good, **change}), change


def test_what_no_command_reports_is_refused():
    with pytest.raises(TypeError, match="MeshSizes is no report"):
        to_json(MeshSizes(tp=2))


def test_a_finding_in_json():
    primary = to_json(REPORTS["lint"])["diagnostics"][0]["primary"]
    assert primary == {
        "location": {
            "file": "my.yaml",
            "path": ["tensor_parallel", "model.layers.*.self_attn.{q,k,v}_proj"],
            "part": "key",
            "span": {"line": 3, "column": 3, "end_line": 3, "end_column": 40},
        },
        "text": "splits the heads",
    }
    assert to_json(REPORTS["lint"])["diagnostics"][1]["primary"]["location"]["span"] is None
    assert to_json(REPORTS["lint"])["count"] == {"errors": 2, "warnings": 1}


def test_an_error_that_is_not_a_number_is_null():
    proof = to_json(REPORTS["verify"], proof=True)["proof"]
    row = proof["variants"][1]["rows"][0]
    assert row["error"] is None and row["verdict"] == "differs"
    assert [one["ok"] for one in proof["variants"]] == [True, False]


class TestSarif:
    """The fields that SARIF 2.1.0 requires, and those that GitHub's code scanning reads."""

    @pytest.fixture
    def run(self) -> dict:
        data = json.loads(json_text(to_sarif(REPORTS["lint"])))
        assert data["version"] == "2.1.0" and data["$schema"].endswith("sarif-2.1.0.json")
        (run,) = data["runs"]
        return run

    def test_driver_and_rules(self, run):
        driver = run["tool"]["driver"]
        assert driver["name"] == "shardplan" and driver["semanticVersion"] == __version__
        assert [rule["id"] for rule in driver["rules"]] == ["SP201", "SP301", "SP501"]
        assert all(rule["shortDescription"]["text"] and rule["fullDescription"]["text"] for rule in driver["rules"])
        for rule in driver["rules"]:
            assert "\nWrong:\n\n```" in rule["help"]["markdown"] and rule["help"]["text"].startswith(
                pages()[rule["id"]].text
            )

    def test_results(self, run):
        rules = run["tool"]["driver"]["rules"]
        assert [result["level"] for result in run["results"]] == ["error", "warning", "error"]
        for result in run["results"]:
            assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
            assert result["message"]["text"]

    def test_places(self, run):
        located, in_dict, nowhere = run["results"]
        (location,) = located["locations"]
        assert location["physicalLocation"] == {
            "artifactLocation": {"uri": "my.yaml"},
            "region": {"startLine": 3, "startColumn": 3, "endLine": 3, "endColumn": 40},
        }
        assert len(location["logicalLocations"]) == 96
        assert located["relatedLocations"][1]["physicalLocation"]["artifactLocation"]["uri"] == "parent.yaml"
        assert located["relatedLocations"][1]["message"]["text"] == "inherited from here"
        assert "locations" not in in_dict and "locations" not in nowhere

    def test_uris_are_relative_to_the_root_where_they_can_be(self):
        from shardplan.report.sarif import _uri

        root = Path("/project")
        assert _uri("plans/my plan.yaml", root) == "plans/my%20plan.yaml"
        assert _uri("/project/plans/a.yaml", root) == "plans/a.yaml"
        assert _uri("/elsewhere/a.yaml", root) == "file:///elsewhere/a.yaml"
