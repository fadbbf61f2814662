"""`Leader` and `follow`, and what processes agree on, with an engine for each of two processes in one.

`tests/parallel/two_processes.py` and `pools_of_processes.py` have two.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from random import Random
from threading import current_thread

import jax
import numpy as np
import pytest

from jaxkv import offload
from jaxkv.models.sampling import Sampling
from jaxkv.serving import Leader, follow, processes
from jaxkv.serving.exchange import TOGETHER, Exchange
from serving import pools_of_processes, serving_process
from serving.toy_engines import BLOCK, MODEL, engine, host_pool, right
from support.cases import further, slow
from support.jobs import job
from support.toy_model import prompt

pytestmark = pytest.mark.usefixtures("toy")


class Messages:
    """In place of the store of `jax.distributed`."""

    queue = Queue[str]()

    def send(self, message):
        self.queue.put(message)

    def received(self):
        while True:
            yield self.queue.get(timeout=60)


@pytest.fixture
def process(monkeypatch):
    """Says which of two processes this one is; process 0 at first."""
    monkeypatch.setattr(processes, "_Messages", Messages)
    monkeypatch.setattr(Messages, "queue", Queue())
    monkeypatch.setattr(jax, "process_count", lambda: 2)

    def is_now(number):
        monkeypatch.setattr(jax, "process_index", lambda: number)

    is_now(0)
    return is_now


def followed(process, served):
    """The tokens and ends of all requests of an engine that follows until the leader is closed."""
    requests = []
    add = served.add
    served.add = lambda request: (requests.append(request), add(request))
    process(1)
    follow(served)
    process(0)
    return [(request.number, request.generated, request.finish_reason) for request in requests]


def test_followers_repeat_what_the_leader_does(process):
    sizes = {"num_blocks": 8, "max_requests": 2, "chunk": 4}
    leader, follower = Leader(engine(**sizes)), engine(**sizes)
    leader.warm_up()
    requests = [leader.submit(prompt(9, n), max_tokens=12, priority=n) for n in range(3)]
    requests.append(leader.submit(prompt(7), max_tokens=6, sampling=Sampling(1.0, seed=3), stop=(5,), cache_salt="a"))
    with pytest.raises(ValueError, match="`prompt` is empty"):
        leader.submit([])
    for _ in range(6):
        leader.step()
    leader.cancel(requests[1], finish_reason="enough")
    assert list(leader.run())
    leader.close()
    for request in (requests[0], requests[2]):
        assert request.generated == right(request.prompt, 12)
    assert requests[1].finish_reason == "enough"
    assert leader.stats == leader.engine.stats
    found = followed(process, follower)
    assert found == [(request.number, request.generated, request.finish_reason) for request in requests]
    assert follower.buckets.ready == {*follower.buckets.shapes}
    assert leader.engine.pool._keys == follower.pool._keys


def test_an_exception_ends_all(process, monkeypatch):
    leader, follower = Leader(engine()), engine()
    request = leader.submit(prompt(9), max_tokens=6)
    leader.step()

    def raises():
        raise RuntimeError("injected")

    monkeypatch.setattr(leader.engine, "_step", raises)
    with pytest.raises(RuntimeError, match="injected"):
        leader.step()
    with pytest.raises(RuntimeError, match="one of several processes cannot be restored without the others"):
        leader.step()
    assert request.finish_reason is None
    with pytest.raises(RuntimeError, match="the `Leader` of process 0 has ended because of an exception"):
        followed(process, follower)


@pytest.mark.parametrize("method", ["add", "cancel"])
def test_an_exception_between_two_steps_ends_all(method, process, monkeypatch):
    """One process cannot be restored alone."""
    leader, follower = Leader(engine()), engine()
    request = leader.submit(prompt(9), max_tokens=6)
    leader.step()

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(leader.engine, method, interrupted)
    with pytest.raises(KeyboardInterrupt):
        leader.cancel(request) if method == "cancel" else leader.submit(prompt(5), max_tokens=3)
    with pytest.raises(RuntimeError, match="one of several processes cannot be restored"):
        leader.step()
    with pytest.raises(RuntimeError, match="has ended because of an exception"):
        followed(process, follower)


def test_what_a_message_may_have(process):
    leader, follower = Leader(engine()), engine()
    sampling = Sampling(temperature=np.float32(0.5), seed=np.int64(3))
    request = leader.submit(prompt(5), max_tokens=3, sampling=sampling)
    leader.cancel(request, finish_reason="enough")
    with pytest.raises(ValueError, match="it ended with 'enough'"):
        leader.cancel(request)
    for _ in range(5):
        leader.step()  # sends one message
    leader.close()
    assert Messages.queue.qsize() == 3
    assert followed(process, follower) == [(request.number, [], "enough")]


def test_engines_with_other_programs(process):
    Leader(engine())
    other = engine()
    other.warm_up()
    with pytest.raises(ValueError, match="expected engines with the same arguments, which have not been warmed up"):
        followed(process, other)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: engine(connectors=[host_pool()]),
            "`engine` has connectors, and a model on devices of this process alone: expected no connectors",
        ),
        (lambda: engine(max_time_between_tokens=0.1), "`engine` has a `max_time_between_tokens`: expected none"),
        (lambda: started(engine()), "`engine` has 1 requests that have not ended: expected none"),
    ],
)
def test_engines_that_cannot_be_stepped_together(make, message, process):
    for function in (Leader, follow):
        with pytest.raises(ValueError, match=message):
            function(make())


def started(served):
    served.submit(prompt(5), max_tokens=3)
    return served


def test_other_processes(process, monkeypatch):
    with pytest.raises(ValueError, match="this is process 0: expected another one; make a `Leader`"):
        follow(engine())
    process(1)
    with pytest.raises(ValueError, match="this is process 1: expected process 0; call `follow`"):
        Leader(engine())
    monkeypatch.setattr(jax, "process_count", lambda: 1)
    for function in (Leader, follow):
        with pytest.raises(ValueError, match="there is one process: expected several"):
            function(engine())


@pytest.mark.ci
@pytest.mark.parametrize("killed", [0, 1])
def test_both_processes_end_if_one_is_killed(killed):
    script = serving_process.__file__
    with job(lambda address, number: [script, address, str(number)]) as both:
        leader, other = both[0], both[1 - killed]
        assert any(serving_process.BEGUN in line for line in leader.stdout)
        both[killed].kill()
        output, _ = other.communicate(timeout=30)
    assert other.returncode != 0
    assert TOGETHER in output or "another task died" in output  # from JAX, which may end the process first


class Store(dict):
    """In place of the store of `jax.distributed`, of all processes."""

    set, delete = dict.__setitem__, dict.__delitem__

    def wait_for(self, key):
        end = time.monotonic() + 30
        while key not in self:
            assert time.monotonic() < end, f"nobody has sent {key}"
            time.sleep(0.001)
        return self[key]


@pytest.fixture
def exchange(monkeypatch):
    """The `Exchange` of two processes, which are threads that have the processes' names."""
    store = Store()
    monkeypatch.setattr("jaxkv.serving.exchange.Store", lambda: store)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: int(current_thread().name[0]))
    with ThreadPoolExecutor(1, "0") as first, ThreadPoolExecutor(1, "1") as second:
        exchanges = [pool.submit(Exchange).result() for pool in (first, second)]
        yield (
            store,
            [
                lambda method, *args, pool=pool, own=own: pool.submit(getattr(own, method), *args)
                for pool, own in zip((first, second), exchanges, strict=True)
            ],
        )


