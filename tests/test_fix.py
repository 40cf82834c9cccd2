"""`validate --fix`: the changes that were tried are written, and nothing else of the file changes."""

from difflib import ndiff
from pathlib import Path

import pytest

from shardplan import Model, validate
from shardplan.api import fix_plan
from shardplan.cli.main import main
from shardplan.core.diagnostics import Edit, Location
from shardplan.language import parse_text
from shardplan.language.plan_edits import edit_plan
from tests.case_tree import cases, unpack

SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "vocab_size": 128,
}
SMALL = [word for name, size in SIZES.items() for word in ("--set", f"{name}={size}")]
WRONG = """\
# A plan of ours.
version: "1"
models: [qwen3]
tensor_parallel:
  # the blocks' inputs
  model.layers.*.{self_attn,mlp}: input_with_grad_allreduce
  model.layers.*.self_attn.{q,k,v}_proj: colwise  # heads
  model.layers.*.self_attn.o_proj: rowwise
  model.layers.*.mlp.{gate,up,down}_proj: colwise   # all three

# the end
"""
RIGHT = """\
# A plan of ours.
version: "1"
models: [qwen3]
tensor_parallel:
  # the blocks' inputs
  model.layers.*.{self_attn,mlp}: input_with_grad_allreduce
  model.layers.*.self_attn.{q,k,v}_proj: colwise  # heads
  model.layers.*.self_attn.o_proj: rowwise
  model.layers.*.mlp.{gate_proj,up_proj}: colwise   # all three
  model.layers.*.mlp.down_proj: rowwise
  model.layers.*.self_attn.{q,k}_norm: replicated_with_grad_allreduce

# the end
"""


@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["unix", "windows"])
def test_a_plan_is_repaired_in_place(tmp_path, capsys, end):
    plan = tmp_path / "plan.yaml"
    plan.write_bytes(WRONG.replace("\n", end).encode())
    words = ["validate", "qwen3", str(plan), "--tp", "2", *SMALL]
    assert main([*words, "--diff"]) == 1
    assert "-  model.layers.*.mlp.{gate,up,down}_proj: colwise   # all three" in capsys.readouterr().out
    assert plan.read_bytes() == WRONG.replace("\n", end).encode()
    assert main([*words, "--fix"]) == 0
    assert plan.read_bytes() == RIGHT.replace("\n", end).encode()
    assert main([*words, "--diff"]) == 0
    assert "unsharded model's\n" in capsys.readouterr().out


def test_a_rule_of_the_parent_is_overridden_here(tmp_path):
    plan = tmp_path / "mine.yaml"
    plan.write_text('version: "1"\nextends: llama\nmodels: [qwen3]\n')
    made = fix_plan(Model("qwen3", settings=SIZES), str(plan), mesh={"tp": 2})
    assert made.report.ok and made.changes >= 1
    assert made.after.startswith(made.before.rstrip())
    assert "tensor_parallel:\n  model.layers.*.self_attn.{q,k}_norm: replicated_with_grad_allreduce" in made.after


MISSPELT = """\
# mine
verzion: "1"
models: [qwen3]
extends: "lama"   # the parent
tensor_parallel:
  # kept
  model.layers.*.mlp.{gate,up}_proj: colwize   # style
  model.layers.*.mlp.down_projj: rowwise
  nothing.like.it: colwise
data_parallel:
  backend: fsdp2
  reshard_after_forward: yes
  unit: [model.layers.*]
"""
SPELT = """\
# mine
version: "1"
models: [qwen3]
extends: "llama"   # the parent
tensor_parallel:
  # kept
  model.layers.*.mlp.{gate,up}_proj: colwise   # style
  model.layers.*.mlp.down_proj: rowwise
  model.layers.*.self_attn.{q,k}_norm: replicated_with_grad_allreduce
data_parallel:
  backend: fsdp2
  reshard_after_forward: true
  units: [model.layers.*]
"""


