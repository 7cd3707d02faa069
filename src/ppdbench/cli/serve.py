"""``ppd serve``: the router."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ppdbench.cli.output import command, say

if TYPE_CHECKING:
    from collections.abc import Callable

    from ppdbench.router.config import RouterConfig

EPILOG = "Example: ppd serve --table T.json --node P=http://127.0.0.1:8101 --node D=http://127.0.0.1:8201"


@command
def serve(
    *,
    table: Path | None = typer.Option(None, help="The decision table for later turns."),
    policy: str | None = typer.Option(
        None, help="Instead of a table: roles, remote, local, pull, share:F, threshold:N."
    ),
    cluster: Path | None = typer.Option(None, help="cluster.toml with the nodes."),
    node: list[str] = typer.Option([], help="A node as ROLE=URL; may be given several times."),
    host: str = typer.Option("127.0.0.1", help="Address to listen on."),
    port: int = typer.Option(8000, min=0, max=65535, help="Port to listen on; 0 takes a free one."),
    workers: int = typer.Option(1, help="Processes that share the port."),
    shadow: str | None = typer.Option(
        None, help="Route by this fixed policy and only log what the table would have done."
    ),
    tokenizer: str | None = typer.Option(
        None,
        metavar="FILE_OR_FOLDER",
        help="Count new tokens of texts by this tokenizer.json, or the model folder's; "
        "without it they are estimated from characters.",
    ),
    allow_mismatch: bool = typer.Option(
        False, help="Serve although the table was measured on another model or engine."
    ),
    allow_override: bool = typer.Option(
        False, help="Let a client choose the route with x-ppd-force-route."
    ),
    client_keys: str | None = typer.Option(
        None, metavar="VARIABLE", help="Environment variable with the keys of clients, by comma."
    ),
    max_in_flight: int = typer.Option(4096, help="More requests at once get 429."),
    max_body_mb: int = typer.Option(32, min=1, help="Longer request bodies get 413."),
    max_notes: int = typer.Option(131072, help="Places in histories that are remembered."),
    state_file: Path | None = typer.Option(None, help="Remember conversations over a restart."),
    decisions_log: Path | None = typer.Option(None, help="Write each decision as a JSON line."),
    prefill_timeout_s: float = typer.Option(600.0, help="Seconds that a P may take to answer."),
    first_byte_timeout_s: float = typer.Option(
        600.0, help="Seconds to the first byte of D or R; a long prompt's prefill lies in it."
    ),
    silence_timeout_s: float = typer.Option(600.0, help="Longest gap inside a stream."),
    drain_s: float = typer.Option(30.0, min=0, help="Seconds that SIGTERM waits for open turns."),
    debug: bool = typer.Option(False, help="Show tracebacks."),  # noqa: ARG001
) -> None:
    """Serve the OpenAI API in front of P, D, pD and R nodes, turn by turn by the table."""
    from ppdbench.cluster.contract import named_cluster
    from ppdbench.router.config import RouterConfig, Timeouts
    from ppdbench.router.run import run

    routed, asked = _policies(table, policy, shadow)
    if table is not None:
        _say_if_simulated(table)
    config = RouterConfig(
        cluster=named_cluster(cluster, node),
        policy=routed,
        shadow=asked,
        host=host,
        port=port,
        workers=workers,
        max_in_flight=max_in_flight,
        max_body_bytes=max_body_mb * 1024 * 1024,
        max_notes=max_notes,
        allow_mismatch=allow_mismatch,
        allow_override=allow_override,
        client_keys=_keys(client_keys),
        decisions_log=decisions_log,
        state_file=state_file,
        count_tokens=_counter(tokenizer),
        timeouts=Timeouts(prefill_timeout_s, first_byte_timeout_s, silence_timeout_s),
        drain_s=drain_s,
    )
    run(config, lambda url: _tell(config, url))


def _policies(table: Path | None, policy: str | None, shadow: str | None) -> tuple[str, str | None]:
    """What routes, and what is only asked."""
    from ppdbench.core.errors import UsageError

    if (table is None) == (policy is None):
        raise UsageError("say how later turns are routed: either --table T.json or --policy NAME")
    named = policy if table is None else f"table:{table}"
    assert named is not None
    return (named, None) if shadow is None else (shadow, named)


def _say_if_simulated(table: Path) -> None:
    from ppdbench.table.schema import SIMULATED_NOTICE, load_table

    if load_table(table).simulated:
        say(f"ppd: {table} is {SIMULATED_NOTICE}")


def _counter(tokenizer: str | None) -> Callable[[str], int] | None:
    """Counts a text as the served model does."""
    from ppdbench.workload.tokens import load_tokenizer

    if tokenizer is None:
        return None
    encode = load_tokenizer(tokenizer).encode
    return lambda text: len(encode(text))


def _keys(variable: str | None) -> tuple[str, ...]:
    import os

    from ppdbench.core.errors import UsageError

    if variable is None:
        return ()
    keys = tuple(key.strip() for key in os.environ.get(variable, "").split(",") if key.strip())
    if not keys:
        raise UsageError(f"--client-keys {variable}: the variable is empty; export {variable}=KEY")
    return keys


def _tell(config: RouterConfig, url: str) -> None:
    say(f"ppd: serving {config.cluster.topology} by {config.policy} on {url}")
