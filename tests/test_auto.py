"""PLAN `auto` for models that no built-in plan is for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from own_models import WIDTH, Stack, tokens
from processes import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForQuestionAnswering

import shardplan
from shardplan.api import deriving
from shardplan.authoring.init import kept_plans
from shardplan.authoring.init import new as derivation
from shardplan.cli.main import main
from shardplan.compiler.automatic import auto_plan
from shardplan.compiler.layout.solver import draft
from shardplan.core.diagnostics import PlanError
from shardplan.language import plan_files
from shardplan.model import find_any
from shardplan.proof.compare import TOLERANCE, relative_error


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Own(Stack):
    def __init__(self) -> None:
        super().__init__(Block)


class Narrow(nn.Module):
    """Nothing of it can be split."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale(x)


def rows(seed: int) -> dict[str, Tensor]:
    return {"x": torch.randn(2, 3, generator=torch.Generator().manual_seed(seed))}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where plans are kept, empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "shardplan" / "derived"


@pytest.fixture
def derived(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The models for which a plan is derived."""
    names: list[str] = []
    before = derivation.new_plan

    def counted(found: Any, **options: Any) -> Any:
        names.append(found.name)
        return before(found, **options)

    monkeypatch.setattr(derivation, "new_plan", counted)
    yield names


def compiled(**options: Any) -> Any:
    return shardplan.compile_plan(shardplan.Model(Own(), inputs=tokens), {"tp": 2}, "auto", **options)


def test_a_type_without_a_plan(folder: Path, derived: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    report = shardplan.validate(shardplan.Model("vit", settings={"num_hidden_layers": 2}), "auto", {"tp": 2})
    assert report.proven and not report.diagnostics and derived == ["vit"]
    assert report.derived is not None and report.derived.save == (
        "shardplan init vit -o plan.yaml --tp 2 --set num_hidden_layers=2"
    )
    assert (
        report.derived.split > 0.9
        and not report.derived.whole
        and "vit.layers.*.mlp.fc1: colwise" in report.derived.text
    )
    assert main(["validate", "vit", "auto", "--tp", "2", "--set", "num_hidden_layers=2", "--no-proof"]) == 0
    printed = capsys.readouterr().out
    assert "derived, as no built-in plan is for the model: splits attention and mlp of each layer\n" in printed
    assert derived == ["vit"]


@pytest.mark.slow
def test_an_overlay_where_it_is_asked_for(folder: Path) -> None:
    report = shardplan.validate("siglip_vision_model", "auto", {"tp": 2}, sequence_parallel=True, layouts=False)
    assert "gather_seq_input" in report.derived.text and "--sequence-parallel" in report.derived.save
    (finding,) = shardplan.validate(
        "vit", "auto", {"tp": 2}, sequence_parallel=True
    ).diagnostics  # the patches and a token of its own
    assert finding.code == "SP531" and "reads 17 positions, which tp=2 does not divide" in str(finding.notes)


def test_deriving_may_be_refused(folder: Path, derived: list[str]) -> None:
    (finding,) = shardplan.validate("vit", "auto", {"tp": 2}, derive=False).diagnostics
    assert finding.code == "SP511"
    with pytest.raises(PlanError, match="SP511"):
        compiled(derive=False)
    assert main(["validate", "vit", "auto", "--tp", "2", "--no-derive"]) == 1
    assert not derived


def test_a_built_in_plan_that_fails_is_an_error(derived: list[str]) -> None:
    report = shardplan.validate(shardplan.Model("llama", settings={"num_hidden_layers": 2}), "auto", {"tp": 5})
    assert not report.ok and "SP301" in {d.code for d in report.diagnostics}
    assert report.derived is None and not derived


def test_a_model_that_cannot_be_split() -> None:
    with pytest.raises(PlanError, match="SP530"):
        shardplan.compile_plan(shardplan.Model(Narrow(), inputs=rows), {"tp": 2}, "auto")


def test_a_plan_is_kept(folder: Path, derived: list[str]) -> None:
    first, second = compiled(), compiled()
    assert derived == ["Own"] and first.describe() == second.describe()
    (file,) = folder.iterdir()  # and nothing else
    assert file.suffix == ".yaml"
    compiled(sequence_parallel=False)
    shardplan.compile_plan(shardplan.Model(Own(), inputs=tokens), {"tp": 4}, "auto")
    assert derived == ["Own"] * 2 and len(list(folder.iterdir())) == 2  # another size, another plan


def test_another_version_and_another_source(
    folder: Path, derived: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiled()
    with monkeypatch.context() as patch:
        patch.setattr(kept_plans.torch, "__version__", "0")
        compiled()
    assert derived == ["Own"] * 2
    with monkeypatch.context() as patch:
        patch.setattr(kept_plans, "package_code", lambda: "another commit")
        compiled()
    assert derived == ["Own"] * 3
    source = tmp_path / "source.py"
    source.write_text("changed")
    before = kept_plans.inspect.getsourcefile
    monkeypatch.setattr(kept_plans.inspect, "getsourcefile", lambda one: str(source) if one is Block else before(one))
    compiled()
    assert derived == ["Own"] * 4


def cut(text: str) -> str:
    return text[:-20]


def emptied(text: str) -> str:
    return ""


def edited(text: str) -> str:
    return text.replace("colwise", "rowwise")


@pytest.mark.parametrize(
    "damage", [cut, pytest.param(emptied, marks=pytest.mark.slow), pytest.param(edited, marks=pytest.mark.slow)]
)
def test_a_damaged_file_is_not_read(folder: Path, derived: list[str], damage: Any) -> None:
    before = compiled().describe()
    (file,) = folder.iterdir()
    whole = file.read_text()
    file.write_text(damage(whole))
    assert compiled().describe() == before and len(derived) == 2 and file.read_text() == whole


def test_a_file_that_names_other_files_is_not_followed(folder: Path, derived: list[str]) -> None:
    compiled()
    (file,) = folder.iterdir()
    text = 'version: "1"\nname: derived\nextends: ./other.yaml\n'
    file.write_text(f"{kept_plans.MARK}{kept_plans._sum(text)}\n{text}")
    compiled()
    assert len(derived) == 2


def test_a_wrong_plan_that_is_kept_is_an_error(folder: Path, derived: list[str]) -> None:
    compiled()
    (file,) = folder.iterdir()
    text = file.read_text().partition("\n")[2].replace("down: rowwise", "down: colwise")
    file.write_text(f"{kept_plans.MARK}{kept_plans._sum(text)}\n{text}")
    with pytest.raises(PlanError, match=deriving.SHOWN):
        compiled()
    assert len(derived) == 1


def test_a_plan_that_another_user_keeps_is_not_read(
    folder: Path, derived: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong one would be told where a proof runs, and not without one."""
    before = compiled().describe()
    (file,) = folder.iterdir()
    text = file.read_text().partition("\n")[2].replace("down: rowwise", "down: colwise")
    file.write_text(f"{kept_plans.MARK}{kept_plans._sum(text)}\n{text}")
    if os.geteuid() == 0:
        os.chown(file, 4711, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 4711)
    assert compiled().describe() == before and len(derived) == 2


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_what_another_user_puts_in_the_place_of_a_plan_is_replaced(folder: Path, tmp_path: Path, kind: str) -> None:
    folder.mkdir(parents=True)
    (tmp_path / "own").write_text("not to be changed")
    file = folder / "digest.yaml"
    file.symlink_to(tmp_path / "own") if kind == "link" else os.mkfifo(file)
    assert kept_plans.kept("digest") is None
    assert kept_plans.keep("digest", "text") is None
    assert (
        (tmp_path / "own").read_text() == "not to be changed" and file.read_text().endswith("text") and file.is_file()
    )


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert "not an absolute path" in str(kept_plans.keep("digest", "text")) and kept_plans.kept("digest") is None
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    report = shardplan.validate(shardplan.Model(Own(), inputs=tokens), "auto", {"tp": 2}, layouts=False)
    assert report.ok and "cannot be kept in" in str(report.derived.kept)


def test_code_without_a_file_is_not_kept(folder: Path) -> None:
    names: dict[str, Any] = {"nn": nn, "__name__": "nowhere"}
    exec("class Own(nn.Sequential):\n    pass", names)
    assert (
        kept_plans.digest_of(find_any(names["Own"](nn.Linear(4, 4))), 2, sequence_parallel=False, expert_parallel=False)
        is None
    )
    width = 4
    found = find_any(nn.Linear(4, 4), inputs=lambda seed: {"input": torch.ones(width)})
    assert kept_plans.digest_of(found, 2, sequence_parallel=False, expert_parallel=False) is None


def test_the_search_is_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft, "BOUNDS", replace(draft.BOUNDS, drafts=1))
    with pytest.raises(PlanError, match="the search ended after 1 tries"):
        compiled()


