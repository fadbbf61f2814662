"""The application with an engine of the tests: what it answers when the engine does what no engine should."""

import asyncio
import json

import httpx
import pytest

from jaxkv.models.sampling import Sampling
from jaxkv.server.app import Limits, Server
from jaxkv.server.client import EngineEnded
from jaxkv.serving import AcceptanceStats, EngineInfo, EngineStats, HostTime, Output, PrefixCacheStats
from jaxkv.text.tokenizer import Tokenizer
from server.checkpoint import VOCABULARY


class Outputs:
    """Outputs that a test gives, after which nothing comes until the request is cancelled."""

    def __init__(self, given):
        self._given, self.reason = list(given), asyncio.get_running_loop().create_future()

    def cancel(self, finish_reason="cancelled"):
        if not self.reason.done():
            self.reason.set_result(finish_reason)

    def __aiter__(self):
        return self

    async def __anext__(self):
        if not self._given:
            return Output([], [], await self.reason)
        if isinstance(output := self._given.pop(0), Exception):
            raise output
        return output


class Engine:
    """Gives every request the same outputs."""

    def __init__(self, *given, starts=True):
        self._given, self._starts = given, starts
        self.submitted, self.outputs = [], []

    async def started(self):
        if not self._starts:
            await asyncio.Event().wait()
        return EngineInfo(max_len=512, max_requests=4, stop_tokens=frozenset([1]))

    async def submit(self, prompt, **options):
        self.submitted.append((prompt, options))
        self.outputs.append(Outputs(self._given))
        return self.outputs[-1]

    async def stats(self):
        return EngineStats(1, 2, 8, 6, PrefixCacheStats(), AcceptanceStats(), HostTime())


def ids(text):
    return [VOCABULARY.index(character) for character in text]


def answered(folder, engine, body, *, then=None, limits=Limits(), path="/v1/completions"):  # noqa: B008
    """The status of a request, and its body or events; `then` is called with the server while the request runs."""

    async def main():
        server = Server(engine, name="tiny", tokenizer=Tokenizer(folder), chat=None, limits=limits)
        transport = httpx.ASGITransport(server.app)
        async with server.app.router.lifespan_context(server.app):
            await asyncio.sleep(0)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                answering = asyncio.create_task(client.post(path, json=body))
                if then is not None:
                    while not engine.outputs:
                        await asyncio.sleep(0)
                    await then(server)
                answer = await answering
                metrics = (await client.get("/metrics")).text if then is None else ""
        if "event-stream" in answer.headers["content-type"]:
            events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
            return answer.status_code, [json.loads(event) if event != "[DONE]" else event for event in events], metrics
        return answer.status_code, answer.json(), metrics

    return asyncio.run(main())


BODY = {"prompt": "ab", "max_tokens": 9}
TWO = Output(ids("xy"), [], None), Output([*ids("z"), 1], [], "stop")


def test_options_reach_the_engine(folder):
    engine = Engine(*TWO)
    body = BODY | {"temperature": 0.5, "seed": 2**32 + 3, "top_k": -1, "priority": 2, "cache_salt": "a"}
    status, found, metrics = answered(folder, engine, body)
    assert (status, found["choices"][0]["text"], found["choices"][0]["finish_reason"]) == (200, "xyz", "stop")
    assert found["usage"] == {"prompt_tokens": 2, "completion_tokens": 4, "total_tokens": 6}
    ((prompt, options),) = engine.submitted
    assert prompt == ids("ab")
    assert options == {
        "max_tokens": 9,
        "sampling": Sampling(0.5, seed=3),
        "stop": frozenset([1]),
        "priority": 2,
        "logprobs": None,
        "cache_salt": "a",
    }
    for line in ("jaxkv_prompt_tokens_total 2.0", "jaxkv_generated_tokens_total 4.0", "jaxkv_cache_usage 0.25"):
        assert line in metrics
    assert 'jaxkv_requests_total{finish_reason="stop"} 1.0' in metrics
    assert "jaxkv_time_to_first_token_seconds_count 1.0" in metrics
    assert "jaxkv_time_between_tokens_seconds_count 2.0" in metrics


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("last", "status", "message"),
    [
        (EngineEnded("the engine has ended"), 503, "the engine has ended"),
        (Output([], [], "nan"), 503, "the logits of the model are NaN"),
    ],
)
def test_an_engine_that_fails(folder, last, status, message, stream):
    found_status, found, _ = answered(folder, Engine(TWO[0], last), BODY | {"stream": stream})
    if stream:
        assert found_status == 200
        *first, found = found
        assert "".join(event["choices"][0]["text"] for event in first) == "xy"
    else:
        assert found_status == status
    assert (found["error"]["message"], found["error"]["type"]) == (message, "server_error")


@pytest.mark.parametrize("stream", [False, True])
def test_requests_that_do_not_end_before_the_server_does(folder, stream):
    status, found, _ = answered(folder, Engine(TWO[0]), BODY | {"stream": stream}, then=lambda server: server.drain(0))
    assert (found[-1] if stream else found)["error"]["message"] == "the server is shutting down"
    assert status == (200 if stream else 503)


def test_several_prompts_of_which_one_fails(folder):
    """All others are cancelled."""
    engine = Engine(TWO[0], EngineEnded("gone"))
    status, found, _ = answered(folder, engine, BODY | {"prompt": ["a", "b", "c"]})
    assert (status, found["error"]["message"]) == (503, "gone")
    assert [outputs.reason.result() for outputs in engine.outputs] == ["cancelled"] * 3


def test_before_the_engine_serves(folder):
    async def main():
        server = Server(Engine(starts=False), name="tiny", tokenizer=Tokenizer(folder), chat=None, limits=Limits())
        async with (
            server.app.router.lifespan_context(server.app),
            httpx.AsyncClient(transport=httpx.ASGITransport(server.app), base_url="http://test") as client,
        ):
            paths = ("/health", "/metrics", "/version", "/v1/models")
            return [(await client.get(path)).status_code for path in paths], await client.post(
                "/v1/completions", json=BODY
            )

    statuses, refused = asyncio.run(main())
    assert statuses == [503, 503, 200, 200]
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")


def test_a_model_without_a_chat_template(folder):
    body = {"messages": [{"role": "user", "content": "a"}]}
    status, found, _ = answered(folder, Engine(), body, path="/v1/chat/completions")
    assert (status, found["error"]["message"]) == (400, "the model has no chat template: use /v1/completions")
