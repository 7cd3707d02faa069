"""The calibrated cost model: what was put in comes out, and a bad fit is not written."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from ppdbench.core.conversation import Arrival, Conversation, Turn
from ppdbench.core.errors import NothingUsableError, UsageError
from ppdbench.core.topology import Topology
from ppdbench.experiments.choosing import sim_config
from ppdbench.experiments.microbench.calibrate import (
    calibrate,
    calibrate_from,
    chunks_of,
    hold_out,
    observe,
    refuse_bad_fit,
)
from ppdbench.experiments.microbench.interference import simulate
from ppdbench.experiments.microbench.plan import Dose, InterferencePlan, Kind
from ppdbench.experiments.microbench.simulated import SimulatedEngine
from ppdbench.load.simulated import run_simulated_point
from ppdbench.policy.parse import parse_policy
from ppdbench.sim.calibrated import Calibration, StepCosts, read_calibration, write_calibration

TRUE = StepCosts(2e-3, 3e-4, 6e-5, 2e-9, 4e-9, 1e-8, 4e-3)
ENGINE = Calibration("tiny", "vllm", "0.32", 128, 500_000, 2048, 8192, 2048, TRUE, fit={})
PLAN = InterferencePlan((1, 4, 16), (512, 2048), (32, 128, 512), repeats=2)


@pytest.fixture(scope="module")
def document(tmp_path_factory):
    """An interference run on an engine whose costs are known."""
    path = tmp_path_factory.mktemp("true") / "true.json"
    write_calibration(path, ENGINE)
    engine = SimulatedEngine(ENGINE.config(path), seed=0, cascade=False)
    known = {"model": "tiny", "engine": "vllm", "engine_version": "0.32",
             "protocol": "interference"}  # fmt: skip
    return simulate(PLAN, engine, explicit=True).document() | {"plan": asdict(PLAN)} | known


def test_the_costs_that_were_put_in_come_out(document, tmp_path):
    """Held-out cells are met within 2 %, the token budget is found, the large terms are right."""
    made = calibrate(document, seed=0, into=tmp_path / "costs.json")

    assert made.fit["held_out"]["all"]["median"] < 0.02
    assert made.max_batched_tokens == 2048
    assert made.steps.token_s == pytest.approx(TRUE.token_s, rel=0.1)
    assert made.steps.sequence_s == pytest.approx(TRUE.sequence_s, rel=0.2)
    assert made.fit["held_out_cells"] == 12
    assert list(tmp_path.iterdir()) == []


def test_a_run_with_fitted_costs_can_be_stored(tmp_path):
    """Its manifest holds the whole configuration, and JSON has no infinity for "no bound"."""
    config = ENGINE.config(tmp_path / "costs.json")

    json.dumps(config.as_dict(), allow_nan=False)
    assert config.overheads.host_s(1000) == pytest.approx(2e-3 + 1000 * (3e-4 - 6e-5))


def test_a_third_of_the_cells_is_never_fitted(document):
    """The two parts are disjoint and whole, and the seed draws them."""
    cells = observe(document)
    fitted, tested = hold_out(cells, 0)

    assert len(tested) == len(cells) // 3
    assert {o.cell for o in fitted} | {o.cell for o in tested} == {o.cell for o in cells}
    assert not {o.cell for o in fitted} & {o.cell for o in tested}
    assert hold_out(cells, 1)[1] != tested


def test_a_fit_beyond_the_bound_is_refused(document, tmp_path):
    """The message has the error, the bound and what to do."""
    made = calibrate(document, seed=0, into=tmp_path / "costs.json")
    names = ("all", "tpot_quiet_s", "tpot_dosed_s", "injected_ttft_s")
    held_out = {name: {"median": 0.2, "p90": 0.4} for name in names}
    bad = replace(made, fit=made.fit | {"held_out": held_out})

    refuse_bad_fit(made, 0.10)
    with pytest.raises(NothingUsableError, match=r"20\.0%.*nothing was written"):
        refuse_bad_fit(bad, 0.10)


def test_a_calibration_file_is_read_as_written_or_refused(tmp_path):
    """Write and read are inverse; damage, another version and absence are sentences."""
    path = tmp_path / "costs.json"
    write_calibration(path, ENGINE)
    assert read_calibration(path) == ENGINE

    path.write_text(path.read_text().replace('"schema_version": 1', '"schema_version": 9'))
    with pytest.raises(UsageError, match="schema version 9"):
        read_calibration(path)
    path.write_text("{")
    with pytest.raises(UsageError, match="no calibration"):
        read_calibration(path)
    with pytest.raises(UsageError, match="no such file"):
        read_calibration(tmp_path / "missing.json")


def test_a_sweep_takes_everything_a_calibration_knows(tmp_path):
    """``--costs FILE`` brings overheads, block size and limits; what was asked for stays."""
    path = tmp_path / "costs.json"
    write_calibration(path, ENGINE)
    config = sim_config({}, {"costs": str(path), "model": "other"})

    assert config.overheads == ENGINE.overheads()
    assert (config.block_tokens, config.max_context_tokens) == (128, 8192)
    assert config.model == "other"


def test_too_few_cells_make_no_fit(document, tmp_path):
    """Nine cells are the least; a hand-off alone is none."""
    few = document | {"samples": document["samples"][:4]}

    with pytest.raises(NothingUsableError, match="at least 9"):
        calibrate(few, seed=0, into=tmp_path / "costs.json")
    with pytest.raises(UsageError, match="interference result"):
        calibrate_from([{"protocol": "handoff"}], seed=0, into=tmp_path / "costs.json")


def test_a_measured_hop_becomes_the_simulators_connector(document, tmp_path):
    """The idle fit of a hand-off result goes into the file, never below 0."""
    hop = {"fixed_s": 0.03, "per_token_s": -1e-9, "bytes_per_token": 2048.0}
    made = calibrate_from(
        [document, {**document, "protocol": "handoff", "fits": {"0": hop}}],
        seed=0,
        into=tmp_path / "c.json",
    )

    assert made.hop == {"fixed_s": 0.03, "per_token_s": 0.0}
    assert made.kv_bytes_per_token == 2048


@pytest.mark.parametrize("prompt_tokens", [128, 2048])
def test_a_lone_turn_pays_the_measured_hop_once(prompt_tokens, tmp_path):
    """TTFT through P→D less TTFT on one node is what was measured so: D's last step is in it."""
    path = tmp_path / "costs.json"
    write_calibration(path, replace(ENGINE, hop={"fixed_s": 0.03, "per_token_s": 1e-5}))
    config = sim_config({}, {"costs": str(path)})
    alone = [Arrival(0.0, Conversation("c", (Turn(prompt_tokens, 8),)))]
    through, at_home = (
        run_simulated_point(
            Topology.parse(name), parse_policy("roles"), alone, 1.0, config, 0
        ).records[0].ttft_s
        for name in ("1P_1D", "1R")
    )  # fmt: skip

    reading_s = ENGINE.steps.chunk_s(1, prompt_tokens - 1) - ENGINE.steps.chunk_s(1, 0)
    assert through - at_home == pytest.approx(0.03 + 1e-5 * prompt_tokens + reading_s, abs=5e-5)


