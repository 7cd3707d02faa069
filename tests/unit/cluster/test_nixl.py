from __future__ import annotations

import pytest

from ppdbench.cluster.nixl import (
    HeldKv,
    Prefilled,
    cached_tokens,
    decode_body,
    held_kv,
    local_body,
    prefill_body,
    pull_refusal,
    read_prefilled,
    release_body,
)
from ppdbench.core.errors import EngineError

COMPLETION = {
    "model": "m", "prompt": [1, 2, 3], "max_tokens": 50, "min_tokens": 50, "stream": True,
    "stream_options": {"include_usage": True}, "temperature": 0.0, "return_token_ids": True,
}  # fmt: skip
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 50}
HANDED_OVER = {
    "do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[1]],
    "remote_engine_id": "e", "remote_request_id": "r", "remote_host": "h", "remote_port": 1,
    "remote_num_tokens": 3,
}  # fmt: skip
OFFERED = HANDED_OVER | {"do_remote_prefill": False, "do_remote_decode": True}


def test_p_is_asked_for_one_unstreamed_token_of_the_same_prompt():
    """All that shapes the KV stays; all that shapes only the answer goes."""
    assert prefill_body(COMPLETION) == {
        "model": "m", "prompt": [1, 2, 3], "max_tokens": 1, "stream": False, "temperature": 0.0,
        "kv_transfer_params": {
            "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
            "remote_block_ids": None, "remote_host": None, "remote_port": None,
        },
    }  # fmt: skip


def test_a_chat_is_limited_in_both_ways():
    """Chat servers read ``max_completion_tokens`` first."""
    body = prefill_body(CHAT | {"max_completion_tokens": 9})

    assert (body["max_tokens"], body["max_completion_tokens"]) == (1, 1)


def test_d_gets_the_clients_body_and_what_p_handed_over():
    """Nothing of the client's request is changed for D, and the inputs stay as they were."""
    prefilled = read_prefilled({"kv_transfer_params": HANDED_OVER})
    body = decode_body(COMPLETION, prefilled)

    assert body == COMPLETION | {"kv_transfer_params": HANDED_OVER}
    assert "kv_transfer_params" not in COMPLETION


def test_ps_answer_says_what_p_computed():
    """Computed tokens on P are prompt − cached, and unknown when P counted nothing."""
    answer = {
        "kv_transfer_params": HANDED_OVER,
        "usage": {"prompt_tokens": 946, "prompt_tokens_details": {"cached_tokens": 768}},
    }

    assert read_prefilled(answer).computed_tokens == 178
    assert read_prefilled({"kv_transfer_params": HANDED_OVER}).computed_tokens is None


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": False}])
def test_an_answer_without_parameters_is_an_error_and_never_a_silent_local_turn(params):
    """Decoding without them would look like a hand-off and be none."""
    with pytest.raises(EngineError, match="kv_transfer_params"):
        read_prefilled({"kv_transfer_params": params})


def test_a_local_turn_carries_no_parameters_of_a_client():
    """A client must not make a node read foreign memory."""
    assert "kv_transfer_params" not in local_body(COMPLETION | {"kv_transfer_params": OFFERED})


def test_a_local_turn_can_ask_d_to_hold_its_kv():
    """Parameters that ask for neither direction make D offer its blocks."""
    assert local_body(CHAT, hold_kv=True)["kv_transfer_params"] == {
        "do_remote_decode": False, "do_remote_prefill": False,
    }  # fmt: skip


def test_a_pull_sends_ds_offer_to_p():
    """P reads D's blocks and prepares its own for D in one request."""
    params = prefill_body(COMPLETION, HeldKv(OFFERED, (1, 2, 3)))["kv_transfer_params"]

    assert params == OFFERED


@pytest.mark.parametrize(
    ("offered", "prompt", "refusal"),
    [
        (OFFERED, [1, 2, 3, 9, 9], None),
        (OFFERED, [1, 2, 3], None),
        (OFFERED, None, "history_is_text"),
        (OFFERED, [1, 2, 7, 9, 9], "prefix_differs"),
        (OFFERED, [1, 2], "token_count"),
        (OFFERED | {"remote_num_tokens": 0}, [1, 2, 3, 9], "token_count"),
        (OFFERED | {"remote_num_tokens": 9}, [1, 2, 3, 4, 5, 6, 7, 8, 9], "token_count"),
        ({}, [1, 2, 3], "no_kv_offered"),
    ],
)
def test_a_pull_is_allowed_only_over_a_proven_common_prefix(offered, prompt, refusal):
    """Every token that D's blocks stand for is the prompt's own, or the pull is refused."""
    held = held_kv({"kv_transfer_params": offered}, [1, 2], [3, 4])

    assert pull_refusal(held, prompt) == refusal


def test_a_release_names_the_blocks_and_asks_for_no_model():
    """D refuses it, and refusing it frees P's blocks."""
    body = release_body(Prefilled(HANDED_OVER, 3, 0))

    assert body["kv_transfer_params"] == HANDED_OVER
    assert body["model"] != "m"


def test_cached_tokens_unknown_is_none_and_zero_is_zero():
    """A server that says nothing has not said 0."""
    assert cached_tokens({"prompt_tokens": 3}) is None
    assert cached_tokens({"prompt_tokens_details": {"cached_tokens": 0}}) == 0


@pytest.mark.parametrize("answer", [None, [], "no", {"kv_transfer_params": [HANDED_OVER]}])
def test_an_answer_of_another_shape_hands_nothing_over(answer):
    """Whatever JSON comes with HTTP 200, it is an error with words."""
    with pytest.raises(EngineError, match="kv_transfer_params"):
        read_prefilled(answer)


@pytest.mark.parametrize("usage", ["x", [1], {"prompt_tokens_details": "x"}])
def test_counts_of_another_shape_are_unknown(usage):
    """The hand-off itself is good; what P had cached, nobody knows."""
    prefilled = read_prefilled({"kv_transfer_params": HANDED_OVER, "usage": usage})

    assert prefilled.cached_tokens is None
