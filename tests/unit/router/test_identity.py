"""Who speaks: branches, edits and look-alikes are what they are."""

from __future__ import annotations

import hashlib
from mmap import mmap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppdbench.router.history import Answer, Place
from ppdbench.router.identity import explicit_key, read_history
from ppdbench.router.memory import ANSWERED, SEVERAL, SPLIT, Memory, Note
from ppdbench.router.messages import MEDIA_LENGTH


@pytest.fixture
def memory():
    buckets = Memory.buckets_for(4096)
    return Memory(mmap(-1, Memory.bytes_for(buckets)), 0, buckets)


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def chat(*messages, **fields):
    return {"model": "m", "messages": list(messages), **fields}


def served(memory, body, answer, conversation, home=0):
    """What the router does when a turn has been answered."""
    history = read_history(body)
    note = Note(conversation, 10, history.size, 1, home, history.turn or 1, 0, 0)
    history.leave(memory, note, Answer(answer, tokens=5))


def test_the_next_turn_finds_its_conversation(memory):
    """The history that ends in our answer leads to the note behind it."""
    served(memory, chat(user("hello")), "hi there", 7, home=2)

    found = read_history(chat(user("hello"), assistant("hi there"), user("more"))).find(memory)

    assert (found.note.conversation, found.note.home, found.note.context_tokens) == (7, 2, 15)
    assert found.place is Place.CONTINUES


def test_two_users_with_the_same_first_words_are_two_conversations(memory):
    """They part at the first answer, and each finds its own."""
    served(memory, chat(user("hello")), "answer to Ann", 1, home=0)
    served(memory, chat(user("hello")), "answer to Bob", 2, home=1)

    ann = read_history(chat(user("hello"), assistant("answer to Ann"), user("x"))).find(memory)
    bob = read_history(chat(user("hello"), assistant("answer to Bob"), user("x"))).find(memory)

    assert (ann.note.conversation, bob.note.conversation) == (1, 2)


def test_a_first_turn_is_nobodys_continuation(memory):
    """Equal opening words alone are no past."""
    served(memory, chat(user("hello")), "hi", 1)

    assert read_history(chat(user("hello"))).find(memory) is None


def test_where_the_answer_was_changed_and_two_opened_alike_nobody_guesses(memory):
    """The question alone fits both, on two nodes: the note names no home."""
    served(memory, chat(user("hello")), "one", 1, home=0)
    served(memory, chat(user("hello")), "two", 2, home=1)

    found = read_history(chat(user("hello"), assistant("edited"), user("x"))).find(memory)

    assert found.note.flags & SPLIT
    assert found.note.flags & SEVERAL


def test_an_edit_in_the_middle_finds_the_last_common_place(memory):
    """What comes after the edit is new; what came before is held."""
    one = chat(user("a"), assistant("A"), user("b"))
    served(memory, chat(user("a")), "A", 1)
    served(memory, one, "B", 1)

    edited = chat(user("a"), assistant("A"), user("changed"), assistant("B"), user("c"))
    found = read_history(edited).find(memory)

    assert found.note.turn == 1
    assert read_history(edited).turn == 3


def test_a_regenerated_later_turn_repeats(memory):
    """The very same request again stands where it stood."""
    body = chat(user("a"), assistant("A"), user("b"))
    served(memory, body, "B", 1)

    assert read_history(body).find(memory).place is Place.REPEATS


@pytest.mark.parametrize(
    "content",
    ["hi there", " hi there\n", [{"type": "text", "text": "hi there"}]],
)
def test_an_answer_is_known_in_the_forms_clients_send_it_back(memory, content):
    """Trimmed, or as a list of parts."""
    served(memory, chat(user("hello")), "hi there", 7)

    assert read_history(chat(user("hello"), assistant(content), user("x"))).find(memory)


@pytest.mark.parametrize("content", [None, "", [], " "])
def test_an_answer_without_text_is_known_however_nothing_is_written(memory, content):
    """It is behind the tool call that the home goes on, not behind the question."""
    history = read_history(chat(user("weather?")))
    history.leave(memory, Note(9, 10, history.size, 1, 0, 1, 0, 0), Answer("", "call_1", 5))

    call = assistant(content, tool_calls=[{"id": "call_1", "function": {"name": "f"}}])
    found = read_history(chat(user("weather?"), call, user("x"))).find(memory)

    assert found.note.flags & ANSWERED