CONDITION = """version: "1"
name: {name}
models: [llama]
for: {condition}
extends: llama
"""


@pytest.mark.parametrize(
    ("conditions", "chosen"),
    [
        (("num_hidden_layers < 8", "num_hidden_layers >= 8"), "second"),
        (("num_hidden_layers < 8", "num_hidden_layers < 4"), None),
        (("num_hidden_layers >= 8", "num_attention_heads"), "SP512"),
        (("num_hidden_layers >= 8", "number_of_layers"), "SP209"),
    ],
)
def test_the_configuration_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, conditions: tuple[str, str], chosen: str | None
) -> None:
    own = {name: path for name, path in plan_files.builtin_plans().items() if name == "llama"}
    nameless = tmp_path / "llama.yaml"  # a parent that `auto` does not choose
    nameless.write_text(own["llama"].read_text().replace("models:", "models: [mistral3] #"))
    own["llama"] = nameless
    for name, condition in zip(("first", "second"), conditions, strict=True):
        own[name] = tmp_path / f"{name}.yaml"
        own[name].write_text(CONDITION.format(name=name, condition=condition))
    for place in ("plan_files", "parsing", "parents"):
        monkeypatch.setattr(f"shardplan.language.{place}.builtin_plans", lambda: own, raising=False)
    monkeypatch.setattr("shardplan.language.builtin_plans", lambda: own)
    read = auto_plan(find_any("llama").tree)
    if chosen in ("first", "second"):
        assert read.plan is not None and read.plan.name == chosen
    else:
        assert [d.code for d in read.findings] == [chosen or "SP511"]


