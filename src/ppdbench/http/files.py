"""Every connection is an open file."""

from __future__ import annotations

import resource


def raise_file_limit() -> None:
    """To the most that the system allows: no connection cap of ours, so no low one of the shell's.

    A router's turn takes two connections; out of files, living nodes would seem dead.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
