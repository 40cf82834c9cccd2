"""An environment with one torch and one transformers, made from pyproject.toml and constraints.txt."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import distributions, version
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "versions"
PAIR = re.compile(r"([\w.+]+)/([\w.]+)")
TARGET = "transformers"


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


def constraints(text: str, pair: Pair) -> str:
    """The project's constraints with this pair, and without what other releases of transformers want otherwise."""
    ours: Mapping[str, str] = {"torch": pair.torch, TARGET: pair.transformers}
    lines = [line for line in text.splitlines() if line.partition("==")[0].strip() not in ours]
    return "\n".join([*lines, *(f"{name}=={said}" for name, said in ours.items())]) + "\n"


def make(pair: Pair, python: str = sys.executable) -> Environment:
    """The environment of a pair. Where torch is the installed one, transformers is put in front of this environment, with those of its
    requirements that are not installed in a release that it takes.

    Raises:
        CalledProcessError: pip does not find the releases.
        RuntimeError: no release suits all that need it.
    """
    if pair.torch == version("torch") and python == sys.executable:
        folder = BUILD / f"{TARGET}-{pair.transformers}"
        if pair.transformers != version(TARGET) and not folder.exists():
            _pip(sys.executable, "install", "--no-deps", "--target", str(folder), f"{TARGET}=={pair.transformers}")
            lacking: list[str] = []
            while now := unmet(folder):
                if now == lacking:
                    raise RuntimeError(
                        f"{folder} still lacks {', '.join(now)}: two of what is there need other releases of it"
                    )
                _pip(sys.executable, "install", "--no-deps", "--target", str(folder), *now)
                lacking = now
        return Environment(python, (ROOT, folder) if folder.exists() else (ROOT,))
    folder = BUILD / f"{pair.torch}-{pair.transformers}-{Path(python).resolve().name}"
    inside = folder / "bin" / "python"
    if not inside.exists():
        if python == sys.executable:
            venv.create(folder, with_pip=True)
        else:
            subprocess.run([python, "-m", "venv", str(folder)], check=True)
    file, text = folder / "constraints.txt", constraints((ROOT / "constraints.txt").read_text("utf-8"), pair)
    if not file.exists() or file.read_text("utf-8") != text:
        used = folder / "used.txt"
        used.write_text(text, "utf-8")
        _pip(str(inside), "install", "--constraint", str(used), "--editable", f"{ROOT}[dev]")
        used.rename(file)  # what is installed
    return Environment(str(inside), (ROOT,))


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
