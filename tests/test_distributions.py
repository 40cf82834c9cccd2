"""The two distributions: they ask for what the project asks for, they build offline, and the first works without torch."""

import difflib
import json
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import shardplan
from shardplan.report.pages import pages
from tools import release

ROOT = Path(__file__).parent.parent


def project(folder: str) -> dict:
    return tomllib.loads((ROOT / folder / "pyproject.toml").read_text("utf-8"))["project"]


def project_data(folder: str) -> set[str]:
    """What a wheel takes from outside of the package."""
    read = tomllib.loads((ROOT / folder / "pyproject.toml").read_text("utf-8"))
    return set(read["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"])


def test_both_together_ask_for_what_the_project_does():
    whole, core, full = project("."), project("packages/core"), project("packages/shardplan")
    assert f"shardplan-core=={core['version']}" in full["dependencies"]
    both = {*core["dependencies"], *full["dependencies"]} - {f"shardplan-core=={core['version']}"}
    assert both == set(whole["dependencies"])
    assert whole["scripts"] == core["scripts"] and "scripts" not in full
    assert {core["requires-python"], full["requires-python"]} == {whole["requires-python"]}
    assert full["optional-dependencies"].items() <= whole["optional-dependencies"].items()


def test_what_models_need_besides_torch_brings_no_other_torch():
    """scipy, einops and pillow are for models and tests. timm is not: it needs torchvision, whose wheels want another build of torch."""
    wanted = project(".")["optional-dependencies"]["dev"]
    pinned = {line.partition("==")[0].strip() for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines()}
    assert {"scipy", "einops", "pillow"} <= pinned.intersection(wanted)
    found, pending = set(), [Requirement(text) for text in wanted]
    while pending:
        name = canonicalize_name(pending.pop().name)
        if name in found:
            continue
        found.add(name)
        try:
            needs = metadata.requires(name) or () if name != "torch" else ()
        except metadata.PackageNotFoundError:
            continue
        pending += [need for need in map(Requirement, needs) if not need.marker or need.marker.evaluate({"extra": ""})]
    assert "torch" in found
    assert not {name for name in found if name in ("timm", "torchvision", "triton") or name.startswith("nvidia-")}


@pytest.fixture(scope="module")
def wheels(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("wheels")
    return {name: release.build(name, folder)[1] for name in release.NAMES}


def test_each_wheel_is_built_from_its_source_and_they_share_no_file(wheels):
    files = {name: set(zipfile.ZipFile(path).namelist()) for name, path in wheels.items()}
    assert release.missing(wheels["shardplan-core"]) == set()
    assert {"shardplan/api/check.py", "shardplan/_data/plans/llama.yaml"} <= release.wanted()
    assert not any("__pycache__" in name for name in files["shardplan-core"])
    assert project_data(".") == project_data("packages/core") == set(release.DATA)
    assert all(".dist-info/" in name for name in files["shardplan"])
    assert all(any(name.endswith("/licenses/LICENSE") for name in names) for names in files.values())


def test_a_wheel_that_lacks_a_page_is_noticed(wheels, tmp_path):
    with zipfile.ZipFile(wheels["shardplan-core"]) as whole, zipfile.ZipFile(tmp_path / "some.whl", "w") as some:
        for name in whole.namelist():
            if not name.endswith("/SP401.md"):
                some.writestr(name, b"")
    assert release.missing(tmp_path / "some.whl") == {"shardplan/_data/docs/diagnostics/SP401.md"}


def test_the_licence_is_one():
    assert {path.read_text("utf-8") for path in (ROOT / "LICENSE", *(ROOT / "packages").glob("*/LICENSE"))} == {
        (ROOT / "LICENSE").read_text("utf-8")
    }
    assert len(list((ROOT / "packages").glob("*/LICENSE"))) == 2


def test_a_version_is_written_to_every_place_that_has_it(tmp_path):
    for place in (*release.PLACES, "CHANGELOG.md"):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / place, tmp_path / place)
    assert set(map(frozenset, release.versions(ROOT).values())) == {frozenset({shardplan.__version__})}
    for wrong in ("2", "9.8.7"):  # no version; none of the changelog's
        with pytest.raises(ValueError, match=r"is no version|CHANGELOG\.md has no heading"):
            release.write_version(tmp_path, wrong)
    with (tmp_path / "CHANGELOG.md").open("a", encoding="utf-8") as file:
        file.write("\n## 9.8.7 (2030-01-02)\n")
    release.write_version(tmp_path, "9.8.7")
    assert set(map(frozenset, release.versions(tmp_path).values())) == {frozenset({"9.8.7"})}
    changed = [
        line
        for place in release.PLACES
        for line in difflib.ndiff(
            (ROOT / place).read_text("utf-8").splitlines(), (tmp_path / place).read_text("utf-8").splitlines()
        )
        if line.startswith("+ ")
    ]
    assert len(changed) == len(release.PLACES) + 1 and all("9.8.7" in line for line in changed)


