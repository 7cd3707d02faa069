"""New tokens counted by a tokenizer: of what text, and when not at all."""

from __future__ import annotations

import orjson
import pytest

from ppdbench.router.choose import COUNTED_CHARACTERS
from ppdbench.router.estimate import Estimates
from ppdbench.router.identity import read_history
from ppdbench.router.memory import ANSWERED, Note

LONG_WORDS = "incomprehensibilities notwithstanding"


class Counter:
    """A tokenizer of words that remembers what it was asked."""

    def __init__(self):
        self.asked = []

    def __call__(self, text):
        self.asked.append(text)
        return len(text.split())


def user(content):
    return {"role": "user", "content": content}


def answer(reply):
    return {"role": "assistant", "content": reply.text()}


async def receipts(bench):
    """The oldest first."""
    return (await bench.get("/ppd/decisions")).json()["decisions"][::-1]


@pytest.mark.parametrize("headers", [{}, {"x_session_id": "s1"}], ids=["found", "named"])
async def test_only_new_messages_of_a_later_turn_are_counted(bench_for, headers):
    """Turn 1 asks no policy and is not counted; each later turn counts behind the last answer."""
    count = Counter()
    bench = await bench_for("1P_1D", policy="threshold:3", count_tokens=count)

    talk = [user("the first question of this conversation")]
    first = await bench.chat(talk, headers=headers)
    talk += [answer(first), user(LONG_WORDS)]
    second = await bench.chat(talk, headers=headers)
    talk += [answer(second), user("a b"), {"role": "user", "content": [_part("c d")]}]
    third = await bench.chat(talk, headers=headers)

    assert count.asked == [LONG_WORDS, "a b", "c d"]
    assert [r["new_tokens"] for r in (await receipts(bench))[1:]] == [2, 4]
    assert (second.route, third.route) == ("local", "remote")


def _part(text):
    return {"type": "text", "text": text}


async def test_without_a_tokenizer_characters_decide(bench_for):
    """The same two words are estimated as more than three tokens."""
    bench = await bench_for("1P_1D", policy="threshold:3")
    talk = [user("the first question of this conversation")]
    talk += [answer(await bench.chat(talk)), user(LONG_WORDS)]

    assert (await bench.chat(talk)).route == "remote"


async def test_raw_text_is_counted_behind_what_is_held(bench_for):
    """A completion's prompt has no messages: what stands behind the last answer is new."""
    count = Counter()
    bench = await bench_for("1P_1D", policy="threshold:3", count_tokens=count)
    prompt = "a prompt of one and twenty words, or so " * 3

    first = await bench.post("/v1/completions", {"prompt": prompt, "max_tokens": 8})
    longer = prompt + first.text() + " two more"
    second = await bench.post("/v1/completions", {"prompt": longer, "max_tokens": 8})

    assert count.asked == [" two more"]
    assert second.route == "local"


async def test_token_ids_are_never_counted(bench_for):
    """Their number is known."""
    count = Counter()
    bench = await bench_for("1P_1D", policy="threshold:3", count_tokens=count)
    body = {"max_tokens": 8, "return_token_ids": True}
    prompt = list(range(100, 200))

    first = await bench.post("/v1/completions", {"prompt": prompt, **body})
    longer = [*prompt, *orjson.loads(first.body)["choices"][0]["token_ids"], 7, 8]
    second = await bench.post("/v1/completions", {"prompt": longer, **body})

    assert second.route == "local"
    assert (await receipts(bench))[1]["new_tokens"] == 2
    assert not count.asked


async def test_what_no_policy_asks_for_or_would_hold_up_the_others_is_estimated(bench_for):
    """An R serves every turn; a text of many thousand characters takes a tokenizer too long."""
    count = Counter()
    replica = await bench_for("1R", policy="roles", count_tokens=count)
    pair = await bench_for("1P_1D", policy="threshold:3", count_tokens=count)
    talk = [user("the first question of this conversation")]

    short = [*talk, answer(await replica.chat(talk)), user("go on")]
    await replica.chat(short)
    long = [*talk, answer(await pair.chat(talk)), user("x " * COUNTED_CHARACTERS)]
    await pair.chat(long)

    assert not count.asked
    assert (await receipts(pair))[1]["new_tokens"] > COUNTED_CHARACTERS / 4


def note(turn, flags):
    return Note(1, 50, 40, 0, 0, turn, 0, flags)


@pytest.mark.parametrize("name", [None, b"n" * 16], ids=["found", "named"])
@pytest.mark.parametrize(
    ("turn", "flags", "new"),
    [
        (2, ANSWERED, ["q3"]),
        (2, 0, ["a2", "q3"]),
        (1, ANSWERED, ["q2", "a2", "q3"]),
        (3, 0, []),
    ],
)
def test_the_new_part_begins_where_the_note_stands(name, turn, flags, new):
    """Behind its turn's answer; before it where the answer was never seen; nowhere in a repeat."""
    texts = ["q1", "a1", "q2", "a2", "q3"]
    roles = ["user", "assistant"] * 3
    messages = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=False)]

    history = read_history({"messages": messages}, name)

    assert history.texts_behind(note(turn, flags)) == new


def test_one_odd_text_does_not_turn_the_ratio():
    """However long it is; what many turns show does."""
    estimates = Estimates()
    for _ in range(100):
        estimates.learn_ratio(1_600, 400, of_a_part=True)

    estimates.learn_ratio(100_000, 100_000, of_a_part=True)
    after_one = estimates.characters_per_token
    for _ in range(300):
        estimates.learn_ratio(600, 400, of_a_part=True)

    assert after_one == pytest.approx(4.0, rel=0.1)
    assert estimates.characters_per_token == pytest.approx(1.5, rel=0.1)


async def test_tools_do_not_count_as_characters(bench_for):
    """A first turn's count holds them, its messages do not; later turns teach the ratio."""
    bench = await bench_for("1P_1D", policy="local")
    before = bench.router.services.chooser.estimates({"model": "fake"}).characters_per_token

    talk = [user("t1 " * 100)]
    talk += [answer(await bench.chat(talk, tools=[{"type": "function"}])), user("t2 " * 100)]
    unchanged = bench.router.services.chooser.estimates({"model": "fake"}).characters_per_token
    await bench.chat(talk, tools=[{"type": "function"}])

    assert unchanged == before
    assert bench.router.services.chooser.estimates({"model": "fake"}).characters_per_token < before


def test_what_a_template_puts_before_a_first_turn_is_in_no_later_part():
    """Whole prompts teach until a part does; then only parts count, which are asked for."""
    estimates = Estimates()
    for _ in range(1000):
        estimates.learn_ratio(80, 20 + 40, of_a_part=False)
    by_wholes = estimates.characters_per_token
    for _ in range(100):
        estimates.learn_ratio(80, 20 + 4, of_a_part=True)
        estimates.learn_ratio(80, 20 + 40, of_a_part=False)

    assert by_wholes == pytest.approx(80 / 60, rel=0.05)
    assert estimates.characters_per_token == pytest.approx(80 / 24, rel=0.1)


def test_answers_that_their_limit_cut_off_do_not_shorten_the_others():
    """As a probe of one token; one that is cut off and longer than the mean does count."""
    estimates = Estimates()
    for _ in range(100):
        estimates.learn_output(300, {"max_tokens": 1000})
    for _ in range(1000):
        estimates.learn_output(1, {"max_tokens": 1})
    probed = estimates.output_tokens({})
    for _ in range(1000):
        estimates.learn_output(500, {"max_tokens": 500})

    assert probed == 300
    assert estimates.output_tokens({}) == 500
