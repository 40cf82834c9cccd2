"""`extends`: from the word in a plan to the text of its parent, without leaving the plan's folder."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from shardplan.core.diagnostics import Code
from shardplan.core.suggest import closest, did_you_mean
from shardplan.core.user_files import CannotRead

from .limits import MAX_ANCESTORS
from .parse_findings import LONGEST_PATH, TOO_LARGE, Findings, quoted
from .plan_files import CANNOT_READ, ENDINGS, builtin_plans, read_text
from .reader import Format

LISTED = "`shardplan list` shows the built-in plans"
NO_PARENT = Code("SP108")
CIRCLE = Code("SP109")
OUTSIDE = Code("SP110")

PATH = ("extends",)


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of a document.

    Args:
        display: its name in findings.
        name: the plan's name, if the document gives none.
        format: the language of its text.
        folder: the folder of files that it extends; None if there is none.
        identity: the real path, by which a cycle is found; None without a file.
        built_in: whether it comes with shardplan.
    """

    display: str
    name: str
    format: Format = "yaml"
    folder: Path | None = None
    identity: str | None = None
    built_in: bool = False


def file_origin(path: Path, display: str) -> Origin:
    """The origin of a plan in a file."""
    format: Format = "json" if path.suffix.lower() == ".json" else "yaml"
    return Origin(display, path.stem, format, path.parent, _real(path))


def _real(path: Path) -> str:
    try:
        return os.path.realpath(path)
    except ValueError:  # a string that no path can be; reading it reports that
        return str(path)


def builtin_origin(name: str, taken: tuple[str, ...] = ()) -> Origin:
    """The origin of a built-in plan.

    Args:
        taken: display names of other documents; it must differ from them.
    """
    path = builtin_plans()[name]
    display = f"plans/{path.name}"
    origin = file_origin(path, display if display not in taken else f"shardplan/{display}")
    return replace(origin, built_in=True)


def find_parent(word: str, chain: tuple[Origin, ...], findings: Findings) -> tuple[Origin, str] | None:
    """The parent's origin and text; None, and a finding, if there is none that may be read.

    Args:
        word: the value of `extends`.
        chain: the plan with that word, then the plans that extend it.
    """
    origin = _locate(word, chain, findings)
    if origin is None:
        return None
    identities = [one.identity for one in chain]
    if origin.identity in identities:
        circle = [one.display for one in chain[identities.index(origin.identity) :]] + [origin.display]
        message = f"a plan extends itself: {' -> '.join(circle)}"
        findings.add(CIRCLE, message, PATH, help="extend another plan")
        return None
    if len(chain) > MAX_ANCESTORS:
        message = f"more than {MAX_ANCESTORS} plans extend one another"
        findings.add(CIRCLE, message, PATH, help="merge some of them")
        return None
    assert origin.identity is not None
    try:
        return origin, read_text(Path(origin.identity))
    except CannotRead as error:
        code = TOO_LARGE if error.too_large else NO_PARENT if error.missing else CANNOT_READ
        message = f"{quoted(origin.display, LONGEST_PATH)} {error.reason}"
        help, words = _similar(word, chain[-1].folder)
        findings.add(code, message, PATH, help=help, words=words)
        return None


def _locate(word: str, chain: tuple[Origin, ...], findings: Findings) -> Origin | None:
    child = chain[-1]
    if "/" in word or "\\" in word or "\0" in word:
        message = f"{quoted(word)} is outside the plan's folder"
        help = "name a built-in plan, or a file next to this one without a folder"
        findings.add(OUTSIDE, message, PATH, help=help)
        return None
    if not word.lower().endswith(ENDINGS):
        if word in builtin_plans():
            return builtin_origin(word, tuple(one.display for one in chain))
        message = f"there is no built-in plan {quoted(word)}"
        help, words = _similar(word, child.folder)
        findings.add(NO_PARENT, message, PATH, help=help, words=words)
        return None
    if child.folder is None:
        message = f"{quoted(word)} is a file, but this plan has no folder"
        findings.add(NO_PARENT, message, PATH, help=f"extend a built-in plan; {LISTED}")
        return None
    path = child.folder / word
    if os.path.dirname(_real(path)) != _real(child.folder):
        message = f"{quoted(word)} is a link out of the plan's folder"
        findings.add(OUTSIDE, message, PATH, help="put the file itself next to the plan")
        return None
    return file_origin(path, os.path.join(os.path.dirname(child.display), word))


def _similar(word: str, folder: Path | None) -> tuple[str, tuple[str, ...]]:
    """Plans that may have been meant, built-in ones and files next to the plan: the help line, and the words it proposes."""
    files = _plan_files(folder) if folder else []
    if f"{word}.yaml" in files:
        return f"write `{word}.yaml` for the file next to this plan", (f"{word}.yaml",)
    near = closest(word, [*builtin_plans(), *files])
    return (did_you_mean(word, near), (near,)) if near else (LISTED, ())


def _plan_files(folder: Path) -> list[str]:
    try:
        return [name for name in os.listdir(folder) if name.endswith(ENDINGS)]
    except OSError:
        return []
