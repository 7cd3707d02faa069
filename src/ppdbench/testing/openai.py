"""The OpenAI-compatible shell around anything that makes tokens.

:class:`OpenAiShell` does HTTP, JSON, streaming and errors in vLLM's manner; a
:class:`TokenEngine` decides what comes and when. FakeEngine and the simulated nodes are both
engines in this shell.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from ppdbench.cluster.contract import NOT_AN_ENGINE
from ppdbench.http.messages import Headers
from ppdbench.http.server import Incoming, Responder, Server
from ppdbench.testing import tokens

EVENT_STREAM: Headers = ((b"content-type", b"text/event-stream; charset=utf-8"),)
VERSION = "0.32.0" + NOT_AN_ENGINE
"""The vLLM whose manner the shell follows, and a local mark that says it is none."""

DEFAULT_OUTPUT_TOKENS = 16
"""What vLLM answers to a completion that says nothing."""

METRICS_TEXT: Headers = ((b"content-type", b"text/plain; version=0.0.4; charset=utf-8"),)


@dataclass(slots=True, eq=False)
class Generation:
    """What a client asks for. ``index`` counts generations of this server from 0."""

    id: str
    index: int
    prompt: list[int]
    max_tokens: int
    received_at_s: float
    chat: bool
    stream: bool
    cache_salt: str = ""
    kv_transfer_params: dict[str, Any] | None = None
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
    headers: Headers = ()
    cached_tokens: int | None = None


class Answer:
    """How an engine answers one generation: ``token`` any number of times, then one end.

    ``sent_at_s`` holds when each chunk with tokens was really given to the kernel.
    """

    def __init__(self, model: str, generation: Generation, responder: Responder) -> None:
        self.generation = generation
        self.responder = responder
        self.sent_at_s: list[float] = []
        self.token_ids: list[int] = []
        self._model = model

    @property
    def closed(self) -> bool:
        """Whether nothing more will reach the client."""
        return self.responder.gone or self.responder.finished

    def token(self, ids: Sequence[int]) -> None:
        """Tokens that are ready now; one chunk when streamed."""
        first = not self.token_ids
        self.token_ids += ids
        if not self.generation.stream:
            self.sent_at_s.append(time.monotonic())
            return
        self._start()
        choice = self._delta(ids)
        if first and self.generation.return_token_ids:
            choice["prompt_token_ids"] = self.generation.prompt
        event = self._event(self._chunk([choice]))
        self.sent_at_s.append(time.monotonic())
        self.responder.write(event)

    def finish(self, reason: str = "length", params: dict[str, Any] | None = None) -> None:
        """The reply is complete. ``params`` are ``kv_transfer_params``, unstreamed answers only."""
        if self.generation.stream:
            self._finish_stream(reason)
        else:
            self.responder.send_json(200, self._whole(reason, params))

    def finish_silently(self) -> None:
        """End the HTTP answer without a finish reason or ``[DONE]``, as a dying engine may."""
        self._start()
        self.responder.end()

    def refuse(self, status: int, message: str, kind: str = "BadRequestError") -> None:
        """An error answer in vLLM's form; in a stream that has begun, an error event."""
        error = {"error": {"message": message, "type": kind, "param": None, "code": status}}
        if self.responder.started:
            self.responder.write(self._event(error))
            self.responder.write(b"data: [DONE]\n\n")
            self.responder.end()
        else:
            self.responder.send_json(status, error)

    def abort(self) -> None:
        """Close the connection as it is."""
        self.responder.abort()

    def _start(self) -> None:
        if self.responder.started:
            return
        self.responder.start(200, EVENT_STREAM)
        if self.generation.chat:
            role = {"index": 0, "delta": {"role": "assistant", "content": ""}}
            self.responder.write(self._event(self._chunk([role | {"finish_reason": None}])))

    def _finish_stream(self, reason: str) -> None:
        self._start()
        last = self._delta(()) | {"finish_reason": reason}
        end = self._event(self._chunk([last]))
        if self.generation.include_usage:
            end += self._event(self._chunk([]) | {"usage": self._usage()})
        self.responder.write(end + b"data: [DONE]\n\n")
        self.responder.end()

    def _event(self, document: dict[str, Any]) -> bytes:
        return b"data: " + orjson.dumps(document) + b"\n\n"

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.generation.chat else "text_completion"
        chunk = {"id": self.generation.id, "object": kind, "created": 0, "model": self._model}
        chunk["choices"] = choices
        if self.generation.continuous_usage and choices:
            chunk["usage"] = self._usage()
        return chunk

    def _delta(self, ids: Sequence[int]) -> dict[str, Any]:
        text = tokens.decode(ids)
        choice: dict[str, Any] = {"index": 0, "finish_reason": None}
        choice |= {"delta": {"content": text}} if self.generation.chat else {"text": text}
        if self.generation.return_token_ids:
            choice["token_ids"] = list(ids)
        return choice

    def _whole(self, reason: str, params: dict[str, Any] | None) -> dict[str, Any]:
        text = tokens.decode(self.token_ids)
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason}
        if self.generation.chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        if self.generation.return_token_ids:
            choice["token_ids"] = self.token_ids
            choice["prompt_token_ids"] = self.generation.prompt
        whole = self._chunk([choice])
        whole["object"] = "chat.completion" if self.generation.chat else "text_completion"
        return whole | {"usage": self._usage(), "kv_transfer_params": params}

    def _usage(self) -> dict[str, Any]:
        prompt, output = len(self.generation.prompt), len(self.token_ids)
        usage: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": output}
        usage["total_tokens"] = prompt + output
        if self.generation.cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self.generation.cached_tokens}
        return usage


