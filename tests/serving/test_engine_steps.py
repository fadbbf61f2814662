"""Steps that the host launches ahead of reading their tokens; cancelling and priorities at any time."""

from functools import cache

import numpy as np
import pytest

from jaxkv.models.sampling import Sampling
from jaxkv.serving.engine import Engine
from jaxkv.serving.pool import BlockPool
from jaxkv.serving.step_inputs import ON_DEVICE
from serving.toy_engines import draw_ready
from support import toy_model
from support.cases import further
from support.toy_model import prompt

PARAMS = toy_model.random_params()
BLOCK = 4

pytestmark = pytest.mark.usefixtures("toy")


def engine(num_blocks=64, **options):
    defaults = {"block_size": BLOCK, "max_requests": 4, "chunk": 7, "max_num_batched_tokens": 25, "max_len": 96}
    return Engine(toy_model.ToyModel(PARAMS), num_blocks=num_blocks, **{**defaults, **options})


@cache
def right(tokens, count):
    """The greedy continuation, without a cache."""
    return toy_model.greedy_without_cache(PARAMS, tokens, count)


def finish(served):
    """Runs to the end, and checks that all blocks and places are free again."""
    stream = list(served.run())
    assert not served.running
    assert not served.waiting
    assert served.pool.num_free == served.pool.num_blocks
    assert sorted(served._places) == list(range(served.max_requests))
    return stream


@pytest.fixture
def launched(monkeypatch):
    """The batches of each step."""
    steps = []
    batches = Engine.batches

    def recorded(self, *args):
        steps.append(batches(self, *args))
        return steps[-1]

    monkeypatch.setattr(Engine, "batches", recorded)
    return steps


class TestAhead:
    def test_a_step_is_launched_before_the_tokens_of_the_previous_one_are_read(self, launched):
        served = engine()
        request = served.submit(prompt(9), max_tokens=4)
        known = []
        while not request.finish_reason:
            served.step()
            known.append((len(launched), len(request.generated)))
        assert known == [(1, 0), (2, 1), (3, 2), (4, 3), (4, 4)]
        # The first step prefills; the others use the token that the device has kept.
        assert [[rows.tokens.shape for rows in batches.present] for batches in launched] == [[(3, 7), (4, 1)]] + [
            [(4, 1)]
        ] * 3
        assert all(batches.decode.tokens[0, 0] == ON_DEVICE for batches in launched[1:])
        assert request.generated == right(prompt(9), 4)

    def test_a_stop_token_is_seen_one_step_late_and_the_extra_token_is_discarded(self, launched):
        tokens = right(prompt(11), 20)
        last = next(n for n, token in enumerate(tokens) if n > 4 and token not in tokens[:n])
        served = engine(num_blocks=6)
        stopped = served.submit(prompt(11), max_tokens=14, stop=[tokens[last]])
        stream = []
        while not stopped.finish_reason:
            stream += served.step()
        assert len(launched) == 1 + last + 1
        assert (stopped.generated, stopped.finish_reason) == (tokens[: last + 1], "stop")
        assert [token for _, token in stream] == stopped.generated
        assert served.pool.num_free == 6
        # The step in flight still writes to the blocks, before those who hold them next.
        other = served.submit(prompt(19, seed=1), max_tokens=6)
        assert [owner for owner, _ in finish(served)] == [other] * 6
        assert other.generated == right(other.prompt, 6)
        assert stopped.generated == tokens[: last + 1]

    def test_no_step_is_launched_for_tokens_beyond_the_last(self, launched):
        served = engine()
        served.submit(prompt(3), max_tokens=1)
        finish(served)
        assert len(launched) == 1

    def test_one_step_prefills_several_prompts_and_decodes_others(self, launched):
        served = engine()
        first = served.submit(prompt(5), max_tokens=9)
        served.step()
        others = [served.submit(prompt(length, seed=1), max_tokens=5) for length in (13, 6, 30)]
        served.step()
        chunks, decoded = launched[1]
        assert chunks.seq_lens.tolist() == [7, 13, 6]  # two chunks of the first prompt, and the whole second
        assert decoded.seq_lens.tolist() == [6, 0, 0, 0]
        finish(served)
        for request in (first, *others):
            assert request.generated == right(request.prompt, request.max_tokens)

    def test_prompts_take_the_tokens_that_are_left_of_the_budget(self):
        """Of 38 tokens, in rows of 7: five rows as long as at most one is decoded, three if more are."""
        served, computed = engine(max_requests=16, max_num_batched_tokens=38), []
        served.buckets.ready.add(max(served.buckets.shapes))
        requests = [served.submit(prompt(length), max_tokens=9) for length in (30, 33, 26, 40)]
        while any(request.missing > 1 for request in requests):
            before = [request.cached for request in requests]
            served.step()
            computed.append([request.cached - start for request, start in zip(requests, before, strict=True)])
        # A row of the first and of the second prompt has fewer tokens than 7, and counts as much.
        assert computed == [[30, 0, 0, 0], [1, 33, 0, 0], [1, 1, 21, 0], [1, 1, 5, 14], [1, 1, 1, 21], [1, 1, 1, 5]]
        finish(served)
        for request in requests:
            assert request.generated == right(request.prompt, 9)

    def test_a_budget_has_a_chunk_beside_all_requests(self):
        with pytest.raises(ValueError, match="`max_num_batched_tokens` is 10: expected at least 11, for 4 tokens of"):
            engine(max_num_batched_tokens=10)

    def test_prompts_with_a_common_block_wait_for_the_first_of_them(self, launched):
        served = engine()
        prefix = prompt(9)
        requests = [served.submit(prefix + prompt(6, seed=n), max_tokens=4) for n in range(3)]
        finish(served)
        assert served.prefix_stats.found == 2 * 9
        for request in requests:
            assert request.generated == right(request.prompt, 4)

    def test_a_block_that_has_been_computed_is_not_awaited(self):
        served = engine(num_blocks=7)
        # Both compute the first block; only that of the first is found by its content, and it is evicted.
        first, second = served.submit(prompt(3), max_tokens=2), served.submit(prompt(3), max_tokens=21)
        while not first.finish_reason:
            served.step()
        other = served.submit(prompt(17, seed=1), max_tokens=2)
        while not other.finish_reason:
            served.step()
        third = served.submit((*prompt(3), *right(prompt(3), 2)), max_tokens=2)
        served.block_manager.extend_keys(third)
        assert second.keys_of("")[0] == third.keys_of("")[0]
        assert served.pool.find(third.keys_of("")[0]) is None
        while not third.finish_reason:
            served.step()
        assert not second.finish_reason
        finish(served)
        assert second.generated == right(prompt(3), 21)
        assert third.generated == right(third.prompt, 2)

    def test_sampled_tokens_are_those_of_steps_that_wait(self):
        def serve(*, waits):
            served = engine(num_blocks=14)
            draws = [Sampling(0.8, 0.9, 1), Sampling(2.0, 1.0, 7), Sampling()]
            requests = [served.submit(prompt(13), max_tokens=24, sampling=draw) for draw in draws]
            while served.running or served.waiting:
                served.step()
                while waits and served._launched:
                    served._read()
            return [request.generated for request in requests]

        assert serve(waits=False) == serve(waits=True)


