"""`export_plan`: plans in the words of transformers and torch, and what their own code makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from shardplan import Model, export_plan
from shardplan.cli.main import main
from tests.exports.entry import Entry, configured, there_and_back
from tests.exports.page import page
from tests.sampling import few
from tests.zoo.table import read

REPORTS = Path(__file__).parents[1] / "reports"


def small(name: str, **settings: Any) -> Model:
    return Model(name, {"num_hidden_layers": 2, **settings})


def test_words_of_transformers() -> None:
    made = export_plan(small("mixtral"), "auto", "transformers", run=False)
    assert made.ok and [(d.code, d.is_error) for d in made.report.diagnostics] == [("SP549", False)]
    assert made.entries["model.layers.*.mlp.experts"] == "moe_tp_experts"
    assert made.entries["model.layers.*.mlp.experts.gate_up_proj"] == "packed_colwise"
    assert "model.layers.*.mlp.gate" not in made.entries, "whole there"
    assert json.loads(str(made.text)) == {"tp_size": 2, "tp_plan": made.entries}
    whole = {"version": "1", "extends": "llama", "tensor_parallel": {"lm_head": "none", "model.embed_tokens": "none"}}
    made = export_plan(small("llama"), whole, "transformers", run=False)
    assert made.entries["lm_head"] == made.entries["model.embed_tokens"] == "replicate", "its own plan splits them"


def test_what_has_no_word_is_named_by_its_line(tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text('version: "1"\nextends: opt\n')
    made = export_plan(small("opt"), str(plan), "transformers", run=False)
    (found,) = made.report.diagnostics
    assert made.text is None and "no word for the option `shares`" in found.message and found.primary is not None
    assert found.primary.location.path == ("tensor_parallel", "model.decoder.layers.*.self_attn")
    apart = {
        "version": "1",
        "extends": "llama",
        "tensor_parallel": {"model.layers.0.mlp": "none", "model.layers.0.mlp.{gate,up,down}_proj": "none"},
    }
    made = export_plan(small("llama"), apart, "transformers", run=False)
    assert made.text is None and "one style for all of `model.layers.*.mlp.gate_proj`" in str(made.report)
    torch = export_plan(small("llama"), apart, "torch", run=False)  # which takes names without `*`
    assert torch.entries["model.layers.1.mlp.gate_proj"] == "ColwiseParallel()"
    assert "model.layers.0.mlp.gate_proj" not in torch.entries


TABLE = read(REPORTS / "export-types.md", Entry)


def test_the_table_has_every_type_and_is_the_page() -> None:
    assert set(TABLE) == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert (REPORTS / "export-types.md").read_text("utf-8") == page(list(TABLE.values()))
    assert sum(one.right for one in TABLE.values()) >= 60
    assert all(one.tensors > 10 for one in TABLE.values() if one.right)
    assert all("SP" in one.refused for one in TABLE.values() if one.refused)


CROSSING = [name for name, one in TABLE.items() if not one.refused]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_moe", *few([name for name in CROSSING if name != "qwen3_moe"], 4)])
def test_there_and_back_is_the_same_program(name: str) -> None:
    config = configured(name)
    made = export_plan(config, "auto", "transformers", run=False)
    assert made.text is not None, made.report
    assert there_and_back(config, made) == ""


def test_gradients_of_bare_parameters_are_added_up_by_their_module() -> None:
    made = export_plan(small("diffllama"), "auto", "transformers", run=False)
    assert made.entries["model.layers.*.self_attn"] == "replicated_with_grad_allreduce"
    assert not [name for name in made.entries if "lambda" in name]
    some = {
        "version": "1",
        "extends": "diffllama",
        "tensor_parallel": {
            "model.layers.*.self_attn.lambda_{q,k}{1,2}": "none",
            "model.layers.*.self_attn.lambda_{q,k}1": "replicated_with_grad_allreduce",
        },
    }
    made = export_plan(small("diffllama"), some, "transformers", run=False)
    assert made.text is None


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["export", "llama", "auto", "--set", "num_hidden_layers=2", "--to", "torch", "--no-run"]
    assert main(words) == 0
    out, err = capsys.readouterr()
    scope: dict[str, Any] = {}
    exec(out, scope)
    assert set(scope["PLAN"]) >= {"model.layers.*.mlp.down_proj", "lm_head"} and "nothing tells" in err
    file = tmp_path / "plan.py"
    assert main([*words, "-o", str(file)]) == 0 and file.read_text() == out
    assert main([*words, "-o", str(file)]) == 2
    capsys.readouterr()
    assert main([*words, "--json"]) == 0 and json.loads(capsys.readouterr().out)["kind"] == "findings"
    assert main(["export", "qwen3", "auto", "--to", "torch", "--no-run"]) == 1


def test_wrong_calls() -> None:
    for arguments, words in (
        ({"to": "jax"}, "there is no target 'jax'"),
        ({"to": "torch", "tp": 1}, "2 or more, not 1"),
    ):
        with pytest.raises(ValueError, match=words):
            export_plan("llama", "auto", **arguments)


PACKED = pytest.param(
    "mixtral",
    "transformers",
    marks=pytest.mark.skipif(
        torch.__version__ < "2.12",
        reason="DTensor of torch 2.11 refuses transformers' packed shards: the export is SP549",
    ),
)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "to"), [("qwen3", "transformers"), PACKED, ("llama", "torch")])
def test_it_is_run_in_the_targets_own_code(name: str, to: Any) -> None:
    made = export_plan(small(name), "auto", to)
    assert made.ok, made.report
    # transformers 5.23 adds up gradients of head norms at every backward, those of the micro-batches before once more.
    assert [d.is_error for d in made.report.diagnostics] == ([False] if name == "qwen3" else []), made.report
    assert all("_norm.weight" in note for d in made.report.diagnostics for note in d.notes)
    assert {row.kind for row in made.rows} >= {"output", "gradient"} and len(made.rows) > 20
    assert {row.name for row in made.rows} >= {"loss", "logits", "lm_head.weight"}


@pytest.mark.slow
def test_what_differs_there_is_refused() -> None:
    """torch's styles replace a tied weight twice, and each copy has a part of the gradient."""
    made = export_plan(small("llama", tie_word_embeddings=True), "auto", "torch")
    assert made.text is None and "SP549" in str(made.report), made.report