class TokenEngine(Protocol):
    """Makes tokens. ``generate`` returns at once and answers later through ``answer``."""

    model: str
    max_model_len: int

    def generate(self, generation: Generation, answer: Answer) -> None: ...
    def cancel(self, generation: Generation) -> None:
        """The client has left."""
        ...

    def refused(self, kv_transfer_params: dict[str, Any] | None) -> None:
        """A request with these parameters was refused before it became a generation."""
        ...

    def metrics(self) -> str:
        """Prometheus text with vLLM's names."""
        ...

    def reset_prefix_cache(self) -> bool: ...


class _RefusedError(Exception):
    """A request that never becomes a generation."""

    def __init__(self, status: int, message: str, kind: str = "BadRequestError") -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind


class OpenAiShell:
    """Serves ``engine``. ``routes`` adds paths; they win over the shell's own."""

    def __init__(
        self,
        engine: TokenEngine,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        routes: dict[str, Callable[[Incoming, Responder], None]] | None = None,
    ) -> None:
        self._engine = engine
        self._count = itertools.count()
        self._server = Server(self._handle, host=host, port=port)
        self._routes: dict[str, Callable[[Incoming, Responder], None]] = {
            "/v1/completions": self._generate,
            "/v1/chat/completions": self._generate,
            "/v1/models": self._models,
            "/version": lambda _, reply: reply.send_json(200, {"version": VERSION}),
            "/health": lambda _, reply: reply.send(200, b""),
            "/metrics": lambda _, reply: reply.send(200, engine.metrics().encode(), METRICS_TEXT),
            "/reset_prefix_cache": lambda _, reply: reply.send_json(
                200, {"success": engine.reset_prefix_cache()}
            ),
            **(routes or {}),
        }

    def __repr__(self) -> str:
        return f"<OpenAiShell {self._engine!r} on {self._server!r}>"

    @property
    def url(self) -> str:
        return self._server.url

    @property
    def port(self) -> int:
        return self._server.port

    async def start(self) -> None:
        await self._server.start()

    async def close(self) -> None:
        await self._server.close()

    def _handle(self, incoming: Incoming, responder: Responder) -> None:
        route = self._routes.get(incoming.path)
        if route is None:
            responder.send_json(404, {"detail": "Not Found"})
        else:
            route(incoming, responder)

    def _models(self, incoming: Incoming, responder: Responder) -> None:  # noqa: ARG002
        model: dict[str, object] = {"id": self._engine.model, "object": "model"}
        model |= {"owned_by": "ppdbench", "max_model_len": self._engine.max_model_len}
        responder.send_json(200, {"object": "list", "data": [model]})

    def _generate(self, incoming: Incoming, responder: Responder) -> None:
        document: Any = None
        try:
            document = _parse(incoming.body)
            generation = self._read(incoming, document)
        except _RefusedError as refusal:
            params = document.get("kv_transfer_params") if isinstance(document, dict) else None
            if isinstance(params, dict):
                self._engine.refused(params)
            error = {"message": refusal.message, "type": refusal.kind, "param": None}
            responder.send_json(refusal.status, {"error": error | {"code": refusal.status}})
            return
        responder.on_gone = lambda: self._engine.cancel(generation)
        self._engine.generate(generation, Answer(self._engine.model, generation, responder))

    def _read(self, incoming: Incoming, document: dict[str, Any]) -> Generation:
        chat = incoming.path.endswith("/chat/completions")
        model = _field(document, "model", str)
        if model not in (None, self._engine.model):
            raise _RefusedError(404, f"The model `{model}` does not exist.", "NotFoundError")
        prompt = _prompt_ids(document, chat=chat)
        wanted = _wanted_tokens(document)
        if len(prompt) + wanted > self._engine.max_model_len:
            raise _RefusedError(
                400,
                f"This model's maximum context length is {self._engine.max_model_len} tokens; "
                f"{len(prompt)} in and {wanted} out were asked for.",
            )
        options = _field(document, "stream_options", dict) or {}
        stream = bool(_field(document, "stream", int))
        cache_salt = _field(document, "cache_salt", str) or ""
        kv_transfer_params = _field(document, "kv_transfer_params", dict)
        index = next(self._count)
        asked_id = incoming.get(b"x-request-id")
        return Generation(
            id=asked_id.decode("latin-1") if asked_id else f"cmpl-{index}",
            index=index,
            prompt=prompt,
            max_tokens=wanted,
            received_at_s=incoming.received_at_s,
            chat=chat,
            stream=stream,
            cache_salt=cache_salt,
            kv_transfer_params=kv_transfer_params,
            include_usage=bool(options.get("include_usage")),
            continuous_usage=bool(options.get("continuous_usage_stats")),
            return_token_ids=bool(document.get("return_token_ids")),
            headers=incoming.headers,
        )


