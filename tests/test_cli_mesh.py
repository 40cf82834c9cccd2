"""Every command that takes a mesh reads it in the same words, and answers an option that it does not have with the form."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardplan.cli.arguments import parse
from shardplan.cli.main import main
from shardplan.cli.mesh_arguments import mesh_of
from shardplan.core.mesh import AXES

SMALL = ["--set", "hidden_size=64", "--set", "intermediate_size=128", "--set", "vocab_size=96"]
SMALL += ["--set", "num_attention_heads=4", "--set", "num_key_value_heads=2", "--set", "num_hidden_layers=2"]
WORDS = {
    "validate": ["llama", "llama"],
    "verify": ["llama", "llama"],
    "show": ["llama", "llama"],
    "estimate": ["llama", "llama", "--seq-len", "32"],
    "diff": ["llama", "qwen3", "llama"],
}
OPTIONS = [word for axis in AXES for word in (f"--{axis.replace('_', '-')}", "2")]


@pytest.mark.parametrize("command", WORDS)
def test_a_mesh_is_options_of_axes_or_one_word_or_both(command: str) -> None:
    sizes = dict.fromkeys(map(str, AXES), 2)
    pairs = ",".join(f"{axis}=2" for axis in AXES)
    for words in (OPTIONS, ["--mesh", pairs], [*OPTIONS[:4], "--mesh", pairs.partition(",")[2], "--mesh", "tp=2"]):
        assert mesh_of(parse([command, *WORDS[command], *words])) == sizes
    assert mesh_of(parse([command, *WORDS[command], "--mesh", "fsdp=4,tensor_parallel=2"])) == {"dp_shard": 4, "tp": 2}
    assert mesh_of(parse([command, *WORDS[command]])) == {}


@pytest.mark.parametrize("command", ["init", "convert"])
def test_commands_with_one_size_take_the_same_words(command: str) -> None:
    source = {"init": "qwen3", "convert": "hf"}[command]
    for words in (["--tp", "4"], ["--mesh", "tp=4"]):
        assert mesh_of(parse([command, source, *words])) == {"tp": 4}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["validate", "llama", "llama", "--tpp", "2"], "unknown option --tpp: did you mean --tp?"),
        (["validate", "llama", "llama", "--fsdp", "4"], "write --dp-shard N or --mesh dp_shard=N"),
        (["verify", "llama", "llama", "--tensor-parallel-size", "4"], "write --tp N or --mesh tp=N"),
        (["diff", "llama", "qwen3", "qwen3", "--tp_size=4"], "unknown option --tp_size: write --tp N"),
        (["show", "llama", "llama", "--seqlen", "4"], "unknown option --seqlen: did you mean --seq-len?"),
        (["estimate", "llama", "llama", "--seq_len", "4"], "did you mean --seq-len?"),  # before what is missing
        (["init", "llama", "--ep", "4"], "init has no axis ep, its axes are tp"),
        (["lint", "a.yaml", "--tp", "2"], "unknown option --tp: lint takes no mesh"),
        (["lint", "a.yaml", "-q"], "unknown option -q: `shardplan lint --help` lists"),
        (["validate", "llama", "llama", "--mesh", "tp=2,dpshard=2"], "no axis 'dpshard': did you mean dp_shard?"),
        (["validate", "llama", "llama", "--mesh", "x=2"], "no axis 'x': the axes are pp, dp_replicate"),
        (["validate", "llama", "llama", "--mesh", "8"], "'8' is not of the form AXIS=N: write dp_shard=8,tp=8"),
        (["init", "llama", "--mesh", "ep=2"], "no axis ep here: the axes are tp"),
        (["init", "llama", "--mesh", "tp=1"], "'1' splits nothing"),
        (["diff", "llama", "llama", "--tp", "2", "--mesh", "tp=4"], "two sizes of tp: 2 and 4"),
        (
            ["show", "llama", "llama", "--mesh", "tp=2", "dp_shard=2"],
            "unexpected word dp_shard=2: write --mesh dp_shard=2",
        ),
        (["show", "llama", "llama", "hidden_size=64"], "is written --set hidden_size=64"),
        (["show", "llama", "llama", "qwen3"], "unexpected word qwen3: write show MODEL PLAN, and options after that"),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, list) else "",
)
def test_what_a_command_does_not_know_is_answered_with_the_form(words: list[str], said: str, capsys) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"shardplan {words[0]}: error: ") and said in error


def test_values_and_words_for_help_are_no_unknown_options(capsys) -> None:
    assert parse(["validate", "llama", "llama", "--tp=2"]).tp == 2
    assert parse(["show", "llama", "llama", "--html=page.html"]).html == "page.html"
    assert parse(["lint", "-"]).plans == ["-"]
    assert main(["validate", "--nothing", "--help"]) == 0
    assert "--dp-shard N" in capsys.readouterr().out


def test_commands_for_reviewers_are_at_the_sizes_of_the_short_options(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["diff", "llama", "llama", "--tp", "2", "--dp-shard", "4", "--save", "lock.json", *SMALL]) == 0
    assert json.loads(Path("lock.json").read_text("utf-8"))["asked"]["mesh"] == {"dp_shard": 4, "tp": 2}
    assert main(["diff", "llama", "llama", "llama", "--tp", "4", "--json", *SMALL]) == 0
    assert json.loads(capsys.readouterr().out)["sizes"]["tp"] == 4
    assert main(["show", "llama", "llama", "--tp", "2", "--html", "page.html", "--no-proof", *SMALL]) == 0
    assert "tp 2" in Path("page.html").read_text("utf-8")


def test_estimate_takes_ep(capsys) -> None:
    words = ["estimate", "mixtral", "auto", "--dp-shard", "4", "--tp", "1", "--seq-len", "32", "--json", *SMALL]
    words += ["--set", "num_local_experts=4"]
    held = {}
    for ep in ("1", "4"):
        assert main([*words, "--ep", ep]) == 0
        shown = json.loads(capsys.readouterr().out)
        assert shown["sizes"]["ep"] == int(ep)
        held[ep] = shown["memory"]["total"]
    assert held["1"] != held["4"]


def test_fit_takes_several_sizes_of_an_axis() -> None:
    words = ["fit", "llama", "--gpus", "8", "--device", "h100", "--global-batch", "8", "--seq-len", "8"]
    assert mesh_of(parse([*words, "--tp", "1,8", "--mesh", "fsdp=2"])) == {"tp": (1, 8), "dp_shard": 2}


def test_show_is_of_the_mesh_that_is_given(capsys) -> None:
    words = ["show", "mixtral", "auto", "--json", "--dp-shard", "2", "--tp", "2", "--ep", "2"]
    assert main([*words, *SMALL]) == 0
    assert json.loads(capsys.readouterr().out)["sizes"]["ep"] == 2
