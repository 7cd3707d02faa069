"""``ppd doctor``."""

from __future__ import annotations

import asyncio
import json
from statistics import median

import pytest
from typer.testing import CliRunner

from ppdbench.cli.app import app
from ppdbench.load.selftest import _bare_ttfts
from ppdbench.testing import FakeEngine, Service


def test_json_is_one_document_with_every_check():
    """Optional things that are absent are null, never a failure."""
    result = CliRunner().invoke(app, ["doctor", "--json"])
    checks = json.loads(result.stdout)["checks"]

    assert checks["conversation"]["ok"] is True
    assert {check["ok"] for check in checks.values()} <= {True, None, False}
    assert result.exit_code == (3 if any(c["ok"] is False for c in checks.values()) else 0)


@pytest.mark.slow
def test_load_measures_the_client_beside_a_bare_socket():
    """The figures are there and possible; how good they are is a benchmark's business."""
    result = CliRunner().invoke(app, ["doctor", "--load", "--seconds", "0.3", "--json"])
    document = json.loads(result.stdout)

    assert document["requests_per_s"] > 100
    assert document["chunks_per_s"] > document["requests_per_s"]
    assert 0 < document["bare_ttft_p50_s"] < 1
    assert document["send_lag_p99_s"] > 0
    assert set(document["targets_met"]) == {
        "requests_per_s", "chunks_per_s", "added_ttft_p50_s", "added_ttft_p99_s",
        "send_lag_p99_s",
    }  # fmt: skip


async def test_a_bare_client_that_cannot_keep_the_pace_does_not_measure_its_own_queue():
    """Ours would look good beside it: each of these waits for all before it."""
    async with FakeEngine(model="instant", service=Service(0.01)) as engine:
        ttfts = await asyncio.to_thread(_bare_ttfts, engine.url, 1_000.0, 0.5)

    assert median(ttfts) < 0.05
