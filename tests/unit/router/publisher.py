"""A publisher of KV events that speaks as vLLM's does."""

from __future__ import annotations

import asyncio

import msgspec
import zmq
import zmq.asyncio


class Batch(msgspec.Struct, array_like=True):
    """vLLM's EventBatch."""

    ts: float
    events: list
    data_parallel_rank: int | None = 0


def stored(*hashes, group=0, block_size=16, kind="full_attention", medium="GPU"):
    return {
        "type": "BlockStored", "block_hashes": list(hashes), "parent_block_hash": None,
        "token_ids": list(range(block_size)), "block_size": block_size, "lora_id": None,
        "medium": medium, "lora_name": None, "extra_keys": None, "group_idx": group,
        "kv_cache_spec_kind": kind,
    }  # fmt: skip


def removed(*hashes, group=0, medium="GPU"):
    return {
        "type": "BlockRemoved", "block_hashes": list(hashes), "medium": medium, "group_idx": group,
    }  # fmt: skip


CLEARED = {"type": "AllBlocksCleared"}


def encoded(*events):
    return msgspec.msgpack.encode(Batch(1.5, list(events)))


class Publisher:
    """A bound socket that numbers its batches; ``number`` is the next one's."""

    def __init__(self):
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.XPUB)
        self._socket.bind("tcp://127.0.0.1:0")
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.number = 0

    async def subscribed(self):
        async with asyncio.timeout(10):
            while await self._socket.recv() != b"\x01":
                pass

    async def send(self, *events):
        await self.send_raw(b"", self.number.to_bytes(8, "big"), encoded(*events))
        self.number += 1

    async def send_raw(self, *frames):
        await self._socket.send_multipart(frames)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self._context.destroy(linger=0)
