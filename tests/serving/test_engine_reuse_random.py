"""Random walks of submissions, cancellations and steps with failures give the tokens of an engine without reuse."""

import numpy as np
import pytest

from jaxkv.offload import DiskPool, transfers
from jaxkv.serving import tiers
from jaxkv.serving.engine import Engine
from serving.toy_engines import check_positions, disk_pool, draw_ready, engine, fail, host_pool, right
from support.cases import further
from support.toy_model import prompt

pytestmark = pytest.mark.usefixtures("toy")


class Walk:
    """A random walk of submissions, cancellations and steps on tiny pools, with failures."""

    def __init__(self, seed, monkeypatch, folder):
        self.rng = np.random.default_rng(seed)
        self.host = host_pool(num_blocks=8, disk=disk_pool(folder))
        self.served = engine(num_blocks=14, connectors=[self.host])
        self.sent_back = 0
        for place, name in ((transfers, "to_host"), (transfers, "to_device"), (tiers, "write_rows")):
            monkeypatch.setattr(place, name, self.flaky(getattr(place, name)))
        monkeypatch.setattr(DiskPool, "load", self.flaky(DiskPool.load))
        monkeypatch.setattr(Engine, "_make_room", self.counted(Engine._make_room))

    def flaky(self, transfer):
        return lambda *args, **kwargs: fail() if self.rng.random() < 0.05 else transfer(*args, **kwargs)

    def counted(self, make_room):
        def call(served, *args):
            before = len(served.waiting)
            make_room(served, *args)
            self.sent_back += len(served.waiting) > before

        return call

    def prompt(self):
        """The beginning of one of three long prompts, and sometimes an end of its own."""
        whole = prompt(32, seed=int(self.rng.integers(3)))
        end = prompt(int(self.rng.integers(6)), seed=int(self.rng.integers(4)))
        return (*whole[: self.rng.integers(1, 33)], *end)

    def run(self, steps):
        requests, cancelled = [], 0
        for _ in range(steps):
            draw_ready(self.served, self.rng)
            if len(self.served.waiting) < 4 and self.rng.random() < 0.3:
                requests.append(self.served.submit(self.prompt(), max_tokens=int(self.rng.integers(1, 11))))
            if self.rng.random() < 0.02 and (alive := [*self.served.waiting, *self.served.running]):
                self.served.cancel(alive[self.rng.integers(len(alive))])
                cancelled += 1
            self.served.step()
            check_positions(self.served.pool)
        for _ in self.served.run():
            pass
        assert cancelled
        return requests


@pytest.mark.parametrize("seed", [0, further(1), further(2)])
def test_any_interleaving_gives_the_tokens_of_an_engine_without_reuse(seed, monkeypatch, tmp_path):
    walk = Walk(seed, monkeypatch, tmp_path)
    requests = walk.run(steps=400)
    served, host = walk.served, walk.host
    for request in requests:
        expected = right(request.prompt, 10)[: request.max_tokens]
        if request.finish_reason == "cancelled":
            expected = expected[: len(request.generated)]
        assert request.generated == expected
    assert served.pool.num_free == served.pool.num_blocks
    reuse = served.prefix_stats
    assert reuse.found > reuse.tokens / 4
    assert 0 < reuse.loaded < reuse.found
    assert host.stats.read > 0
    assert served.tiers.failures > 5
    assert walk.sent_back > 0
