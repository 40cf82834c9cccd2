"""`extends`: what is inherited, what is reported, and that nothing outside the folder is read."""

import os
from pathlib import Path

import pytest

from shardplan.core.sections import ActivationCheckpointing, Compile, DataParallel, MixedPrecision, Prefetch
from shardplan.language import parse_plan, parse_text
from shardplan.language.inherit import effective_sections
from shardplan.language.limits import MAX_ANCESTORS
from shardplan.language.parsing import Parsed

BASE = """\
version: "1"
name: base
description: the parent
models: [llama]
tensor_parallel: {lm_head: colwise_gather_output}
sequence_parallel: {model.norm: sequence_parallel}
data_parallel:
  units: [model.layers.*]
  reshard_after_forward: true
  mixed_precision: {param: bfloat16, cast_forward_inputs: false}
  prefetch: {forward: 2}
activation_checkpointing: {modules: [model.layers.*], every: 2}
"""
CHILD = """\
version: "1"
extends: base.yaml
tensor_parallel: {lm_head: none}
data_parallel:
  reshard_after_forward: all_but_last
  mixed_precision: {reduce: float32, cast_forward_inputs: true}
  prefetch: {backward: 1}
activation_checkpointing: {mode: selective}
compile: {modules: [model.layers.*]}
"""


def write(folder: Path, **texts: str) -> None:
    for name, text in texts.items():
        (folder / f"{name}.yaml").write_text(text)


def found(parsed: Parsed) -> list[tuple[str, str]]:
    return [(d.code, d.message) for d in parsed.diagnostics]


def test_sections_are_inherited_field_by_field(tmp_path: Path) -> None:
    write(tmp_path, base=BASE, child=CHILD)
    parsed = parse_plan(tmp_path / "child.yaml")
    assert parsed.diagnostics == ()
    plan = parsed.plan
    assert [one.name for one in plan.lineage] == ["base", "child"]
    assert (plan.description, plan.models) == ("", ())
    assert plan.has_overlay and not plan.sequence_parallel

    sections = effective_sections(plan)
    assert sections.data_parallel == DataParallel(
        units=("model.layers.*",),
        reshard_after_forward="all_but_last",
        mixed_precision=MixedPrecision(param="bfloat16", reduce="float32", cast_forward_inputs=True),
        prefetch=Prefetch(2, 1),
        location=plan.data_parallel.location,
    )
    assert sections.activation_checkpointing == ActivationCheckpointing(
        ("model.layers.*",), "selective", 2, location=plan.activation_checkpointing.location
    )
    assert sections.compile == Compile(("model.layers.*",), location=plan.compile.location)

    places = {name: (place.file, place.path) for name, place in sections.data_parallel.given.items()}
    base, child = str(tmp_path / "base.yaml"), str(tmp_path / "child.yaml")
    assert places == {
        "units": (base, ("data_parallel", "units")),
        "reshard_after_forward": (child, ("data_parallel", "reshard_after_forward")),
        "mixed_precision": (child, ("data_parallel", "mixed_precision")),
        "prefetch": (child, ("data_parallel", "prefetch")),
    }
    ahead = {name: (place.file, place.path) for name, place in sections.data_parallel.prefetch.given.items()}
    assert ahead == {
        "forward": (base, ("data_parallel", "prefetch", "forward")),
        "backward": (child, ("data_parallel", "prefetch", "backward")),
    }
    assert set(sections.data_parallel.mixed_precision.given) == {"param", "reduce", "cast_forward_inputs"}


def test_a_default_that_is_written_counts_as_said(tmp_path: Path) -> None:
    """`reshard_after_forward: all_but_last` is the default, and still replaces what the parent says."""
    write(
        tmp_path,
        base=BASE,
        child='version: "1"\nextends: base.yaml\ndata_parallel: {backend: fsdp2}\n'
        "activation_checkpointing: {modules: []}\n",
    )
    plan = parse_plan(tmp_path / "child.yaml").plan
    assert set(plan.data_parallel.given) == {"backend"}
    assert effective_sections(plan).data_parallel.reshard_after_forward is True
    assert effective_sections(plan).activation_checkpointing == ActivationCheckpointing(
        (), every=2, location=plan.activation_checkpointing.location
    )
    assert effective_sections(plan.parent).compile is None


def test_findings_of_the_parent_stand_at_its_lines(tmp_path: Path) -> None:
    write(tmp_path, base=BASE.replace("[llama]", "llama"), child=CHILD.replace("none", "nonne"))
    parsed = parse_plan(tmp_path / "child.yaml")
    assert parsed.plan is None
    places = [
        (d.code, os.path.basename(d.primary.location.file), parsed.sources.span(d.primary.location).line)
        for d in parsed.diagnostics
    ]
    assert places == [("SP106", "child.yaml", 3), ("SP105", "base.yaml", 4)]


def test_a_file_extends_a_builtin_plan_that_extends_another() -> None:
    parsed = parse_text('version: "1"\nname: mine\nextends: qwen3_moe\n')
    assert [plan.name for plan in parsed.plan.lineage] == ["llama", "mixtral", "qwen3_moe", "mine"]
    assert set(parsed.sources.files) == {"<text>", "plans/llama.yaml", "plans/mixtral.yaml", "plans/qwen3_moe.yaml"}


