"""Blocks that an engine pulls from the host pool of another; and whatever may go wrong on the way."""

import json
import socket
import time
from contextlib import contextmanager, suppress
from threading import Thread

import numpy as np
import pytest

from jaxkv.offload import BlockServer, HostPool, JaxTransport, NixlTransport, RemoteBlocks, remote
from serving.toy_engines import MODEL, engine, host_pool, right, serve
from support import toy_model
from support.toy_model import prompt

LONG = prompt(42)
"""Ten blocks and two tokens."""


@pytest.fixture(autouse=True)
def _toy(monkeypatch):
    toy_model.install(monkeypatch)
    monkeypatch.setattr(remote, "RETRY_SECONDS", 0.02)


def nixl():
    try:
        return NixlTransport()
    except ImportError as error:
        pytest.skip(str(error))


@pytest.fixture(params=[JaxTransport, nixl], ids=["jax", "nixl"])
def transport(request):
    return request.param


class Pair:
    """A pool that has the blocks of a prompt, a server of it, and an engine that may pull them."""

    def __init__(self, transport=JaxTransport, authkey=b"password", layout=None, **options):
        self.pool = host_pool()
        self.first = engine(connectors=[self.pool])
        serve(self.first, LONG, count=1)
        self.transport = transport()
        self.server = self.serve(("127.0.0.1", 0))
        layout = layout or MODEL.layout(1, 4)
        self.blocks = RemoteBlocks(
            layout, [self.server.address], authkey=authkey, transport=transport(), **{"pull_timeout": 30.0, **options}
        )
        self.keys = list(self.pool._chunks._places)

    def serve(self, address):
        return BlockServer(self.pool, address, authkey=b"password", transport=self.transport)

    def engine(self, **options):
        assert self.blocks.wait_for(self.keys, 30)
        return engine(connectors=[self.blocks], **options)

    def close(self):
        self.blocks.close()
        self.server.close()


@pytest.fixture
def pair():
    pairs = []

    def make(*args, **options):
        pairs.append(Pair(*args, **options))
        return pairs[-1]

    yield make
    for made in pairs:
        made.close()


def until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_the_tokens_of_one_engine(pair, transport):
    both = pair(transport)
    served = both.engine()
    assert serve(served, LONG) == 40
    assert (served.prefix_stats.loaded, served.tiers.failures) == (40, 0)
    # New blocks are reported while it is connected.
    serve(both.first, prompt(30, seed=1), count=1)
    both.keys = list(both.pool._chunks._places)
    assert serve(both.engine(), prompt(30, seed=1)) == 28


def test_in_several_replies(pair, monkeypatch):
    monkeypatch.setattr(remote, "CHUNK_BYTES", 3 * host_pool().block_nbytes)
    served = pair().engine()
    assert serve(served, LONG) == served.prefix_stats.loaded == 40


def test_others_decode_meanwhile(pair, monkeypatch):
    both = pair()
    answer, held = both.server._answer, []
    monkeypatch.setattr(both.server, "_answer", lambda *args: held.append(args))
    served = both.engine(num_blocks=32)
    first = served.submit(prompt(5), max_tokens=30)
    loading = served.submit(LONG, max_tokens=3)
    for _ in range(12):
        served.step()
    assert len(first.generated) > 8
    assert loading.loading == 40
    monkeypatch.setattr(both.server, "_answer", answer)
    until(lambda: held)
    answer(*held[0])
    list(served.run())
    assert first.generated == right(first.prompt, 30)
    assert loading.generated == right(LONG, 3)
    assert served.tiers.failures == 0


def test_a_server_that_says_nothing(pair, monkeypatch, caplog):
    both = pair(pull_timeout=0.2)
    answer = both.server._answer
    monkeypatch.setattr(both.server, "_answer", lambda *_: None)
    served = both.engine()
    assert serve(served, LONG) == 0
    assert "10 blocks were not loaded; what cannot be read is computed instead: TimeoutError" in caplog.text
    assert served.tiers.failures == 1
    assert both.keys[0] not in both.blocks
    # As soon as it says something, it is asked again.
    monkeypatch.setattr(both.server, "_answer", answer)
    serve(both.first, prompt(30, seed=1), count=1)
    assert serve(both.engine(), LONG) == 40


