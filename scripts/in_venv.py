"""Import it first: the script goes on in the checkout's .venv, made where there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHON = ROOT / ".venv" / "bin" / "python"

if Path(sys.prefix).resolve() != (ROOT / ".venv").resolve():
    made = subprocess.run([ROOT / "scripts" / "setup"], check=False)
    if made.returncode != 0:
        sys.exit(made.returncode)  # it has said why
    os.execv(PYTHON, [str(PYTHON), *sys.argv])  # noqa: S606
