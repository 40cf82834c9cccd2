"""The environments of pairs of releases, and the row that says what passed."""

import tomllib
from types import SimpleNamespace

import pytest

from shardplan import validate
from shardplan.torchlib.private_attributes import SEEN
from tests.model_settings import find
from tests.versions.__main__ import _without
from tests.versions.environment import ROOT, Pair, constraints, unmet
from tests.versions.passed import RIGHT, Passed, digest
from tests.versions.table import HEAD, written
from tests.zoo import judged_with

ROW = ("2026-11-26", "3.11", "2.13.0+cpu", "5.24.0", "Linux", "`make judge`: all")


def test_a_pair_is_read_and_its_torch_replaces_the_projects(monkeypatch):
    assert Pair.read("2.14.1/5.17.0") == Pair("2.14.1", "5.17.0")
    assert constraints("# text\ntorch==2.13.0+cpu\nnumpy==2.4.6\n", "2.14.1").splitlines() == [
        "# text",
        "numpy==2.4.6",
        "torch==2.14.1",
    ]
    monkeypatch.setattr("tests.versions.environment.version", lambda name: f"{name}'s")
    assert Pair.read("installed/installed") == Pair("torch's", "transformers's")
    with pytest.raises(ValueError, match=r"'2\.14' is no pair: write TORCH/TRANSFORMERS"):
        Pair.read("2.14")


