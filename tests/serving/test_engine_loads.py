"""Blocks are loaded from disk and host memory, and stored there, while other requests decode."""

import threading
from itertools import pairwise

import jax
import pytest

from jaxkv.offload import DiskPool
from serving.toy_engines import disk_pool, engine, host_pool, right, serve
from support.toy_model import prompt

pytestmark = pytest.mark.usefixtures("toy")
LONG = prompt(41)
"""Ten full blocks."""


@pytest.fixture
def disk(tmp_path):
    """A disk that has the blocks of `LONG`."""
    host = host_pool(disk=disk_pool(tmp_path))
    serve(engine(connectors=[host]), LONG, count=1)
    host.flush()
    return host.disk


@pytest.fixture
def stalled(monkeypatch):
    """Reads from disk wait for this event."""
    event, load = threading.Event(), DiskPool.load

    def waiting(*args):
        assert event.wait(60)
        return load(*args)

    monkeypatch.setattr(DiskPool, "load", waiting)
    yield event
    event.set()


def finish(served, *requests):
    for _ in served.run():
        pass
    for request in requests:
        assert request.generated == right(request.prompt, request.max_tokens)
    assert served.pool.num_free == served.pool.num_blocks
    assert not served.block_manager.loads


def test_others_decode_and_join_while_blocks_are_read_from_disk(disk, stalled):
    host = host_pool(disk=disk)
    served = engine(num_blocks=32, connectors=[host])
    first = served.submit(prompt(5), max_tokens=30)
    while not first.generated:
        served.step()
    loading = served.submit(LONG, max_tokens=3)
    later = served.submit(prompt(6), max_tokens=30)
    for _ in range(8):
        served.step()
    assert len(first.generated) > 8
    assert len(later.generated) > 4
    assert (loading.place >= 0, loading.loading, loading.generated) == (True, 40, [])
    stalled.set()
    finish(served, first, loading, later)
    assert (served.prefix_stats.found, served.prefix_stats.loaded, host.stats.read) == (40, 40, 10)
    assert served.tiers.failures == 0
    assert not any(host._held.maps)


def test_a_step_with_nothing_else_to_do_waits_for_the_disk_but_not_for_long(disk, stalled):
    served = engine(connectors=[host_pool(disk=disk)])
    request = served.submit(LONG, max_tokens=3)
    assert served.step() == served.step() == []
    later = served.submit(prompt(6), max_tokens=3)
    while not later.generated:
        served.step()
    stalled.set()
    finish(served, request, later)
    assert served.prefix_stats.loaded == 40


def test_a_request_waits_for_blocks_that_another_loads(disk, stalled):
    host = host_pool(disk=disk)
    served = engine(num_blocks=32, connectors=[host])
    requests = [served.submit(LONG[:length], max_tokens=3) for length in (41, 29)]
    served.step()
    assert served.running == requests[:1]
    stalled.set()
    finish(served, *requests)
    assert host.stats.read == 10
    assert served.prefix_stats.found == 40 + 28


@pytest.mark.parametrize("end", ["cancelled", "preempted", "restored", "released"])
def test_a_load_ends_with_its_request(end, disk, stalled):
    host = host_pool(disk=disk)
    served = engine(num_blocks=14, connectors=[host])
    request = served.submit(LONG, max_tokens=3)
    served.step()
    assert served.block_manager.loads
    if end == "cancelled":
        served.cancel(request)
    elif end == "preempted":
        first = served.submit(prompt(20), max_tokens=3, priority=1)
        while not first.generated:
            served.step()
        assert request.place < 0
    elif end == "restored":
        served.changing = True
        served.check_usable()
    else:
        served.end(RuntimeError())
    assert not served.block_manager.loads
    assert not any(host._held.maps)
    stalled.set()
    if end == "released":
        return
    finish(served, *(() if end == "cancelled" else (request,)))
    assert served.pool.num_free == 14


def test_few_blocks_are_on_their_way_at_a_time():
    """Less than twice the greatest length of a chunk, which is two blocks of this pool."""
    host = host_pool(num_blocks=16)
    serve(engine(connectors=[host]), LONG, count=1)
    served = engine(num_blocks=32, connectors=[host])
    first = served.submit(prompt(5), max_tokens=40)
    while not first.generated:
        served.step()
    loading, loaded = served.submit(LONG, max_tokens=3), [0]
    while not loading.generated:
        served.step()
        loaded.append(host.stats.loaded)
    assert loaded[-1] == 10
    assert max(later - before for before, later in pairwise(loaded)) < 4
    finish(served, first, loading)


def test_stores_do_not_wait_for_the_disk(monkeypatch, tmp_path):
    """Blocks that have not been written yet are not evicted for others, which are not stored then."""
    event, store = threading.Event(), DiskPool.store

    def waiting(*args, **kwargs):
        assert event.wait(60)
        return store(*args, **kwargs)

    monkeypatch.setattr(DiskPool, "store", waiting)
    host = host_pool(num_blocks=8, disk=disk_pool(tmp_path))
    served = engine(num_blocks=32, connectors=[host])
    requests = [served.submit(prompt(20, seed), max_tokens=9) for seed in range(3)]
    finish(served, *requests)
    assert len(host) == 8
    assert host.stats.rejected > 0
    event.set()
    host.flush()
    assert len(host.disk) == 8


def test_many_stores_of_few_blocks_do_not_wait_for_each_other(monkeypatch):
    """As many blocks may be in flight as in few stores of many."""
    host, waited = host_pool(num_blocks=256), []
    most = host.blocks_in_flight
    monkeypatch.setattr("jaxkv.offload.host.Chunk.has_arrived", False)
    block = jax.block_until_ready

    def counting(rows):
        waited.append(len(host._arriving))
        return block(rows)

    served = engine(num_blocks=64, max_len=48, connectors=[host])
    monkeypatch.setattr("jax.block_until_ready", counting)
    requests = [served.submit(prompt(24, seed), max_tokens=20) for seed in range(3)]
    finish(served, *requests)
    assert host.stats.stored < most
    assert len(host._arriving) > 8
    assert not waited