def test_all_processes_get_the_values_of_all(exchange):
    store, (first, second) = exchange
    for number in range(5):
        gathered = [each("all_gather", [number, name]) for each, name in ((first, "a"), (second, "b"))]
        assert [each.result() for each in gathered] == [[[number, "a"], [number, "b"]]] * 2
    assert len(store) <= 4  # of the last exchange, and of one more in the process that was first


@pytest.mark.parametrize("waits", [False, True])
def test_a_process_that_leaves_ends_the_others(waits, exchange):
    _, (first, second) = exchange
    gathered = first("all_gather", 1), second("all_gather", 2)
    assert [each.result() for each in gathered] == [[1, 2]] * 2
    waiting = first("all_gather", 3) if waits else None
    second("leave").result()
    with pytest.raises(RuntimeError, match="process 1 has ended its engine because of an exception"):
        (waiting or first("all_gather", 3)).result()


class Unreliable(offload.Connector):
    """Has blocks in memory, and at random forgets them, loses them, or brings them late."""

    def __init__(self, rng):
        self.layout, self.rng, self.rows, self.pulled = MODEL.layout(1, BLOCK), rng, {}, 0

    def __contains__(self, key):
        return key in self.rows and self.rng.random() < 0.9

    def offer(self, cache, blocks, keys):
        if self.rng.random() < 0.1:
            raise OSError("injected")
        self.rows |= zip(keys, np.asarray(offload.read_rows(cache, blocks)), strict=True)

    def pull(self, keys, sharding):
        return Late(self, [(key, self.rows[key]) for key in keys])