def both_models() -> tuple[Own, Own]:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Own())
    return models[0], models[1]


def largest_error() -> tuple[float, str]:
    """A step of the model that `auto` split, against the unsharded one: the largest error of loss, logits and gradients."""
    whole, model = both_models()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    shardplan.apply_plan(shardplan.Model(model, inputs=tokens), mesh, "auto")
    assert any(isinstance(p, DTensor) and p.to_local().shape != p.shape for p in model.parameters())
    expected, found = whole(**tokens(3)), model(**tokens(3))
    expected["loss"].backward()
    found["loss"].backward()
    pairs = [(found[name], expected[name]) for name in ("loss", "logits")]
    gradients = {name: p.grad for name, p in model.named_parameters()}
    for name, parameter in whole.named_parameters():
        gradient = gradients[name]
        pairs.append((gradient.full_tensor() if isinstance(gradient, DTensor) else gradient, parameter.grad))
    return max(relative_error(one.detach(), other.detach()) for one, other in pairs), str(shardplan.applied(model))


def refusals() -> list[str]:
    """What each rank is told where the first rank cannot derive, and where only one rank is to derive."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    told = []
    first = mesh.get_rank() == 0
    for plan, inputs in (
        ("auto", rows),
        ("auto" if first else "./nowhere.yaml", rows),
        ("auto", None if first else rows),
    ):
        try:
            shardplan.apply_plan(shardplan.Model(Narrow(), inputs=inputs), mesh, plan)
        except (PlanError, RuntimeError) as error:
            told.append(str(error))
    return told


def test_on_ranks() -> None:
    (first, receipt), (second, other) = on_ranks(2, largest_error)
    assert max(first, second) <= TOLERANCE[torch.float32]
    assert "derived, as no built-in plan is for the model: splits up and down of each layer" in receipt
    assert receipt.split("derived, ")[1].splitlines()[:3] == other.split("derived, ")[1].splitlines()[:3]
    told, also = on_ranks(2, refusals)
    assert "SP530" in told[0] and "SP530" in also[0]
    assert "the ranks compiled different programs" in told[1] and "SP101" in also[1]
    assert "SP52" in told[2] and "SP52" in also[2]  # the first rank's own


def test_a_head_that_holds_the_model_under_another_name_gets_a_derived_plan() -> None:
    """The built-in plan names no module of it: `auto` derives, instead of one finding for each rule."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "num_key_value_heads": 4}
    config = AutoConfig.for_model("llama", **sizes, num_hidden_layers=2, head_dim=8, vocab_size=128)
    with torch.device("meta"):
        model = AutoModelForQuestionAnswering.from_config(config)
    report = shardplan.validate(model, "auto", {"tp": 2}, sequence_parallel=False)
    assert report.proven and report.derived is not None
    assert "transformer.layers.*.mlp.down_proj: rowwise" in report.derived.text
    told = shardplan.validate(model, "auto", {"tp": 2}, derive=False)
    assert [one.code for one in told.diagnostics] == ["SP511"]
