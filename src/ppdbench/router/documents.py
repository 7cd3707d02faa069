"""JSON that is written anew: what can be read is not always what can be written."""

from __future__ import annotations

import json
from typing import Any

import orjson


class TooDeepError(Exception):
    """A document nested more deeply than can be written: orjson reads 1,024 levels, writes 254."""


def written(document: object, option: int = 0) -> bytes:
    """``document``, which was read from JSON, as JSON.

    Raises:
        TooDeepError: it is nested too deeply.
    """
    try:
        return orjson.dumps(document, option=option)
    except orjson.JSONEncodeError:
        raise TooDeepError("the JSON is nested more than 254 levels deep") from None


def without_field(raw: bytes, name: str) -> bytes:
    """``raw`` less the field ``name`` of its object; unchanged where it has none.

    Read as Python's own parser does it, because an engine does: with NaN, in UTF-16 too. Read at
    all only where the name can stand in it: plainly, escaped or in another encoding.
    """
    if name.encode() not in raw and b"\\u" not in raw and b"\0" not in raw:
        return raw
    try:
        document: Any = json.loads(raw)
    except (ValueError, RecursionError):
        return raw
    if not isinstance(document, dict) or name not in document:
        return raw
    del document[name]
    return json.dumps(document).encode()