def test_tool_calls_are_part_of_the_history(memory):
    """Content null with a tool call, then the tool's answer: one conversation."""
    history = read_history(chat(user("weather?")))
    history.leave(memory, Note(9, 10, history.size, 1, 0, 1, 0, 0), Answer("", "call_1", 5))

    call = assistant(None, tool_calls=[{"id": "call_1", "function": {"name": "f"}}])
    tool = {"role": "tool", "tool_call_id": "call_1", "content": "sunny"}
    found = read_history(chat(user("weather?"), call, tool)).find(memory)

    assert found.note.conversation == 9
    assert found.note.context_tokens == 15


@pytest.mark.parametrize(
    "field",
    [
        "user", "cache_salt", "tools", "model", "prompt_cache_key", "reasoning_effort",
        "chat_template", "chat_template_kwargs", "documents",
    ],
)  # fmt: skip
def test_what_separates_caches_separates_histories(memory, field):
    """Another user, salt, tool set, model or template is another history; a null is none."""
    served(memory, chat(user("hello")), "hi", 1)

    later = chat(user("hello"), assistant("hi"), user("x"))

    assert read_history(later | {field: "other"}).find(memory) is None
    assert field == "model" or read_history(later | {field: None}).find(memory)


def test_token_prompts_are_found_by_their_own_beginning(memory):
    """The longest history that is a prefix wins; a foreign one of the same opening does not."""
    opening = list(range(200))
    for conversation in range(1, 4):
        body = {"model": "m", "prompt": [*opening, *[conversation] * 40]}
        served(memory, body, "", conversation)

    found = read_history({"model": "m", "prompt": [*opening, *[2] * 40, 5, 6, 7]}).find(memory)
    stranger = read_history({"model": "m", "prompt": [*opening, *[9] * 60]}).find(memory)

    assert found.note.conversation == 2
    assert stranger is None


@pytest.mark.parametrize("opening", [list(range(2000)), "You are a helpful assistant. " * 80])
def test_many_raw_histories_with_one_opening_are_told_apart(memory, opening):
    """As those of an application are, by its system prompt: also those that are about as long."""
    talks = []
    for at in range(40):
        question = [at] * (20 + at) if isinstance(opening, list) else f"{at} " * (20 + at)
        talks.append(opening + question)
        history = read_history({"model": "m", "prompt": talks[at]})
        ids = (at,) * 20 if isinstance(opening, list) else ()
        note = Note(at, 10, history.size, 1, 0, 1, 0, 0)
        history.leave(memory, note, Answer(f"answer {at}", tokens=5, token_ids=ids))
        talks[at] += [*ids, 1, 2, 3] if isinstance(opening, list) else f"answer {at} and now?"

    found = [read_history({"model": "m", "prompt": talk}).find(memory) for talk in talks]

    assert [each and each.note.conversation for each in found] == list(range(40))
    assert all(each.note.flags & ANSWERED for each in found)


class Counting(Memory):
    """Counts how often a directory is asked for."""

    asked = 0

    def sizes(self, key):
        self.asked += 1
        return super().sizes(key)


def test_a_long_opening_of_many_raw_histories_is_not_searched_step_by_step():
    """All other turns wait meanwhile: of 60,000 steps of a text some hundred are looked at."""
    memory = Counting(mmap(-1, Memory.bytes_for(512)), 0, 512)
    opening = "You are a helpful assistant. " * 33_000
    for at in range(40):
        served(memory, {"model": "m", "prompt": f"{opening}{at} asks this"}, f"answer {at}", at)
    memory.asked = 0

    talk = f"{opening}{7} asks thisanswer 7 and now?"
    found = read_history({"model": "m", "prompt": talk}).find(memory)

    assert (found.note.conversation, bool(found.note.flags & ANSWERED)) == (7, True)
    assert memory.asked < 200


def test_a_short_raw_question_is_known_however_long_its_conversation_became(memory):
    """Its later turns pass the same first border, and end behind others."""
    question = [*range(20)]
    talk = question
    for _ in range(6):
        served(memory, {"model": "m", "prompt": talk}, "", 7)
        talk = [*talk, *range(100, 150)]

    edited = read_history({"model": "m", "prompt": [*question, *range(300, 350)]}).find(memory)

    assert (edited.note.conversation, edited.note.size) == (7, len(question))


