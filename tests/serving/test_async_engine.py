"""An engine in a thread: requests of several threads and event loops get their own tokens, or the engine's error.

Nothing here waits for a time: commands are taken in order, so that a request which ends shows that earlier commands
have been taken.
"""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from jaxkv.models.sampling import Sampling
from jaxkv.serving import AsyncEngine, Engine
from serving.toy_engines import engine, right
from support.toy_model import prompt

pytestmark = pytest.mark.usefixtures("toy")
LONG = 40
"""Tokens of a request that ends only if it is cancelled."""
FIRST = 2
"""Steps until the first token has been read."""


@pytest.fixture
def served():
    toy = engine(num_blocks=32)
    with AsyncEngine(toy) as served:
        yield served
    assert not toy.unfinished
    assert toy.pool.num_free == toy.pool.num_blocks
    assert "jaxkv-engine" not in [thread.name for thread in threading.enumerate()]


class Steps:
    """Has an engine wait before each step until a test allows it."""

    def __init__(self, toy):
        self._allowed, self._step, toy.step = threading.Semaphore(0), toy.step, self

    def __call__(self):
        assert self._allowed.acquire(timeout=60)
        return self._step()

    def allow(self, count=1000):
        self._allowed.release(count)


@pytest.fixture
def paused():
    """An engine, and its steps, which wait."""
    toy = engine(num_blocks=32)
    steps = Steps(toy)
    with AsyncEngine(toy) as served:
        yield served, steps
        steps.allow()
    assert toy.pool.num_free == toy.pool.num_blocks


async def collected(stream):
    return [token async for token in stream]


def test_streams_of_an_event_loop(served):
    prompts = [prompt(length) for length in (3, 9, 5, 14, 8)]

    async def main():
        streams = [served.submit(tokens, max_tokens=6) for tokens in prompts]
        return streams, await asyncio.gather(*map(collected, streams))

    streams, found = asyncio.run(main())
    assert found == [right(tokens, 6) for tokens in prompts]
    for stream, tokens in zip(streams, found, strict=True):
        assert (stream.request.generated, stream.request.finish_reason) == (tokens, "length")
        assert list(stream) == []


def test_streams_of_several_threads_and_event_loops(served):
    def one(number):
        tokens = prompt(3 + number % 7, seed=number)
        stream = served.submit(tokens, max_tokens=5)
        assert (asyncio.run(collected(stream)) if number % 2 else list(stream)) == right(tokens, 5)

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(one, range(18)))


def test_options_are_those_of_the_engine(served):
    tokens = right(prompt(9), 6)
    stop = tokens[2]
    stream = served.submit(prompt(9), max_tokens=6, stop=[stop], logprobs=1, sampling=Sampling(), priority=1)
    assert list(stream) == tokens[: tokens.index(stop) + 1]
    assert stream.request.finish_reason == "stop"
    assert [top[0][0] for _, top in stream.request.logprobs] == stream.request.generated
    with pytest.raises(ValueError, match="`prompt` is empty"):
        served.submit([])


def test_the_engine_waits_for_requests_and_works_again(served):
    for seed in range(3):
        assert list(served.submit(prompt(6, seed=seed), max_tokens=3)) == right(prompt(6, seed=seed), 3)
        assert (served.stats.running, served.stats.waiting) == (0, 0)
    assert served.stats.free_blocks == 32


