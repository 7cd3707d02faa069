from __future__ import annotations

import pytest

from ppdbench.cluster.canary import Path, Prober, check_canaries, preflight
from ppdbench.cluster.nixl import pull_refusal
from ppdbench.core.decision import Route

NEW_TOKENS, OUTPUT_TOKENS = 50, 24


@pytest.fixture
def prober(one_p_one_d, request):
    return Prober(one_p_one_d.facts.model, seed=abs(hash(request.node.name)))


@pytest.fixture
def remote(one_p_one_d):
    return Path(Route.REMOTE, one_p_one_d.spec["d0"], one_p_one_d.spec["p0"])


@pytest.fixture
def local(one_p_one_d):
    return Path(Route.LOCAL, one_p_one_d.spec["d0"])


def later_prompt(prober, first):
    return (*first.prompt_ids, *first.output_ids, *prober.tokens(NEW_TOKENS))


def test_remote_and_local_give_equal_tokens_and_only_remote_moves_kv(
    one_p_one_d, prober, remote, local
):
    """Turn 2 of one conversation by both routes, held against the engines' own counters.

    The local turn reads no KV from anybody and computes its new tokens, plus at most what stands
    in the last, incomplete block of the history.
    """
    block = one_p_one_d.facts.block_size
    first = prober.ask(remote, prober.tokens(600), OUTPUT_TOKENS)
    prompt = later_prompt(prober, first)

    start = one_p_one_d.counters()
    by_local = prober.ask(local, prompt, OUTPUT_TOKENS)
    middle = one_p_one_d.counters()
    by_remote = prober.ask(remote, prompt, OUTPUT_TOKENS)
    end = one_p_one_d.counters()
    alone = prober.ask(local, prompt, OUTPUT_TOKENS, cold=True)

    assert by_local.output_ids == by_remote.output_ids == alone.output_ids
    on_d = middle["d0"].counters.since(start["d0"].counters)
    on_p = middle["p0"].counters.since(start["p0"].counters)
    assert (on_d.received_bytes, on_d.received_tokens, on_d.transfers) == (0, 0, 0)
    assert (on_p.finished_requests, on_p.computed_tokens) == (0, 0)
    assert NEW_TOKENS <= on_d.computed_tokens < NEW_TOKENS + block
    assert on_d.computed_tokens == len(prompt) - by_local.cached_tokens
    through_p = end["d0"].counters.since(middle["d0"].counters)
    assert through_p.received_bytes > 0
    assert through_p.computed_tokens == 0
    assert end["p0"].counters.since(middle["p0"].counters).computed_tokens >= NEW_TOKENS


def test_the_counters_prove_each_route_and_refute_the_other(one_p_one_d, prober, remote, local):
    """A remote and a local turn prove themselves; told as anything else they do not."""
    before = one_p_one_d.counters()
    first = prober.ask(remote, prober.tokens(300), OUTPUT_TOKENS)
    prober.ask(local, later_prompt(prober, first), OUTPUT_TOKENS)
    after = one_p_one_d.counters()

    honest = one_p_one_d.proof(before, after, {Route.REMOTE: 1, Route.LOCAL: 1})

    assert (honest.proven, honest.problems) == (True, ())
    assert honest.bytes_moved > 0
    assert one_p_one_d.proof(before, after, {Route.LOCAL: 2}).proven is False
    assert one_p_one_d.proof(before, after, {Route.REMOTE: 2}).proven is False


def test_a_pull_spares_p_the_answer_and_gives_equal_tokens(one_p_one_d, prober, remote, local):
    """P reads D's KV of Turn 1 instead of computing its answer again."""
    first = prober.ask(remote, prober.tokens(600), 150)
    prompt = later_prompt(prober, first)
    assert pull_refusal(first.held, prompt) is None

    before = one_p_one_d.counters()
    pulled = prober.ask(remote, prompt, OUTPUT_TOKENS, pull_from=first.held)
    after = one_p_one_d.counters()
    alone = prober.ask(local, prompt, OUTPUT_TOKENS, cold=True)

    assert pulled.output_ids == alone.output_ids
    on_p = after["p0"].counters.since(before["p0"].counters)
    assert on_p.received_bytes > 0
    assert on_p.computed_tokens == NEW_TOKENS + 1
    assert pulled.prefill_cached_tokens == len(prompt) - NEW_TOKENS - 1


def test_every_route_passes_preflight_and_canaries(one_p_one_d):
    """A cluster that is sound has nothing to report, and answers from which wrong KV would show."""
    preflight(one_p_one_d.spec, one_p_one_d.facts.model)
    said = []

    assert (
        check_canaries(one_p_one_d.spec, one_p_one_d.facts.model, pull=True, notice=said.append)
        == []
    )
    assert said == []
