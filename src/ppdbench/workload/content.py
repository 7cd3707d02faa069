"""The words of a schedule, for real engines. A simulation needs only the counts.

Token-id prompts of synthetic conversations are drawn by the driver (load/history.py): a list of
ids has its length by construction. Here are the recorded texts, and text of a planned length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ppdbench.core.conversation import Arrival, Conversation, Turn
from ppdbench.core.errors import WorkloadError
from ppdbench.core.seeds import rng_for
from ppdbench.workload.chat import Chat
from ppdbench.workload.tokens import Tokenizer

_ATTEMPTS = 20
_SPACES = ("Ġ", "▁")
"""How byte-level and SentencePiece vocabularies write a leading space."""


def with_texts(arrivals: Sequence[Arrival], chats: Sequence[Chat]) -> list[Arrival]:
    """Recorded words put into a schedule of their counts; one chat per arrival, in order."""
    return [
        Arrival(arrival.at_s, _texts(arrival.conversation, chat))
        for arrival, chat in zip(arrivals, chats, strict=True)
    ]


def _texts(conversation: Conversation, chat: Chat) -> Conversation:
    turns = [
        replace(turn, text=text, reply_text=reply)
        for turn, text, reply in zip(conversation.turns, chat.texts, chat.replies, strict=False)
    ]
    return replace(conversation, turns=tuple(turns), context_text=chat.context_text or None)


def with_token_ids(arrivals: Sequence[Arrival], tokenizer: Tokenizer) -> list[Arrival]:
    """The texts as ids of the served model, so that client and server count the same.

    Turns without text are left alone. Counts become those of the ids.
    """
    return [Arrival(arrival.at_s, _ids(arrival.conversation, tokenizer)) for arrival in arrivals]


def _ids(conversation: Conversation, tokenizer: Tokenizer) -> Conversation:
    if conversation.turns[0].text is None:
        return conversation
    context = tuple(tokenizer.encode(conversation.context_text or ""))
    return replace(
        conversation,
        turns=tuple(_turn_of_ids(turn, tokenizer) for turn in conversation.turns),
        context_tokens=len(context),
        context_token_ids=context,
    )


def _turn_of_ids(turn: Turn, tokenizer: Tokenizer) -> Turn:
    ids = tuple(tokenizer.encode(turn.text or ""))
    reply = tuple(tokenizer.encode(turn.reply_text or ""))
    return replace(turn, token_ids=ids, new_tokens=len(ids), reply_token_ids=reply)


class TextMaker:
    """Text of planned lengths for synthetic conversations, different for each of them.

    Raises:
        WorkloadError: the tokenizer has no whole words, or no draw encodes back to its length.
    """

    def __init__(self, tokenizer: Tokenizer, root_seed: int) -> None:
        self._tokenizer, self._seed = tokenizer, root_seed
        self._words = _whole_words(tokenizer)

    def __repr__(self) -> str:
        return f"<TextMaker {self._tokenizer.name}, {len(self._words)} words>"

    def fill(self, conversation: Conversation) -> Conversation:
        """The same conversation with a text per turn, and one for its context."""
        name, tokens = conversation.id, conversation.context_tokens
        turns = [
            replace(turn, text=self.text(turn.new_tokens, name, number))
            for number, turn in enumerate(conversation.turns, start=1)
        ]
        context = self.text(tokens, conversation.shared_id or name, 0) if tokens else None
        return replace(conversation, turns=tuple(turns), context_text=context)

    def text(self, length: int, *names: object) -> str:
        """Words that encode to ``length`` tokens, verified; drawn anew where they do not."""
        rng = rng_for(self._seed, "text", *names)
        for _ in range(_ATTEMPTS):
            chosen = [self._words[i] for i in rng.integers(len(self._words), size=length)]
            text = self._tokenizer.decode(chosen)
            if len(self._tokenizer.encode(text)) == length:
                return text
        raise WorkloadError(
            f"tokenizer {self._tokenizer.name}: no text of {length} tokens encodes back to that "
            f"length in {_ATTEMPTS} draws; use token-id prompts, whose length always holds"
        )


def _whole_words(tokenizer: Tokenizer) -> list[int]:
    """Ids of lower-case words with a space before them: such neighbours never merge."""
    vocabulary = tokenizer.inner.get_vocab(with_added_tokens=False)
    words = sorted(index for piece, index in vocabulary.items() if _is_whole_word(piece))
    if not words:
        raise WorkloadError(
            f"tokenizer {tokenizer.name} has no whole words to make text of; use token-id prompts"
        )
    return words


def _is_whole_word(piece: str) -> bool:
    word = piece[1:]
    return (
        piece[:1] in _SPACES
        and len(word) > 2
        and word.isascii()
        and word.islower()
        and word.isalpha()
    )