def test_words_of_help_lines_are_tried(tmp_path, capsys):
    """Misspelt fields, styles, words and keys; a key that matches nothing; and what then comes to light about layouts."""
    plan = tmp_path / "plan.yaml"
    plan.write_text(MISSPELT)
    assert main(["validate", "qwen3", str(plan), "--tp", "2", "--fix", *SMALL]) == 0
    assert plan.read_text() == SPELT
    assert "plan.yaml: 8 changes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("tensor_parallel: {lm_head: colwise}\n", 'version: "1"\ntensor_parallel: {lm_head: colwise}\n'),
        ("version: 1\nextends: qwen3\n", 'version: "1"\nextends: qwen3\n'),
        ("version: '1'\nextends: 'qwenn3'\n", "version: '1'\nextends: 'qwen3'\n"),
        ('version: "1"\nextends: qwen3\nmodels: qwen3\n', 'version: "1"\nextends: qwen3\nmodels: [qwen3]\n'),
        ('version: "1"\nextends: llama\nname:\n', 'version: "1"\nextends: llama\n'),
        (
            'version: "1"\nextends: qwen3\ntensor_parallel:\n  lm_head: {style: colwise, when: vocab_sise > 1}\n',
            'version: "1"\nextends: qwen3\ntensor_parallel:\n  lm_head: {style: colwise, when: vocab_size > 1}\n',
        ),
        (
            'version: "1"\ntensor_parallel:\n  lm_head: none\n  model.norm: replicate\n',
            'version: "1"\ntensor_parallel:\n  model.norm: replicate\n',
        ),
        (
            'version: "1"\nextends: qwen3\ntensor_parallel:\n  no.such.thing: colwise\n',
            'version: "1"\nextends: qwen3\n',
        ),
    ],
    ids=["version", "quotes", "parent", "list", "nothing", "condition", "none", "section"],
)
def test_one_word(before, after, tmp_path):
    plan = tmp_path / "plan.yaml"
    plan.write_text(before)
    made = fix_plan(Model("qwen3", settings=SIZES), str(plan), mesh={"tp": 1}, proof=False)
    assert made.after + "\n" == after or made.after == after
    assert made.changes == 1


def test_one_misspelling_in_several_lines(tmp_path):
    """Their messages are equal: each that is gone is one error less."""
    rules = "  {}.self_attn.o_proj: {style}\n  {}.mlp.down_proj: {style}\n  {}.self_attn.q_proj: none\n".replace(
        "{}", "model.layers.*"
    )
    plan = tmp_path / "plan.yaml"
    plan.write_text('version: "1"\nextends: qwen3\ntensor_parallel:\n' + rules.replace("{style}", "rowise"))
    made = fix_plan(Model("qwen3", settings=SIZES), str(plan), mesh={"tp": 1}, proof=False)
    assert made.changes == 2 and made.after.count(": rowwise") == 2 and "rowise" not in made.after


def test_what_helps_nothing_is_not_written(tmp_path):
    """A style that is near, but does not fit the module; a later version; a parent's file; two words for one."""
    plan = tmp_path / "plan.yaml"
    for text in (
        'version: "2"\nextends: qwen3\n',
        'version: "1"\nextends: qwen3\nno_such_field: 1\n',
        'version: "1"\nextends: base.yaml\n',
    ):
        plan.write_text(text)
        (tmp_path / "base.yaml").write_text('verzion: "1"\n')
        made = fix_plan(Model("qwen3", settings=SIZES), str(plan), mesh={"tp": 1}, proof=False)
        assert not made.report.ok and made.changes == 0 and made.after == made.before


