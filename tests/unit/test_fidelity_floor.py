"""The floor under a prediction of one unseeded run, on made-up runs whose answers are known."""

from __future__ import annotations

import pytest

from ppdbench.experiments.fidelity_floor import (
    agreement_under_turn1_noise,
    error_floor,
    self_agreement,
    turn1_differences,
)
from ppdbench.experiments.fidelity_report import Pair

KEY = "turn2plus", "tpot_s"
KEYS = [
    (turn, metric)
    for turn in ("turn1", "turn2plus")
    for metric in ("ttft_s", "tpot_s", "ttft_mean_s", "tpot_mean_s")
]


def pair(*runs_s: float, turn1_s=1.0, expected_turn1_s=None, rate_per_s=4.0) -> Pair:
    """Seeds that saw ``runs_s`` everywhere; the real Turn 1 took ``turn1_s``, the rest 1 s.

    With ``expected_turn1_s`` the seeds saw that in Turn 1.
    """
    turns = {
        name: {"n": 40, "ttft_s": both(real_s), "tpot_s": both(real_s)}
        for name, real_s in (("turn1", turn1_s), ("turn2plus", 1.0))
    }
    runs = [dict.fromkeys(KEYS, run_s) for run_s in runs_s]
    if expected_turn1_s is not None:
        runs = [run | {k: expected_turn1_s for k in KEYS if k[0] == "turn1"} for run in runs]
    return Pair(turns | {"rate_per_s": rate_per_s}, runs)


def both(value_s: float) -> dict[str, float]:
    return {"p50": value_s, "mean": value_s}


def test_the_floor_is_the_error_against_one_more_run_of_oneself():
    """1, 1 and 2: the others predict 1.5, 1.5 and 1, which is off by 50 %, 50 % and 50 %."""
    found = error_floor([pair(1.0, 1.0, 2.0)], KEY)

    assert found == {"median": pytest.approx(0.5), "p90": pytest.approx(0.5)}
    assert error_floor([pair(1.0, 1.0)], KEY) == {"median": 0, "p90": 0}


def test_one_seed_has_no_floor():
    """There is no other run to predict it by."""
    assert error_floor([pair(1.0)], KEY) is None
    assert self_agreement([(pair(1.0), pair(2.0))], KEY)["share"] is None


def test_seeds_that_contradict_one_another_agree_on_no_winner():
    """Two seeds, two winners: each predicts the other wrongly. Ties within 5 % do not count."""
    steady = pair(1.0, 1.0)

    assert self_agreement([(steady, pair(2.0, 2.0))], KEY) == {"same": 2, "of": 2, "share": 1.0}
    assert self_agreement([(steady, pair(2.0, 0.5))], KEY) == {"same": 0, "of": 2, "share": 0.0}
    assert self_agreement([(steady, pair(1.04, 0.96))], KEY)["of"] == 0


def test_one_more_run_shares_no_arrivals_between_its_sides():
    """By equal seeds local is 10 % slower each time; by unlike ones the winner is anybody's."""
    remote, local = pair(1.0, 2.0), pair(1.1, 2.2)

    assert self_agreement([(remote, local)], KEY) == {"same": 0, "of": 2, "share": 0.0}


def test_noise_of_turn_1_turns_small_differences_round():
    """A true +2 % under noise of ±10 % is seen as −8 % half of the time; a true +50 % never."""
    same = pair(1.0)

    def noisy(true, turn1_s):
        return same, pair(true, turn1_s=turn1_s, expected_turn1_s=1.0)

    assert agreement_under_turn1_noise([noisy(1.02, 1.1), noisy(1.02, 1 / 1.1)], KEY) == 0.5
    assert agreement_under_turn1_noise([noisy(1.5, 1.1), noisy(1.5, 1 / 1.1)], KEY) == 1.0


def test_a_difference_of_turn_1_that_the_model_expects_is_no_noise():
    """P has more time for Turn 1 where later turns stay on D: really and expected 30 % faster."""
    twins = [
        (pair(1.0), pair(1.02, turn1_s=0.7, expected_turn1_s=0.7)),
        (pair(1.0), pair(1.1, turn1_s=0.7, expected_turn1_s=0.7)),
    ]

    assert agreement_under_turn1_noise(twins, KEY) == 1.0
    assert turn1_differences(twins, "tpot_s") == {
        "pairs": 2, "real": 2, "expected": 2, "unexplained": 0, "unexplained_between_seeds": None,
    }  # fmt: skip


def test_noise_stays_with_its_rate():
    """At a low rate a point has few turns and much noise; that says nothing about a high rate."""
    quiet = pair(1.0, rate_per_s=20.0), pair(1.1, expected_turn1_s=1.0, rate_per_s=20.0)
    low = pair(1.0, rate_per_s=0.5), pair(1.1, turn1_s=0.5, expected_turn1_s=1.0, rate_per_s=0.5)

    assert agreement_under_turn1_noise([quiet], KEY) == 1.0
    assert agreement_under_turn1_noise([quiet, low], KEY) == 0.5


def test_turn_1_of_twins_is_compared_on_both_sides():
    """Two of three really differ; one as much as was expected; one seed differs from the others."""
    twins = [
        (pair(1.0, 1.0), pair(1.0, 1.2, turn1_s=1.1)),
        (pair(1.0, 1.0), pair(1.0, 1.0, turn1_s=1.1)),
        (pair(1.0, 1.0), pair(1.0, 1.0)),
    ]

    assert turn1_differences(twins, "tpot_s") == {
        "pairs": 3, "real": 2, "expected": 1, "unexplained": 1, "unexplained_between_seeds": 1,
    }  # fmt: skip