def test_a_text_prompt_with_its_answer_is_a_history(memory):
    """Completion clients send prompt + answer + new text."""
    text = "Once upon a time there was a router. "
    served(memory, {"model": "m", "prompt": text}, "It was fast.", 4)

    found = read_history({"model": "m", "prompt": text + "It was fast. And then?"}).find(memory)

    assert found.note.conversation == 4
    assert found.note.size == len(text) + len("It was fast.")


@pytest.mark.parametrize("prompt", ["Once upon a time there was", [*range(40)]])
def test_a_raw_first_turn_is_nobodys_continuation(memory, prompt):
    """As of chats: two users who open with the same words are two conversations."""
    first = {"model": "m", "prompt": prompt}
    more = " a router" if isinstance(prompt, str) else [1, 2]
    later = {"model": "m", "prompt": prompt + more}
    served(memory, first, "", 1)
    history = read_history(later)

    assert read_history(first).find(memory) is None
    assert history.find(memory).place is Place.CONTINUES
    history.leave(memory, Note(1, 10, history.size, 1, 0, 2, 0, 0), None)
    assert read_history(later).find(memory).place is Place.REPEATS


@pytest.mark.parametrize(
    ("first", "same", "changed"),
    [
        (
            chat(user("a")),
            chat(user("a"), assistant("A, trimmed"), user("b")),
            chat(user("changed"), assistant("A"), user("b")),
        ),
        (
            {"model": "m", "prompt": [1, 2, 3]},
            {"model": "m", "prompt": [1, 2, 3, 4, 5]},
            {"model": "m", "prompt": [1, 9, 3, 4, 5]},
        ),
    ],
)
def test_a_named_conversation_notices_an_edit(memory, first, same, changed):
    """The client's name leads home; whether the history is the same is checked."""
    name = explicit_key(b"session", first)
    history = read_history(first, name)
    history.leave(memory, Note(1, 10, history.size, 1, 3, 1, 0, 0), Answer("A", tokens=5))

    places = [read_history(body, name).find(memory).place for body in (same, first, changed)]

    assert places == [Place.CONTINUES, Place.REPEATS, Place.DIFFERS]
    assert memory.get(name).context_tokens == 15


@pytest.mark.parametrize("question", [[*range(30)], "a question of some words "])
def test_a_named_raw_prompt_is_held_up_to_its_question(memory, question):
    """Where it is asked anew, or what was answered comes back as something else."""
    body = {"model": "m", "prompt": question}
    answer, other, more = ("one", "two", "!") if isinstance(question, str) else ([7], [8], [9])
    name = explicit_key(b"session", body)
    history = read_history(body, name)
    ids = () if isinstance(question, str) else tuple(answer)
    note = Note(1, 10, history.size, 1, 3, 1, 0, 0)
    history.leave(memory, note, Answer("one", tokens=5, token_ids=ids))

    prompts = (question + answer + more, question, question + other + more, more + question)
    found = [read_history({"model": "m", "prompt": it}, name).find(memory) for it in prompts]

    assert [each.place for each in found] == [
        Place.CONTINUES, Place.REPEATS, Place.CONTINUES, Place.DIFFERS,
    ]  # fmt: skip
    assert [each.note.context_tokens for each in found] == [15, 10, 10, 15]


def test_the_header_names_a_conversation_and_a_cache_key_keeps_histories_apart():
    """Many clients send one prompt_cache_key for all their users, so the histories say more."""
    assert explicit_key(b"k", {}) not in {explicit_key(b"other", {}), None}
    assert explicit_key(b"k", {"prompt_cache_key": "a"}) != explicit_key(b"k", {})
    assert explicit_key(None, {"prompt_cache_key": "k"}) is None


def test_a_cache_key_names_a_conversation_whose_history_was_cut(memory):
    """As by a client that keeps the last messages alone; what is held of them nobody knows."""
    key = {"prompt_cache_key": "k"}
    served(memory, chat(user("a"), **key), "A", 7, home=3)
    cut = chat(assistant("A "), user("b"), **key)

    found = read_history(cut).find(memory)
    assert (found.note.conversation, found.note.home, found.place) == (7, 3, Place.DIFFERS)
    assert (
        read_history(chat(user("a"), assistant("A"), user("b"), **key)).find(memory).place
        is Place.CONTINUES
    )
    assert read_history(chat(user("new"), **key)).find(memory) is None
    assert read_history(cut | {"prompt_cache_key": ""}).find(memory) is None


