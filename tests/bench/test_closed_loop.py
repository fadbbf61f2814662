"""`jaxkv bench serve --url` and `--http`: what clients read of streams, what is counted, and mistakes."""

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from jaxkv.bench import closed_loop
from jaxkv.bench.clients import Answered, _Connection, completion, get, model_name
from jaxkv.bench.closed_loop import Batch, Served
from jaxkv.cli import main
from serving.toy_engines import engine
from support import toy_model
from support.jobs import free_port
from support.toy_model import prompt

MODELS = Path(__file__).parents[1] / "data" / "models"
HEAD = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
PAUSE, PAUSE_SECONDS = "<pause>", 0.2
"""Where a server waits before it writes the rest of an answer."""
USAGE = {"choices": [], "usage": {"completion_tokens": 7}}


def event(found) -> str:
    return f"data: {json.dumps(found)}\n\n"


def text(text) -> str:
    return event({"choices": [{"text": text}], "usage": None})


def chunked(*parts: str) -> str:
    return "".join(f"{len(part.encode()):x}\r\n{part}\r\n" for part in parts)


def stream(*parts: str) -> str:
    return HEAD + chunked(*parts, "data: [DONE]\n\n") + "0\r\n\r\n"


def refused(status: int, body: str) -> str:
    return f"HTTP/1.1 {status} No\r\nContent-Length: {len(body)}\r\n\r\n{body}"


