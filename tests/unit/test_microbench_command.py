"""``ppd microbench`` refuses contradictions before it measures, and keeps what it measured."""

from __future__ import annotations

import json
import re

import pytest
from typer.testing import CliRunner

from ppdbench.cli.app import app
from ppdbench.cli.microbench_tables import shortfalls, show_document
from ppdbench.experiments.microbench import interference

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
        (("--protocol", "paper", "--batch", "0,20"), "needs a batch of decodes"),
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


def test_no_digit_of_an_interval_is_cut():
    """A table is as wide as it needs where no terminal sets a width."""
    result = invoke(*ONE_CELL[:-1], "2")

    assert result.exit_code == 0
    assert "…" in result.stdout
    assert "repeats" in result.stdout
    assert not re.search(r"\.…|[0-9]…", result.stdout)


ROW = {
    "kind": "full", "batch": 4, "context_tokens": 0, "new_tokens": 544, "repeats": 3,
    "slowdown_mean": 0.1, "slowdown_ci": None, "tpot_dosed_s": 0.01, "itl_p99_s": 0.02,
    "max_gap_s": 0.03, "injected_ttft_s": 0.04,
}  # fmt: skip
HOP = {
    "way": "remote", "running_mean": 0.0, "prompt_tokens": 512, "context_tokens": 0,
    "ttft_s": 0.02, "ttft_ci": None, "repeats": 3,
}  # fmt: skip
CUT_SHORT = {
    "protocol": "interference", "simulated": False, "model": "m", "gpu": None, "finding": "Found.",
    "plan": {"repeats": 10}, "rows": [ROW, ROW | {"repeats": 10}], "cells_without_rows": 2,
    "unmeasured_doses": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    "document",
    [CUT_SHORT, CUT_SHORT | {"protocol": "handoff", "rows": [HOP, HOP | {"repeats": 10}]}],
)
def test_a_row_with_fewer_repeats_than_asked_says_so_on_the_screen(document, capsys):
    """In its own line, in a sentence below, and for cells that have no row at all."""
    show_document(document)
    shown = capsys.readouterr().out

    assert "3 of 10" in shown
    assert "1 of 2 rows have fewer than the 10 repeats asked for: 3 to 3" in shown
    assert "Cells without a row, because no repeat of them was measured: 2." in shown
    assert "Doses" not in shown


def test_a_hand_off_cut_short_or_cached_otherwise_says_so():
    """Whole ways may be missing, and a context may have been evicted."""
    evicted = HOP | {"context_tokens": 256, "cached_tokens_min": 0, "cached_tokens_max": 256}
    exact = evicted | {"cached_tokens_min": 256}
    document = CUT_SHORT | {"protocol": "handoff", "rows": [evicted, exact], "left_out_points": 5}
    said = " ".join(shortfalls(document))

    assert "1 rows rest on prompts of which other than the stated context was cached" in said
    assert "left out when the time limit was reached: 5." in said


def test_a_whole_run_has_no_shortfall():
    """Nothing is said where nothing is missing."""
    whole = CUT_SHORT | {"rows": [ROW | {"repeats": 10}], "cells_without_rows": 0}

    assert list(shortfalls(whole)) == []


def test_a_run_that_measured_nothing_is_exit_code_1(monkeypatch):
    """The work was done and nothing usable came out."""
    monkeypatch.setattr(interference, "proven", lambda *_: None)
    result = invoke(*ONE_CELL)

    assert result.exit_code == 1
    assert "no repeat of them was measured: 2." in result.stdout
    assert "not cached as they claim: 2." in result.stdout
    assert "nothing was measured whole" in result.stderr


@pytest.mark.parametrize("content", ["[]", "{}", '{"schema_version": 1}', "{"])
def test_a_source_that_is_no_result_is_refused(content, tmp_path):
    """Whatever stands in the file, and when a file is named in place of the folder."""
    source = tmp_path / "microbench.json"
    source.write_text(content)
    for folder in (tmp_path, source):
        result = invoke("--calibrate", tmp_path / "costs.json", "--from", folder)
        assert result.exit_code == 2, result.output
        assert "ppd microbench" in result.stderr


def test_a_dose_that_decodes_for_long_is_measured():
    """Victims last as long as what is injected beside them, not only as long as their window."""
    result = invoke(*ONE_CELL, "--dose-output", "1000", "--json")

    assert result.exit_code == 0, result.stderr
    assert len(json.loads(result.stdout)["rows"]) == 2
