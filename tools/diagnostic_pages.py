"""The files made from the pages of the diagnostic codes: their table, and below each page the run of a command that gives the code."""

from __future__ import annotations

import shlex
from functools import cache

from shardplan.core.data_files import data_folder
from shardplan.report.pages import RUN, pages
from tests.case_tree import CASES, Case, read

ENDINGS = {"yaml": "yaml", "yml": "yaml", "json": "json", "py": "python"}
FAMILIES = {
    "SP1": "The file",
    "SP2": "Binding a plan to a model",
    "SP3": "Structure",
    "SP4": "Layout",
    "SP5": "Environment, models and applying",
}


def diagnostics_document() -> str:
    """docs/diagnostics.md: every code, by family, with its page in docs/diagnostics/."""
    lines = [
        "# Diagnostics",
        "",
        "Every finding has a code that never changes its meaning. Each code has a page; `shardplan explain CODE` prints it.",
        "Errors refuse the plan, warnings do not, unless `--strict` is given.",
    ]
    for prefix, title in FAMILIES.items():
        lines += ["", f"## {title}", "", "| code | |", "|---|---|"]
        lines += [
            f"| [{c}](diagnostics/{c}.md) | {page.title} |" for c, page in pages().items() if c.startswith(prefix)
        ]
    return "\n".join(lines) + "\n"


def with_run(code: str) -> str:
    """docs/diagnostics/CODE.md: as it is written, with its run; without one where no case in tests/cases/err has the code."""
    written = (data_folder("docs/diagnostics") / f"{code}.md").read_text("utf-8").partition(RUN)[0]
    case = _shortest_case(code)
    return written if case is None else written + _run(case)


@cache
def _cases() -> dict[str, list[Case]]:
    found: dict[str, list[Case]] = {}
    for path in sorted((CASES / "err").glob("*.case")):
        found.setdefault(path.name.partition("-")[0], []).append(read(path))
    return found


def _shortest_case(code: str) -> Case | None:
    """The case that is read fastest: the one whose files and output have the fewest characters."""
    return min(
        _cases().get(code, ()), key=lambda case: sum(map(len, (_text(case), *case.files.values()))), default=None
    )


def _text(case: Case) -> str:
    return case.expected or ""


def _run(case: Case) -> str:
    """The files of a case that are text, its command and what it prints."""
    parts = [RUN.rstrip("\n")]
    for name, content in case.files.items():
        try:
            text = content.decode()
        except UnicodeDecodeError:
            parts.append(f"`{name}` is not text.")
            continue
        if 0 < len(text) <= 3000:  # a file made to be too large is not for reading
            parts.append(f"`{name}`:\n\n{_block(text, ENDINGS.get(name.rpartition('.')[2], ''))}")
    command = f"$ shardplan {shlex.join(case.command)}\n{_text(case)}"
    parts.append(_block(command, "console"))
    return "\n\n".join(parts) + "\n"


def _block(text: str, language: str) -> str:
    """A code block whose fence is longer than any in the text."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}{language}\n{text.strip(chr(10))}\n{fence}"
