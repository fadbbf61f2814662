"""Bodies of all kinds, most of them wrong, and clients at random: no answer is a 500, and the engine serves on."""

import asyncio
import json
import random

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.checkpoint import FAMILY, text_of
from server.conftest import GREEDY, KEY, wait_until_idle
from support.recorded import recorded

pytestmark = pytest.mark.ci
HEADERS = {"Authorization": f"Bearer {KEY}"}
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
NUMBERS = st.sampled_from([0, 1, -1, 0.5, 1e300, -0.0, 2**31, 2**63, 10**30, True, None])
IDS = st.lists(st.integers(-2, 99), max_size=4)
FIELDS = {
    "model": st.just("tiny") | JUNK,
    "prompt": st.text(max_size=8) | IDS | st.lists(IDS, max_size=3) | st.lists(st.text(max_size=3), max_size=3) | JUNK,
    "messages": st.lists(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["user", "system", "x", ""]), "content": st.text(max_size=5) | JUNK}
        )
        | JUNK,
        max_size=3,
    ),
    "stop": st.text(max_size=2) | st.lists(st.text(max_size=2), max_size=3) | JUNK,
    "stream_options": st.fixed_dictionaries({"include_usage": st.booleans()}) | JUNK,
    "stop_token_ids": IDS | JUNK,
    "cache_salt": st.text(max_size=3) | JUNK,
    **dict.fromkeys(("stream", "ignore_eos", "logprobs", "echo"), st.booleans() | NUMBERS | JUNK),
    **dict.fromkeys(
        ("temperature", "top_p", "top_k", "min_p", "seed", "priority", "n", "top_logprobs"), NUMBERS | JUNK
    ),
    **dict.fromkeys(("logit_bias", "tools", "response_format", "user", "metadata", "more"), JUNK),
}
OBJECTS = st.fixed_dictionaries(
    {"max_tokens": st.just(2) | st.integers(-1, 3)}, optional={name: values for name, values in FIELDS.items()}
)


def broken(body):
    """JSON of which a part is missing, or that has a byte of another kind."""
    whole = json.dumps(body).encode()
    return st.integers(0, len(whole)).flatmap(
        lambda at: st.sampled_from([whole[:at], whole[:at] + b"\xff" + whole[at:], whole[at:] + whole[:at]])
    )


BODIES = OBJECTS.map(lambda body: json.dumps(body).encode()) | OBJECTS.flatmap(broken) | st.binary(max_size=20)


@pytest.fixture(scope="module")
def post(served):
    with httpx.Client(base_url=served.url, headers=HEADERS, timeout=60) as client:
        yield lambda path, body: client.post(path, content=body)


@settings(max_examples=100, deadline=None)
@given(path=st.sampled_from(["/v1/completions", "/v1/chat/completions"]), body=BODIES)
def test_any_body_is_answered(post, path, body):
    answer = post(path, body)
    assert answer.status_code in (200, 400, 404), answer.text
    if answer.status_code != 200:
        assert answer.json()["error"]["message"]


def test_clients_at_random(served):
    """200 requests, several times as many as run at once; some go away before the end, and all others are right."""
    rng = random.Random(0)

    async def one(client):
        prompt, tokens = rng.choice(recorded(FAMILY))
        known, count = rng.randrange(20), rng.randint(1, 30)
        body = {**GREEDY, "prompt": [*prompt, *tokens[:known]], "max_tokens": count, "stream": True}
        most = rng.randint(0, count) if rng.random() < 0.4 else None
        right, text = text_of(tokens[known : known + count]), ""
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code == 429:
                return "refused"
            assert answer.status_code == 200
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    assert text == right
                    return "ended"
                if line:
                    text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                    assert right.startswith(text)
                if most is not None and len(text) > most:
                    return "left"
        raise AssertionError("a stream ended without [DONE]")

    async def main():
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(base_url=served.url, headers=HEADERS, timeout=120, limits=limits) as client:
            return await asyncio.gather(*(one(client) for _ in range(200)))

    found = asyncio.run(main())
    assert found.count("ended") > 50
    assert found.count("left") > 10
    wait_until_idle(served)
