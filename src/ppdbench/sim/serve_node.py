"""``python -m ppdbench.sim.serve_node --role D --port 8201``: one simulated node as a process.

Prints nothing; it is ready when ``/health`` answers. It ends on SIGTERM or SIGINT.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
from collections.abc import Sequence
from pathlib import Path

from ppdbench.core.topology import Role
from ppdbench.sim.config import SimConfig
from ppdbench.sim.engine import SimEngine
from ppdbench.sim.prepare import capacity_for, costs_for


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    asyncio.run(serve(options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ppdbench.sim.serve_node")
    parser.add_argument("--role", required=True, choices=[role.value for role in Role])
    parser.add_argument("--port", required=True, type=int)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--served-model-name", help="default: the configuration's model")
    parser.add_argument("--config", type=Path, help="SimConfig as JSON; default: its defaults")
    return parser


async def serve(options: argparse.Namespace) -> None:
    """Serve until a signal comes."""
    config = SimConfig()
    if options.config is not None:
        config = SimConfig.from_dict(json.loads(options.config.read_text()))
    engine = SimEngine(
        Role(options.role),
        config,
        costs_for(config),
        capacity_for(config),
        model=options.served_model_name or config.model,
        host=options.host,
        port=options.port,
    )
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with engine:
        await stop.wait()


if __name__ == "__main__":
    main()
