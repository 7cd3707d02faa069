"""``ppd workload show`` and ``ppd workload prepare``."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ppdbench.cli.output import command, say, show, show_json
from ppdbench.cli.progress import counting_progress

if TYPE_CHECKING:
    from ppdbench.workload.account import Account
    from ppdbench.workload.describe import Shape
    from ppdbench.workload.select import Selection

workload = typer.Typer(
    no_args_is_help=True,
    help="What is in a set of conversations, and what was left out.",
    epilog="Example: ppd workload show sharegpt",
)

Source = Annotated[
    str,
    typer.Argument(
        metavar="SRC",
        help="`sharegpt`, `wildchat`, a .json/.jsonl(.gz)/.parquet file, a folder of Parquet "
        "shards, or a hub name OWNER/NAME.",
    ),
]
TokenizerOption = Annotated[
    str, typer.Option("--tokenizer", help="Model folder, tokenizer.json, or `default`.")
]
MinTurns = Annotated[int, typer.Option(min=1, help="Drop conversations with fewer turns.")]
MaxTurns = Annotated[int | None, typer.Option(min=1, help="Cut conversations to so many turns.")]
MaxInput = Annotated[
    int | None, typer.Option("--max-input-tokens", min=1, help="Drop those with a longer request.")
]
MaxOutput = Annotated[
    int | None, typer.Option("--max-output-tokens", min=1, help="Drop those with a longer reply.")
]
MaxContext = Annotated[
    int | None,
    typer.Option(
        "--max-context-tokens", min=1, help="Cut before the turn that holds more, reply included."
    ),
]
Languages = Annotated[
    list[str] | None, typer.Option("--language", help="Keep this language (repeat for more).")
]
Models = Annotated[
    list[str] | None, typer.Option("--model", help="Keep this model's chats (repeat for more).")
]
DropToxic = Annotated[bool, typer.Option("--drop-toxic", help="Leave rows marked toxic out.")]
DropRedacted = Annotated[
    bool, typer.Option("--drop-redacted", help="Leave rows marked redacted out.")
]
Sample = Annotated[int | None, typer.Option(min=1, help="Keep so many, drawn by --seed.")]
Seed = Annotated[int, typer.Option(help="Draws the sample.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]


@workload.command("show")
@command
def show_workload(
    source: Source,
    *,
    tokenizer: TokenizerOption = "default",
    no_tokens: Annotated[
        bool, typer.Option("--no-tokens", help="Do not count tokens: quick, keeps nothing.")
    ] = False,
    min_turns: MinTurns = 1,
    max_turns: MaxTurns = None,
    max_input: MaxInput = None,
    max_output: MaxOutput = None,
    max_context: MaxContext = None,
    languages: Languages = None,
    models: Models = None,
    drop_toxic: DropToxic = False,
    drop_redacted: DropRedacted = False,
    sample: Sample = None,
    seed: Seed = 0,
    plot: Annotated[Path | None, typer.Option(help="Write a figure to this PNG.")] = None,
    as_json: AsJson = False,
    debug: Debug = False,  # noqa: ARG001
) -> None:
    """Say what is in SRC: counts by reason, turns, lengths.

    Example: ppd workload show sharegpt --min-turns 2 --max-context-tokens 8192
    """
    from ppdbench.workload.select import Selection

    if plot is not None:
        _check_figure(plot)
    selection = Selection(
        min_turns, max_turns, max_input, max_output, max_context, tuple(languages or ()),
        tuple(models or ()), drop_toxic, drop_redacted, sample, seed,
    )  # fmt: skip
    document, shape = _described(source, tokenizer, selection, with_tokens=not no_tokens)
    if plot is not None:
        _draw(shape, source, plot, with_tokens=not no_tokens)
        document["plot"] = str(plot)
    show_json(document) if as_json else show(_as_text(document))


@workload.command("prepare")
@command
def prepare_workload(
    source: Source,
    *,
    out: Annotated[Path, typer.Option("--out", "-o", help="The Parquet file to write.")],
    tokenizer: TokenizerOption = "default",
    min_turns: MinTurns = 1,
    max_turns: MaxTurns = None,
    max_input: MaxInput = None,
    max_output: MaxOutput = None,
    max_context: MaxContext = None,
    languages: Languages = None,
    models: Models = None,
    drop_toxic: DropToxic = False,
    drop_redacted: DropRedacted = False,
    sample: Sample = None,
    seed: Seed = 0,
    as_json: AsJson = False,
    debug: Debug = False,  # noqa: ARG001
) -> None:
    """Clean and count SRC once and write it, so that sweeps start at once.

    Two machines with this file use the same bytes; its digest goes into manifests.

    Example: ppd workload prepare wildchat --language English --sample 5000 -o wildchat.parquet
    """
    from ppdbench.workload.dataset import prepare_into
    from ppdbench.workload.describe import account_document
    from ppdbench.workload.select import Selection

    selection = Selection(
        min_turns, max_turns, max_input, max_output, max_context, tuple(languages or ()),
        tuple(models or ()), drop_toxic, drop_redacted, sample, seed,
    )  # fmt: skip
    report = partial(counting_progress(), source)
    prepared = prepare_into(out, source, tokenizer, selection, report)
    account = prepared.info.account
    _warn_of_cut(source, account)
    document = {
        "file": str(out),
        "digest": prepared.info.digest,
        "source": source,
        "tokenizer": _tokenizer_document(prepared.info.origin),
        **account_document(account),
    }
    show_json(document) if as_json else show(_as_text(document))


def _described(
    source: str, tokenizer: str, selection: Selection, *, with_tokens: bool
) -> tuple[dict[str, Any], Shape]:
    from ppdbench.workload.describe import account_document

    opened = _open_counted if with_tokens else _open_uncounted
    account, shape, facts = opened(source, tokenizer, selection)
    _warn_of_cut(source, account)
    document = {
        "source": source,
        **account_document(account),
        **shape.to_json(with_tokens=with_tokens),
        **facts,
    }
    return document, shape


def _open_counted(
    source: str, tokenizer: str, selection: Selection
) -> tuple[Account, Shape, dict[str, Any]]:
    from copy import deepcopy

    from ppdbench.workload.dataset import prepare
    from ppdbench.workload.describe import shape_of
    from ppdbench.workload.prepared import read_prepared
    from ppdbench.workload.select import select

    prepared = prepare(source, tokenizer, selection, partial(counting_progress(), source))
    account = deepcopy(prepared.info.account)
    shape = shape_of(select(read_prepared(prepared.path, content=False), selection, account))
    facts = {
        "tokenizer": _tokenizer_document(prepared.info.origin),
        "digest": prepared.info.digest,
        "prepared": str(prepared.path),
    }
    return account, shape, facts


def _open_uncounted(
    source: str, tokenizer: str, selection: Selection
) -> tuple[Account, Shape, dict[str, Any]]:
    from ppdbench.core.errors import UsageError
    from ppdbench.workload.account import Account
    from ppdbench.workload.dataset import read_chats
    from ppdbench.workload.describe import shape_of
    from ppdbench.workload.select import select
    from ppdbench.workload.source import find_source

    if selection.needs_tokens or tokenizer != "default":
        raise UsageError(
            "--no-tokens counts nothing, so --tokenizer and limits in tokens cannot be honoured; "
            "leave out one or the other"
        )
    account = Account()
    shape = shape_of(select(read_chats(find_source(source), account), selection, account))
    return account, shape, {"tokenizer": None, "digest": None, "prepared": None}


def _tokenizer_document(origin: Any) -> dict[str, str]:  # noqa: ANN401
    return {"name": origin.tokenizer, "digest": origin.tokenizer_digest}


def _warn_of_cut(source: str, account: Account) -> None:
    if account.truncated_at_byte is not None:
        say(
            f"ppd: {source} is cut off at byte {account.truncated_at_byte}; the "
            f"{account.conversations.read} whole conversations before that are used"
        )


def _check_figure(path: Path) -> None:
    """Before anything is read and counted."""
    from ppdbench.core.errors import UsageError

    if path.suffix != ".png" or path.is_dir():
        raise UsageError(f"--plot {str(path)!r}: expected the name of a .png file")


def _draw(shape: Shape, source: str, path: Path, *, with_tokens: bool) -> None:
    from ppdbench.core.errors import NothingUsableError, UsageError
    from ppdbench.plots import style
    from ppdbench.plots.workload_figure import workload_figure

    if not shape.turns:
        raise NothingUsableError(f"{source}: no conversation is left to draw; loosen the selection")
    columns = {"turns per conversation": shape.turns}
    if with_tokens:
        columns |= {
            "new tokens per turn": shape.new_tokens,
            "output tokens per turn": shape.output_tokens,
            "context tokens before the turn": shape.context_tokens,
        }
    figure = workload_figure(columns, f"{source}: {len(shape.turns)} conversations")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        style.save(figure, path)
    except OSError as error:
        raise UsageError(
            f"--plot {str(path)!r} cannot be written ({error}); name a file in a folder that "
            "you may write to"
        ) from error


def _as_text(document: dict[str, Any]) -> str:
    lines = [f"{document['source']}: {document['input']} conversations read"]
    lines.append(f"  kept {document['kept']}")
    lines += [f"  dropped {count} {reason}" for reason, count in document["dropped"].items()]
    lines += [_books_line(name, document[name]) for name in ("messages", "turns")]
    names = ("turns_per_conversation", "new_tokens", "output_tokens", "context_tokens")
    lines += [_statistics_line(name, document[name]) for name in names if document.get(name)]
    if document.get("tokenizer"):
        lines.append(f"tokens by {document['tokenizer']['name']}")
    facts = ("file", "prepared", "digest", "plot")
    lines += [f"{key}: {document[key]}" for key in facts if document.get(key)]
    return "\n".join(lines)


def _books_line(name: str, books: dict[str, Any]) -> str:
    parts = [f"{books['read']} read", f"{books['kept']} kept"]
    parts += [f"{count} {reason}" for reason, count in books["dropped"].items()]
    return f"{name}: {', '.join(parts)}"


def _statistics_line(name: str, found: dict[str, float]) -> str:
    shown = ", ".join(f"{key} {found[key]:.4g}" for key in ("mean", "p50", "p90", "p99", "max"))
    return f"{name.replace('_', ' ')}: {shown}"
