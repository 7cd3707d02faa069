"""The client that most users have, through the router to fake engines."""

from __future__ import annotations

import pytest

openai = pytest.importorskip("openai")


@pytest.mark.slow
async def test_a_streaming_chat_of_five_turns_by_the_openai_package(bench_for):
    """All turns succeed, the first goes remote, the later ones stay on one node."""
    bench = await bench_for("1P_2D", policy="local")
    messages, seen = [], []
    async with openai.AsyncOpenAI(base_url=f"{bench.router.url}/v1", api_key="none") as client:
        models = [model.id async for model in await client.models.list()]
        for turn in range(5):
            messages.append({"role": "user", "content": f"question {turn}: and then?"})
            raw = await client.chat.completions.with_raw_response.create(
                model="fake", messages=messages, stream=True, max_tokens=12
            )
            seen.append((raw.headers["x-ppd-route"], raw.headers["x-ppd-node"]))
            pieces = [chunk.choices[0].delta.content or "" async for chunk in raw.parse()]
            messages.append({"role": "assistant", "content": "".join(pieces)})

    assert models == ["fake"]
    assert [route for route, _ in seen] == ["remote", *["local"] * 4]
    assert len({node for _, node in seen}) == 1
    assert all(message["content"] for message in messages)


@pytest.mark.slow
async def test_an_engines_error_is_the_openai_packages_error(bench_for):
    """A prompt that is too long raises what it raises without a router."""
    bench = await bench_for("1P_1D", engine=lambda _: {"max_model_len": 20})
    async with openai.AsyncOpenAI(
        base_url=f"{bench.router.url}/v1", api_key="none", max_retries=0
    ) as client:
        with pytest.raises(openai.BadRequestError, match="maximum context length"):
            await client.completions.create(model="fake", prompt="word " * 50, max_tokens=5)