def test_a_server_that_ends_during_a_pull_and_starts_again(pair, monkeypatch):
    both = pair()
    monkeypatch.setattr(both.server, "_answer", lambda *_: both.server.close())
    served = both.engine()
    assert serve(served, LONG) == 0
    assert served.tiers.failures == 1
    until(lambda: both.keys[0] not in both.blocks)
    both.server = both.serve(both.server.address)
    assert serve(both.engine(), LONG) == 40


def test_blocks_that_the_pool_has_lost(pair, monkeypatch, caplog):
    both = pair()
    served = both.engine()
    rows = both.pool.rows
    monkeypatch.setattr(both.pool, "rows", lambda keys: rows(keys[:3]))
    assert serve(served, LONG) == 0
    assert "does not have" in caplog.text
    monkeypatch.setattr(both.pool, "rows", lambda keys: rows(()))
    assert serve(both.engine(), LONG) == 0


def test_a_reply_without_blocks_does_not_end_the_connection(pair, monkeypatch):
    both = pair()
    served = both.engine()
    link = both.blocks._peers[0]._link
    with monkeypatch.context() as lost:
        rows = both.pool.rows
        lost.setattr(both.pool, "rows", lambda keys: rows(()))
        assert serve(served, LONG) == 0
    assert serve(both.engine(), LONG) == 40
    assert both.blocks._peers[0]._link is link


@pytest.mark.parametrize("cancelled", [False, True])
def test_more_pulls_than_a_server_answers_at_once(cancelled, pair):
    both = pair()
    prompts = [prompt(13, seed=n) for n in range(2 * remote.MAX_OFFERS)]
    for tokens in prompts:
        serve(both.first, tokens, count=1)
    both.keys = list(both.pool._chunks._places)
    served = both.engine(num_blocks=64, max_requests=len(prompts))
    link = both.blocks._peers[0]._link
    requests = [served.submit(tokens, max_tokens=3) for tokens in prompts]
    served.step()
    if cancelled:
        for request in requests:
            served.cancel(request)
        requests = [served.submit(tokens, max_tokens=3) for tokens in prompts]
    list(served.run())
    for request in requests:
        assert request.generated == right(request.prompt, 3)
    assert served.prefix_stats.loaded == 12 * len(prompts)
    assert served.tiers.failures == 0
    assert both.blocks._peers[0]._link is link
    assert not both.blocks._peers[0]._requests


def test_evicted_blocks_are_reported(pair):
    both = pair()
    assert both.blocks.wait_for(both.keys, 30)
    for chunk in list(both.pool._chunks):
        both.pool._chunks.remove(chunk)
    until(lambda: not any(key in both.blocks for key in both.keys))


def test_a_transfer_that_fails(pair, monkeypatch):
    both = pair()
    served = both.engine()

    def fails(*_):
        raise RuntimeError("injected")

    monkeypatch.setattr(both.blocks._peers[0]._transport, "fetch", fails)
    assert serve(served, LONG) == 0
    assert served.tiers.failures == 1


def test_a_request_that_is_cancelled_leaves_nothing(pair, monkeypatch):
    both = pair()
    answer, held = both.server._answer, []
    monkeypatch.setattr(both.server, "_answer", lambda *args: held.append(args))
    served = both.engine()
    request = served.submit(LONG, max_tokens=3)
    served.step()
    until(lambda: held)
    served.cancel(request)
    (peer,) = both.blocks._peers
    assert len(peer._requests) == 1
    monkeypatch.setattr(both.server, "_answer", answer)
    answer(*held[0])
    serve(both.first, prompt(30, seed=1), count=1)  # until messages come, nobody looks
    until(lambda: not peer._requests and not held[0][2])
    assert served.pool.num_free == served.pool.num_blocks


def test_another_password(pair, caplog):
    both = pair(authkey=b"other")
    assert not both.blocks.wait_for(both.keys, 0.3)
    assert caplog.text.count("cannot be used: AuthenticationError") == 1


def test_another_layout(pair, caplog):
    both = pair(layout=MODEL.layout(1, 8))
    assert not both.blocks.wait_for(both.keys, 0.3)
    assert caplog.text.count("make its pool and this RemoteBlocks for one layout") == 1


