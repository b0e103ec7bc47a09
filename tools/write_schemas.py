"""Write the JSON Schemas in `docs/schemas/` anew from the types: `python -m tools.write_schemas`.

Not part of the package. A unit test fails when files and types differ.
"""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from inference_worker.documents import MetricsDocument, UsageCloudEvent, json_schema

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "schemas"

_KINDS: dict[str, type[msgspec.Struct]] = {
    "metrics-document.schema.json": MetricsDocument,
    "usage-event.schema.json": UsageCloudEvent,
}


def render_schemas() -> dict[str, str]:
    """Generate all schemas: file name → text."""
    dialect = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return {name: json.dumps(dialect | json_schema(kind), indent=2) + "\n" for name, kind in _KINDS.items()}


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in render_schemas().items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
