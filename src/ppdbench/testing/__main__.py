"""``python -m ppdbench.testing``: one FakeEngine in a process of its own.

Prints its URL and serves until its standard input closes, so that it dies with whoever started
it. Example: ``python -m ppdbench.testing --first-token 0.05 --per-token 0.01 --slots 8``.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys

import uvloop

from ppdbench.testing.fake import FakeEngine, Service


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m ppdbench.testing", description=__doc__)
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--model", default="fake")
    parser.add_argument("--first-token", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--per-token", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--slots", type=int, default=None, help="requests served at a time")
    return parser.parse_args()


async def _serve(options: argparse.Namespace) -> None:
    engine = FakeEngine(
        model=options.model,
        service=Service(options.first_token, options.per_token),
        slots=options.slots,
        port=options.port,
        keep_log=False,
    )
    closed = asyncio.Event()
    async with engine:
        print(engine.url, flush=True)  # noqa: T201  (the one line a starter reads)
        asyncio.get_running_loop().add_reader(sys.stdin.fileno(), _until_end_of_input, closed)
        await closed.wait()


def _until_end_of_input(closed: asyncio.Event) -> None:
    if not os.read(sys.stdin.fileno(), 4096):
        closed.set()


if __name__ == "__main__":
    uvloop.run(_serve(_arguments()))
