"""`event` is an API: docs/log-events.md lists every one that the code can log, and no other."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
#: `trouble` makes these from a prefix and an ending
PREFIXES = ("metrics_flush", "usage_flush", "metrics_source")
ENDINGS = ("failed", "recovered")


def events_in_code() -> set[str]:
    found = {f"{prefix}_{ending}" for prefix in PREFIXES for ending in ENDINGS}
    for path in (ROOT / "inference_worker").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Dict):
                for key, value in zip(node.keys, node.values, strict=True):
                    if isinstance(key, ast.Constant) and key.value == "event" and isinstance(value, ast.Constant):
                        found.add(str(value.value))
    return found


def events_in_docs() -> set[str]:
    text = (ROOT / "docs" / "log-events.md").read_text().partition("## Holds")[0]
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    return {event for row in rows for event in re.findall(r"`([a-z_]+)`", row.split("|")[1])}


def test_every_event_of_the_log_is_documented_and_no_other() -> None:
    assert events_in_docs() == events_in_code()


def test_the_prefixes_and_endings_of_trouble_are_those_in_the_code() -> None:
    files = {path.stem: path.read_text() for path in (ROOT / "inference_worker").glob("*.py")}
    prefixes = re.findall(r'Trouble\(\s*"([a-z_]+)"', "".join(files.values()))
    assert sorted(prefixes) == sorted(PREFIXES)
    assert set(re.findall(r"_event_prefix}_([a-z]+)", files["trouble"])) == set(ENDINGS)