def test_a_prompt_is_computed_in_chunks_of_the_budget():
    """Each chunk stands after what was computed before it."""
    assert chunks_of(Dose(Kind.APPEND, 100, 5000), 2048) == [
        (2048, 100), (2048, 2148), (904, 4196),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("other", "words"),
    [({}, "one interference result"), ({"protocol": "paper"}, "one interference result"),
     ({"protocol": "handoff", "model": "other"}, "differ in model: other and tiny"),
     ({"protocol": "handoff", "engine_version": "0.9"}, "differ in engine_version")],
)  # fmt: skip
def test_results_that_do_not_belong_together_are_refused(other, words, document, tmp_path):
    """None of them is dropped in silence, and no hop of another engine enters the costs."""
    with pytest.raises(UsageError, match=words):
        calibrate_from([document, document | other], seed=0, into=tmp_path / "costs.json")


def test_what_attached_nodes_do_not_tell_is_no_difference(document, tmp_path):
    """Their GPU is unknown; the hand-off of launched ones knows it."""
    hand_off = document | {"protocol": "handoff", "gpu": "cpu", "fits": {}}

    found = calibrate_from([document | {"gpu": None}, hand_off], seed=0, into=tmp_path / "c.json")

    assert found.document()["hop"] is None


@pytest.mark.parametrize(
    ("broken", "what"),
    [
        ({"hop": {"fixed_s": 0.01}}, "hop is .*; expected numbers from 0 on for fixed_s and per"),
        ({"hop": 5}, "hop is 5; expected numbers"),
        ({"kv_tokens": None}, "kv_tokens is None; expected a whole number from 1 on"),
        ({"kv_bytes_per_token": -4}, "kv_bytes_per_token is -4; expected a whole number"),
        ({"steps": asdict(TRUE) | {"step_s": "x"}}, "step_s is 'x'; expected a number from 0 on"),
    ],
)
def test_a_file_of_impossible_costs_is_refused(broken, what, tmp_path):
    """Edited by hand, or half of it lost: the file, the value, and what it takes."""
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(ENGINE.document() | broken))

    with pytest.raises(UsageError, match=f"costs.json is damaged .*{what}.*fit it again"):
        read_calibration(path)
