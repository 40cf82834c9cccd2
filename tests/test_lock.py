"""`shardplan diff`: a plan that is bound as it was passes, and nothing else does."""

import json
from dataclasses import replace

import jsonschema
import pytest

from shardplan.api import check_lock, lock_plan
from shardplan.cli.main import main
from shardplan.core.plan_lock import LockedQuestion
from shardplan.report.lock_json import check_text, lock_text, read_lock
from shardplan.report.report_schema import report_schema

SIZES = {
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "hidden_size": 64,
    "intermediate_size": 96,
    "vocab_size": 128,
    "num_key_value_heads": 4,
}
ASKED = LockedQuestion("llama", "llama", {"tp": 2}, settings=SIZES)
MODEL = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, first):
        super().__init__()
        self.first = first
        setattr(self, first, nn.Linear(16, 32, bias=False))
        self.down = nn.Linear(32, 16, bias=False)

    def forward(self, x):
        return self.down(torch.relu(getattr(self, self.first)(x)))

class Net(nn.Module):
    def __init__(self, first):
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList([Block(first) for _ in range(2)])

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return x

def before(): return Net("up")
def after(): return Net("expand")
"""
PLAN = """
version: "1"
tensor_parallel:
  blocks.*: input_with_grad_allreduce
  blocks.*.up: {style: colwise, optional: true}
  blocks.*.down: rowwise
