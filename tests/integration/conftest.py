"""The authors' sweep, where a checkout has it."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEFAULT = ROOT.parent / "shared" / "data" / "vllm-ppd-sweep-2026-01.tar.xz"


@pytest.fixture(scope="session")
def reference_sweep(tmp_path_factory):
    """Folder of the unpacked sweep; ``PPD_REFERENCE_SWEEP`` names the archive."""
    archive = Path(os.environ.get("PPD_REFERENCE_SWEEP", DEFAULT))
    if not archive.exists():
        pytest.skip(f"the reference sweep is not here ({archive}); set PPD_REFERENCE_SWEEP")
    folder = tmp_path_factory.mktemp("sweep")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return folder
