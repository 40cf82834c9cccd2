"""`diff_plans` and `shardplan diff`: what differs is what the programs say, and nothing else."""

import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from transformers import LlamaConfig

from shardplan import PlanError, TrainingStep, compile_plan, diff_plans, load_plan
from shardplan.cli.main import main
from shardplan.compiler.compare_programs import checkpoints
from shardplan.core.diagnostics import Location
from shardplan.core.plan_changes import ModuleChange, PlanDiff, RuleChange, Said
from shardplan.report import to_json
from shardplan.report.diff_text import diff_markdown, diff_text
from shardplan.report.report_schema import report_schema

CONFIG = LlamaConfig(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=4,
    tie_word_embeddings=False,
)
SMALL = [
    word
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    for word in ("--set", f"{name}={getattr(CONFIG, name)}")
] + ["--set", "num_key_value_heads=4"]

OLD = {
    "version": "1",
    "name": "old",
    "tensor_parallel": {
        "model.layers.*.mlp": "input_with_grad_allreduce",
        "model.layers.*.mlp.{gate,up}_proj": "colwise",
        "model.layers.*.mlp.down_proj": "rowwise",
    },
    "data_parallel": {"units": ["model.layers.*"]},
}


def edited(**rules):
    """The plan with other rules: None removes one."""
    changed = {**OLD["tensor_parallel"], **rules}
    return {**OLD, "name": "new", "tensor_parallel": {key: rule for key, rule in changed.items() if rule is not None}}


# Plans that mean the same, written differently.
SAME = {
    "spelled out": edited(
        **{
            "model.layers.*.mlp.{gate,up}_proj": None,
            "model.layers.*.mlp.up_proj": "colwise",
            "model.layers.*.mlp.gate_proj": "colwise",
        }
    ),
    "by a wider pattern": edited(
        **{"model.layers.*.mlp.{gate,up}_proj": None, "model.**.{gate,up}_proj": {"style": "colwise", "optional": True}}
    ),
    "units one by one": {**OLD, "data_parallel": {"units": [f"model.layers.{i}" for i in range(3)]}},
    "defaults written out": {**OLD, "data_parallel": {"units": ["model.layers.*"], "backend": "fsdp2"}},
}
# Plans that mean something else, and what must be said.
OTHER = {
    "the mlp of one layer whole": (
        edited(
            **{
                "model.layers.1.mlp": {"style": "replicate", "override": True},
                "model.layers.1.mlp.{gate,up,down}_proj": {"style": "replicate", "override": True},
            }
        ),
        "model.layers.1.mlp.{gate_proj,up_proj}",
    ),
    "attention split": (
        edited(
            **{
                "model.layers.*.self_attn": "input_with_grad_allreduce",
                "model.layers.*.self_attn.{q,k,v}_proj": "colwise",
                "model.layers.*.self_attn.o_proj": "rowwise",
            }
        ),
        "model.layers.0-2.self_attn",
    ),
    "fewer units": (
        {**OLD, "data_parallel": {"units": ["model.layers.{0,1}"]}},
        "data_parallel.units model.layers.0-2 -> model.layers.0-1",
    ),
    "kept gathered": (
        {**OLD, "data_parallel": {"units": ["model.layers.*"], "reshard_after_forward": False}},
        "data_parallel.reshard_after_forward all_but_last -> false",
    ),
    "recomputed": ({**OLD, "activation_checkpointing": {"mode": "full"}}, "activation_checkpointing.mode - -> full"),
}


def described(plan) -> list[str]:
    """What ranks compare before they train, without the plan's name; and the fields of its sections."""
    program = compile_plan(CONFIG, {"tp": 2}, plan, allow_unproven=True)
    resolved = program.resolved
    sections = (resolved.data_parallel, resolved.activation_checkpointing, resolved.compile)
    return [
        *program.describe().splitlines()[1:],
        *(str(s and {k: v for k, v in s.values.items() if k != "units"}) for s in sections),
    ]


