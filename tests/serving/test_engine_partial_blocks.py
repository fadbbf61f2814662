"""Prefixes that end inside a block, on the device: the block is copied, and the tokens are the same."""

import numpy as np
import pytest

from jaxkv.serving.pool import BlockPool
from serving.toy_engines import BLOCK, check_positions, disk_pool, engine, host_pool, right, serve
from support.toy_model import prompt

pytestmark = pytest.mark.usefixtures("toy")

LONG = prompt(16)
OTHER = tuple((token + 1) % 97 for token in LONG)
"""Differs from `LONG` in every token."""


def branch(length):
    """A prompt with exactly `length` tokens of `LONG`."""
    return LONG[:length] + OTHER[length:]


def test_the_first_tokens_of_a_full_block_are_found():
    served = engine()
    serve(served, LONG, count=1)
    for length in (14, 1, 15, 4, 9):
        assert serve(served, branch(length), count=3) == length
    # The blocks that were copied are still there.
    assert serve(served, LONG, count=1) == 15
    assert served.prefix_stats.loaded == 0


def test_the_last_block_of_a_request_that_has_ended_is_found():
    served = engine()
    serve(served, LONG[:10], count=4)  # its last token has no entry
    whole = LONG[:10] + tuple(right(LONG[:10], 4))
    assert serve(served, (*whole, 5)) == 13
    assert serve(served, LONG[:9]) == 8
    assert serve(served, LONG[:3]) == 2
    stopped = served.submit(OTHER, stop=[right(OTHER, 3)[2]], max_tokens=9)
    list(served.run())
    assert stopped.finish_reason == "stop"
    assert serve(served, (*stopped.tokens, 5, 6)) == len(stopped.tokens) - 1


def test_what_a_request_had_that_was_cancelled_is_found():
    served = engine()
    request = served.submit(LONG, max_tokens=9)
    while len(request.generated) < 3:
        served.step()
    served.cancel(request)
    assert serve(served, (*request.tokens, 5)) == len(request.tokens) - 1


def test_less_than_a_quarter_of_a_block_is_computed_and_not_copied():
    served = engine(block_size=8, num_blocks=16)
    serve(served, LONG, count=1)
    for length, found in ((1, 0), (2, 2), (9, 8), (10, 10)):
        # The first requests hold the block, so that it would be copied.
        held = served.submit(LONG, max_tokens=9)
        while not held.generated:
            served.step()
        before = served.prefix_stats.found
        branches = served.submit(branch(length), max_tokens=3)
        list(served.run())
        assert served.prefix_stats.found - before == found
        for request in (held, branches):
            assert request.generated == right(request.prompt, request.max_tokens)
        served.pool.clear()
        serve(served, LONG, count=1)


