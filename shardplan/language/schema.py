"""The JSON Schema of plans, draft 2020-12, made from the models; `schemas/plan.schema.json` is for editors."""

from __future__ import annotations

from typing import Any

from .document import PlanDocument

ID = "urn:shardplan:plan:1"  # includes the version of the plan language
DIALECT = "https://json-schema.org/draft/2020-12/schema"


def json_schema() -> dict[str, Any]:
    """The schema: everything about a document's form that needs no other texts."""
    schema = PlanDocument.model_json_schema()
    return {"$schema": DIALECT, "$id": ID, "title": schema["title"], **_plain(schema)}


def _plain(schema: Any) -> Any:
    """Removes what pydantic adds: titles, and the default None, which a document cannot say."""
    if isinstance(schema, dict):
        return {
            key: _plain(value)
            for key, value in schema.items()
            if not (key == "default" and value is None) and not (key == "title" and isinstance(value, str))
        }
    if isinstance(schema, list):
        return [_plain(item) for item in schema]
    return schema
