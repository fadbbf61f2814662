"""The engine with models that have states: the tokens are Hugging Face's, also with prefixes from each tier."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from jaxkv import models, serving
from jaxkv.offload import DiskPool, HostPool
from support.cases import further, slow
from support.recorded import model, recorded

BLOCK = 16


def engine(family, connectors=(), num_blocks=40, chunk=64, block_size=BLOCK, order="BLNHC"):
    return serving.Engine(
        model(family), num_blocks=num_blocks, block_size=block_size, max_requests=3, chunk=chunk,
        max_num_batched_tokens=3 + 2 * chunk, order=order, connectors=connectors,
    )  # fmt: skip


def serve(family, engine, *, known=0, count=64):
    """How many tokens of the longest prompt, and `known` of those after it, were found; what follows must be right."""
    prompt, tokens = recorded(family)[-1]
    before = engine.prefix_stats.found
    request = engine.submit(prompt + tokens[:known], max_tokens=count - known, stop=())
    list(engine.run())
    assert request.generated == tokens[known:count]
    return engine.prefix_stats.found - before


@pytest.mark.ci
@pytest.mark.parametrize(
    ("family", "block_size", "order"),
    [
        ("qwen3_next", BLOCK, "BLNHC"),
        # The same code with other strides, and with other states.  Latents have one head, so that only the size of
        # blocks changes their layout.
        slow("qwen3_next", BLOCK, "BHLNC"),
        slow("kimi_linear", 32, "BLNHC"),
        slow("kimi_linear", BLOCK, "BLNHC"),
    ],
)
def test_cold_and_from_each_tier_the_tokens_are_the_same(family, block_size, order, tmp_path):
    """A prefix is as long as the last block at whose end a step ended, because that block has a state."""
    layout, name = model(family).layout(1, block_size, order), models.fingerprint(model(family))
    start, send = partial(engine, family, block_size=block_size, order=order), partial(serve, family)

    def pools():
        return HostPool(layout, 40, disk=DiskPool(tmp_path, layout, model=name))

    host = pools()
    first = start([host])
    assert send(first) == 0
    assert send(first, count=8) == 192
    assert first.prefix_stats.loaded == 0
    assert send(first, known=50) == 250 // block_size * block_size  # decoded tokens fill blocks, too
    second = start([host])
    assert send(second, count=8) == 192
    assert host.stats.read == 0
    host.flush()
    host = pools()
    third = start([host])
    assert send(third, count=8) == 192
    assert host.stats.read == 192 // block_size + 1  # entries of all blocks, and the last state


@pytest.mark.parametrize(
    ("family", "block_size", "state_block_size"),
    [further("qwen3_next", 64, 16), slow("qwen3_next", 16, None), slow("kimi_linear", 64, 16)],
)
def test_a_prefix_that_is_seen_twice_has_a_state_near_its_end(family, block_size, state_block_size):
    changed = replace(model(family), state_block_size=state_block_size)
    served = serving.Engine(changed, num_blocks=40, block_size=block_size, max_requests=3, max_num_batched_tokens=131)
    (*_, (prompt, tokens)), other = recorded(family), recorded(family)[-2][0]
    for after in (other, other[::-1]):
        served.submit(prompt[:60] + after, max_tokens=2, stop=())
        list(served.run())
        assert served.prefix_stats.found == 0
    request = served.submit(prompt, max_tokens=64, stop=())
    list(served.run())
    assert request.generated == tokens
    assert served.prefix_stats.found == 48
    assert served.pool.num_free == 40


@pytest.mark.parametrize(
    ("family", "chunk"), [further("qwen3_next", 64), slow("qwen3_next", 40), slow("kimi_linear", 64)]
)
def test_requests_come_and_go(family, chunk):
    """So few blocks that some wait and some are computed again."""
    served = engine(family, num_blocks=24, chunk=chunk)
    rng, requests, sent_back = np.random.default_rng(0), [], set()
    while len(requests) < 10 or served.running or served.waiting:
        if len(requests) < 10 and rng.random() < 0.4:
            prompt, follows = recorded(family)[len(requests) // 2 % 5]
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