class TestCancel:
    def test_cancelled_requests_release_their_blocks(self):
        served = engine(num_blocks=10, max_num_batched_tokens=11)
        requests = [served.submit(prompt(16, seed=n), max_tokens=8) for n in range(3)]
        served.step()
        for request in requests[::2]:
            served.cancel(request)
        finish(served)
        assert [request.finish_reason for request in requests] == ["cancelled", "length", "cancelled"]
        assert requests[1].generated == right(requests[1].prompt, 8)
        with pytest.raises(ValueError, match="`request` neither waits nor runs: it ended with 'length'"):
            served.cancel(requests[1])

    @pytest.mark.parametrize("steps", range(6))
    def test_at_any_time(self, steps, monkeypatch):
        """In the queue, between chunks, with its last chunk launched, and with a decode step launched."""
        freed, free = [], BlockPool.free
        monkeypatch.setattr(BlockPool, "free", lambda pool, block: freed.append(block) or free(pool, block))
        served = engine(num_blocks=12, max_num_batched_tokens=11)
        other = served.submit(prompt(6), max_tokens=20)
        request = served.submit(prompt(14, seed=1), max_tokens=9)
        for _ in range(steps):
            served.step()
        held, before = list(request.blocks), len(request.generated)
        assert (len(held), before) == [(0, 0), (0, 0), (4, 0), (4, 0), (4, 1), (4, 2)][steps]
        served.cancel(request)
        assert freed == held[::-1]
        newcomer = served.submit(prompt(16, seed=2), max_tokens=5)  # takes the blocks at once
        stream = finish(served)
        assert request not in [owner for owner, _ in stream]
        assert request.generated == right(request.prompt, 9)[:before]
        assert request.finish_reason == "cancelled"
        for survivor in (other, newcomer):
            assert survivor.generated == right(survivor.prompt, survivor.max_tokens)

    def test_inside_run_it_ends_the_stream_of_the_request(self):
        served = engine()
        requests = [served.submit(prompt(length), max_tokens=8) for length in (9, 10, 3)]
        cancelled, late = {}, []
        for request, _ in served.run():
            late += [request] if request in cancelled else []
            if request is requests[0] and len(request.generated) == 4:
                cancelled[requests[1]] = served.cancel(requests[1], finish_reason="stop")
            if request is requests[2] and request not in cancelled:
                cancelled[request] = served.cancel(request)
        assert len(cancelled) == 2
        assert not late
        assert [request.finish_reason for request in requests] == ["length", "stop", "cancelled"]
        assert [request.cancelled for request in requests] == [False, True, True]
        assert requests[0].generated == right(requests[0].prompt, 8)


