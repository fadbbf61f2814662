"""The tests that every connector must pass: derive from `ConnectorSuite` and implement `connectors`."""

import time
from abc import ABC, abstractmethod

import jax
import numpy as np
import pytest

from jaxkv import KVCache, read_blocks
from serving.toy_engines import BLOCK, MODEL, engine, right, serve
from support import toy_model
from support.compare import assert_same_bits
from support.toy_model import prompt

LONG = prompt(42)
"""Ten blocks and two tokens."""
SECONDS = 30
"""Whatever takes longer has failed."""


class ConnectorSuite(ABC):
    """Tests of a kind of connector."""

    @abstractmethod
    def connectors(self, layout, folder):
        """Two connectors for blocks of `layout`: the second has what is offered to the first.

        They may be one.  `folder` is an empty folder.  Append to `self.opened` what must be closed after the test.
        """

    @pytest.fixture(autouse=True)
    def _closed(self):
        self.opened = []
        yield
        for opened in self.opened:
            opened.close()

    @pytest.fixture
    def both(self, tmp_path, monkeypatch):
        toy_model.install(monkeypatch)
        return self.connectors(MODEL.layout(1, BLOCK), tmp_path)

    def test_bits_that_are_offered_are_pulled(self, both):
        first, second = both
        layout = MODEL.layout(6, BLOCK)
        values = np.random.default_rng(0).standard_normal(layout.size, np.float32)
        cache = KVCache(jax.device_put(values, jax.devices()[0]), layout)
        blocks = np.asarray([4, 0, 3], np.int32)
        expected = np.asarray(read_blocks(cache, blocks))
        keys = [bytes([n]) * 32 for n in range(3)]
        assert not any(key in connector for key in keys for connector in both)
        first.offer(cache, blocks, keys)
        cache.buffer.delete()  # the next step of the engine donates it
        wait_for(second, keys)
        assert b"another".ljust(32) not in second
        for wanted in (keys, keys[1:2], keys[::-1]):
            pulled = pull(second, wanted, cache.buffer.sharding)
            assert_same_bits(np.stack([pulled[key] for key in wanted]), expected[[keys.index(key) for key in wanted]])

    def test_an_engine_finds_what_another_has_computed(self, both):
        first, second = (engine(connectors=[connector]) for connector in both)
        serve(first, LONG, count=1)
        wait_for(both[1], list(first.pool._blocks)[:10])
        assert serve(second, LONG) == second.prefix_stats.loaded == 40
        assert serve(engine(connectors=[both[1]]), (*LONG[:21], *prompt(9, seed=1))) == 20
        assert first.tiers.failures == second.tiers.failures == 0

    def test_requests_of_one_step(self, both):
        first, second = (engine(num_blocks=40, connectors=[connector]) for connector in both)
        prompts = [prompt(20 + n, seed=n) for n in range(3)]
        for tokens in prompts:
            serve(first, tokens, count=1)
        wait_for(both[1], [key for tokens in prompts for key in keys_of(first, tokens)])
        requests = [second.submit(tokens, max_tokens=5) for tokens in prompts]
        list(second.run())
        for request in requests:
            assert request.generated == right(request.prompt, 5)
        assert second.prefix_stats.loaded == 3 * 20
        assert second.tiers.failures == 0

    def test_a_pull_that_is_not_needed_any_more(self, both):
        first, second = (engine(connectors=[connector]) for connector in both)
        serve(first, LONG, count=1)
        wait_for(both[1], keys_of(first, LONG))
        for steps in (1, 2):
            request = second.submit(LONG, max_tokens=3)
            for _ in range(steps):
                second.step()
            second.cancel(request)
            assert second.pool.num_free == second.pool.num_blocks
        assert serve(engine(connectors=[both[1]]), LONG) == 40

    def test_blocks_that_are_not_there(self, both, monkeypatch):
        connector = both[1]
        monkeypatch.setattr(type(connector), "__contains__", lambda self, key: True)
        monkeypatch.setattr(type(connector), "pull_timeout", 0.5)
        monkeypatch.setattr(connector, "pull_timeout", 0.5)
        served = engine(connectors=[connector])
        assert serve(served, LONG) == 0
        assert served.tiers.failures > 0

    def test_other_blocks_are_rejected(self, both):
        for connector in both:
            with pytest.raises(ValueError, match=r"`connectors\[0\]` has other blocks"):
                engine(block_size=2 * BLOCK, connectors=[connector])


def keys_of(served, tokens):
    """The keys of the full blocks of a prompt."""
    return served.export(tokens).keys[: len(tokens) // BLOCK]


def wait_for(connector, keys):
    deadline = time.monotonic() + SECONDS
    while not all(key in connector for key in keys):
        assert time.monotonic() < deadline, "not all blocks that were offered are there"
        time.sleep(0.001)


def pull(connector, keys, sharding):
    """Rows by key."""
    rows, deadline = {}, time.monotonic() + SECONDS
    pulled = connector.pull(keys, sharding)
    while not rows.keys() >= set(keys):
        assert time.monotonic() < deadline, "not all blocks that were pulled have arrived"
        for arrival in pulled.poll(0.01):
            rows |= dict(zip(arrival.keys, np.asarray(arrival.rows), strict=True))
    pulled.release()
    return rows