@pytest.mark.parametrize("name", SAME)
def test_what_means_the_same_does_not_differ(name):
    assert described(OLD) == described(SAME[name])
    diff = diff_plans(OLD, SAME[name], CONFIG, {"tp": 2})
    assert not diff.differs and not diff.modules and not diff.fields and not diff.rules
    assert "training is the same" in diff_text(diff, color=False)


@pytest.mark.parametrize("name", OTHER)
def test_what_means_something_else_does(name):
    new, said = OTHER[name]
    assert described(OLD) != described(new)
    diff = diff_plans(OLD, new, CONFIG, {"tp": 2})
    assert diff.differs
    text = diff_text(diff, color=False)
    assert said in " ".join(text.split()) and "training differs" in text
    back = diff_plans(new, OLD, CONFIG, {"tp": 2})
    assert [(c.names, c.gone, c.added) for c in back.modules] == [(c.names, c.added, c.gone) for c in diff.modules]


def test_matrices_that_are_taken_apart_differ():
    old = {"version": "1", "name": "small", "extends": "llama"}
    new = {**old, "separate_matrices": {"heads": ["model.layers.0.self_attn.q_proj"]}}
    diff = diff_plans(old, new, CONFIG, {"tp": 2})
    said = "separate_matrices.heads - -> model.layers.0.self_attn.q_proj.weight"
    assert diff.differs and not diff.rules and said in " ".join(diff_text(diff, color=False).split())


def test_the_numbers_are_those_of_both_plans():
    new, _ = OTHER["attention split"]
    (cost,) = diff_plans(OLD, new, CONFIG, {"tp": 2}).costs
    attention = 3 * (2 * 64 * 64 + 2 * 64 * 32)
    assert cost.old.parameters - cost.new.parameters == attention // 2
    assert cost.old.size - cost.new.size == 4 * attention // 2
    assert cost.old.collectives == {"forward": {"all_reduce": 3}, "backward": {"all_reduce": 3}}
    assert cost.new.collectives == {"forward": {"all_reduce": 6}, "backward": {"all_reduce": 6}}


def test_a_step_is_estimated_with_both_plans():
    new, _ = OTHER["recomputed"]
    diff = diff_plans(OLD, new, CONFIG, {"dp_shard": 2, "tp": 2}, TrainingStep(256), device="h200")
    (cost,) = diff.costs
    assert cost.new.estimate.memory.total < cost.old.estimate.memory.total
    assert cost.new.estimate.bound.seconds > 0
    assert "memory of a rank at the peak" in diff_text(diff, color=False)


def test_an_overlay_that_only_one_plan_has():
    diff = diff_plans(OLD, "llama", CONFIG, {"tp": 2})
    assert [(c.section, c.old is None) for c in diff.costs] == [("tensor_parallel", False), ("sequence_parallel", True)]
    assert "sequence parallel only with llama" in diff_text(diff, color=False)


def test_without_a_size_the_smallest_that_both_allow():
    assert diff_plans(OLD, "llama", CONFIG).sizes.tp == 2


def test_rules_as_text():
    assert not diff_plans(OLD, SAME["spelled out"]).differs
    child = {"version": "1", "extends": "llama", "tensor_parallel": {"lm_head": "colwise_vocab"}}
    (change,) = diff_plans("llama", child).rules
    assert change.names == ("lm_head",)
    assert change.old[0].text == "{style: colwise_gather_output} (optional)".replace("{style: ", "").replace("}", "")
    assert change.new[0].text == "colwise_vocab"
    removed = {"version": "1", "extends": "llama", "tensor_parallel": {"lm_head": "none"}}
    (change,) = diff_plans("llama", removed).rules
    assert change.new == ()
    assert not diff_plans("llama", {"version": "1", "name": "mine", "extends": "llama"}).rules


def test_conditions_are_part_of_the_text():
    def plan(condition):
        return edited(lm_head={"style": "colwise_gather_output", "when": condition})

    (change,) = diff_plans(plan("num_hidden_layers > 2"), plan("num_hidden_layers > 3")).rules
    assert change.names == ("lm_head",)


