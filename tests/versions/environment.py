"""An environment with one torch and one transformers, made from pyproject.toml and constraints.txt."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import distributions, version
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "versions"
PAIR = re.compile(r"([\w.+]+)/([\w.]+)")
TARGET = "transformers"
INSTALL = ("install", "--no-compile")  # little of it is imported
CPU_INDEX = os.environ.get("TORCH_CPU_INDEX", "https://download.pytorch.org/whl/cpu")


@dataclass(frozen=True)
class Pair:
    """Two releases."""

    torch: str
    transformers: str

    @classmethod
    def read(cls, text: str) -> Pair:
        """`2.13.0+cpu/5.24.0`; "installed" in place of either: what this environment has.

        Raises:
            ValueError: it is none.
        """
        found = PAIR.fullmatch(text)
        if found is None:
            raise ValueError(f"{text!r} is no pair: write TORCH/TRANSFORMERS, as 2.13.0+cpu/5.24.0 or installed/5.24.0")
        names = ("torch", TARGET)
        return cls(
            *(version(name) if said == "installed" else said for name, said in zip(names, found.groups(), strict=True))
        )


@dataclass(frozen=True)
class Environment:
    """Which Python runs, with which folders in front of what is installed."""

    python: str
    folders: tuple[Path, ...]

    def run(self, *words: str, stdout: int | None = None) -> subprocess.CompletedProcess[str]:
        """Run `python WORDS` in the project; what it prints is seen."""
        path = os.pathsep.join(map(str, self.folders))
        environment = {**os.environ, "PYTHONPATH": path, "TRANSFORMERS_VERBOSITY": "error"}
        return subprocess.run([self.python, *words], cwd=ROOT, env=environment, stdout=stdout, text=True)

    def said(self, *words: str) -> str:
        """What `python WORDS` prints."""
        return self.run(*words, stdout=subprocess.PIPE).stdout.strip()


def constraints(text: str, torch: str) -> str:
    """The project's constraints with this torch."""
    lines = [line for line in text.splitlines() if line.partition("==")[0].strip() != "torch"]
    return "\n".join([*lines, f"torch=={torch}"]) + "\n"


def make(pair: Pair, python: str = sys.executable) -> Environment:
    """The environment of a pair: one for each torch and Python, the installed one if it has them, and in front of it transformers, with those
    of its requirements that are not there in a release that suits.

    Raises:
        CalledProcessError: pip does not find the releases.
        RuntimeError: no release suits all that need it.
    """
    here = python == sys.executable and pair.torch in (installed := version("torch"), installed.partition("+")[0])
    base = Environment(python, (ROOT,)) if here else _with_torch(pair.torch, python)
    if base.said("-c", f"from importlib.metadata import version; print(version('{TARGET}'))") == pair.transformers:
        return base
    name = f"{TARGET}-{pair.transformers}"
    folder = BUILD / (name if here else f"{Path(base.python).parents[1].name}-{name}")
    if not (finished := folder / "finished").exists():
        wanted, before = [f"{TARGET}=={pair.transformers}"], [""]
        while wanted and wanted != before:
            _pip(base.python, *INSTALL, "--no-deps", "--target", str(folder), *wanted)
            wanted, before = base.said("-m", "tests.versions.environment", str(folder)).splitlines(), wanted
        if wanted:
            raise RuntimeError(f"{folder} lacks {', '.join(wanted)}: two of what is there need other releases of it")
        finished.touch()
    return Environment(base.python, (ROOT, folder))


def _with_torch(torch: str, python: str) -> Environment:
    """An environment with a torch: the CPU build, or where pip finds none the release that it has, which may take gigabytes for CUDA.

    Raises:
        CalledProcessError: pip does not find the release.
    """
    folder = BUILD / f"torch-{torch}-{Path(python).resolve().name}"
    environment = Environment(str(folder / "bin" / "python"), (ROOT,))
    text = (ROOT / "constraints.txt").read_text("utf-8")
    finished, used = folder / "finished.txt", folder / "used.txt"
    if finished.exists() and finished.read_text("utf-8") == text:
        return environment
    if not Path(environment.python).exists():
        subprocess.run([python, "-m", "venv", str(folder)], check=True)
    builds = (
        [(torch, ())]
        if "+" in torch
        else [(f"{torch}+cpu", ()), (f"{torch}+cpu", ("--extra-index-url", CPU_INDEX)), (torch, ())]
    )
    for build, words in builds:
        used.write_text(constraints(text, build), "utf-8")
        print(f"torch {build}: asking pip {' '.join(words)}", flush=True)
        try:
            _pip(environment.python, *INSTALL, "--constraint", str(used), *words, f"torch=={build}")
            break
        except subprocess.CalledProcessError:
            if build == torch:
                raise
    _pip(environment.python, *INSTALL, "--constraint", str(used), "--editable", f"{ROOT}[dev]")
    finished.write_text(text, "utf-8")
    return environment


def unmet(folder: Path) -> list[str]:
    """What the distributions in a folder need, extras aside, and is neither there nor in this environment, in a release that they take."""
    needed = [Requirement(text) for one in distributions(path=[str(folder)]) for text in one.requires or ()]
    return [
        str(need)
        for need in needed
        if (need.marker is None or need.marker.evaluate())
        and not any(
            need.specifier.contains(found.version, prereleases=True)
            for found in distributions(name=need.name, path=[str(folder), *sys.path])
        )
    ]


def wheel(transformers: str) -> Path:
    """The wheel of a release of transformers, loaded once."""
    folder = BUILD / "wheels"
    if not (found := [*folder.glob(f"{TARGET}-{transformers}-*.whl")]):
        _pip(sys.executable, "download", "--no-deps", "--dest", str(folder), f"{TARGET}=={transformers}")
        found = [*folder.glob(f"{TARGET}-{transformers}-*.whl")]
    return found[0]


def _pip(python: str, *words: str) -> None:
    subprocess.run([python, "-m", "pip", "--quiet", "--disable-pip-version-check", *words], check=True)


if __name__ == "__main__":
    print("\n".join(unmet(Path(sys.argv[1]))))
