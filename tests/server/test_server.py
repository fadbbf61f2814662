"""`jaxkv serve` with OpenAI's own client: tokens are those of the recorded model, and mistakes are answered."""

import asyncio
import json
import signal

import httpx
import openai
import pytest

from jaxkv.bench.requests import Lengths
from jaxkv.cli import main
from server.checkpoint import FAMILY, VOCABULARY, text_of
from server.conftest import GREEDY, KEY, serving, wait_until_idle
from support.recorded import recorded

pytestmark = pytest.mark.ci
RECORDED = recorded(FAMILY)
"""Prompts, and the tokens that follow them."""


@pytest.fixture(scope="module")
def client(served):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture
def patient(served):
    """A client of an event loop, of which many run at once."""
    return lambda: openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key=KEY, max_retries=0)


def test_tokens_are_those_of_the_recorded_model(client):
    for prompt, tokens in RECORDED:
        answer = client.completions.create(prompt=prompt, max_tokens=len(tokens), **GREEDY)
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == (text_of(tokens), "length")
        usage = answer.usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), len(tokens))
    answer = client.completions.create(prompt=[prompt for prompt, _ in RECORDED], max_tokens=9, **GREEDY)
    assert [choice.text for choice in answer.choices] == [text_of(tokens[:9]) for _, tokens in RECORDED]
    assert [choice.index for choice in answer.choices] == list(range(len(RECORDED)))


def test_streams_have_the_same_text(client):
    prompt, tokens = RECORDED[0]
    options = {"stream_options": {"include_usage": True}, "logprobs": 2}
    *chunks, last = client.completions.create(prompt=prompt, max_tokens=len(tokens), stream=True, **options, **GREEDY)
    assert "".join(chunk.choices[0].text for chunk in chunks) == text_of(tokens)
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert len(chunks) > len(tokens) // 2
    assert last.usage.completion_tokens == len(tokens)
    logprobs = [value for chunk in chunks for value in chunk.choices[0].logprobs.token_logprobs]
    whole = client.completions.create(prompt=prompt, max_tokens=len(tokens), logprobs=2, **GREEDY).choices[0].logprobs
    assert logprobs == pytest.approx(whole.token_logprobs, abs=1e-4)
    assert whole.tokens == [VOCABULARY[token] for token in tokens]
    for token, value, top in zip(whole.tokens, whole.token_logprobs, whole.top_logprobs, strict=True):
        assert len(top) == 2
        assert top[token] == value == max(top.values())


def test_texts_and_chats_are_prompts_of_their_tokens(client):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    text = "<bos>system: Be brief.\nuser: Why?\nassistant: "
    ids = [0, *(VOCABULARY.index(character) for character in text.removeprefix("<bos>"))]
    right = client.completions.create(prompt=ids, max_tokens=12, **GREEDY).choices[0].text
    assert client.completions.create(prompt=text, max_tokens=12, **GREEDY).choices[0].text == right
    answer = client.chat.completions.create(messages=messages, max_tokens=12, **GREEDY)
    assert (answer.choices[0].message.role, answer.choices[0].message.content) == ("assistant", right)
    parts = [message | {"content": [{"type": "text", "text": message["content"]}]} for message in messages]
    chunks = client.chat.completions.create(messages=parts, max_completion_tokens=12, stream=True, **GREEDY)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert ("".join(delta.content for delta in deltas), deltas[0].role) == (right, "assistant")
    answer = client.chat.completions.create(messages=messages, max_tokens=3, logprobs=True, top_logprobs=2, **GREEDY)
    for found in answer.choices[0].logprobs.content:
        assert (found.token, found.logprob) == (found.top_logprobs[0].token, found.top_logprobs[0].logprob)
        assert bytes(found.bytes).decode() == found.token


def test_generate_answers_like_the_server(client, folder, capsys):
    message = {"role": "user", "content": "Why?"}
    right = client.chat.completions.create(messages=[message], max_tokens=12, **GREEDY).choices[0].message.content
    assert main(["generate", "--model", str(folder), "--chat", "--prompt", "Why?", "--max-tokens", "12"]) == 0
    assert capsys.readouterr().out == f"{right}\n"


def test_answers_end_before_stop_strings(client):
    prompt, tokens = RECORDED[0]
    text = text_of(tokens)
    stop = text[20:23]
    right = text[: text.index(stop)]
    for options in ({"stop": stop}, {"stop": ["not there", stop]}):
        answer = client.completions.create(prompt=prompt, max_tokens=len(tokens), **options, **GREEDY).choices[0]
        assert (answer.text, answer.finish_reason) == (right, "stop")
        chunks = list(client.completions.create(prompt=prompt, max_tokens=64, stream=True, **options, **GREEDY))
        assert "".join(chunk.choices[0].text for chunk in chunks) == right
        assert chunks[-1].choices[0].finish_reason == "stop"
    extra = {"stop_token_ids": [tokens[7]]}
    answer = client.completions.create(prompt=prompt, max_tokens=64, extra_body=extra, **GREEDY).choices[0]
    assert (answer.text, answer.finish_reason) == (text_of(tokens[: tokens.index(tokens[7])]), "stop")