class Late(offload.Pull):
    def __init__(self, connector, found):
        self.connector, self.found = connector, found

    def poll(self, timeout):
        if self.connector.rng.random() < 0.05:
            raise OSError("injected")
        count = self.connector.rng.randrange(3)
        arrived, self.found = self.found[:count], self.found[count:]
        self.connector.pulled += len(arrived)
        return [offload.Arrival([key], row[None]) for key, row in arrived]

    def release(self):
        self.found = []


def agreeing(*connectors, **sizes):
    """The engine of a process, which agrees with the other one: as if each had a part of the cache."""
    served = engine(connectors=connectors, **sizes)
    served.tiers.exchange = Exchange()
    return served


@pytest.fixture
def both(exchange):
    """Calls a function of a process's number in both, at the same time; returns the results."""
    with ThreadPoolExecutor(1, "0") as first, ThreadPoolExecutor(1, "1") as second:
        yield lambda function: [
            call.result() for call in [pool.submit(function, number) for number, pool in enumerate((first, second))]
        ]


@pytest.mark.parametrize("seed", [0, *map(further, (1, 2, 3)), *map(slow, range(4, 40))])
def test_processes_agree_whatever_their_connectors_do(seed, both):
    def serve(number):
        script, connector = Random(seed), Unreliable(Random(f"{seed} {number}"))
        served = agreeing(connector, num_blocks=8, max_requests=2, chunk=4)
        requests, steps = [], []
        while len(requests) < 30 or served.unfinished:
            if len(requests) < 30 and script.random() < 0.2:
                tokens = prompt(script.randrange(9, 17), script.randrange(3))
                requests.append(served.submit(tokens, max_tokens=script.randrange(1, 9), priority=script.randrange(2)))
            if served.unfinished and script.random() < 0.02:
                served.cancel(script.choice(served.unfinished))
            served.step()
            steps.append([(request.number, request.place, request.cached) for request in served.unfinished])
        assert connector.pulled
        assert served.tiers.failures
        assert served.pool.num_free == 8
        for request in requests:
            expected = right(request.prompt, request.max_tokens)
            assert request.generated == expected[: len(request.generated)]
            assert len(request.generated) == request.max_tokens or request.cancelled
        return steps, [request.generated for request in requests], served.prefix_stats

    first, second = both(serve)
    assert first == second
    assert first[2].loaded


def test_only_steps_that_look_up_or_load_blocks_exchange_anything(both):
    def serve(number):
        served, counts = agreeing(host_pool(), num_blocks=4), []
        for tokens in (prompt(9), prompt(9), prompt(9, 1), prompt(3), prompt(9)):
            served.submit(tokens, max_tokens=4)
            list(served.run())
            counts.append(served.tiers.exchange._number)
        assert served.prefix_stats.loaded == 8
        return counts

    first, second = both(serve)
    assert first == second
    computed, on_device, evicting, without_full_blocks, loaded = first
    assert (computed, on_device, evicting, without_full_blocks) == (1, 1, 2, 2)
    assert loaded > 3


def test_an_exception_in_one_process_ends_the_load_of_the_other(both):
    def serve(number):
        served = agreeing(host_pool())
        served.submit(prompt(9), max_tokens=4)
        if number:
            served.schedule = None
        expected = "'NoneType' object is not callable" if number else "process 1 has ended its engine"
        with pytest.raises((TypeError, RuntimeError), match=expected):
            served.step()
        with pytest.raises(RuntimeError, match="one of several processes cannot be restored without the others"):
            served.step()
        return len(served.waiting)

    assert both(serve) == [1, 1]


def test_an_exception_of_the_leader_ends_a_follower_that_waits(both, monkeypatch):
    monkeypatch.setattr(processes, "_Messages", Messages)
    monkeypatch.setattr(Messages, "queue", Queue())

    def serve(number):
        served = agreeing(host_pool())
        if number:
            with pytest.raises(RuntimeError, match="process 0 has ended its engine because of an exception"):
                follow(served)
            return
        leader = Leader(served)
        leader.submit(prompt(9), max_tokens=4)
        served.schedule = None
        with pytest.raises(TypeError):
            leader.step()

    both(serve)


@pytest.mark.slow
def test_each_of_two_processes_loads_its_part(tmp_path):
    script = pools_of_processes.__file__
    with job(lambda address, number: [script, address, str(number), str(tmp_path)]) as processes:
        outputs = [process.communicate(timeout=500)[0] for process in processes]
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output
        assert "equal" in output.splitlines(), output