"""


@pytest.fixture(scope="module")
def lock():
    return lock_plan(ASKED)


def test_a_lock_survives_its_file_and_holds(lock):
    again = read_lock(lock_text(lock))
    assert again == lock
    check = check_lock(again)
    assert check.ok and "as before" in check_text(check, color=False)
    assert not (check.parameters or check.modules or check.sections or check.about)


def test_it_folds_layers(lock):
    assert lock.parameters["model.layers.0-2.mlp.up_proj.weight"] == "[96, 64] float32"
    assert "model.layers.0-2.mlp" in lock.variants["sequence_parallel"]
    assert lock.sections["data_parallel.units"] == "model.layers.0-2"


def test_without_a_size_it_says_which(lock):
    assert lock_plan(replace(ASKED, mesh={})).asked.mesh == {"tp": 2}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"settings": {**SIZES, "num_hidden_layers": 4}}, "+ model.layers.0-3.mlp.up_proj.weight: [96, 64] float32"),
        ({"settings": {**SIZES, "intermediate_size": 192}}, "- model.layers.0-2.mlp.up_proj.weight: [96, 64] float32"),
        ({"settings": {**SIZES, "attention_bias": True}}, "model.layers.0-2.self_attn.q_proj.bias"),
        ({"plan": "qwen2"}, None),
    ],
)
def test_another_model_differs_and_another_plan_that_does_the_same_does_not(lock, change, said):
    check = check_lock(replace(lock, asked=replace(lock.asked, **change)))
    text = check_text(check, color=False)
    assert check.ok == (said is None)
    assert said is None or said in text
    assert "versions" not in text


def test_every_fact_counts(lock):
    """A change of any one fact is seen, by the digest and in words."""
    for on, modules in lock.variants.items():
        for name in list(modules)[:4]:
            other = {**modules, name: (*modules[name], "something else")}
            check = check_lock(replace(lock, variants={**lock.variants, on: other}, digest="0"))
            assert not check.ok and check.modules == {on: (name, "- something else")}


def test_a_module_that_was_renamed_is_named(tmp_path, monkeypatch, capsys):
    (tmp_path / "locked_model.py").write_text(MODEL)
    (tmp_path / "plan.yaml").write_text(PLAN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    words = ["plan.yaml", "--mesh", "tp=2", "--no-sequence-parallel"]
    assert main(["diff", "locked_model:before", *words, "--save", "lock.json"]) == 0
    assert main(["diff", "locked_model:before", "--against", "lock.json"]) == 0
    data = json.loads((tmp_path / "lock.json").read_text())
    data["asked"]["model"] = "locked_model:after"
    (tmp_path / "lock.json").write_text(json.dumps(data))
    capsys.readouterr()
    assert main(["diff", "locked_model:after", "--against", "lock.json"]) == 1
    text = capsys.readouterr().out
    assert "- blocks.0-1.up.weight: [32, 16] float32" in text and "+ blocks.0-1.expand.weight: [32, 16] float32" in text
    assert "error[SP" in text  # rowwise gets a whole input
    assert main(["diff", "locked_model:after", "--against", "lock.json", "--json"]) == 1
    made = json.loads(capsys.readouterr().out)
    assert [e.message for e in jsonschema.Draft202012Validator(report_schema()).iter_errors(made)] == []
    assert made["findings"] and not made["ok"]


CODE = """
from pathlib import Path
Path("it-ran").touch()
raise RuntimeError("this ran")
"""


@pytest.mark.parametrize("field", ["model", "inputs", "reduced"])
def test_a_lock_does_not_say_what_is_imported(lock, field, tmp_path, monkeypatch, capsys):
    (tmp_path / "code_of_a_lock.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    named = replace(lock, asked=replace(lock.asked, settings={}, **{field: "code_of_a_lock:run"}))
    (tmp_path / "lock.json").write_text(lock_text(named))
    assert main(["diff", "--against", "lock.json"]) == 2
    words = "code_of_a_lock:run" if field == "model" else f"--{field} code_of_a_lock:run"
    assert f"shardplan diff {words} --against lock.json" in capsys.readouterr().err
    with pytest.raises(ValueError, match="a lock is data"):
        check_lock(named)
    other = ["other:run"] if field == "model" else [f"--{field}", "other:run"]
    assert main(["diff", *other, "--against", "lock.json"]) == 2
    assert "not of other:run" in capsys.readouterr().err
    assert not (tmp_path / "it-ran").exists()
    main(["diff", *words.split(), "--against", "lock.json"])  # the command line says it
    assert (tmp_path / "it-ran").exists()


def test_a_lock_does_not_say_that_code_is_trusted(lock, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "code_of_a_folder.py").write_text(CODE)
    config = {"model_type": "own", "auto_map": {"AutoConfig": "code_of_a_folder.Config"}}
    (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    asked = replace(lock.asked, model=str(folder), settings={}, trust_remote_code=True)
    (tmp_path / "lock.json").write_text(lock_text(replace(lock, asked=asked)))
    assert main(["diff", "--against", "lock.json"]) == 1
    shown = capsys.readouterr()
    assert "SP506" in shown.out and "--trust-remote-code" in shown.out
    assert not (tmp_path / "it-ran").exists()
    main(["diff", "--against", "lock.json", "--trust-remote-code"])
    assert (tmp_path / "it-ran").exists()


@pytest.mark.parametrize("edited", ["variants", "parameters", "sections", "digest"])
def test_an_edited_lock_has_one_answer(lock, edited):
    if edited == "digest":
        check = check_lock(replace(lock, digest="0"))
        assert "the digests differ, and nothing that the lock lists does" in check_text(check, color=False)
    else:
        on, modules = next(iter(lock.variants.items()))
        other = {on: {**modules, "mine": ("a fact",)}} if edited == "variants" else {"mine": "a fact"}
        check = check_lock(replace(lock, **{edited: {**getattr(lock, edited), **other}}))
        assert "mine" in check_text(check, color=False)
    assert not check.ok and "as before" not in check_text(check, color=False)


def test_other_versions_are_said_and_decide_nothing(lock):
    old = replace(lock, versions={**lock.versions, "transformers": "4.0"})
    assert check_lock(old).ok
    text = check_text(check_lock(replace(old, digest="0")), color=False)
    assert "transformers: 4.0 -> " in text


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"lock": "2"}',
        '{"lock": "1"}',
        '{"lock": "1", "asked": 1, "versions": {}, "files": {}, "parameters": {}, "variants": {}, "sections": {}, "digest": ""}',
        (
            '{"lock": "1", "asked": {"model": "x", "plan": "y", "mesh": {"zp": 2}}, '
            '"versions": {}, "files": {}, "parameters": {}, "variants": {}, "sections": {}, "digest": ""}'
        ),
    ],
)
def test_what_is_no_lock_is_a_wrong_command(tmp_path, capsys, content):
    path = tmp_path / "lock.json"
    path.write_text(content)
    assert main(["diff", "--against", str(path)]) == 2
    assert "error: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["diff"],
        ["diff", "llama"],
        ["diff", "llama", "llama", "--against", "x"],
        ["diff", "llama", "--save", "x"],
        ["diff", "llama", "llama", "llama", "--save", "x"],
        ["diff", "llama", "llama", "--save", "x", "--markdown"],
        ["diff", "--against", "x", "--save", "y"],
        ["diff", "--against", "no-such-file"],
    ],
    ids=" ".join,
)
def test_a_wrong_command_line_is_2(words):
    assert main(words) == 2


@pytest.mark.usefixtures("no_repairs")
def test_a_plan_with_errors_is_refused(capsys):
    small = [word for name, size in SIZES.items() for word in ("--set", f"{name}={size}")]
    assert (
        main(["diff", "qwen3", "llama", *small, "--set", "head_dim=8", "--mesh", "tp=2", "--save", "no/lock.json"]) == 1
    )
    assert "SP401" in capsys.readouterr().out