def test_seeds(client):
    def drawn(**options):
        options = {"model": "tiny", "temperature": 1.5, "max_tokens": 30, **options}
        return client.completions.create(prompt="Once", **options).choices[0].text

    assert drawn(seed=3) == drawn(seed=3) == drawn(seed=3 + 2**32)
    assert len({drawn(seed=seed) for seed in range(4)}) == 4
    assert drawn() != drawn()
    assert drawn(seed=1, top_p=1e-6) == drawn(temperature=0) == drawn(seed=2, extra_body={"top_k": 1})


def test_64_clients_at_once(patient, served):
    async def one(client, number):
        prompt, tokens = RECORDED[number % len(RECORDED)]
        count = 5 + number % 40
        stream = await client.completions.create(prompt=prompt, max_tokens=count, stream=True, **GREEDY)
        text = "".join([chunk.choices[0].text async for chunk in stream])
        return text == text_of(tokens[:count])

    async def main():
        async with patient() as client:
            return await asyncio.gather(*(one(client, number) for number in range(64)))

    assert all(asyncio.run(main()))
    wait_until_idle(served)


def test_clients_that_go_away_cancel_their_requests(patient, served):
    async def stream(client):
        prompt, _ = RECORDED[0]
        chunks = await client.completions.create(prompt=prompt, max_tokens=400, stream=True, **GREEDY)
        async for _ in chunks:
            await chunks.close()
            return

    async def whole(client):
        with pytest.raises(openai.APITimeoutError):
            await client.completions.create(prompt=RECORDED[0][0], max_tokens=400, timeout=0.2, **GREEDY)

    async def main():
        async with patient() as client:
            await asyncio.gather(*(stream(client) for _ in range(6)), *(whole(client) for _ in range(6)))

    asyncio.run(main())
    wait_until_idle(served)


def test_prompts_that_do_not_fit_in_the_queue_are_refused(patient, served):
    """8 run and 100 wait: of two requests with 64 prompts each, one is served."""

    async def main():
        async with patient() as client:
            options = {"prompt": [[5, 6, 7]] * 64, "max_tokens": 20, **GREEDY}
            return await asyncio.gather(
                *(client.completions.create(**options) for _ in range(2)), return_exceptions=True
            )

    found, refused = sorted(asyncio.run(main()), key=lambda answer: isinstance(answer, Exception))
    assert len({choice.text for choice in found.choices}) == 1
    assert isinstance(refused, openai.RateLimitError)
    assert "64 prompts are being served or wait" in str(refused)
    wait_until_idle(served)


@pytest.mark.parametrize(
    ("options", "message", "param"),
    [
        ({"n": 2}, "`n` is not supported", "n"),
        ({"logit_bias": {"5": 1}}, "`logit_bias` is not supported", "logit_bias"),
        ({"echo": True}, "`echo` is not supported", "echo"),
        ({"extra_body": {"beams": 3}}, "the request is not valid: Object contains unknown field `beams`", None),
        ({"temperature": -1}, "`temperature` is -1.0: expected a finite number", "temperature"),
        ({"top_p": 2}, "`top_p` is 2.0: expected more than 0, at most 1", "top_p"),
        ({"max_tokens": 0}, "the request is not valid: Expected `int` >= 1 - at `$.max_tokens`", None),
        ({"max_tokens": 10**6}, "`prompt` has 1 tokens and `max_tokens` is 1000000", None),
        ({"logprobs": 21}, "the request is not valid: Expected `int` <= 20 - at `$.logprobs`", None),
        ({"prompt": ""}, "`prompt` is empty", None),
        ({"prompt": [97]}, "`prompt` has token id 97: expected one or more token ids from 0 to 96", None),
        ({"prompt": [[1], "a"]}, "`prompt`: expected a text, a list of token ids, or 1 to 64", "prompt"),
        ({"stop": [""]}, "`stop`: expected at most 16 strings, none of them empty", "stop"),
        ({"stream_options": {"include_usage": True}}, "`stream_options` needs `stream`", "stream_options"),
    ],
)
def test_mistakes_are_answered(client, options, message, param):
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(**{"prompt": "a", "model": "tiny", **options})
    assert refused.value.body["message"].startswith(message)
    assert refused.value.body["param"] == param


def test_mistakes_in_chats_are_answered(client):
    def chat(**options):
        options = {"messages": [{"role": "user", "content": "a"}], "model": "tiny", **options}
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(**options)
        return refused.value.body["message"]

    assert chat(messages=[{"role": "judge", "content": "a"}]).startswith(
        "the chat template rejects `messages`: no role"
    )
    assert chat(tools=[{"type": "function", "function": {"name": "f"}}]) == "`tools` is not supported"
    assert "`response_format`" in chat(response_format={"type": "json_object"})
    assert chat(top_logprobs=2).startswith("the request is not valid: `top_logprobs` needs `logprobs`")
    image = {"type": "image_url", "image_url": {"url": "x"}}
    assert chat(messages=[{"role": "user", "content": [image]}]).startswith("`messages`: expected a text")


