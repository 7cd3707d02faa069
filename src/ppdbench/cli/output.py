"""Where text goes: progress and errors to stderr, results to stdout, JSON alone on stdout."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

_MACHINE_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ENFILE})
"""Another path would not help: the disk is full or broken, or too many files are open."""

P = ParamSpec("P")
T = TypeVar("T")


def say(text: str) -> None:
    """A line of progress or advice, on stderr."""
    print(text, file=sys.stderr, flush=True)


def show(text: str) -> None:
    """A line of result, on stdout."""
    print(text, flush=True)


def show_json(document: Mapping[str, Any]) -> None:
    """Exactly one JSON document on stdout; NaN is refused because JSON has none."""
    print(json.dumps(document, sort_keys=True, allow_nan=False, indent=2), flush=True)


def command(run: Callable[P, T]) -> Callable[P, T]:
    """Wrap a command: our errors become one sentence and an exit code, Ctrl-C or SIGTERM 130.

    So do the system's refusals about a path: full disk, read-only folder, a file for a folder.

    ``--debug`` (or ``PPD_DEBUG=1``) lets the traceback through.
    """

    @wraps(run)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        debug = bool(kwargs.get("debug")) or _debug_from_environment()
        with _errors_as_sentences(debug=debug), _sigterm_as_ctrl_c():
            return run(*args, **kwargs)

    return wrapped


@contextmanager
def _sigterm_as_ctrl_c() -> Iterator[None]:
    """A scheduler's polite end goes the way of a user's. Where it is handled already, it stays."""
    mine = threading.current_thread() is threading.main_thread()
    if not mine or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def if_interrupted(left: str) -> Iterator[None]:
    """An interrupt inside says what it ``left`` and how to go on; elsewhere, only that it was."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(left) from None


def _debug_from_environment() -> bool:
    return os.environ.get("PPD_DEBUG", "") not in ("", "0")


@contextmanager
def _errors_as_sentences(*, debug: bool) -> Iterator[None]:
    from ppdbench.core.errors import PpdError

    try:
        yield
    except PpdError as error:
        if debug:
            traceback.print_exc()
        say(f"ppd: {error}")
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt as interrupt:
        say("; ".join(["ppd: interrupted", *map(str, interrupt.args)]))
        raise SystemExit(130) from None
    except BrokenPipeError:
        sys.stderr.close()
        raise SystemExit(0) from None
    except OSError as error:
        if debug or error.filename is None:
            raise
        machine = error.errno in _MACHINE_ERRORS
        advice = "make room or raise the limit" if machine else "name another path or allow it"
        say(f"ppd: {os.fsdecode(error.filename)} cannot be used: {error.strerror}; {advice}")
        raise SystemExit(3 if machine else 2) from None
