"""Build the two distributions and try them as somebody does who installs them: `make release`.

    python tools/release.py [--version 0.1.0] [--out dist]

`--version` writes the version to every place that has it; CHANGELOG.md must have the version, with a date. Then each source distribution is
built, and each wheel from its source distribution. Each wheel is installed into a new environment: `shardplan-core` alone, then `shardplan`,
which brings it. There, outside of the project, the commands of README.md print what README.md says.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tests.doc_blocks import blocks, commands, plain  # noqa: E402

NAMES = ("shardplan-core", "shardplan")  # the second asks for the first
FOLDERS = {"shardplan-core": "packages/core", "shardplan": "packages/shardplan"}
CPU_INDEX = os.environ.get("TORCH_CPU_INDEX", "https://download.pytorch.org/whl/cpu")
# File -> what is around the version there.
PLACES = {
    "shardplan/core/version.py": r'(?<=^__version__ = ")[^"]+',
    "pyproject.toml": r'(?<=^version = ")[^"]+',
    "packages/core/pyproject.toml": r'(?<=^version = ")[^"]+',
    "packages/shardplan/pyproject.toml": r'(?<=^version = ")[^"]+|(?<="shardplan-core==)[^"]+',
    "CITATION.cff": r"(?<=^version: ).+",
    "docs/editors.md": r"(?<=^    rev: v).+",
    "tests/cases/err/SP114-later.case": r"(?<=but shardplan )\S+",
}
# Folder of the project -> where a wheel has it.
DATA = {
    "plans": "shardplan/_data/plans",
    "schemas": "shardplan/_data/schemas",
    "docs/diagnostics": "shardplan/_data/docs/diagnostics",
}
# Command -> a text that it prints, where `shardplan-core` alone is installed.
WITHOUT_TORCH = {
    "--version": "shardplan ",
    "explain SP401": "SP401: ",
    "list": "qwen3",
    "lint llama": "no findings",
    "editor schema": "urn:shardplan:plan:1",
}


def versions(root: Path) -> dict[str, set[str]]:
    """The versions that each place has."""
    return {
        place: set(re.findall(around, (root / place).read_text("utf-8"), re.MULTILINE))
        for place, around in PLACES.items()
    }


def write_version(root: Path, version: str) -> None:
    """Write the version to every place.

    Raises:
        ValueError: it is no version, or CHANGELOG.md has no heading with it and a date.
    """
    if not re.fullmatch(r"\d+\.\d+\.\d+(rc\d+)?", version):
        raise ValueError(f"{version} is no version: write 0.2.0, or 0.2.0rc1")
    if not re.search(
        rf"^## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)$", (root / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE
    ):
        raise ValueError(f"CHANGELOG.md has no heading `## {version} (YYYY-MM-DD)`")
    for place, around in PLACES.items():
        text = (root / place).read_text("utf-8")
        (root / place).write_text(re.sub(around, version, text, flags=re.MULTILINE), "utf-8")


def build(name: str, to: Path) -> tuple[Path, Path]:
    """Build the source distribution, and the wheel from it."""
    _python("-m", "hatchling", "build", "-t", "sdist", "-d", str(to.resolve()), folder=ROOT / FOLDERS[name])
    (source,) = to.glob(f"{name.replace('-', '_')}-[0-9]*.tar.gz")
    with tempfile.TemporaryDirectory() as scratch, tarfile.open(source) as archive:
        archive.extractall(scratch, filter="data")
        (unpacked,) = Path(scratch).iterdir()
        _python("-m", "hatchling", "build", "-t", "wheel", "-d", str(to.resolve()), folder=unpacked)
    (wheel,) = to.glob(f"{name.replace('-', '_')}-[0-9]*.whl")
    return source, wheel


def wanted() -> set[str]:
    """The files that the wheel of `shardplan-core` must have: the code, and what the package reads."""
    code = {path.relative_to(ROOT).as_posix() for path in (ROOT / "shardplan").rglob("*.py")}
    return code | {
        f"{packaged}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, packaged in DATA.items()
        for path in (ROOT / folder).rglob("*")
        if path.is_file()
    }


def missing(wheel: Path) -> set[str]:
    """What a wheel of `shardplan-core` lacks."""
    return wanted() - set(zipfile.ZipFile(wheel).namelist())


def environment(folder: Path, *asked: str, wheels: Path) -> Path:
    """Install into a new environment, torch as constraints.txt says; returns the folder of its programs."""
    venv.create(folder, with_pip=True, clear=True)
    install = [
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--constraint",
        str(ROOT / "constraints.txt"),
    ]
    install += ["--find-links", str(wheels.resolve()), *asked]
    python = folder / "bin" / "python"
    if _run([python, *install]).returncode:
        _done(_run([python, *install, "--extra-index-url", CPU_INDEX]))
    return folder / "bin"


def differences(programs: Path, folder: Path) -> Iterator[str]:
    """What the commands of README.md print otherwise than README.md says, in a folder that has no project."""
    for block in blocks((ROOT / "README.md").read_text("utf-8")):
        if block.file:
            (folder / block.file).write_text(block.text + "\n", "utf-8")
        elif block.mark == "run":
            for command, expected in commands(block.text):
                words = shlex.split(command)
                printed = _run([programs / words[0], *words[1:]], folder)
                if plain(printed.stdout) != plain(expected):
                    yield f"$ {command}\n{printed.stdout}{printed.stderr}"


def main(argv: list[str]) -> int:
    """Write, build, install and try."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    asked = parser.parse_args(argv)
    if asked.version:
        try:
            write_version(ROOT, asked.version)
        except ValueError as error:
            return _say(str(error))
    found = set[str]().union(*versions(ROOT).values())
    if len(found) != 1:
        return _say(f"the places of the version differ: {versions(ROOT)}")
    if asked.out.exists() and any(asked.out.iterdir()):
        return _say(f"{asked.out} has files: move them, or name another folder with --out (make release DIST=...)")
    asked.out.mkdir(parents=True, exist_ok=True)
    built = {name: build(name, asked.out) for name in NAMES}
    if lacking := missing(built["shardplan-core"][1]):
        return _say(f"the wheel lacks {sorted(lacking)[:5]}")
    (version,) = found
    with tempfile.TemporaryDirectory() as scratch:
        outside = Path(scratch) / "outside"
        outside.mkdir()
        programs = environment(Path(scratch) / "core", str(built["shardplan-core"][1]), wheels=asked.out)
        for command, said in WITHOUT_TORCH.items():
            ran = _run([programs / "shardplan", *command.split()], outside)
            if ran.returncode or said not in ran.stdout:
                return _say(f"shardplan {command}\n{ran.stdout}{ran.stderr}")
        programs = environment(Path(scratch) / "whole", f"shardplan=={version}", wheels=asked.out)
        if differ := list(differences(programs, outside)):
            return _say("README.md says something else\n" + "\n".join(differ))
    print(*(f"built and tried: {path}" for pair in built.values() for path in pair), sep="\n")
    return 0


def _python(*words: str, folder: Path) -> None:
    _done(_run([Path(sys.executable), *words], folder))


def _run(words: list[str | Path], folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    own = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return subprocess.run(words, cwd=folder, env=own | {"NO_COLOR": "1"}, capture_output=True, text=True)


def _done(ran: subprocess.CompletedProcess[str]) -> None:
    if ran.returncode:
        raise SystemExit(f"{shlex.join(map(str, ran.args))}\n{ran.stdout}{ran.stderr}")


def _say(text: str) -> int:
    print(text, file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