class TestPriorities:
    def test_a_request_of_higher_priority_overtakes(self):
        served = engine(max_requests=1)
        first = served.submit(prompt(5), max_tokens=4)
        low, high, higher = (served.submit(prompt(6, seed=n), max_tokens=4, priority=n) for n in range(3))
        assert served.waiting == [higher, high, first, low]
        ended = [owner for owner, _ in finish(served) if len(owner.generated) == 4]
        assert list(dict.fromkeys(ended)) == [higher, high, first, low]
        for request in (first, low, high, higher):
            assert request.generated == right(request.prompt, 4)

    @pytest.mark.parametrize("sizes", [{"max_requests": 2}, {"num_blocks": 12}], ids=["places", "blocks"])
    def test_it_preempts_the_most_recent_request_of_lower_priority(self, sizes):
        served = engine(**sizes)
        old, recent = (served.submit(prompt(13, seed=n), max_tokens=12) for n in range(2))
        while len(recent.generated) < 3:
            served.step()
        urgent = served.submit(prompt(14, seed=2), max_tokens=6, priority=1)
        served.step()
        assert served.running == [urgent, old]
        assert served.waiting == [recent]
        while not urgent.finish_reason:
            served.step()
        assert not recent.finish_reason
        finish(served)
        for request in (old, recent, urgent):
            assert request.generated == right(request.prompt, request.max_tokens)

    def test_equal_priorities_wait_for_each_other(self):
        served = engine(max_requests=1)
        first, second = (served.submit(prompt(5, seed=n), max_tokens=6, priority=3) for n in range(2))
        served.step()
        served.step()
        assert (served.running, served.waiting) == ([first], [second])
        finish(served)

    def test_nobody_is_preempted_in_vain(self):
        served = engine(num_blocks=12)
        same = served.submit(prompt(21), max_tokens=8, priority=1)
        low = served.submit(prompt(9, seed=1), max_tokens=8)
        while not low.generated:
            served.step()
        # Beside the first, which it cannot preempt, it does not fit even without the second.
        big = served.submit(prompt(26, seed=2), max_tokens=2, priority=1)
        served.step()
        assert low in served.running
        assert big in served.waiting
        finish(served)
        for request in (same, low, big):
            assert request.generated == right(request.prompt, request.max_tokens)

    def test_out_of_blocks_the_lowest_priority_makes_room(self):
        served = engine(num_blocks=8)
        low = served.submit(prompt(9, seed=1), max_tokens=20)
        served.step()
        high = served.submit(prompt(9, seed=2), max_tokens=20, priority=1)
        while not served.waiting or not high.generated:
            served.step()
        assert (served.running, served.waiting) == ([high], [low])
        finish(served)
        for request in (low, high):
            assert request.generated == right(request.prompt, 20)

    def test_a_priority_is_an_integer(self):
        with pytest.raises(TypeError, match="'str' object cannot be interpreted as an integer"):
            engine().submit(prompt(3), priority="high")


@pytest.mark.parametrize("seed", [0, 1, further(2), further(3)])
def test_random_walks_of_priorities_stops_and_cancellations(seed):
    rng = np.random.default_rng(seed)
    served = engine(num_blocks=int(rng.integers(13, 24)), max_requests=3, max_num_batched_tokens=17)
    requests, preempted = [], 0
    for _ in range(300):
        draw_ready(served, rng)
        if len(served.waiting) < 4 and rng.random() < 0.3:
            tokens = (*prompt(32, seed=int(rng.integers(3)))[: rng.integers(1, 33)], *prompt(int(rng.integers(6))))
            stop = right(tokens, 12)[int(rng.integers(4, 12)) :][:1] if rng.random() < 0.5 else []
            options = {"max_tokens": int(rng.integers(1, 13)), "priority": int(rng.integers(3)), "stop": stop}
            requests.append(served.submit(tokens, **options))
        alive = [*served.waiting, *served.running]
        if alive and rng.random() < 0.03:
            served.cancel(alive[rng.integers(len(alive))])
        served.step()
        preempted += sum(bool(request.generated) for request in served.waiting)
    finish(served)
    assert preempted
    reasons = {request.finish_reason for request in requests}
    assert reasons == {"length", "stop", "cancelled"}
    for request in requests:
        expected = right(request.prompt, 12)[: request.max_tokens]
        ends = [n for n, token in enumerate(expected, 1) if token in request.stop]
        expected = expected[: ends[0] if ends else None]
        if request.finish_reason == "cancelled":
            expected = expected[: len(request.generated)]
        assert request.generated == expected


def test_a_loop_that_is_left_loses_no_token():
    """The tokens of a step that `run` has not yielded yet are the next ones of `run`, or the first of `step`."""
    served = engine()
    requests = [served.submit(prompt(length), max_tokens=4) for length in (9, 10, 3)]
    stream = []
    for _ in range(5):
        for drawn in served.run():
            stream.append(drawn)
            break
    stream += served.step()
    stream += served.run()
    assert not served.unfinished
    for request in requests:
        assert request.generated == right(request.prompt, 4)
        assert [token for owner, token in stream if owner is request] == request.generated