def test_other_statuses(client, served):
    url, headers = f"{served.url}/v1/completions", {"Authorization": f"Bearer {KEY}"}

    def post(content, **options):
        answer = httpx.post(url, content=content, **{"headers": headers, **options})
        return answer.status_code, answer.json()["error"]["message"]

    whole = {"prompt": "a", "model": "tiny"}
    assert post(json.dumps(whole), headers={}) == (
        401,
        "expected the API key of the server as `Authorization: Bearer KEY`",
    )
    assert post(json.dumps(whole | {"model": "huge"})) == (404, "`model` is 'huge': expected 'tiny'")
    assert post(json.dumps(whole | {"prompt": "a" * 20000})) == (413, "the body has more than 20000 bytes")
    for body in ("", "{", "[1]", "null", '{"prompt": "a",}', b"\xff\xfe", "[" * 5000):
        status, message = post(body)
        assert (status, message.startswith("the body is")) == (400, True), body
    assert httpx.get(f"{served.url}/v1/models", headers=headers).json()["data"][0]["id"] == "tiny"
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("huge")
    assert httpx.get(f"{served.url}/version").json().keys() == {"version"}
    assert httpx.get(f"{served.url}/health").json()["status"] == "ready"


def test_sigterm_lets_requests_end(folder):
    prompt, tokens = RECORDED[0]
    body = {"prompt": prompt, "max_tokens": len(tokens), "temperature": 0, "stream": True}
    headers = {"Authorization": f"Bearer {KEY}"}
    with serving(folder, "--blocks", "24", "--max-requests", "2") as server, httpx.Client(headers=headers) as client:
        with client.stream("POST", f"{server.url}/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            seen = [next(lines)]
            server.process.send_signal(signal.SIGTERM)
            late = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers)
            assert (late.status_code, late.json()["error"]["message"]) == (503, "the server is shutting down")
            seen += lines
        events = [line.removeprefix("data: ") for line in seen if line]
        assert events.pop() == "[DONE]"
        assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == text_of(tokens)
        assert server.process.wait(timeout=60) == 0


def test_clients_load_the_server(served, folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("JAXKV_API_KEY", KEY)
    file = tmp_path / "found.json"
    lengths = ["--prompt", "20", "--output", "12", "--json", str(file)]
    assert main(["bench", "serve", str(folder), "--url", served.url, "--clients", "2", "5", *lengths]) == 0
    printed, found = capsys.readouterr().out.splitlines(), json.loads(file.read_text())
    assert found["server"] == {"url": served.url, "model": "tiny"}
    for line, load, clients in zip(printed[1:], found["loads"], (2, 5), strict=True):
        assert line.split()[:2] == [str(clients), "server"]
        assert (load["clients"], load["requests"], load["errors"]) == (clients, 4 * clients, 0)
        assert load["output_tokens"] == Lengths.drawn(4 * clients, 20, 12).outputs.sum()
        assert load["output_tokens"] / 2 < load["chunks"] <= load["output_tokens"]
        assert 0 < load["first_token_ms"]["median"] <= load["first_token_ms"]["p99"]
        assert load["output_tokens_per_s"] > 0
    wait_until_idle(served)


def test_requests_that_the_server_refuses_are_counted(served, folder, capsys, monkeypatch):
    monkeypatch.setenv("JAXKV_API_KEY", KEY)
    lengths = folder / "lengths"
    lengths.write_text("5 4\n5 4\n5 100000\n")
    options = ["--clients", "2", "--requests", "6", "--lengths", str(lengths)]
    assert main(["bench", "serve", str(folder), "--url", served.url, *options]) == 1
    assert "2 of 6 requests failed, the first because the server answers with the status 400" in capsys.readouterr().err
    monkeypatch.setenv("JAXKV_API_KEY", "wrong")
    with pytest.raises(SystemExit, match="/v1/models answers with the status 401: expected the API key"):
        main(["bench", "serve", str(folder), "--url", served.url])


def test_the_server_is_compared_with_its_engine(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))  # which both engines share
    file = tmp_path / "found.json"
    sizes = [
        "--max-requests",
        "2",
        "--chunk",
        "16",
        "--max-num-batched-tokens",
        "18",
        "--prompt",
        "12",
        "--output",
        "9",
    ]
    assert main(["bench", "serve", str(folder), "--http", "--clients", "2", "3", *sizes, "--json", str(file)]) == 0
    found, printed = json.loads(file.read_text()), capsys.readouterr().out
    assert [(load["served_by"], load["clients"]) for load in found["loads"]] == [
        ("engine", 2),
        ("engine", 3),
        ("http", 2),
        ("http", 3),
    ]
    engine, http = found["loads"][:2], found["loads"][2:]
    for alone, server in zip(engine, http, strict=True):
        assert alone["errors"] == server["errors"] == 0
        assert alone["output_tokens"] == server["output_tokens"] == alone["chunks"]
        ratio = found["ratio"][str(alone["clients"])]["output_tokens_per_s"]
        assert ratio == server["output_tokens_per_s"] / alone["output_tokens_per_s"]
        assert f"with {alone['clients']} clients, the server has {ratio:.1%} of the tokens/s of" in printed
    assert found["engine"]["max_requests"] == 2
