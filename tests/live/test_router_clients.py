"""Other people's clients through the router before a real 1P_1D."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("engine_python")]

SCRIPT = Path(__file__).parents[2] / "scripts" / "router-clients"


def test_every_client_gets_what_one_engine_alone_says_and_keeps_its_home():
    """All turns succeed, all later ones at home, all answers equal and not all the same."""
    done = subprocess.run(
        [SCRIPT, "--json"], capture_output=True, text=True, timeout=800, check=False
    )

    assert done.returncode == 0, done.stderr[-3000:] + done.stdout
    verdicts = json.loads(done.stdout)
    assert {verdict["client"] for verdict in verdicts} == {"openai", "vllm bench serve", "AIPerf"}
    for verdict in verdicts:
        sent = verdict["conversations"] * verdict["turns"]
        assert verdict["succeeded"] == verdict["equal"] == sent
        assert verdict["at_home"] == verdict["later_turns"] == sent - verdict["conversations"]
        assert verdict["distinct"] > sent / 2
        assert verdict["routes"].get("local", 0) == verdict["later_turns"]
