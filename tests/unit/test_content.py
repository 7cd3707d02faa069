"""Schedules with their words: recorded, as the served model's ids, or made up to a length."""

from __future__ import annotations

import json

import orjson
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from ppdbench.core.errors import WorkloadError
from ppdbench.core.topology import Topology
from ppdbench.experiments.grid import load_grid
from ppdbench.http.reply import Reply
from ppdbench.load.history import history_for
from ppdbench.load.simulated import run_simulated_point
from ppdbench.policy.parse import parse_policy
from ppdbench.sim.config import SimConfig
from ppdbench.workload.dataset import ASSUMED_TURNS
from ppdbench.workload.tokens import load_tokenizer

GRID = """
rates_per_s = [2]
duration_s = 10
{extra}
[[arm]]
topologies = ["1P_1D"]
policies = ["remote"]
[[workload]]
name = "w"
{workload}
"""
CORPUS = ["the quick brown fox jumps over the lazy dog while seven other animals look on"] * 50


@pytest.fixture
def model_folder(tmp_path):
    """A model with a small byte-level BPE of its own."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    inner.train_from_iterator(CORPUS, trainer)
    folder = tmp_path / "model"
    folder.mkdir()
    inner.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"vocab_size": inner.get_vocab_size()}))
    return folder


@pytest.fixture
def grid(tmp_path, monkeypatch):
    """A grid over sixty recorded chats, or over what ``workload`` says."""
    monkeypatch.setenv("PPD_CACHE", str(tmp_path / "cache"))
    chats = [
        {
            "id": f"c{i}",
            "conversations": [
                {"from": "system", "value": "be kind"},
                *[
                    {"from": side, "value": f"{side} {i} says seven things {turn}"}
                    for turn in range(3)
                    for side in ("human", "gpt")
                ],
            ],
        }
        for i in range(60)
    ]
    (tmp_path / "chats.json").write_bytes(orjson.dumps(chats))

    def make(workload='source = "chats.json"', extra=""):
        path = tmp_path / "g.toml"
        path.write_text(GRID.format(workload=workload, extra=extra))
        return load_grid(str(path))

    return make


def content(grid, served=None):
    key = grid.points()[0]
    return grid.with_content(key, grid.schedule(key, 1), served, seed=1)


def test_a_recorded_schedule_gets_the_words_of_its_own_chats(grid):
    """Text, reply and context of the chat that the conversation is named after."""
    for arrival in content(grid()):
        name = arrival.conversation.id.rsplit("/", 1)[1][1:]
        turn = arrival.conversation.turns[2]

        assert turn.text == f"human {name} says seven things 2"
        assert turn.reply_text == f"gpt {name} says seven things 2"
        assert arrival.conversation.context_text == "be kind"


def test_counted_by_the_served_model_a_prompt_is_ids_of_the_planned_length(grid, model_folder):
    """Client and server then count the same, request by request."""
    counted = grid().counted_by(str(model_folder))
    tokenizer = load_tokenizer(str(model_folder))
    planned = counted.schedule(counted.points()[0], 1)

    for plan, filled in zip(planned, content(counted, str(model_folder)), strict=True):
        for before, turn in zip(plan.conversation.turns, filled.conversation.turns, strict=True):
            assert turn.new_tokens == before.new_tokens == len(turn.token_ids)
            assert tokenizer.decode(turn.token_ids) == turn.text
        assert filled.conversation.context_tokens == plan.conversation.context_tokens


def test_a_synthetic_schedule_has_no_words_unless_asked_for(grid):
    """The driver draws token ids of exact length."""
    arrivals = content(grid("turns = [[50, 4], [20, 4]]"))

    assert all(turn.text is None for a in arrivals for turn in a.conversation.turns)


def test_made_up_text_encodes_to_exactly_the_planned_length(grid):
    """Verified by encoding it again; different in every conversation."""
    made = content(
        grid("turns = [[50, 4], [1, 4]]\nsystem_tokens = 30", '[engine]\nprompts = "text"')
    )
    tokenizer = load_tokenizer()
    firsts = [a.conversation.turns[0].text for a in made]

    assert {tokenizer.count([text])[0] for text in firsts} == {50}
    assert {tokenizer.count([a.conversation.turns[1].text])[0] for a in made} == {1}
    assert len(set(firsts)) == len(firsts)
    assert len({a.conversation.context_text for a in made}) == 1


def test_a_tokenizer_without_words_is_refused(grid, tmp_path):
    """Text of a planned length cannot be promised; the error says what to use instead."""
    inner = Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    inner.save(str(tmp_path / "tokenizer.json"))
    text_grid = grid("turns = [[50, 4]]", '[engine]\nprompts = "text"')

    with pytest.raises(WorkloadError, match="use token-id prompts"):
        content(text_grid, str(tmp_path / "tokenizer.json"))


@pytest.mark.parametrize(
    ("prepare", "said"),
    [
        (lambda folder: (folder / "tokenizer.json").unlink(), "no file"),
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), "cannot be read"),
        (lambda folder: (folder / "tokenizer.json").write_bytes(b"\xff\xfe"), "cannot be read"),
        (lambda folder: (folder / "config.json").write_text('{"vocab_size": 20}'), "knows only 20"),
        (lambda folder: (folder / "config.json").write_text("{"), "not JSON"),
    ],
)
def test_a_tokenizer_that_does_not_match_is_one_sentence(model_folder, prepare, said):
    """Missing, broken, or with ids that the model beside it does not know."""
    prepare(model_folder)

    with pytest.raises(WorkloadError, match=said):
        load_tokenizer(str(model_folder))


def test_the_default_tokenizer_is_a_real_bpe_from_a_wheel():
    """Not characters divided by four: the same length in letters, different counts."""
    counts = load_tokenizer().count(["the same old thing", "xq zvk jjw pprtxw "])

    assert counts[0] < counts[1]
    assert load_tokenizer().vocabulary_size > 100_000


def test_more_conversations_than_there_are_is_an_error(grid):
    """They never repeat within a point."""
    small = grid('source = "chats.json"\nsample = 5')

    with pytest.raises(WorkloadError, match="never repeat"):
        small.schedule(small.points()[0], 1)


def test_recorded_pauses_need_recorded_times(grid):
    """ShareGPT has none, so the option cannot be honoured."""
    with pytest.raises(WorkloadError, match="records no message times"):
        grid('source = "chats.json"\nthink = { kind = "recorded" }').prepare()


def test_a_closed_loop_runs_as_many_conversations_at_a_time_as_it_has_users(grid, tmp_path):
    """Users take the next conversation when the one before has ended; none waits for a rate."""
    text = GRID.format(
        workload="turns = [[64, 16], [32, 16]]",
        extra='users = [3]\n[arrivals]\nprocess = "closed"\nconversations_per_user = 4',
    ).replace("rates_per_s = [2]\nduration_s = 10", "")
    path = tmp_path / "closed.toml"
    path.write_text(text)
    closed = load_grid(str(path))
    key = closed.points()[0]

    records = run_simulated_point(
        Topology.parse("1P_1D"), parse_policy("remote"), closed.schedule(key, 1), key.rate_per_s,
        SimConfig(costs="roofline"), 1, users=closed.users(key),
    ).records  # fmt: skip
    spans = {}
    for record in records:
        begin, _ = spans.get(record.conversation, (record.scheduled_at_s, 0))
        spans[record.conversation] = (begin, record.finished_at_s)

    assert len(spans) == 12
    for begin, _ in spans.values():
        assert sum(b <= begin < e for b, e in spans.values()) <= 3
    assert sum(begin == 0 for begin, _ in spans.values()) == 3


def test_a_grid_tells_how_many_requests_to_expect(grid):
    """Rate × duration × turns, on average, over its points."""
    plain = grid("turns = [[50, 4], [20, 4]]")

    assert plain.expected_turns(plain.points()) == 2 * 10 * 2

    recorded = grid()
    guessed = recorded.expected_turns(recorded.points())
    recorded.prepare()
    assert guessed == 2 * 10 * ASSUMED_TURNS
    assert recorded.expected_turns(recorded.points()) == 2 * 10 * 3


def test_recorded_replies_stand_in_the_history_when_asked_for(grid, model_folder):
    """Then the next prompt holds the workload's reply, as text or as ids, not the model's."""
    counted = grid().counted_by(str(model_folder))
    spoken = content(counted, str(model_folder))[0].conversation
    told = Reply()
    told.text.append("what the model said")

    as_ids = history_for(spoken, 1, 400, recorded_replies=True)
    as_text = history_for(content(grid())[0].conversation, 1, 400, recorded_replies=True)
    for history in (as_ids, as_text):
        history.ask(1, spoken.turns[0])
        assert history.hear(told) == ""
    prompt = as_ids.ask(2, spoken.turns[1])["prompt"]

    text = load_tokenizer(str(model_folder)).decode(prompt)
    first, second = spoken.turns[:2]
    assert text == "be kind" + first.text + first.reply_text + second.text
    assert as_text.ask(2, spoken.turns[1])["messages"][2] == {
        "role": "assistant",
        "content": spoken.turns[0].reply_text,
    }


def test_recorded_replies_of_a_synthetic_workload_are_refused(grid):
    """There are none."""
    with pytest.raises(WorkloadError, match="is synthetic"):
        grid("turns = [[50, 4]]", '[engine]\nreplies = "recorded"')