def _parse(body: bytes) -> dict[str, Any]:
    try:
        document = orjson.loads(body)
    except ValueError as error:
        raise _RefusedError(400, f"the body is no JSON: {error}") from None
    if not isinstance(document, dict):
        raise _RefusedError(400, "the body is no JSON object")
    return document


_KINDS = {str: "a text", int: "a whole number or a truth value", dict: "an object"}


def _field(document: dict[str, Any], name: str, kind: type) -> Any:  # noqa: ANN401  (``kind``)
    """A field of that kind, or ``None`` where it is missing or null."""
    value = document.get(name)
    if value is None or isinstance(value, kind):
        return value
    raise _RefusedError(400, f"{name} must be {_KINDS[kind]}, not {value!r:.40}")


def _wanted_tokens(document: dict[str, Any]) -> int:
    for name in ("max_completion_tokens", "max_tokens"):
        wanted: int | None = _field(document, name, int)
        if wanted is not None and wanted < 1:
            raise _RefusedError(400, f"{name} must be at least 1, got {wanted}.")
        if wanted is not None:
            return wanted
    return DEFAULT_OUTPUT_TOKENS


def _chat_ids(messages: object) -> list[int]:
    if not isinstance(messages, list) or not messages:
        raise _RefusedError(400, "messages must be a list that is not empty")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise _RefusedError(400, f"a message must be an object with a role: {message!r:.40}")
        if not isinstance(message.get("content"), str | list | None):
            raise _RefusedError(400, "a message's content must be a text, a list of parts or null")
    return tokens.encode_chat(messages)


def _prompt_ids(document: dict[str, Any], *, chat: bool) -> list[int]:
    """The prompt as ids: a text, a list of ids, or a list that holds one of these."""
    if chat:
        return _chat_ids(document.get("messages"))
    prompt = document.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str):
        prompt = tokens.encode(prompt)
    if not isinstance(prompt, list) or not prompt or not all(isinstance(i, int) for i in prompt):
        raise _RefusedError(400, "prompt must be a text or a list of token ids, and not empty")
    return prompt