def test_strangers_do_not_delay_others(pair):
    both = pair()
    with socket.create_connection(both.server.address), socket.create_connection(both.server.address) as rude:
        rude.sendall(b"GET / HTTP/1.1\r\n\r\n")
        blocks = RemoteBlocks(MODEL.layout(1, 4), [both.server.address], authkey=b"password", transport=JaxTransport())
        assert blocks.wait_for(both.keys, 30)
        blocks.close()


def test_who_says_nothing_is_disconnected(pair, monkeypatch):
    monkeypatch.setattr(remote, "HANDSHAKE_SECONDS", 1)
    both = pair()
    with socket.create_connection(both.server.address) as silent:
        silent.settimeout(30)
        while silent.recv(1000):  # the challenge, and then the end
            pass
    with silent_listener() as (address, connected):
        blocks = RemoteBlocks(MODEL.layout(1, 4), [address], authkey=b"password", transport=JaxTransport())
        until(lambda: len(connected) > 1)  # it has tried again
        blocks.close()


@contextmanager
def silent_listener():
    """Accepts connections and says nothing."""
    connected = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept():
            with suppress(OSError):
                while True:
                    connected.append(listener.accept()[0])

        Thread(target=accept, daemon=True).start()
        yield listener.getsockname(), connected
        listener.shutdown(socket.SHUT_RDWR)
    for connection in connected:
        connection.close()


def test_a_number_that_is_repeated_ends_the_connection(pair):
    """Otherwise, offers would be forgotten, with their memory."""
    both = pair()
    assert both.blocks.wait_for(both.keys, 30)
    link = both.blocks._peers[0]._link
    released = []
    release = both.transport.release
    both.transport.release = lambda ticket, fetched: (released.append(fetched), release(ticket, fetched=fetched))
    for _ in range(2):
        link._connection.send_bytes(json.dumps({"request": 99, "keys": [both.keys[0].hex()]}).encode())
    until(lambda: both.blocks._peers[0]._link not in (link, None))
    until(lambda: released == [False])


def test_closing_while_it_connects(pair):
    both = pair()
    both.blocks.close()
    peer = both.blocks._peers[0]
    until(lambda: peer._link is None)
    time.sleep(0.1)
    assert peer._link is None


def test_offers_that_are_never_fetched_are_bounded(monkeypatch):
    monkeypatch.setattr(JaxTransport, "MAX_UNFETCHED", 1000)
    transport = JaxTransport()
    tickets = [transport.offer(np.zeros(100)) for _ in range(2)]
    transport.release(tickets[0], fetched=True)
    transport.offer(np.zeros(100))
    for _ in range(2):
        transport.release(tickets[1], fetched=False)
    with pytest.raises(MemoryError, match=r"of blocks were offered and never fetched, .* start this process again"):
        transport.offer(np.zeros(100))


@pytest.mark.parametrize(
    "message", [b"not JSON", b"[]", b"{}", b'{"request": 1}', b'{"request": 1, "keys": ["x"]}', b'{"done": 7}']
)
def test_messages_that_are_none_end_the_connection_only(message, pair):
    both = pair()
    assert both.blocks.wait_for(both.keys, 30)
    link = both.blocks._peers[0]._link
    link._connection.send_bytes(message)
    until(lambda: both.blocks._peers[0]._link not in (link, None))
    assert serve(both.engine(), LONG) == 40


@pytest.mark.parametrize("authkey", ["password", b""])
def test_authkey(authkey):
    with pytest.raises(ValueError, match=r"`authkey` is (empty|a str): expected bytes"):
        RemoteBlocks(MODEL.layout(1, 4), [], authkey=authkey, transport=None)
    with pytest.raises(ValueError, match=r"`authkey` is (empty|a str): expected bytes"):
        BlockServer(host_pool(), ("127.0.0.1", 0), authkey=authkey, transport=None)


def test_rows_of_a_pool_while_it_is_used(pair):
    both = pair()
    keys, rows = both.pool.rows([b"unknown", *both.keys])
    assert keys == both.keys
    expected = np.asarray(both.first.export(LONG).rows[:10])
    np.testing.assert_array_equal(rows, expected)
    assert isinstance(both.pool, HostPool)