@pytest.mark.parametrize("plan", ["qwen3", "auto", "plan.json"])
def test_only_yaml_files_are_changed(plan, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("plan.json").write_text("{}")
    assert main(["validate", "qwen3", plan, "--fix"]) == 2
    assert main(["validate", "qwen3", plan, "--fix", "--quick"]) == 2


def test_a_plan_that_cannot_be_read_stays(tmp_path, capsys):
    plan = tmp_path / "plan.yaml"
    plan.write_text("version: 3\n")
    assert main(["validate", "qwen3", str(plan), "--fix", *SMALL]) == 1
    assert plan.read_text() == "version: 3\n" and "SP114" in capsys.readouterr().out


LAYOUT = [case for case in cases() if (case.code or "").startswith("SP4") and "plan.yaml" in case.command]


@pytest.mark.slow
@pytest.mark.parametrize("case", LAYOUT, ids=lambda case: case.name)
def test_what_is_proposed_can_be_written(case, tmp_path, monkeypatch):
    """Whatever is changed is better than before, and lines that no change is about stay."""
    monkeypatch.chdir(tmp_path)
    unpack(case, tmp_path)
    before = Path("plan.yaml").read_bytes()
    main([*case.command, "--fix"])
    after = Path("plan.yaml").read_bytes()
    proposed = "help: add" in (case.expected or "") or " instead of " in (case.expected or "")
    assert (before == after) or proposed
    gone = [line for line in ndiff(before.decode().splitlines(), after.decode().splitlines()) if line.startswith("- ")]
    assert not [line for line in gone if line.lstrip("- ").startswith("#")]
    assert len(gone) <= 4


def edited(text: str, *edits: Edit) -> str:
    parsed = parse_text(text, file="plan.yaml")
    made, _ = edit_plan(parsed.sources.files["plan.yaml"], edits)
    return made


def at(key: str, section: str = "tensor_parallel") -> Location:
    return Location("plan.yaml", (section, key))


class TestEdits:
    """Of the text alone."""

    def test_a_value_in_braces(self):
        text = 'version: "1"\ntensor_parallel:\n  a: {style: colwise, optional: true}  # why\n  b: rowwise\n'
        edit = Edit("tensor_parallel", "a", "{style: rowwise, optional: true}", at("a"))
        assert edited(text, edit) == text.replace("colwise", "rowwise")

    def test_a_value_over_several_lines(self):
        text = 'version: "1"\ntensor_parallel:\n  a:\n    style: colwise\n    optional: true\n  b: rowwise\n'
        made = edited(text, Edit("tensor_parallel", "a", "rowwise", at("a")))
        assert made == 'version: "1"\ntensor_parallel:\n  a: rowwise\n  b: rowwise\n'
        commented = text.replace("style: colwise", "style: colwise  # why")
        assert edited(commented, Edit("tensor_parallel", "a", "rowwise", at("a"))) == commented

    def test_a_rule_is_removed(self):
        text = 'version: "1"\ntensor_parallel:\n  a: colwise\n  # of b\n  b: rowwise\n'
        assert edited(text, Edit("tensor_parallel", "a", None, at("a"))) == text.replace("  a: colwise\n", "")

    def test_the_last_rule_is_not(self):
        text = 'version: "1"\ntensor_parallel:\n  a: colwise\n'
        assert edited(text, Edit("tensor_parallel", "a", None, at("a"))) == text

    def test_a_section_is_added(self):
        text = 'version: "1"\ntensor_parallel:\n  a: colwise\n'
        made = edited(text, Edit("sequence_parallel", "**.norm", "sequence_parallel"))
        assert made == text.rstrip() + '\n\nsequence_parallel:\n  "**.norm": sequence_parallel\n'

    def test_a_section_in_braces_stays(self):
        text = 'version: "1"\ntensor_parallel: {a: colwise}\n'
        assert edited(text, Edit("tensor_parallel", "b", "colwise")) == text

    def test_a_rule_that_cannot_be_divided_is_overridden(self):
        text = 'version: "1"\ntensor_parallel:\n  "*": colwise\n  b: {style: colwise, optional: true, override: true}\n'
        made = edited(text, Edit("tensor_parallel", "a", "rowwise", at("*"), override=True))
        assert '  "*": colwise\n  a: {style: rowwise, override: true}\n' in made

    def test_after_the_last_rule_before_a_comment_of_the_next_section(self):
        text = 'version: "1"\ntensor_parallel:\n  a:\n    style: colwise\n\n# data\ndata_parallel:\n  units: [a]\n'
        made = edited(text, Edit("tensor_parallel", "b", "rowwise"))
        assert made == text.replace("colwise\n", "colwise\n  b: rowwise\n")


def test_findings_carry_their_edits():
    report = validate(
        Model("qwen3", settings=SIZES), {"version": "1", "extends": "llama", "models": ["qwen3"]}, {"tp": 2}
    )
    (finding,) = [d for d in report.errors if d.code == "SP401"]
    assert finding.edits[0].value == "replicated_with_grad_allreduce" and finding.edits[0].location is None