class TestConsumersThatGoAway:
    @staticmethod
    def check_cancelled(paused, *requests):
        """That another request is served, and that these have been cancelled by then."""
        served, steps = paused
        other = served.submit(prompt(5), max_tokens=3)
        steps.allow()
        assert list(other) == right(prompt(5), 3)
        for request in requests:
            assert request.finish_reason == "cancelled"
            assert len(request.generated) <= 2
            assert request.generated == right(request.prompt, LONG)[: len(request.generated)]

    def test_cancelled_streams_end(self, paused):
        served, steps = paused
        stream = served.submit(prompt(7), max_tokens=LONG)
        steps.allow(FIRST)
        found = [next(stream)]
        stream.cancel(finish_reason="stop")
        stream.cancel()
        steps.allow()
        found += list(stream)
        assert found == stream.request.generated == right(prompt(7), LONG)[: len(found)]
        assert (stream.request.finish_reason, stream.request.cancelled) == ("stop", True)
        del stream
        assert list(served.submit(prompt(5), max_tokens=3)) == right(prompt(5), 3)

    def test_dropped_streams(self, paused):
        served, steps = paused
        stream = served.submit(prompt(7), max_tokens=LONG)
        steps.allow(FIRST)
        for _ in stream:
            break
        requests = [stream.request, served.submit(prompt(8), max_tokens=LONG).request]  # one never read from
        del stream
        self.check_cancelled(paused, *requests)

    def test_closed_generators(self, paused):
        served, steps = paused
        requests = []

        def generate():
            stream = served.submit(prompt(7), max_tokens=LONG)
            requests.append(stream.request)
            yield from stream

        running = generate()
        steps.allow(FIRST)
        next(running)
        running.close()
        self.check_cancelled(paused, *requests)

    def test_cancelled_tasks(self, paused):
        served, steps = paused

        async def main():
            stream, begun = served.submit(prompt(7), max_tokens=LONG), asyncio.Event()

            async def consume():
                async for _ in stream:
                    begun.set()

            task = asyncio.create_task(consume())
            steps.allow(FIRST)
            await begun.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            return stream  # not dropped

        stream = asyncio.run(main())
        self.check_cancelled(paused, stream.request)

    def test_an_event_loop_that_ends_before_its_tasks(self, paused):
        served, _ = paused

        async def main():
            stream = served.submit(prompt(7), max_tokens=LONG)
            task = asyncio.create_task(collected(stream))
            await asyncio.sleep(0)  # it waits for its first token
            return stream.request, task

        request, task = asyncio.run(main())
        assert task.cancelled()
        self.check_cancelled(paused, request)

    def test_an_interrupted_wait_loses_no_token(self, paused):
        served, steps = paused
        stream = served.submit(prompt(7), max_tokens=5)
        assert stream._channel.wait(threading.Event())  # as if the thread that waits for it had been interrupted
        steps.allow()
        assert list(stream) == right(prompt(7), 5)


class TestEnd:
    def test_closing_ends_all_requests(self):
        toy = engine(num_blocks=32)
        steps = Steps(toy)
        served = AsyncEngine(toy)
        streams = [served.submit(prompt(9, seed=n), max_tokens=LONG) for n in range(5)]
        with ThreadPoolExecutor(6) as threads:
            found = threads.map(list, streams)
            steps.allow(FIRST)
            join = served._thread.join
            served._thread.join = lambda: steps.allow() or join()
            served.close()  # while the engine is in a step
            for stream, tokens in zip(streams, found, strict=True):
                assert stream.request.finish_reason == "cancelled"
                assert tokens == right(stream.request.prompt, LONG)[: len(tokens)]
        assert toy.pool.num_free == toy.pool.num_blocks
        served.close()
        with pytest.raises(RuntimeError, match="this AsyncEngine is closed"):
            served.submit(prompt(3), max_tokens=2)
        toy.submit(prompt(3), max_tokens=2)
        assert [token for _, token in toy.run()] == right(prompt(3), 2)

    def test_errors_reach_every_stream(self):
        toy, entered, failing = engine(num_blocks=32), threading.Event(), threading.Event()
        step, steps = toy._step, []

        def broken():
            steps.append(step())
            if len(steps) == 3:
                entered.set()
                assert failing.wait(60)
                raise ZeroDivisionError("injected")

        toy._step = broken
        with AsyncEngine(toy) as served:
            streams = [served.submit(prompt(6, seed=n), max_tokens=LONG) for n in range(4)]
            assert entered.wait(60)
            streams.append(served.submit(prompt(4), max_tokens=2))  # never reaches the engine
            failing.set()
            found = []
            with pytest.raises(RuntimeError, match="its engine has, because of ZeroDivisionError") as raised:
                found.extend(streams[0])
            assert isinstance(raised.value.__cause__, ZeroDivisionError)
            assert found == right(prompt(6), LONG)[: len(found)]
            for stream in streams[1:]:
                with pytest.raises(RuntimeError, match="because of ZeroDivisionError"):
                    asyncio.run(collected(stream))
            with pytest.raises(RuntimeError, match="closed, or its engine has ended") as raised:
                served.submit(prompt(3), max_tokens=2)
            assert isinstance(raised.value.__cause__, ZeroDivisionError)

    def test_tokens_that_an_earlier_run_left_are_dropped(self):
        toy = engine(num_blocks=32)
        for seed in range(2):
            toy.submit(prompt(3, seed=seed), max_tokens=1)
        next(toy.run())  # the token of the second has been read
        with AsyncEngine(toy) as served:
            assert list(served.submit(prompt(5), max_tokens=3)) == right(prompt(5), 3)

    def test_an_engine_that_steps_with_other_processes_is_rejected(self, monkeypatch):
        monkeypatch.setattr(Engine, "steps_with_others", True)
        with pytest.raises(ValueError, match="`engine` steps together with those of other processes: expected one"):
            AsyncEngine(engine())

    def test_an_engine_with_requests_is_rejected(self):
        toy = engine()
        toy.submit(prompt(3), max_tokens=2)
        with pytest.raises(ValueError, match="`engine` has 1 requests that have not ended: expected none"):
            AsyncEngine(toy)


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 20))])
def test_random_requests_of_several_threads(served, seed):
    """Some are cancelled or dropped at random; all others get the tokens that they get alone."""

    def client(number):
        rng = np.random.default_rng([seed, number])
        for turn in range(5):
            tokens, count = prompt(int(rng.integers(1, 9)), seed=int(rng.integers(4))), int(rng.integers(1, 12))
            stream = served.submit(tokens, max_tokens=count, priority=int(rng.integers(3)))
            most, found = int(rng.integers(count + 1)) if rng.random() < 0.4 else count, []
            for token in stream:
                found.append(token)
                if len(found) >= most:
                    break
            if most == count:
                assert found == right(tokens, count)
            elif turn % 2:
                stream.cancel()
                found += list(stream)
            assert found == right(tokens, count)[: len(found)]

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(client, range(4)))


