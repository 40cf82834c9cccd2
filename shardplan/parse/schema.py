"""The JSON Schema of plans, draft 2020-12, made from the models.

    python -m shardplan.parse.schema --write    writes schemas/plan.schema.json
    python -m shardplan.parse.schema --check    fails where that file is not up to date
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[2] / "schemas" / "plan.schema.json"
DIALECT = "https://json-schema.org/draft/2020-12/schema"


def json_schema() -> dict[str, Any]:
    """The schema: whatever can be said of a document's form without reading other texts."""
    from .models import PlanDocument

    schema = PlanDocument.model_json_schema()
    return {"$schema": DIALECT, "title": schema["title"], **_plain(schema)}


def _plain(schema: Any) -> Any:
    """Without what pydantic adds: titles, and the default None, which a document cannot say."""
    if isinstance(schema, dict):
        return {
            key: _plain(value)
            for key, value in schema.items()
            if not (key == "default" and value is None) and not (key == "title" and isinstance(value, str))
        }
    if isinstance(schema, list):
        return [_plain(item) for item in schema]
    return schema


def text() -> str:
    """The schema as the file holds it."""
    return json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"


def main(argv: Sequence[str]) -> int:
    """Writes or checks the file; returns the exit code."""
    if list(argv) == ["--write"]:
        FILE.write_text(text(), "utf-8")
        return 0
    if list(argv) == ["--check"]:
        if FILE.exists() and FILE.read_text("utf-8") == text():
            return 0
        command = "python -m shardplan.parse.schema --write"
        print(f"schemas/plan.schema.json is not what the models say: run `{command}`", file=sys.stderr)
        return 1
    print("usage: python -m shardplan.parse.schema --write | --check", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
