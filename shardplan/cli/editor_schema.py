"""`shardplan editor schema`: the JSON Schema of plans, or of reports; for VS Code installed with its settings."""

from __future__ import annotations

import argparse
from pathlib import Path

from shardplan.core.user_files import CannotRead, decode, in_form_of
from shardplan.report import json_text

from .exits import CLEAN, UsageError
from .output import put, read_file, say, write_file

MOST_SETTINGS = 2**20  # bytes


def run(args: argparse.Namespace) -> int:
    if args.install is not None:
        if args.report:
            raise UsageError("--install is for the schema of plans: it does not go with --report")
        return _install(Path(args.install))
    if args.report:
        from shardplan.report.report_schema import report_schema as schema
    else:
        from shardplan.language import json_schema as schema
    put(json_text(schema()))
    return CLEAN


def _install(folder: Path) -> int:
    """Write the schema and the settings; other settings stay."""
    from shardplan.language import json_schema

    from .editor_settings import SCHEMA, with_schema

    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder")
    place = folder / ".vscode"
    settings = place / "settings.json"
    try:
        place.mkdir(exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write {place}: {error.strerror or error}") from None
    old = read_file(settings, MOST_SETTINGS) if settings.exists() else b""
    try:
        new = in_form_of(old, with_schema(decode(old)))
    except CannotRead as error:
        raise UsageError(f"{settings} {error.reason}") from None
    except ValueError as error:
        raise UsageError(f"{settings}: {error}") from None
    write_file(place / SCHEMA, json_text(json_schema()) + "\n")
    write_file(settings, new)
    say(f"{place / SCHEMA} and {settings}: written, for plans/*.yaml")
    return CLEAN