def test_outputs_have_all_tokens_that_have_come(paused):
    served, steps = paused
    stream = served.submit(prompt(9), max_tokens=6, logprobs=1)

    async def outputs():
        found = []
        async for output in stream.outputs():
            found.append(output)
            if len(found) == 1:
                steps.allow()
                await asyncio.wrap_future(served.call(lambda engine: None))
                while stream.request.finish_reason is None:
                    await asyncio.sleep(0.001)
                await asyncio.wrap_future(served.call(lambda engine: None))
        return found

    steps.allow(FIRST)
    first, last = asyncio.run(outputs())
    assert (first.tokens, first.finish_reason) == (right(prompt(9), 1), None)
    assert (first.tokens + last.tokens, last.finish_reason) == (right(prompt(9), 6), "length")
    assert [top[0][0] for _, top in first.logprobs + last.logprobs] == right(prompt(9), 6)


def test_outputs_of_a_request_without_tokens(served):
    async def outputs():
        stream = served.submit(prompt(9), max_tokens=LONG)
        stream.cancel(finish_reason="gone")
        return [output async for output in stream.outputs()]

    *_, last = asyncio.run(outputs())
    assert last.finish_reason == "gone"


def test_an_engine_that_is_open(served):
    served.check_open()
    served.close()
    with pytest.raises(RuntimeError, match="this AsyncEngine is closed"):
        served.check_open()


def test_functions_are_called_between_steps(paused):
    served, steps = paused
    stream = served.submit(prompt(9), max_tokens=6)
    steps.allow(FIRST)
    first = next(stream)
    exported = served.call(lambda engine: engine.export(prompt(9)))
    failing = served.call(lambda engine: engine.export([]))
    assert not exported.done()
    steps.allow()
    assert exported.result(timeout=60).num_tokens == 9
    with pytest.raises(ValueError, match="`prompt` is empty"):
        failing.result(timeout=60)
    assert [first, *stream] == right(prompt(9), 6)
    assert served.call(lambda engine: engine.adopt(exported.result())).result(timeout=60) == 9


def test_functions_after_the_end(monkeypatch):
    toy = engine(num_blocks=32)
    served = AsyncEngine(toy)
    served.close()
    with pytest.raises(RuntimeError, match="this AsyncEngine is closed"):
        served.call(len)
