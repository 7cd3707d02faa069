"""What a node's KV events say about whose KV it no longer has. No I/O.

The events name blocks by hashes that the router cannot compute for a text. So they are read for one
fact only: vLLM frees the blocks of a finished turn together and reuses the longest free one first.
A block that was stored at time s and is removed now was in use at s or later, hence all KV whose
last turn had ended by s went before it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import msgspec

BLOCKS_LIMIT = 262_144
"""Remembered per node, at most 27 MiB; an 8B model's cache on one GPU has fewer of 16 tokens.

A block that is no longer remembered counts as stored when the newest forgotten one was.
"""

LAST_BLOCK_S = 2.0
"""A turn ends this long after its last whole block was stored: 128 tokens at 15 ms each.

So the turn to which the removed block belongs is cold too, and with it what ended just after.
"""

_FIELDS = {
    "BlockStored": (
        "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium",
        "lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}  # fmt: skip
"""In the order of vLLM's structures: older versions send arrays, newer ones maps."""

_WHOLE_HISTORY = (None, "full_attention", "mla_attention", "sink_full_attention", "unknown")
"""Other kinds of layers (a sliding window, Mamba) drop blocks that no turn would miss."""

_ON_DEVICE = (None, "GPU")
"""vLLM says GPU on CPU as well; blocks in an offload tier come and go by other rules."""


class NotKvEventsError(Exception):
    """A message that is no batch of vLLM's KV events."""


def read_events(payload: bytes) -> list[Mapping[str, Any]]:
    """The events of one batch that are known here, by field name.

    Raises:
        NotKvEventsError: it is none.
    """
    try:
        batch = msgspec.msgpack.decode(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise NotKvEventsError(f"no msgpack: {error}") from None
    if not (isinstance(batch, list) and len(batch) >= 2 and isinstance(batch[1], list)):
        raise NotKvEventsError("no batch of the form [time, events, …]")
    named = map(_named, batch[1])
    return [event for event in named if event["type"] in _FIELDS]


def _named(event: object) -> Mapping[str, Any]:
    if isinstance(event, list) and event and isinstance(event[0], str):
        pairs = zip(_FIELDS.get(event[0], ()), event[1:], strict=False)
        event = {"type": event[0], **dict(pairs)}
    if not isinstance(event, dict) or not isinstance(event.get("type"), str):
        raise NotKvEventsError("an event without a type")
    if event["type"] in ("BlockStored", "BlockRemoved"):
        _check_block_event(event)
    return event


def _check_block_event(event: Mapping[str, Any]) -> None:
    hashes = event.get("block_hashes")
    if not (isinstance(hashes, list) and all(isinstance(each, (bytes, int)) for each in hashes)):
        raise NotKvEventsError(f"{event['type']} without block hashes")
    if not isinstance(event.get("group_idx"), int | None):
        raise NotKvEventsError(f"{event['type']} of a group that is no number")
    if event["type"] == "BlockStored" and not isinstance(event.get("block_size"), int):
        raise NotKvEventsError("BlockStored without a block size")


class Residency:
    """When each block of a node's prefix cache was stored, as far as its events were seen.

    Blocks stored before ``now_s``, when listening began, count as stored then: of what is older
    than our knowledge nothing is trusted after the first of them has gone.
    """

    def __init__(self, now_s: float, limit: int = BLOCKS_LIMIT) -> None:
        self._limit = limit
        self._stored_s: dict[int, float] = {}
        self._unknown_s = now_s
        self._block_tokens: dict[Hashable, int] = {}
        self._passing_groups: set[Hashable] = set()

    def __repr__(self) -> str:
        return f"<Residency of {len(self._stored_s)} blocks>"

    def __len__(self) -> int:
        return len(self._stored_s)

    def gone_by(self, events: Iterable[Mapping[str, Any]], now_s: float) -> float:
        """KV whose last turn ended at or before this time is gone; 0 says nothing of any."""
        gone_s = 0.0
        for event in events:
            if event["type"] == "AllBlocksCleared":
                self._stored_s.clear()
                gone_s = self._unknown_s = now_s
            elif event.get("medium") not in _ON_DEVICE:
                continue
            elif event["type"] == "BlockStored":
                self._store(event, now_s)
            else:
                gone_s = max(gone_s, self._remove(event))
        return min(gone_s, now_s)

    def _store(self, event: Mapping[str, Any], now_s: float) -> None:
        group, tokens = event.get("group_idx"), event["block_size"]
        if event.get("kv_cache_spec_kind") not in _WHOLE_HISTORY:
            self._passing_groups.add(group)
            return
        whole = max(tokens, self._block_tokens.get(group, 0))
        self._block_tokens[group] = whole
        # A block that is not full is removed when it is filled, which is no loss.
        at_s = now_s if tokens == whole else 0.0
        for each in event["block_hashes"]:
            # The earlier time of a block that is there twice holds for both copies.
            self._stored_s.setdefault(hash((each, group)), at_s)
        while len(self._stored_s) > self._limit:
            oldest = next(iter(self._stored_s))
            self._unknown_s = max(self._unknown_s, self._stored_s.pop(oldest))

    def _remove(self, event: Mapping[str, Any]) -> float:
        group = event.get("group_idx")
        if group in self._passing_groups:
            return 0.0
        keys = [hash((each, group)) for each in event["block_hashes"]]
        return max((self._removed(key) for key in keys), default=0.0)

    def _removed(self, key: int) -> float:
        stored_s = self._stored_s.pop(key, None)
        if stored_s is None:
            return self._unknown_s
        return stored_s + LAST_BLOCK_S if stored_s else 0.0
