"""Write the files that are made from the code: `python tools/generate.py`; with `--check`, only say which are
stale."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

COMMAND = "python tools/generate.py"


def _diagnostics() -> str:
    from tools.diagnostic_pages import diagnostics_document

    return diagnostics_document()


def _diagnostic(code: str) -> str:
    from tools.diagnostic_pages import with_run

    return with_run(code)


def _codes() -> tuple[str, ...]:
    from shardplan.report.pages import pages

    return tuple(pages())


def _combinations() -> str:
    from tools.combinations import combinations_document

    return combinations_document()


def _api() -> str:
    from tools.api_pages import index_document

    return index_document()


def _api_page(page: str) -> str:
    from tools.api_pages import page_document

    return page_document(page)


def _api_pages() -> tuple[str, ...]:
    from tools.api_pages import PAGES

    return tuple(PAGES)


def _cli() -> str:
    from shardplan.cli.reference import cli_document

    return cli_document()


def _command(name: str) -> str:
    from shardplan.cli.reference import command_document

    return command_document(name)


def _commands() -> tuple[str, ...]:
    from shardplan.cli.arguments import COMMANDS

    return tuple(COMMANDS)


def _report_schema() -> str:
    from shardplan.report import json_text
    from shardplan.report.report_schema import report_schema

    return json_text(report_schema()) + "\n"


def _plan_schema() -> str:
    from shardplan.language import json_schema
    from shardplan.report import json_text

    return json_text(json_schema()) + "\n"


GENERATED: dict[str, Callable[[], str]] = {
    "docs/diagnostics.md": _diagnostics,
    **{f"docs/diagnostics/{code}.md": partial(_diagnostic, code) for code in _codes()},
    "docs/api.md": _api,
    **{f"docs/api/{page}.md": partial(_api_page, page) for page in _api_pages()},
    "docs/cli.md": _cli,
    **{f"docs/cli/{name}.md": partial(_command, name) for name in _commands()},
    "docs/combinations.md": _combinations,
    "schemas/report.schema.json": _report_schema,
    "schemas/plan.schema.json": _plan_schema,
}


def stale() -> list[str]:
    """The generated files that are not what the code says."""
    return [name for name, make in GENERATED.items() if _read(ROOT / name) != make()]


def write() -> list[str]:
    """Bring every generated file up to date; returns those that changed."""
    changed = stale()
    for name in changed:
        (ROOT / name).write_text(GENERATED[name](), encoding="utf-8")
    return changed


def _read(path: Path) -> str | None:
    return path.read_text("utf-8") if path.exists() else None


def main(words: list[str]) -> int:
    if words not in ([], ["--check"]):
        print(f"usage: {COMMAND} [--check]", file=sys.stderr)
        return 2
    if words:
        names = stale()
        if names:
            print(f"{', '.join(names)}: not what the code says. Run `{COMMAND}` and commit the result.")
        return 1 if names else 0
    for name in write():
        print(f"wrote {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
