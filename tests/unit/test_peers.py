"""Environments for other people's tools."""

from __future__ import annotations

import pytest

from ppdbench.core.errors import EngineError
from ppdbench.testing.peers import peer_python


@pytest.fixture
def python(tmp_path, monkeypatch):
    """What ``tool==1`` gets as interpreter: a shell script that notes how it was called."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = tmp_path / "ppdbench" / "tool-1" / "bin" / "python"
    path.parent.mkdir(parents=True)
    path.write_text('#!/bin/sh\necho "$@" >"$0.called"\n')
    path.chmod(0o755)
    return path


def test_what_was_begun_is_gone_on_with_and_what_is_there_is_used(python):
    """Installed once; the second call runs nothing."""
    said, called = [], python.with_name("python.called")

    first = peer_python("tool==1", said.append)
    asked = called.read_text()
    called.unlink()
    second = peer_python("tool==1", said.append)

    assert first == second == python
    assert asked == "-m pip install --quiet --disable-pip-version-check tool==1\n"
    assert not called.exists()
    assert len(said) == 1


def test_an_installation_that_fails_says_what_pip_said(python):
    """And is tried again the next time."""
    python.write_text("#!/bin/sh\necho 'no such tool' >&2\nexit 1\n")

    for _ in range(2):
        with pytest.raises(EngineError, match="could not install tool==1; it said: no such tool"):
            peer_python("tool==1", lambda _: None)