def test_a_block_that_is_continued_is_not_kept_twice():
    served, tokens = engine(), LONG[:9]
    for _ in range(5):
        serve(served, tokens, count=2)
        tokens += tuple(right(tokens, 2))
        check_positions(served.pool)
        assert len(served.pool._keys) == -(-(len(tokens) - 1) // BLOCK)
    assert served.prefix_stats.found == served.prefix_stats.tokens - 9 - 4


def test_without_room_for_a_copy_the_block_is_overwritten():
    served = engine(num_blocks=4)
    serve(served, LONG, count=1)
    assert serve(served, branch(14), count=1) == 14
    check_positions(served.pool)
    assert serve(served, LONG, count=1) == 14
    # Two requests at once: the second waits, because the first holds the block that it begins with.
    requests = [served.submit(branch(length), max_tokens=1) for length in (14, 15)]
    list(served.run())
    assert [request.generated for request in requests] == [right(request.prompt, 1) for request in requests]
    assert served.pool.num_free == 4


def test_evicted_blocks_are_not_found():
    served = engine(num_blocks=5)
    serve(served, LONG, count=1)
    serve(served, OTHER, count=1)
    check_positions(served.pool)
    assert serve(served, branch(6), count=1) == 4
    served.pool.clear()
    assert not served.pool._followers
    assert serve(served, LONG, count=1) == 0


def test_blocks_that_were_loaded_are_found_by_their_first_tokens():
    host = host_pool()
    serve(engine(connectors=[host]), LONG, count=1)
    served = engine(connectors=[host])
    assert serve(served, branch(14)) == 12  # host memory has whole blocks
    serve(served, LONG, count=1)
    assert served.prefix_stats.loaded == 16
    assert serve(served, branch(15)) == 15


@pytest.mark.parametrize("seed", range(3))
def test_the_pool_finds_the_block_that_begins_with_the_most_tokens(seed):
    rng, pool, held, known = np.random.default_rng(seed), BlockPool(12), [], {}

    def drawn():
        return tuple(rng.integers(0, 3, rng.integers(1, 6)).tolist())

    for _ in range(300):
        if pool.num_free:
            block = pool.allocate()
            known.pop(block, None)
            place, tokens = (b"a", b"b", ())[rng.integers(3)], drawn()
            pool.name(block, repr((place, tokens)).encode(), (place, tokens))
            if (place, tokens) not in known.values():
                known[block] = place, tokens
            held.append(block)
        while held and rng.random() < 0.6:
            block = held.pop(rng.integers(len(held)))
            if block in known and rng.random() < 0.2:
                pool.overwrite(block)
                del known[block]
            pool.free(block)
        check_positions(pool)
        place, wanted = (b"a", b"b", (), b"c")[rng.integers(4)], drawn()
        counts = {
            block: next((n for n, pair in enumerate(zip(tokens, wanted, strict=False)) if pair[0] != pair[1]),
                        min(len(tokens), len(wanted)))
            for block, (after, tokens) in known.items() if after == place
        }  # fmt: skip
        block, count = pool.find_first_tokens(place, wanted)
        assert count == max(counts.values(), default=0)
        assert block == -1 if count == 0 else counts[block] == count


class TestSalts:
    def serve(self, served, salt, tokens=LONG):
        before, request = served.prefix_stats.found, served.submit(tokens, max_tokens=3, cache_salt=salt)
        list(served.run())
        assert request.generated == right(tokens, 3)
        return served.prefix_stats.found - before

    def test_only_requests_of_the_same_salt_share_blocks(self, tmp_path):
        salts = (None, "tenant", ("tenant", "adapter"), ("tenantadapter",), b"\xff")
        host = host_pool(disk=disk_pool(tmp_path))
        served = engine(num_blocks=64, connectors=[host])
        for salt in salts:
            assert self.serve(served, salt) == 0
        for salt in salts:
            assert self.serve(served, salt) == 15
            assert self.serve(served, salt, LONG[:3] + OTHER) == 3
        assert served.prefix_stats.loaded == 0
        other = engine(connectors=[host])
        assert [self.serve(other, salt) for salt in ("tenant", "another", ("tenant",))] == [15, 0, 15]
        assert other.prefix_stats.loaded == 16
        host.flush()
        later = engine(connectors=[host_pool(disk=disk_pool(tmp_path))])
        assert [self.serve(later, salt) for salt in ("adapter", b"tenant")] == [0, 15]
        assert later.prefix_stats.loaded == 16

    def test_running_requests_of_other_salts_are_neither_copied_nor_awaited(self):
        served = engine()
        first, other = (served.submit(LONG[:7], max_tokens=9, cache_salt=salt) for salt in ("a", "b"))
        served.step()
        assert served.running == [first, other]
        served.cancel(other)
        served.step()
        assert first.cached >= 7
        other, same = (served.submit(LONG[:7], max_tokens=4, cache_salt=salt) for salt in ("b", "a"))
        served.step()
        assert (other.cached, served.prefix_stats.found) == (7, 6)
        list(served.run())
        for request in (first, other, same):
            assert request.generated == right(request.prompt, request.max_tokens)

    def test_a_request_can_be_submitted_again_with_its_salt(self):
        served = engine()
        self.serve(served, "tenant")
        (salt,) = {served.submit(LONG, max_tokens=1, cache_salt="tenant").cache_salt}
        assert self.serve(served, salt) == 30
        with pytest.raises(ValueError, match="`cache_salt` is 7: expected a string or bytes, a tuple"):
            served.submit(LONG, max_tokens=1, cache_salt=7)
