"""What somebody does who has just cloned the project: the commands of README.md and the quickstart, in their order, in a fresh
environment. `-s` shows how long it took; more than ten minutes fail."""

import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.doc_blocks import blocks, commands, plain

ROOT = Path(__file__).parent.parent
CPU_BUILD = "torch==2.13.0+cpu"  # as README says; where pip's own sources have it, no index is asked


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """The committed project, as `git clone` gives it."""
    folder = tmp_path_factory.mktemp("first") / "shardplan"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)
    return folder


@pytest.mark.exhaustive
def test_from_a_clone_to_a_refused_plan_and_a_trained_model(clone):
    start, environment = time.monotonic(), fresh(clone)
    installed = time.monotonic()
    for name in ("README.md", "docs/quickstart.md"):
        for block in blocks((clone / name).read_text("utf-8")):
            if block.file:
                (clone / block.file).write_text(block.text + "\n")
            elif block.mark == "run" and block.language == "console":
                for command, expected in commands(block.text):
                    result = run(command, clone, environment, codes=(0, 1))
                    assert unnumbered(result) == unnumbered(expected), f"{name}: $ {command}"
    checked = time.monotonic()
    (training,) = re.findall(
        r"^\$ (torchrun .+)$", (clone / "docs/quickstart.md").read_text("utf-8"), flags=re.MULTILINE
    )
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", run(training, clone, environment))]
    assert len(losses) == 30 and losses[-1] < losses[0] - 1
    end, used = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    parts = {"installing": installed - start, "checking": checked - installed, "training": end - checked}
    minutes, processor = (end - start) / 60, (used.ru_utime + used.ru_stime) / 60
    print(f"\n{minutes:.1f} minutes from a clone to a trained model, {processor:.1f} of them on a processor:")
    print(", ".join(f"{part} {seconds / 60:.1f}" for part, seconds in parts.items()))
    assert minutes < 10


def unnumbered(text: str) -> str:
    """What is printed, without the numbers of transformers' lines: its newest release is installed, and README quotes the pinned one."""
    return re.sub(r"(modeling_\w+\.py):\d+", r"\1", plain(text))


def fresh(clone: Path) -> dict[str, str]:
    """The environment that README's commands make."""
    subprocess.run([sys.executable, "-m", "venv", str(clone / "env")], check=True)
    environment = {key: value for key, value in os.environ.items() if key not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    environment["PATH"] = f"{clone / 'env' / 'bin'}{os.pathsep}{environment['PATH']}"
    environment |= {"NO_COLOR": "1", "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(clone / "cache")}
    readme = (clone / "README.md").read_text("utf-8")
    written = re.findall(r"^\$ (pip install [^#\n]+)", readme, flags=re.MULTILINE)
    assert [CPU_BUILD in line for line in written] == [True, False]
    if subprocess.run(["pip", "install", "--quiet", CPU_BUILD], cwd=clone, env=environment).returncode:
        run(written[0], clone, environment)
    run(written[1], clone, environment)
    return environment


def run(command: str, folder: Path, environment: dict[str, str], codes: tuple[int, ...] = (0,)) -> str:
    words = shlex.split(command)
    words[0] = shutil.which(words[0], path=environment["PATH"]) or words[0]
    result = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
    assert result.returncode in codes, f"$ {command}\n{result.stdout}{result.stderr}"
    return result.stdout