def test_ci_and_the_requirements_name_the_oldest_and_the_newest_release():
    """No upper bounds: an untested release is a warning."""
    oldest, *_, newest = SEEN["transformers"]
    assert f'transformers: ["{oldest}", "{newest}"]' in (ROOT / ".github/workflows/tests.yml").read_text("utf-8")
    for project in (ROOT, ROOT / "packages" / "shardplan"):
        needs = tomllib.loads((project / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"]
        for name in ("torch", "transformers"):
            assert f"{name}>={SEEN[name][0].rpartition('.')[0]}" in needs


def test_a_row_is_added_once():
    old = "| 2026-01-01 | 3.11 | 2.13.0+cpu | 5.23.0 | Linux | `make test` |\n"
    page = f"# Text\n{HEAD}{old}\nMore.\n"
    first = written(page, ROW)
    assert first == f"# Text\n{HEAD}{old}| {' | '.join(ROW)} |\n\nMore.\n"
    assert written(first, ("2026-12-01", *ROW[1:])) == first.replace("2026-11-26", "2026-12-01")


def test_runs_of_the_same_releases_are_one_row():
    def page(date: str, what: str) -> str:
        return f"{HEAD}| {' | '.join((date, *ROW[1:5], what))} |\n"

    def ran(before: str, date: str, what: str) -> str:
        return written(before, (date, *ROW[1:5], what))

    first = page("2026-11-26, 27", "`make test-all`, `make test`")
    second = ran(first, "2026-11-28", "`--only names`: names")
    assert second == page("2026-11-26 to 2026-11-28", "`make test-all`, `make test`; `--only names`: names")
    third = ran(second, "2026-11-28", "`--only names quick`: names, `make quick`")
    assert third == second.replace("names |", "names; `--only names quick`: names, `make quick` |")
    assert ran(second, "2026-11-28", "`--only names`: more") == second.replace(": names", ": more")
    assert ran(third, "2026-11-29", ROW[5]) == page(
        "2026-11-26 to 2026-11-29", f"`make test-all`, `make test`; {ROW[5]}"
    )


def test_what_a_release_needs_and_the_environment_has_not(tmp_path):
    """transformers 5.17 takes a huggingface_hub before 2.0, and that takes httpx."""

    def put(name: str, version: str, *needs: str) -> None:
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {need}" for need in needs)]
        (folder / "METADATA").write_text("Metadata-Version: 2.1\n" + "\n".join(lines) + "\n")

    put(
        "ours",
        "1.0",
        "pytest>=1",
        "pytest<1",
        "no-such-hub<2",
        "no-such-kernels; extra == 'cuda'",
        "old; python_version<'3'",
    )
    assert unmet(tmp_path) == ["pytest<1", "no-such-hub<2"]
    put("no_such_hub", "1.5", "no-such-x")
    put("pytest", "0.9")
    assert unmet(tmp_path) == ["no-such-x"]


@pytest.mark.torch
def test_what_passed_is_noted(tmp_path, monkeypatch, capsys):
    """A judge that was ended goes on where it was."""
    from tests.versions.types import main as types

    monkeypatch.setattr("tests.versions.passed.BUILD", tmp_path)
    noted = Passed.of("pair")
    assert noted.said("llama") == ""
    noted.note("llama", RIGHT)
    noted.note("llama4", "SP301: 8 heads")
    assert Passed.of("pair").said("llama") == RIGHT and Passed.of("pair").said("llama4") == "SP301: 8 heads"
    noted.note("jamba", "refused: SP401")
    assert _without(["jamba", "llama"], noted) == ", refused jamba"
    assert _without(["llama", "llama4"], noted) == ", without a verdict on llama4" and _without(["llama"], noted) == ""
    monkeypatch.setattr("tests.versions.types.judged", lambda name: (name != "gpt2", name))
    assert types(["llama", "gpt2", "opt", "--passed", str(noted.file)]) == 1
    assert capsys.readouterr().out == "gpt2: gpt2\nopt: opt\n1 of 3 types are wrong: gpt2\n"
    assert noted.said("opt") == "opt" and noted.said("gpt2") == ""


def test_what_passed_counts_until_what_it_depends_on_changes(tmp_path, monkeypatch):
    """A quick test may read any file of ours; a type depends on its plans and the code of a proof."""
    test = tmp_path / "tests" / "test_one.py"
    test.parent.mkdir()
    test.write_text("a = 1")
    for name in ("ROOT", "BUILD"):
        monkeypatch.setattr(f"tests.versions.passed.{name}", tmp_path)
    noted = Passed.of("pair")
    kinds = ("quick", "arcee", "gpt2", "gpt2 {'tp': 2}", "a type that no plan is for")
    for what in kinds:
        noted.note(what, RIGHT)
    assert all(map(noted.said, kinds))
    text = judged_with._text

    def changed(plan: str) -> str:  # arcee extends it
        return text.__wrapped__(plan) + "# more" if plan == "llama" else text.__wrapped__(plan)

    test.write_text("a = 2")
    digest.cache_clear()
    monkeypatch.setattr(judged_with, "_text", changed)
    assert [bool(noted.said(what)) for what in kinds] == [False, False, True, True, True]
    monkeypatch.setattr(judged_with, "code", lambda _: "other")
    assert not any(map(noted.said, kinds))


@pytest.mark.torch
@pytest.mark.parametrize(
    ("release", "codes", "fits"),
    [("5.20.0", ["SP401"], True), ("5.20.0", ["SP401", "SP404"], False), ("5.21.0", ["SP401"], False)],
)
def test_what_no_plan_fits_is_refused_in_older_releases_alone(release, codes, fits, monkeypatch):
    from tests.versions import types

    found = [SimpleNamespace(code=code, message="wrong", is_error=True) for code in codes]
    monkeypatch.setattr(types, "validate", lambda *_, **__: SimpleNamespace(diagnostics=found, ok=False, proven=False))
    monkeypatch.setattr(types, "version", lambda _: release)
    assert types.judged("jamba") == (fits, "refused: SP401" if fits else "wrong: SP401: wrong")


@pytest.mark.torch
def test_types_are_judged_with_experts_that_a_router_chooses_from(monkeypatch):
    """Of one expert, HunYuan's default, the weights are 1: the router has no gradient, and before transformers 5.18 no other result."""
    from tests.versions import types

    seen = []

    def validate(config, *_, **__):
        seen.append(config)
        return SimpleNamespace(diagnostics=[], ok=True, proven=True)

    monkeypatch.setattr(types, "validate", validate)
    assert types.judged("hunyuan_v1_moe") == (True, RIGHT) and seen[0].num_experts > seen[0].moe_topk > 1


@pytest.mark.parametrize(
    ("name", "architectures"),
    [
        ("emu3_text_model", ["Emu3ForCausalLM"]),
        ("qwen3_omni_moe_text", ["Qwen3OmniMoeThinkerTextModel"]),
        ("llama", None),
    ],
)
def test_a_type_that_no_automatic_class_is_for_is_found_by_its_own_class(name, architectures):
    assert find(name).config.architectures == architectures


def test_cross_attention_without_a_picture_is_proven():
    """The factors of Llama 3.2's cross-attention are read by each rank for its part of the sequence."""
    report = validate(find("mllama_text_model").config, "mllama", {"tp": 2})
    assert report.ok and report.proven