def test_who_shows_another_answer_is_another_conversation_under_a_cache_key(memory):
    """As the second user of an application is whose history nobody knows here."""
    key = {"prompt_cache_key": "app"}
    served(memory, chat(user("a"), **key), "A", 7, home=3)
    other = chat(user("c"), assistant("C"), user("d"), **key)

    assert read_history(other).find(memory) is None


def test_a_cache_key_of_two_conversations_names_neither_for_good(memory):
    """It is an application's; the one that spoke last has no claim to it."""
    key = {"prompt_cache_key": "app"}
    served(memory, chat(user("a"), **key), "A", 7)
    for _ in range(2):
        served(memory, chat(user("b"), **key), "B", 8)

    assert read_history(chat(assistant("B"), user("c"), **key)).find(memory) is None


def system(text):
    return {"role": "system", "content": text}


LONG = [system("It is 12:00:01"), user("a"), assistant("A"), user("b"), assistant("B"), user("c")]


@pytest.mark.parametrize(
    ("at", "place"),
    [
        (None, Place.CONTINUES),
        (0, Place.DIFFERS),
        (1, Place.DIFFERS),
        (2, Place.DIFFERS),
        (3, Place.DIFFERS),
        (4, Place.CONTINUES),
    ],
    ids=["nothing", "system", "first question", "first answer", "last question", "last answer"],
)
def test_a_named_conversation_notices_an_edit_wherever_it_is(memory, at, place):
    """Of equal length too, as a clock in the system message is.

    Only behind the last question nothing is claimed, so the last answer may be another.
    """
    name = explicit_key(b"session", chat())
    history = read_history(chat(*LONG[:4]), name)
    history.leave(memory, Note(1, 10, history.size, 1, 3, 2, 0, 0), Answer("B", tokens=5))

    edited = [message | {"content": "It is 12:00:02"} if i == at else message
              for i, message in enumerate(LONG)]  # fmt: skip

    assert read_history(chat(*edited), name).find(memory).place is place


@pytest.mark.parametrize("name", [None, b"n" * 16], ids=["found", "named"])
def test_behind_reasoning_only_the_question_is_held(memory, name):
    """The next prompt leaves the reasoning out, so no KV from there on is of use to it."""
    body = chat(user("a question"))
    history = read_history(body, name)
    note = Note(7, 100, history.size, 1, 2, 1, 0, 0)
    history.leave(memory, note, Answer("an answer", tokens=900, reasoned=True))

    later = read_history(chat(user("a question"), assistant("an answer"), user("more")), name)
    found = later.find(memory)

    assert (found.note.conversation, found.note.context_tokens) == (7, 100)
    assert found.note.size == len("a question")
    assert later.texts_behind(found.note) == ["an answer", "more"]


@pytest.mark.parametrize(
    ("shown", "context_tokens", "size"),
    [("an answer of some words", 150, 33), ("changed", 100, 10)],
    ids=["as it was", "changed"],
)
def test_what_a_changed_answer_was_is_not_held_for_a_named_conversation(
    memory, shown, context_tokens, size
):
    """The question is; a trimmed answer is none that was changed."""
    name = explicit_key(b"session", chat())
    history = read_history(chat(user("a question")), name)
    note = Note(7, 100, history.size, 1, 2, 1, 0, 0)
    history.leave(memory, note, Answer(" an answer of some words", tokens=50))

    found = read_history(chat(user("a question"), assistant(shown), user("x")), name).find(memory)

    assert found.place is Place.CONTINUES
    assert found.note.context_tokens == context_tokens
    assert found.note.size == pytest.approx(size, abs=1)


@pytest.mark.parametrize("name", [None, b"n" * 16], ids=["found", "named"])
def test_a_question_that_is_asked_again_is_held_up_to_its_end(memory, name):
    """The answer that it once got stands in no prompt now, so it is no context."""
    opening = [user("a question"), assistant("an answer"), user("more")]
    history = read_history(chat(*opening), name)
    note = Note(7, 100, history.size, 1, 2, 2, 0, 0)
    history.leave(memory, note, Answer("a long answer", tokens=900))

    again = read_history(chat(*opening), name)
    found = again.find(memory)

    assert (found.place, found.note.context_tokens) == (Place.REPEATS, 100)
    assert found.note.size == again.size
    assert again.texts_behind(found.note) == []