def test_a_file_named_like_a_builtin_plan_keeps_its_own_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plans").mkdir()
    write(tmp_path / "plans", llama='version: "1"\nextends: llama\n')
    parsed = parse_plan("plans/llama.yaml")
    assert list(parsed.sources.files) == ["plans/llama.yaml", "shardplan/plans/llama.yaml"]
    assert parsed.plan.parent.tensor_parallel


@pytest.mark.parametrize(
    "word", ["../base.yaml", "a/base.yaml", "/etc/passwd", "/etc/hosts.yaml", "..\\base.yaml", "a\0.yaml"]
)
def test_no_separator_leads_out_of_the_folder(tmp_path: Path, word: str) -> None:
    write(tmp_path, base=BASE)
    inner = tmp_path / "inner"
    inner.mkdir()
    parsed = parse_plan({"version": "1", "extends": word})
    assert [code for code, _ in found(parsed)] == ["SP110"]
    if "\0" not in word:
        (inner / "p.yaml").write_text(f"version: '1'\nextends: '{word}'\n")
        assert [code for code, _ in found(parse_plan(inner / "p.yaml"))] == ["SP110"]


def test_links_may_not_lead_out_of_the_folder(tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    write(tmp_path, base=BASE)
    write(inner, child=CHILD, real=BASE)
    (inner / "base.yaml").symlink_to("../base.yaml")
    assert found(parse_plan(inner / "child.yaml")) == [("SP110", "`base.yaml` is a link out of the plan's folder")]
    (inner / "base.yaml").unlink()
    (inner / "base.yaml").symlink_to("real.yaml")
    assert parse_plan(inner / "child.yaml").plan.parent.name == "base"
    (tmp_path / "linked").symlink_to(inner)
    assert parse_plan(tmp_path / "linked" / "child.yaml").plan.parent.name == "base"


@pytest.mark.parametrize(
    ("make", "code", "message"),
    [
        (lambda path: None, "SP108", "does not exist"),
        (os.mkfifo, "SP101", "is not a regular file"),
        (os.mkdir, "SP101", "is a folder"),
        (lambda path: path.write_bytes(b"#" * 2**21), "SP111", "is larger than 1 MiB"),
        (lambda path: path.write_bytes(b"\xff"), "SP101", "is not UTF-8 text: byte 0 is 0xff"),
    ],
)
def test_a_parent_that_cannot_be_read(tmp_path: Path, make, code: str, message: str) -> None:
    write(tmp_path, child=CHILD)
    make(tmp_path / "base.yaml")
    parsed = parse_plan(tmp_path / "child.yaml")
    (finding,) = parsed.diagnostics
    assert parsed.plan is None and finding.code == code and finding.message.endswith(message)
    assert parsed.sources.span(finding.primary.location).line == 2


def test_circles_and_depth(tmp_path: Path) -> None:
    def plan(parent: str) -> str:
        return f'version: "1"\nextends: {parent}.yaml\n'

    write(tmp_path, a=plan("b"), b=plan("c"), c=plan("b"), d=plan("d"))
    (finding,) = parse_plan(tmp_path / "a.yaml").diagnostics
    circle = " -> ".join(str(tmp_path / f"{name}.yaml") for name in "bcb")
    assert (finding.code, finding.message) == ("SP109", f"a plan extends itself: {circle}")
    assert finding.primary.location.file == str(tmp_path / "c.yaml")
    assert [code for code, _ in found(parse_plan(tmp_path / "d.yaml"))] == ["SP109"]

    write(tmp_path, p0='version: "1"\n', **{f"p{i + 1}": plan(f"p{i}") for i in range(12)})
    assert len(parse_plan(tmp_path / f"p{MAX_ANCESTORS}.yaml").plan.lineage) == MAX_ANCESTORS + 1
    deep = parse_plan(tmp_path / f"p{MAX_ANCESTORS + 1}.yaml")
    assert found(deep) == [("SP109", f"more than {MAX_ANCESTORS} plans extend one another")]


def test_without_a_folder_only_builtin_plans_can_be_extended() -> None:
    assert parse_plan({"version": "1", "extends": "llama"}).plan.parent.name == "llama"
    parsed = parse_plan({"version": "1", "extends": "llama.yaml"})
    assert found(parsed) == [("SP108", "`llama.yaml` is a file, but this plan has no folder")]
    assert found(parse_text('version: "1"\nextends: ""\n')) == [("SP108", "there is no built-in plan ``")]


def test_suggestions(tmp_path: Path) -> None:
    write(tmp_path, base=BASE)

    def helped(word: str) -> str:
        (finding,) = parse_text(f'version: "1"\nextends: {word}\n', folder=tmp_path).diagnostics
        return finding.help

    assert helped("base") == "write `base.yaml` for the file next to this plan"
    assert helped("bas.yaml") == "did you mean `base.yaml`?"
    assert helped("qwen_3") == "did you mean `qwen3`?"
    assert helped("zzz") == "`shardplan list` shows the built-in plans"
