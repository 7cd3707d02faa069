"""JSON that is written anew: what can be read is not always what can be written."""

from __future__ import annotations

import json
from typing import Any

import orjson

from ppdbench.cluster.nixl import PARAMS


class TooDeepError(Exception):
    """A document nested more deeply than can be written: orjson reads 1,024 levels, writes 254."""


class UnreadableError(Exception):
    """A document that Python's parser gives up, though it may be JSON."""


def written(document: object, option: int = 0) -> bytes:
    """``document``, which was read from JSON, as JSON.

    Raises:
        TooDeepError: it is nested too deeply.
    """
    try:
        return orjson.dumps(document, option=option)
    except orjson.JSONEncodeError:
        raise TooDeepError("the JSON is nested more than 254 levels deep") from None


def without_hand_off(raw: bytes) -> bytes:
    """``raw`` less the fields that steer a hand-off; unchanged where it has none.

    Read as Python's own parser does it, because an engine does: with NaN, in UTF-16 too. Read at
    all only where the name can stand in it: plainly, escaped or in another encoding.

    Raises:
        UnreadableError: an engine with higher limits than ours could read what we cannot.
    """
    if PARAMS.encode() not in raw and b"\\u" not in raw and b"\0" not in raw:
        return raw
    try:
        document: Any = json.loads(raw)
    except (json.JSONDecodeError, UnicodeDecodeError):
        return raw
    except (ValueError, RecursionError) as error:
        raise UnreadableError(f"the JSON cannot be read: {error}") from None
    if not isinstance(document, dict):
        return raw
    steers = PARAMS in document
    document.pop(PARAMS, None)
    return json.dumps(document).encode() if drop_nested(document) or steers else raw


def drop_nested(document: dict[str, Any]) -> bool:
    """Take hand-off parameters out of ``vllm_xargs``, where vLLM reads them too; whether any were.

    A value there can be no object, and one that is none ends vLLM's scheduler for all.
    """
    nested = document.get("vllm_xargs")
    if not isinstance(nested, dict) or PARAMS not in nested:
        return False
    del nested[PARAMS]
    return True