def ask(*answers: str) -> tuple[list[Answered], list[int]]:
    """How a client reads each of a server's answers, and how many requests each of its connections has sent.

    The server closes the connection after an answer that is not complete.
    """
    left, connections = iter(answers), list[int]()

    async def serve(reader, writer):
        number = len(connections)
        connections.append(0)
        while head := await reader.readline():
            assert head == b"POST /v1/completions HTTP/1.1\r\n"
            while (line := await reader.readline()) != b"\r\n":
                name, _, value = line.partition(b": ")
                length = int(value) if name == b"Content-Length" else 0
            body = json.loads(await reader.readexactly(length))
            assert (body["prompt"], body["max_tokens"], body["ignore_eos"]) == ([5, 6], 7, True)
            connections[number] += 1
            answer = next(left)
            first, pause, rest = answer.partition(PAUSE)
            writer.write(first.encode())
            await asyncio.sleep(PAUSE_SECONDS if pause else 0)
            writer.write(rest.encode())
            if not answer.endswith("\r\n\r\n") and not answer.endswith("}"):
                break
        writer.close()

    async def ask():
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            connection = _Connection(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
            found = [await connection.ask(completion("model", [5, 6], 7)) for _ in answers]
            connection.close()
            return found

    return asyncio.run(ask()), connections


def test_events_of_a_stream_are_timed_and_tokens_are_those_of_its_usage():
    whole = stream(text("ab"), text(""), text("c"), event(USAGE))
    # Frames and events need not agree, and lines may end as in HTTP.
    first = text("data: a")
    parts = (first[:9], first[9:] + text("b")[:-1], "\n: a comment\n\n" + text("c"), event(USAGE).replace("\n", "\r\n"))
    last = event({"choices": [{"text": "a"}], "usage": {"completion_tokens": 7}})  # the text and the usage in one
    found, connections = ask(whole, stream(*parts), stream(last))
    assert [(each.error, each.tokens, len(each.times)) for each in found] == [("", 7, 3), ("", 7, 3), ("", 7, 1)]
    assert connections == [3]
    (slow,), _ = ask(HEAD + chunked(text("a")) + PAUSE + stream(text("b"), event(USAGE)).removeprefix(HEAD))
    assert slow.sent < slow.times[0] < slow.times[1] - PAUSE_SECONDS / 4


def test_errors_are_reported_and_later_requests_succeed():
    reason = '{"error": {"message": "too many"}}'
    answers = {
        refused(429, reason): "the server answers with the status 429: too many",
        refused(500, "{}"): "the server answers with the status 500",
        refused(200, "{}"): "the server answers without a stream of chunks",
        HEAD + chunked(text("a")) + "1f\r\ndata: ": "the stream broke off: IncompleteReadError(",
        HEAD + chunked(text("a")): "the stream broke off: ValueError(",
        HEAD + "x\r\n": "the stream broke off: ValueError(",
        stream(text("a")): "the stream ends without usage",
        stream(text("a"), f"data: {reason}\n\n"): "the stream ends without usage: too many",
        stream(event(USAGE)): "the stream ends without usage",
        stream(): "the stream broke off: JSONDecodeError(",
    }
    good = stream(text("a"), event(USAGE))
    found, connections = ask(*answers, good, good)
    for each, message in zip(found, answers.values(), strict=False):
        assert each.error.startswith(message)
    assert [(each.error, each.tokens) for each in found[-2:]] == [("", 7), ("", 7)]
    assert connections == [1] * len(answers) + [2]


def test_a_server_that_is_not_there():
    found, url = [], f"http://127.0.0.1:{free_port()}"
    found.append(asyncio.run(_Connection(url).ask(b"")))
    assert "Connection refused" in found[0].error or "Connect call failed" in found[0].error
    with pytest.raises(OSError, match=f"{url}/v1/models cannot be reached: .*refused"):
        get(f"{url}/v1/models")
    with pytest.raises(SystemExit, match=f"^jaxkv bench serve: {url}/v1/models cannot be reached: "):
        main(["bench", "serve", str(MODELS / "youtu"), "--url", url])


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (refused(401, '{"error": {"message": "a key"}}'), "/v1/models answers with the status 401: a key"),
        (refused(200, "[]"), "/v1/models does not answer with a JSON object"),
        (refused(200, "x"), "/v1/models does not answer with a JSON object"),
        (refused(200, '{"data": []}'), "/v1/models names no model"),
        ("not HTTP\r\n\r\n", "/v1/models cannot be reached: BadStatusLine"),
    ],
)
def test_a_server_without_openais_interface(answer, message):
    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer.encode())
        writer.close()

    async def ask():
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            await asyncio.to_thread(model_name, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")

    with pytest.raises(OSError, match=message):
        asyncio.run(ask())


def test_what_is_counted():
    answered = [
        Answered(sent=0, times=[1, 2], tokens=4),
        Answered(sent=0, times=[3], tokens=3),
        Answered(sent=2, times=[4, 5, 7], tokens=3),
        Answered(sent=3, error="refused"),
        Answered(sent=6, times=[8], tokens=1),
    ]
    found = Served(2, answered).summary()
    assert (found["requests"], found["errors"], found["error"]) == (5, 1, "refused")
    assert (found["output_tokens"], found["chunks"]) == (11, 7)
    assert found["output_tokens_per_s"] == 11 / 8
    # From the time at which two have ended, 3, until the last one is sent, 6, two chunks with a token each arrive.
    assert found["saturated"] == pytest.approx(2 / 3)
    assert found["first_token_ms"]["median"] == 2000
    assert found["between_tokens_ms"]["median"] == 1000
    with pytest.raises(ValueError, match="all 1 requests failed: refused"):
        Served(2, answered[3:4]).summary()


def test_an_engine_has_as_many_requests_as_there_are_clients(monkeypatch):
    toy_model.install(monkeypatch)
    served, unfinished = engine(), []
    step = served.step

    def counted():
        unfinished.append(len(served.unfinished))
        return step()

    monkeypatch.setattr(served, "step", counted)
    outputs = [4, 6, 1, 3, 5, 2]
    found = closed_loop.closed_loop(served, Batch(3, [prompt(5, seed=n) for n in range(6)], outputs))
    assert [(each.tokens, len(each.times), each.error) for each in found.answered] == [(n, n, "") for n in outputs]
    assert set(unfinished[: -max(outputs)]) == {3}
    first, last = found.answered[0], found.answered[-1]
    assert first.sent < first.times[0] < last.sent < last.times[0]


def test_requests_of_batches_share_no_prefixes():
    lengths = closed_loop.Lengths(np.asarray([9, 9, 9]), np.asarray([20, 3, 5]))
    warm, *rest = batches = list(closed_loop._batches({1: lengths, 2: lengths}, 97))
    assert [(batch.clients, batch.outputs) for batch in batches] == [(1, [8]), (1, [20, 3, 5]), (2, [20, 3, 5])]
    assert len({tuple(prompt) for batch in batches for prompt in batch.prompts}) == 7
    assert rest == list(closed_loop._batches({1: lengths, 2: lengths}, 97))[1:]
    assert warm.prompts != next(closed_loop._batches({1: lengths}, 97, seed=1)).prompts


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--url", "http://x", "--chunk", "16"], "--chunk has no effect with --url: leave it out"),
        (["--url", "http://x", "--requests", "128"], "--requests is 128: expected more than 128, twice the 64 clients"),
        (["--http", "--loads", "1"], "--loads has no effect with --http: leave it out"),
        (["--clients", "3"], "--clients has no effect without --url or --http: leave it out"),
        (["--http", "--requests", "1000"], "youtu has no tokenizer.json, which the server needs"),
    ],
)
def test_misuse_is_reported(arguments, message):
    with pytest.raises(SystemExit, match=f"^jaxkv bench serve: .*{message}"):
        main(["bench", "serve", str(MODELS / "youtu"), *arguments])


@pytest.mark.parametrize(
    "url", ["x", "https://x", "http://", "http://x/v1", "http://x:99999", "http://u@x", "http://x?a"]
)
def test_urls_are_checked(url, capsys):
    with pytest.raises(SystemExit):
        main(["bench", "serve", "config.json", "--url", url])
    assert f"argument --url: {url!r} is not http://HOST:PORT, without a path" in capsys.readouterr().err