def test_a_command_that_prints_something_else_than_the_readme_is_noticed(tmp_path):
    program = tmp_path / "shardplan"
    program.write_text("#!/bin/sh\necho no findings\n")
    program.chmod(0o755)
    told = list(release.differences(tmp_path, tmp_path))
    assert len(told) == 2 and all("\nno findings\n" in one for one in told)


# Each command in a process of its own, forked from one that has imported no more than the command line.
WITHOUT_TORCH = """
import json, os, sys
for name in ("torch", "transformers", "safetensors", "tqdm", "numpy"):
    sys.modules[name] = None
from shardplan.cli.main import main
for number, words in enumerate(json.loads(sys.argv[1])):
    if (child := os.fork()) == 0:
        for stream in (1, 2):
            os.dup2(os.open(f"{number}.out", os.O_CREAT | os.O_APPEND | os.O_WRONLY), stream)
        sys.exit(main(words))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)  # else the next child has it too
"""


@pytest.fixture(scope="module")
def core(wheels, tmp_path_factory) -> Path:
    """What the wheel installs, outside of the repository."""
    folder = tmp_path_factory.mktemp("installed")
    zipfile.ZipFile(wheels["shardplan-core"]).extractall(folder)
    (folder / "mine.yaml").write_text('version: "1"\nextends: llama\n')
    return folder


COMMANDS = [
    (["lint", "mine.yaml", "llama"], 0, "no findings in 2 files"),
    (["lint", "mine.yaml", "no.yaml"], 1, "SP101"),
    (["explain", "SP401"], 0, "SP401: "),
    (["editor", "schema"], 0, "urn:shardplan:plan:1"),
    (["list"], 0, "qwen3"),
    (["diff", "llama", "mine.yaml"], 1, "rules"),
    (["editor", "completion", "bash"], 0, "complete -F"),
    (["--version"], 0, "shardplan "),
    (["validate", "llama", "mine.yaml"], 2, "pip install shardplan"),
    (["estimate", "llama", "llama", "--mesh", "tp=2", "--seq-len", "8"], 2, "pip install shardplan"),
    (["init", "llama"], 2, "pip install shardplan"),
    (["verify", "llama", "llama", "--tp", "2"], 2, "pip install shardplan"),
    (["show", "llama", "llama", "--tp", "2"], 2, "pip install shardplan"),
    (["diff", "llama", "mine.yaml", "llama"], 2, "pip install shardplan"),
    (["diff", "llama", "mine.yaml", "--save", "x.json"], 2, "pip install shardplan"),
    (["show", "llama", "mine.yaml", "--html", "x.html"], 2, "pip install shardplan"),
    (["list", "llama"], 2, "pip install shardplan"),
    (["validate", "llama", "mine.yaml", "--fix"], 2, "pip install shardplan"),
]


@pytest.fixture(scope="module")
def ended(core) -> list[tuple[int, str]]:
    """The exit code of each command, and what it printed."""
    words = json.dumps([command for command, _, _ in COMMANDS])
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, words], cwd=core, capture_output=True, text=True)
    codes = map(int, done.stdout.split())
    return [(code, (core / f"{number}.out").read_text("utf-8")) for number, code in enumerate(codes)]


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [pytest.param(number, *expected, id=" ".join(words)) for number, (words, *expected) in enumerate(COMMANDS)],
)
def test_the_core_works_without_torch(ended, number, code, said):
    ended_with, printed = ended[number]
    assert ended_with == code, printed
    assert said in printed and "Traceback" not in printed


EXPLAINED = """
import sys
for name in ("torch", "transformers", "pydantic", "yaml"):
    sys.modules[name] = None
from shardplan.cli.main import main
sys.exit(max(main(["explain", code]) for code in sys.argv[1:]))
"""


def test_every_code_is_explained_without_the_repository(core):
    done = subprocess.run([sys.executable, "-c", EXPLAINED, *pages()], cwd=core, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "".join(f"{page}\n" for page in pages().values())


@pytest.mark.exhaustive  # it installs from an index
def test_pre_commit_runs_the_hook(tmp_path):
    pre_commit = shutil.which("pre-commit", path=f"{Path(sys.executable).parent}:/usr/bin:/usr/local/bin")
    assert pre_commit is not None, "pre-commit belongs to the extra `dev`"
    repository = tmp_path / "theirs"
    (repository / "plans").mkdir(parents=True)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "--quiet"], cwd=repository, check=True)
    plan = repository / "plans" / "mine.yaml"
    for text, code in (('version: "1"\nextends: llama\n', 0), ('version: "1"\ntensor_parallel: {a: colwyse}\n', 1)):
        plan.write_text(text)
        subprocess.run([*git, "add", "."], cwd=repository, check=True)
        command = [pre_commit, "try-repo", str(ROOT), "shardplan-lint", "--all-files", "--ref", "HEAD"]
        done = subprocess.run(command, cwd=repository, capture_output=True, text=True, env={**_environment(tmp_path)})
        assert done.returncode == code, done.stdout + done.stderr
    assert "SP106" in done.stdout


def _environment(folder: Path) -> dict[str, str]:
    import os

    return {**os.environ, "PRE_COMMIT_HOME": str(folder / "cache"), "NO_COLOR": "1"}
