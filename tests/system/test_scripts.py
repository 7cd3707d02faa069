"""Scripts in Python find their environment by themselves, whatever Python starts them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


def first_line(path):
    return path.read_bytes().partition(b"\n")[0]


PYTHON = [p for p in sorted(SCRIPTS.iterdir()) if p.is_file() and b"python" in first_line(p)]


@pytest.mark.parametrize("script", PYTHON, ids=lambda path: path.name)
def test_a_script_starts_under_a_python_without_our_packages(script):
    """A fresh Debian knows python3 alone, and it has none of the libraries."""
    outside = getattr(sys, "_base_executable", sys.executable)

    asked = subprocess.run(
        [outside, str(script), "--help"], capture_output=True, text=True, check=False, timeout=60
    )

    assert first_line(script) == b"#!/usr/bin/env python3"
    assert asked.returncode == 0, asked.stderr
    assert "usage" in asked.stdout
