"""Looking into JSON while keeping its text, for the rare body that the fast decoder will not take.

Pure: any thread, no I/O, nothing of what the JSON means. msgspec decodes every ordinary body in one pass; here is the
second look for what it refuses although the grammar allows it (lone surrogate escapes), and the salvage of one member
from a text that is no JSON at all.
"""

from __future__ import annotations

import json
import re
from typing import Any


def _refuse_constant(name: str) -> Any:
    # json.loads takes NaN and Infinity, which are no JSON (field report R44)
    raise ValueError(f"{name} is no JSON")


#: for looking only: numbers stay text, since Python converts no integer of more than 4,300 digits
_STRICT = json.JSONDecoder(parse_constant=_refuse_constant, parse_int=str, parse_float=str)
_VALUES = json.JSONDecoder(parse_constant=_refuse_constant)
_SPACE = re.compile(r"[ \t\r\n]*")
_SIGN = re.compile(r'["{}\[\],]')


def check_utf8(data: bytes) -> None:
    """Look at every byte.

    Raises:  UnicodeDecodeError
    """
    # of ASCII no text has to be made: 10 MB more for a body of 10 MB
    if not data.isascii():
        data.decode()


def has_surrogate_escape(text: str) -> bool:
    """Tell whether the text may hold an escape of half a surrogate pair."""
    return "\\ud" in text or "\\uD" in text


def is_json(text: str) -> bool:
    """Tell whether the text is JSON by the letter of RFC 8259, lone surrogate escapes included."""
    try:
        _STRICT.decode(text)
    except (ValueError, RecursionError):
        return False
    return True


def to_value(text: str) -> Any:
    """Convert a small text to Python values, lone surrogates and huge numbers included; None when it is no JSON."""
    try:
        return _VALUES.decode(text)
    except (ValueError, RecursionError):
        return None


def split_object(text: str) -> dict[str, str] | None:
    """Split the text of a JSON object into its members' texts, unchanged; None when it is no JSON object.

    Of a name given twice the last counts.
    """
    at = _space_end(text, 0)
    if text[at : at + 1] != "{" or not is_json(text):
        return None
    members: dict[str, str] = {}
    at = _space_end(text, at + 1)
    while text[at] != "}":
        name, at = _STRICT.raw_decode(text, at)
        start = _space_end(text, _space_end(text, at) + 1)
        _, end = _STRICT.raw_decode(text, start)
        members[name] = text[start:end]
        at = _space_end(text, end)
        if text[at] == ",":
            at = _space_end(text, at + 1)
    return members


def _space_end(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at


def salvage_string(text: str, name: str) -> str:
    """Return the text of a string member of the outermost object, quotes included, from what need not be JSON.

    "" when there is none before the text stops making sense. Depth is counted, not recursed into (field report R46).
    """
    found, key, depth = "", None, 0
    at = _space_end(text, 0)
    if text[at : at + 1] != "{":
        return ""
    while match := _SIGN.search(text, at):
        at, sign = match.end(), match.group()
        if sign == '"':
            try:
                value, at = _STRICT.raw_decode(text, match.start())
            except ValueError:
                break
            if depth == 1 and key is None:
                key = value
            elif depth == 1 and key == name:
                found = text[match.start() : at]
        elif sign in "{[":
            depth += 1
        elif sign == ",":
            key = None if depth == 1 else key
        else:
            depth -= 1
            if depth == 0:
                break
    return found