def test_two_conversations_behind_the_same_reasoned_answer_have_either_home(memory):
    """Question and answer are equal, so either node holds what the next turn needs."""
    for conversation, home in ((1, 0), (2, 1)):
        history = read_history(chat(user("hello")))
        note = Note(conversation, 10, history.size, 1, home, 1, 0, 0)
        history.leave(memory, note, Answer("hi", tokens=50, reasoned=True))

    found = read_history(chat(user("hello"), assistant("hi"), user("x"))).find(memory)

    assert not found.note.flags & SPLIT


@pytest.mark.parametrize("name", [None, b"n" * 16], ids=["found", "named"])
@pytest.mark.parametrize(
    ("content", "size"),
    [
        ("look", 4),
        ("\u4f60\u597d", 6),
        ([{"type": "text", "text": "look"}], 4),
        (
            [
                {"type": "text", "text": "look"},
                {
                    "type": "image_url",
                    "image_url": {"url": "data:image/png;base64," + "A" * 90_000},
                },
            ],
            4 + MEDIA_LENGTH,
        ),
    ],
    ids=["text", "wide", "parts", "image"],
)
def test_a_length_is_of_texts_and_the_same_however_one_is_known(name, content, size):
    """An image's base64 says nothing of its tokens; a length is in bytes, named or not."""
    assert read_history(chat(user(content)), name).size == size


def test_memory_is_bounded_and_the_longest_unused_goes():
    """A full bucket evicts its oldest note and counts it."""
    memory = Memory(mmap(-1, Memory.bytes_for(1)), 0, 1)
    keys = [bytes([at]) * 16 for at in range(1, 11)]
    for at, key in enumerate(keys):
        memory.put(key, Note(at, 1, 1, 100 + at, 0, 1, 0, 0))

    held = [memory.get(key) is not None for key in keys]

    assert held == [False, False, *[True] * 8]
    assert (memory.evicted, memory.used(), memory.capacity) == (2, 8, 8)


def test_used_counts_the_notes_of_every_bucket_and_nothing_before_them():
    """The table begins somewhere in what all workers share."""
    memory = Memory(mmap(-1, 24 + Memory.bytes_for(64)), 24, 64)
    memory._buffer[:24] = b"x" * 24
    for at in range(40):
        memory.put(hashlib.md5(b"%d" % at).digest(), Note(at, 1, 1, 100, 0, 1, 0, 0))

    assert (memory.used(), memory.evicted) == (40, 0)


def test_a_free_place_behind_a_key_that_ends_in_zero_is_free():
    """Taking it evicts nobody."""
    memory = Memory(mmap(-1, Memory.bytes_for(1)), 0, 1)
    keys = [bytes([*[at] * 15, 0]) for at in range(1, 9)]
    for at, key in enumerate(keys):
        memory.put(key, Note(at, 1, 1, 100 + at, 0, 1, 0, 0))

    assert all(map(memory.get, keys))
    assert memory.evicted == 0


@pytest.mark.parametrize("lengths", [(2**32, 1), (1, 2**32)], ids=["tokens", "size"])
def test_what_no_engine_serves_stays_unknown(memory, lengths):
    """A length beyond a note's field breaks no turn."""
    memory.put(b"k" * 16, Note(1, *lengths, 4, 0, 1, 0, 0))

    assert memory.get(b"k" * 16) is None


def test_a_torn_note_reads_as_unknown():
    """Two writers at once cost a note, never a wrong one."""
    buffer = mmap(-1, Memory.bytes_for(1))
    memory = Memory(buffer, 0, 1)
    key = b"k" * 16
    memory.put(key, Note(1, 2, 3, 4, 0, 1, 0, 0))
    at = buffer.find(key) + 8 * 16
    buffer[at] ^= 0xFF

    assert memory.get(key) is None
    assert memory.torn == 1


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=10,
)


@given(st.dictionaries(st.sampled_from(["messages", "prompt", "model", "tools"]), json_values))
def test_any_json_has_a_history_or_none(body):
    """Identity never raises on what a client may send; the engine is the one to refuse."""
    history = read_history(body)

    assert history is None or history.size >= 0
