"""The times of requests, how they end, and the numbers of engines."""

from types import SimpleNamespace

import numpy as np
import pytest

from jaxkv.serving import engine as engine_module
from jaxkv.serving import request as request_module
from jaxkv.serving.drafts import AcceptanceStats
from jaxkv.serving.prefix import PrefixCacheStats
from jaxkv.serving.stats import EngineStats, HostTime
from serving.toy_engines import PARAMS, engine, right
from support import toy_model
from support.toy_model import prompt

pytestmark = pytest.mark.usefixtures("toy")


@pytest.fixture
def clock(monkeypatch):
    """A clock that tests set."""
    now = [0.0]
    monkeypatch.setattr(request_module, "perf_counter", lambda: now[0])
    return now


def times(request):
    return request.arrival_time, request.first_token_time, request.finish_time


def test_a_request_has_the_times_of_its_arrival_first_token_and_end(clock):
    served = engine()
    clock[0] = 10.0
    request = served.submit(prompt(9), max_tokens=3)
    others = [served.submit(prompt(5, seed=n), max_tokens=9) for n in range(3)]
    assert times(request) == (10, None, None)
    for now in range(20, 24):
        clock[0] = float(now)
        served.step()
    # A step is read after the next one is launched.
    assert (request.generated, request.finish_reason) == (right(prompt(9), 3), "length")
    assert times(request) == (10, 21, 23)
    clock[0] = 30.0
    served.cancel(others[2])  # it has waited
    served.cancel(others[1])
    assert times(others[2]) == (10, None, 30)
    assert times(others[1]) == (10, 21, 30)
    assert times(others[0]) == (10, 21, None)


def test_a_request_that_a_stop_token_or_a_nan_ends_has_a_time_of_its_end(clock):
    served, stop = engine(), right(prompt(9), 3)[1]
    clock[0] = 1.0
    stopped = served.submit(prompt(9), max_tokens=9, stop=[stop])
    list(served.run())
    assert (stopped.finish_reason, times(stopped)) == ("stop", (1, 1, 1))
    poisoned = {**PARAMS, "embedding": PARAMS["embedding"].copy()}
    poisoned["embedding"][5] = np.nan
    served.model = toy_model.ToyModel(poisoned)
    lost = served.submit((1, 5, 2), max_tokens=4)
    list(served.run())
    assert (lost.finish_reason, times(lost)) == ("nan", (1, None, 1))


def test_a_preempted_request_keeps_its_times(clock):
    served = engine(num_blocks=5, max_len=20)
    requests = [served.submit(prompt(7, seed=n), max_tokens=8) for n in range(2)]
    preempted, preempt = {}, served.preempt
    served.preempt = lambda request: preempted.update({request: times(request)}) or preempt(request)
    for now in range(1, 100):
        clock[0] = float(now)
        served.step()
    assert any(first for _, first, _ in preempted.values())
    for request in requests:
        assert request.generated == right(request.prompt, 8)
        assert preempted.get(request, times(request))[1] in (None, request.first_token_time)
        assert 0 < request.first_token_time < request.finish_time < 99


def test_the_numbers_of_an_engine():
    served = engine(num_blocks=16)
    requests = [
        served.submit(prompt(9), max_tokens=4),
        *(served.submit(prompt(6, seed=n), max_tokens=4) for n in range(4)),
    ]
    before = served.stats
    assert (before.waiting, before.running, before.num_blocks, before.free_blocks) == (5, 0, 16, 16)
    served.step()
    during = served.stats
    assert (during.waiting, during.running) == (2, 3)
    assert during.free_blocks == served.pool.num_free == 16 - 3 - 2 - 2
    assert during.host_time.steps == 1
    list(served.run())
    served.submit(prompt(9), max_tokens=1)
    list(served.run())
    after = served.stats
    assert (after.waiting, after.running, after.free_blocks) == (0, 0, 16)
    assert (after.prefix.tokens, after.prefix.found) == (9 + 4 * 6 + 9, 8)
    assert (before.prefix.tokens, during.host_time.steps) == (0, 1)  # earlier numbers stay
    assert all(request.finish_reason == "length" for request in requests)


def test_only_the_wait_for_blocks_counts_as_waited_if_there_is_nothing_to_compute(monkeypatch):
    served, now = engine(), [0.0]
    monkeypatch.setattr(engine_module, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def taking(seconds, method):
        def call(*args, **kwargs):
            now[0] += seconds
            return method(*args, **kwargs)

        return call

    monkeypatch.setattr(served, "schedule", taking(2.0, served.schedule))
    monkeypatch.setattr(served, "_advance_loads", taking(0.5, served._advance_loads))
    served.step()
    # It also looks for loads while it schedules.
    assert served.host_time == HostTime(steps=1, seconds=3.0, waited=0.5)


def test_the_numbers_of_several_engines_are_added():
    first = EngineStats(1, 2, 16, 3, PrefixCacheStats(10, 4, 1), AcceptanceStats(5, 6, 7), HostTime(8, 1.5, 0.5))
    second = EngineStats(10, 20, 16, 5, PrefixCacheStats(100, 40, 0), AcceptanceStats(0, 1, 2), HostTime(2, 0.5, 0.25))
    assert EngineStats.total([first, second]) == EngineStats(
        11, 22, 32, 8, PrefixCacheStats(110, 44, 1), AcceptanceStats(5, 7, 9), HostTime(10, 2.0, 0.75)
    )