def test_a_wrong_plan_is_all_its_findings(capsys):
    wrong = edited(**{"model.layers.*.mlp.down_proj": "colwise"})
    with pytest.raises(PlanError) as caught:
        diff_plans(OLD, wrong, CONFIG, {"tp": 2})
    assert any(d.code.startswith("SP4") for d in caught.value.diagnostics)
    assert main(["diff", "llama", "no-such-file.yaml"]) == 1
    assert "SP101" in capsys.readouterr().out


def test_the_command_says_it_by_its_code(capsys, tmp_path):
    new = tmp_path / "new.yaml"
    new.write_text('version: "1"\nextends: llama\ndata_parallel: {reshard_after_forward: true}\n')
    same = tmp_path / "same.yaml"
    same.write_text('version: "1"\nextends: llama\n# the same\n')
    assert main(["diff", "llama", str(new), "llama", *SMALL]) == 1
    assert main(["diff", "llama", str(same), "llama", *SMALL]) == 0
    assert main(["diff", "llama", str(new)]) == 1
    assert main(["diff", "llama", str(same)]) == 1  # a child does not inherit `models`
    assert main(["diff", "llama", str(new), "--mesh", "tp=2"]) == 2
    assert main(["diff", "auto", "llama"]) == 2
    assert main(["diff", "llama", str(new), "llama", "--device", "h200"]) == 2
    assert main(["diff", "llama", str(new), "llama", "--mesh", "tp=2,ep=3"]) == 2


def test_json_is_what_the_schema_says(capsys, tmp_path):
    new = tmp_path / "new.yaml"
    new.write_text('version: "1"\nextends: llama\ntensor_parallel: {lm_head: none}\n')
    validator = jsonschema.Draft202012Validator(report_schema())
    assert main(["diff", "llama", str(new), "llama", *SMALL, "--seq-len", "64", "--device", "h200", "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert [error.message for error in validator.iter_errors(data)] == []
    assert data["differs"] and {one["section"] for one in data["modules"]} == {"tensor_parallel", "sequence_parallel"}
    assert main(["diff", "llama", str(new), "--json"]) == 1
    assert validator.is_valid(json.loads(capsys.readouterr().out))


def test_two_files_of_one_name_keep_their_own_lines(tmp_path, monkeypatch):
    plans = []
    for folder, style, more in (("a", "colwise", ""), ("b", "rowwise", "\n\n")):
        (tmp_path / folder).mkdir()
        monkeypatch.chdir(tmp_path / folder)
        Path("mine.yaml").write_text(f'version: "1"\n{more}name: mine\ntensor_parallel: {{m.a: {style}}}\n')
        plans.append(load_plan("mine.yaml"))
    (rule,) = to_json(diff_plans(*plans))["rules"]
    assert [rule[side][0]["location"]["span"]["line"] for side in ("old", "new")] == [3, 5]


def test_markdown_escapes_what_names_hold():
    diff = PlanDiff(
        "a|b`c<script>.yaml",
        "b.yaml",
        (RuleChange("tensor_parallel", ("x|`y",), (), (Said("<b>", Location("f|g.yaml")),)),),
        modules=(ModuleChange("tensor_parallel", ("m",), ("```",), ("\x1b[31m",)),),
    )
    made = diff_markdown(diff)
    title, rows = made.splitlines()[0], [line for line in made.splitlines() if line.startswith("| tensor")]
    assert title.count("`") == 2 and "a\\|b'c<script>" in title
    assert rows == ["| tensor parallel | `x\\|'y` | `no rule` | `<b>` | - -\\> f\\|g.yaml |"]
    assert made.count("```") == 2 and "\x1b" not in made


@pytest.mark.parametrize(("backend", "known"), [("fsdp2", True), ("ddp", True), ("megatron_fsdp", False)])
def test_states_of_backends_that_were_not_tried_are_not_promised(backend, known):
    old = compile_plan(CONFIG, {"tp": 1}, OLD).resolved
    new = replace(old, data_parallel=replace(old.data_parallel, backend=backend))
    made = checkpoints(old, new)
    assert made.weights and made.states is known and (backend in made.reason) is not known
    assert checkpoints(new, new).states
