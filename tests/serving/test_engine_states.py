"""The engine with a model that has states: the tokens are Hugging Face's, also with prefixes from each tier."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from jaxkv import models, serving
from jaxkv.offload import DiskPool, HostPool
from support.cases import slow

FOLDER = Path(__file__).parents[1] / "data" / "models" / "qwen3_next"
BLOCK = 16


@cache
def model():
    return models.load(FOLDER)


@cache
def recorded():
    """Prompts of 1, 63, 64, 65 and 200 tokens, and the 64 tokens that follow each."""
    with np.load(FOLDER / "truth.npz") as found:
        prompts, lengths, tokens = (found[name].tolist() for name in ("prompts", "prompt_lens", "tokens"))
    return [(prompt[:length], right) for prompt, length, right in zip(prompts, lengths, tokens, strict=True)]


def engine(offload=None, num_blocks=40, chunk=64):
    return serving.Engine(
        model(), num_blocks=num_blocks, block_size=BLOCK, max_requests=3, chunk=chunk, max_chunks=2, offload=offload
    )


def serve(engine, *, known=0, count=64):
    """How many tokens of the longest prompt, and `known` of those after it, were found; what follows must be right."""
    prompt, tokens = recorded()[-1]
    before = engine.prefix_stats.found
    request = engine.submit(prompt + tokens[:known], max_tokens=count - known, stop=())
    list(engine.run())
    assert request.generated == tokens[known:count]
    return engine.prefix_stats.found - before


def test_cold_and_from_each_tier_the_tokens_are_the_same(tmp_path):
    """A prefix is as long as the last block at whose end a step ended, because that block has a state."""

    def pools():
        name, layout = models.fingerprint(model()), model().layout(1, BLOCK)
        return HostPool(layout, 40, disk=DiskPool(tmp_path, layout, model=name))

    host = pools()
    first = engine(host)
    assert serve(first) == 0
    assert serve(first, count=8) == 192
    assert first.prefix_stats.loaded == 0
    assert serve(first, known=50) == 240  # decoded tokens fill blocks, too
    second = engine(host)
    assert serve(second, count=8) == 192
    assert host.stats.read == 0
    host.flush()
    host = pools()
    third = engine(host)
    assert serve(third, count=8) == 192
    assert host.stats.read == 12 + 1  # keys and values of 12 blocks, and the last state


@pytest.mark.parametrize("chunk", [64, slow(40)])
def test_requests_come_and_go(chunk):
    """So few blocks that some wait and some are computed again."""
    served = engine(num_blocks=24, chunk=chunk)
    rng, requests, sent_back = np.random.default_rng(0), [], set()
    while len(requests) < 10 or served.running or served.waiting:
        if len(requests) < 10 and rng.random() < 0.4:
            prompt, follows = recorded()[len(requests) // 2 % 5]
            known, end = int(rng.integers(0, 20)), int(rng.integers(24, 64))
            request = served.submit(prompt + follows[:known], max_tokens=end - known, stop=())
            requests.append((request, follows[known:end]))
        served.step()
        sent_back |= {request for request in served.waiting if request.generated}
    for request, follows in requests:
        assert request.generated == follows
    assert sent_back
    assert served.prefix_stats.found
    assert served.pool.num_free == 24
