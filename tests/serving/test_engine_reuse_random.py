"""Random submissions, cancellations and steps of random engines: each request has the tokens of itself alone.

25 draws by default and 175 more in CI; ten times as many with `--hypothesis-profile long`.
"""

from collections import Counter
from functools import cache

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxkv.models import Sampling
from jaxkv.offload import DiskPool, transfers
from jaxkv.serving import tiers
from jaxkv.serving.drafts import NGram, verify_drafts
from jaxkv.serving.engine import Engine
from jaxkv.serving.request import ABSENT
from serving.toy_engines import check_positions, disk_pool, draw_ready, engine, fail, host_pool, right
from support.toy_model import prompt

pytestmark = pytest.mark.usefixtures("toy")

MOST = 10
"""Generated tokens of a request."""
GREEDY, SAMPLED = Sampling(), Sampling(0.8, top_k=20, seed=5)
COPIES = {}
"""The program that copies blocks, so that it is compiled once."""


def made(**options):
    served = engine(**options)
    manager = served.block_manager
    manager._copy = COPIES.setdefault("copy", manager._copy)
    return served


@cache
def alone(tokens, sampling):
    """The tokens of a request alone: without a cache if it is greedy, and else in an engine that has served nothing."""
    if sampling == GREEDY:
        return right(tokens, MOST)
    served = made(drafts=Guesses())
    request = served.submit(tokens, max_tokens=MOST, sampling=sampling)
    list(served.run())
    return request.generated


class Guesses:
    """Drafts of which about every fourth is wrong; none without random numbers."""

    num_speculative_tokens, lookahead, program = 2, 0, staticmethod(verify_drafts)

    def __init__(self, rng=None):
        self.rng = rng

    def check(self, model, tables):
        assert [table.plain for table in tables] == [True]

    def following(self, request, drafted):
        assert len(drafted) == 0
        if self.rng is None:
            return []
        new = len(request.generated)
        tokens = alone(request.prompt, request.sampling)[new : new + self.rng.integers(3)]
        return [token if self.rng.random() < 0.75 else int(self.rng.integers(97)) for token in tokens]


class Walk:
    """A random walk of submissions, cancellations and steps of a random engine on tiny pools, with failures."""

    def __init__(self, rng, patch, folder):
        self.rng, self.seen, host = rng, Counter(), None
        if rng.random() < 0.6:
            host = host_pool(num_blocks=8, disk=disk_pool(folder) if rng.random() < 0.5 else None)
            for place, name in ((transfers, "to_host"), (transfers, "to_device"), (tiers, "write_rows")):
                patch.setattr(place, name, self.flaky(getattr(place, name)))
            patch.setattr(DiskPool, "load", self.flaky(DiskPool.load))
        self.host = host
        self.served = made(
            num_blocks=int(rng.integers(12, 18)),
            connectors=() if host is None else [host],
            drafts=[None, NGram(2, 3, 1), Guesses(rng)][rng.integers(3)],
            max_time_between_tokens=[None, 1e-9][rng.integers(2)],
        )
        patch.setattr(Engine, "preempt", self.counted("preempted", Engine.preempt))

    def flaky(self, transfer):
        return lambda *args, **kwargs: fail() if self.rng.random() < 0.05 else transfer(*args, **kwargs)

    def counted(self, name, method):
        def call(*args):
            self.seen[name] += 1
            return method(*args)

        return call

    def prompt(self):
        """The beginning of one of three long prompts, and sometimes an end of its own."""
        rng = self.rng
        whole, end = prompt(32, seed=int(rng.integers(3))), prompt(int(rng.integers(6)), seed=int(rng.integers(2)))
        return (*whole[: rng.integers(1, 33)], *end)

    def submit(self):
        rng = self.rng
        return self.served.submit(
            self.prompt(),
            max_tokens=int(rng.integers(1, MOST + 1)),
            # Without drafts, tokens are drawn by programs of their own, which other tests run.
            sampling=SAMPLED if self.served.drafts and rng.random() < 0.2 else GREEDY,
            priority=int(rng.integers(2)),
            cache_salt=[None, "tenant"][int(rng.random() < 0.2)],
        )

    def run(self, steps):
        served, rng, requests = self.served, self.rng, []
        load = rng.uniform(0.2, 0.9)
        for _ in range(steps):
            draw_ready(served, rng)
            if len(served.waiting) < 4 and rng.random() < load:
                requests.append(self.submit())
            if rng.random() < 0.05 and (alive := served.unfinished):
                served.cancel(alive[rng.integers(len(alive))])
            served.step()
            check_positions(served.pool)
        list(served.run())
        self.check(requests)

    def check(self, requests):
        """All tokens are right, every request has ended for a reason, and nothing is held."""
        served = self.served
        for request in requests:
            expected = alone(request.prompt, request.sampling)[: request.max_tokens]
            if request.finish_reason == "cancelled":
                expected = expected[: len(request.generated)]
            else:
                assert request.finish_reason == "length"
            assert request.generated == expected
            assert not request.blocks
            self.seen[request.finish_reason] += 1
        assert served.pool.num_free == served.pool.num_blocks
        assert not served.block_manager.loads
        assert all((table == ABSENT).all() for table in served.block_manager.arrays.values())
        assert sorted(served._places) == list(range(served.max_requests))
        reuse = served.prefix_stats
        self.seen.update(found=reuse.found, loaded=reuse.loaded, accepted=served.acceptance.accepted)
        self.seen.update(rejected=served.acceptance.drafted - served.acceptance.accepted)
        self.seen.update(failures=served.tiers.failures, read=0 if self.host is None else self.host.stats.read)


EXPECTED = "length", "cancelled", "preempted", "found", "loaded", "read", "accepted", "rejected", "failures"
EXAMPLES = settings.default.max_examples


def check_draws(part, count, folder):
    """Walks so many times, and checks that all that may happen has happened."""
    seen = Counter()

    @settings(max_examples=count, suppress_health_check=[HealthCheck.too_slow])
    @given(st.integers(0, 2**32 - 1))
    def draws(seed):
        with pytest.MonkeyPatch.context() as patch:
            walk = Walk(np.random.default_rng([part, seed]), patch, folder / str(seed))
            walk.run(steps=int(walk.rng.integers(12, 37)))
            seen.update(walk.seen)

    draws()
    assert all(seen[event] for event in EXPECTED), seen


def test_each_request_has_the_tokens_of_itself_alone(tmp_path):
    check_draws(0, EXAMPLES, tmp_path)


@pytest.mark.ci
def test_each_request_has_the_tokens_of_itself_alone_in_further_draws(tmp_path):
    check_draws(1, 7 * EXAMPLES, tmp_path)
