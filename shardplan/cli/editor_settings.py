"""Settings of VS Code's YAML and JSON support for plans, and the line with which an editor finds a plan's schema."""

from __future__ import annotations

import json
import os
from pathlib import Path

SCHEMA = "shardplan-plan-1.schema.json"  # the name has the version of the plan language
GLOBS = ["plans/**/*.yaml", "plans/**/*.yml"]
ABOVE = 6  # folders above a plan that are searched for a schema


def with_schema(settings: str) -> str:
    """The text of a settings.json with the schema for plans.

    Raises:
        ValueError: it is not a JSON object (comments, which VS Code allows, would be lost); the message says what to add by hand.
    """
    entry = f"./.vscode/{SCHEMA}"
    try:
        data = json.loads(settings or "{}")
    except ValueError:
        data = None
    if not isinstance(data, dict) or not isinstance(data.get("yaml.schemas", {}), dict):
        added = json.dumps({"yaml.schemas": {entry: GLOBS}})
        raise ValueError(f"it has comments or is no JSON object; add {added} by hand")
    schemas = data.get("yaml.schemas", {})
    known = {name: globs for name, globs in schemas.items() if Path(name).name != SCHEMA}
    data["yaml.schemas"] = {**known, entry: schemas.get(entry, GLOBS)}
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"


def schema_line(plan: Path) -> str:
    """The comment that tells the YAML language server where the schema is: in `.vscode` or `schemas` of a folder around the
    plan. Empty where there is none."""
    folder = plan.absolute().parent
    for above in [folder, *folder.parents][:ABOVE]:
        for found in (above / ".vscode" / SCHEMA, above / "schemas" / "plan.schema.json"):
            if found.is_file():
                relative = os.path.relpath(found, folder).replace(os.sep, "/")
                return f"# yaml-language-server: $schema={relative}\n"
    return ""
