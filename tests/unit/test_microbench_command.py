"""``ppd microbench`` refuses contradictions before it measures, and keeps what it measured."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from ppdbench.cli.app import app

ONE_CELL = ("--batch", "1", "--context", "256", "--new", "16", "--repeats", "1")


def invoke(*arguments):
    return CliRunner().invoke(app, ["microbench", *map(str, arguments)])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--protocol", "handoff", "--batch", "4"), "--batch belongs to --protocol interference"),
        (("--tokens", "128"), "--tokens belongs to --protocol handoff"),
        (("--protocol", "paper", "--new", "16"), "--new belongs to --protocol interference"),
        (("--protocol", "paper", "--batch", "0"), "needs a batch of decodes"),
        (("--protocol", "handoff", "--calibrate", "x"), "--calibrate belongs to"),
        (("--protocol", "handoff", "--load", "-1"), "counts from 0"),
        (("--device", "cuda"), "--device belongs to --backend vllm"),
        (("--backend", "vllm", "--gpu", "h100_sxm"), "--gpu belongs to --backend sim"),
        (("--node", "R=http://127.0.0.1:1"), "--node belongs to --backend attach"),
        (("--from", "x"), "--from needs --calibrate"),
        (("--calibrate", "x", "--from", "y", "-o", "z"), "-o says how to measure"),
        (("--calibrate", "missing/costs.json"), "there is no folder missing"),
        (("--calibrate", "."), "is a folder"),
        (("--batch", ""), "--batch ''"),
        ((*ONE_CELL, "--dose-rate", "nan"), "a dose rate is a number above 0"),
    ],
)
def test_what_cannot_be_meant_is_a_sentence_and_exit_code_2(arguments, words):
    """An option that would be ignored, or a target that cannot be written, costs no run."""
    result = invoke(*arguments)

    assert result.exit_code == 2, result.output
    assert words in " ".join(result.stderr.split())
    assert result.stdout == ""


def test_a_refused_fit_keeps_the_measurement(tmp_path):
    """With ``-o`` the result is written before the fit; the refusal is still the exit code."""
    run, costs = tmp_path / "run", tmp_path / "costs.json"
    result = invoke(*ONE_CELL, "-o", run, "--calibrate", costs)

    assert result.exit_code == 1
    assert "at least 9 measured cells" in result.stderr
    assert len(json.loads((run / "microbench.json").read_text())["rows"]) == 2
    assert not costs.exists()


def test_json_is_one_document_alone():
    """Progress goes to stderr."""
    result = invoke(*ONE_CELL, "--json")

    assert result.exit_code == 0
    assert {row["kind"] for row in json.loads(result.stdout)["rows"]} == {"full", "append"}
