"""The engine: a request's tokens depend on no other request, whether blocks are shared, awaited or recomputed."""

from functools import cache

import chex
import numpy as np
import pytest

from jaxkv.models.sampling import Sampling
from jaxkv.serving import program
from jaxkv.serving.engine import Engine
from jaxkv.serving.pool import BlockPool
from support import toy_model
from support.cases import further
from support.toy_model import prompt

PARAMS = toy_model.random_params()
BLOCK = 4


pytestmark = pytest.mark.usefixtures("toy")


def engine(num_blocks=64, **options):
    defaults = {"block_size": BLOCK, "max_requests": 4, "chunk": 7, "max_len": 96}
    return Engine(toy_model.ToyModel(PARAMS), num_blocks=num_blocks, **{**defaults, **options})


@cache
def right(tokens, count):
    """The greedy continuation, without a cache."""
    found = toy_model.greedy_without_cache(PARAMS, tokens, count)
    assert count < 8 or len(set(found)) > count / 2, "a model that repeats itself tests nothing"
    return found


def finish(served):
    """Runs to the end, and checks that all blocks are free again."""
    stream = list(served.run())
    assert not served.running
    assert not served.waiting
    assert served.pool.num_free == served.pool.num_blocks
    return stream


def test_tokens_are_those_of_the_model_without_a_cache():
    served = engine()
    requests = [served.submit(prompt(length), max_tokens=20) for length in (1, 3, 4, 5, 7, 8, 29)]
    finish(served)
    for request in requests:
        assert request.generated == right(request.prompt, 20)
        assert request.finish_reason == "length"


@pytest.mark.parametrize("order", [further("LBNHC"), "BLNHC"])
@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_chunks_and_orders_do_not_matter(order, chunk):
    served = engine(order=order, chunk=chunk)
    request = served.submit(prompt(30), max_tokens=8)
    finish(served)
    assert request.generated == right(request.prompt, 8)


def test_the_stream_is_what_the_requests_hold():
    served = engine()
    requests = [served.submit(prompt(length), max_tokens=5 + length % 3) for length in range(1, 8)]
    stream = finish(served)
    for request in requests:
        assert [token for owner, token in stream if owner is request] == request.generated
    assert len(stream) == sum(len(request.generated) for request in requests)


def test_twenty_requests_join_and_leave_with_one_trace_of_each_program(monkeypatch):
    chex.clear_trace_counter()
    for function in ("run_layers", "draw"):  # for steps with and without chunks
        monkeypatch.setattr(program, function, chex.assert_max_traces(getattr(program, function), n=2))
    served, rng = engine(), np.random.default_rng(0)
    requests, concurrent = [], set()
    while len(requests) < 20 or served.running or served.waiting:
        if len(requests) < 20 and rng.random() < 0.5:
            length, count = int(rng.integers(1, 40)), int(rng.integers(1, 16))
            requests.append(served.submit(prompt(length), max_tokens=count))
        served.step()
        concurrent.add(len(served.running))
    assert concurrent >= {1, 2, 3, 4}
    for request in requests:
        assert request.generated == right(request.prompt, request.max_tokens)


def copies(served, monkeypatch):
    """Counts the blocks that are copied."""
    made, copy = [], served.block_manager._copy
    monkeypatch.setattr(
        served.block_manager, "_copy", lambda cache, src, dst: made.append((src, dst)) or copy(cache, src, dst)
    )
    return made


@pytest.mark.parametrize("common", [3, BLOCK, 2 * BLOCK, 2 * BLOCK + 1, 23])
def test_a_shared_prefix_is_stored_once_and_copied_before_it_is_written(common, monkeypatch):
    served = engine()
    made = copies(served, monkeypatch)
    prefix = prompt(common)
    first = served.submit(prefix + prompt(5, seed=1), max_tokens=24)
    while len(first.generated) < 2:
        served.step()
    second = served.submit(prefix + prompt(6, seed=2), max_tokens=12)
    free = served.pool.num_free
    served.step()
    whole = common // BLOCK
    assert second.blocks[:whole] == first.blocks[:whole]
    assert set(second.blocks[whole:]).isdisjoint(first.blocks)
    assert free - served.pool.num_free <= len(second.blocks) - whole + 1
    assert len(made) == (common % BLOCK > 0)
    finish(served)
    for request in (first, second):
        assert request.generated == right(request.prompt, request.max_tokens)


def test_equal_prompts_share_all_but_the_last_token(monkeypatch):
    served = engine()
    made = copies(served, monkeypatch)
    requests = [served.submit(prompt(4 * BLOCK), max_tokens=6 + n) for n in range(3)]
    finish(served)
    assert len(made) == 2
    for request in requests:
        assert request.generated == right(request.prompt, request.max_tokens)


def test_a_prefix_outlives_the_request_that_computed_it():
    served = engine()
    first = served.submit(prompt(21), max_tokens=4)
    while not first.generated:
        served.step()
    second = served.submit(prompt(21), max_tokens=24)
    served.step()
    assert first.blocks[0] == second.blocks[0]
    while not first.finish_reason:
        served.step()
    # Newcomers take what the first gave back, and nothing else.
    others = [served.submit(prompt(21, seed=n), max_tokens=9) for n in range(1, 4)]
    finish(served)
    for request in (second, *others):
        assert request.generated == right(request.prompt, request.max_tokens)


def test_a_request_waits_for_blocks():
    served = engine(num_blocks=8)
    first = served.submit(prompt(20), max_tokens=8)
    second = served.submit(prompt(20, seed=1), max_tokens=8)
    while not first.finish_reason:
        assert second in served.waiting
        served.step()
    finish(served)
    for request in (first, second):
        assert request.generated == right(request.prompt, 8)


@pytest.mark.parametrize("num_blocks", [10, 11, 13, 17])
def test_out_of_blocks_the_most_recent_request_is_preempted_and_recomputed(num_blocks, monkeypatch):
    served = engine(num_blocks=num_blocks)
    left = []
    leave = served._leave
    monkeypatch.setattr(served, "_leave", lambda request: left.append(request) or leave(request))
    requests = [served.submit(prompt(9, seed=n), max_tokens=28) for n in range(4)]
    finish(served)
    assert len(left) > len(requests), "no request was preempted"
    assert requests[0] not in left[: left.index(requests[0])]
    for request in requests:
        assert request.generated == right(request.prompt, 28)


def test_a_preempted_request_is_the_next_to_join():
    served = engine(num_blocks=8, max_requests=2)
    first, second, third = (served.submit(prompt(9, seed=n), max_tokens=16) for n in range(3))
    while second not in served.running:
        served.step()
    while second in served.running:
        served.step()
    assert first in served.running
    assert list(served.waiting) == [second, third]
    finish(served)
    for request in (first, second, third):
        assert request.generated == right(request.prompt, 16)


def test_a_request_may_fill_the_whole_cache():
    served = engine(num_blocks=5)
    request = served.submit(prompt(9), max_tokens=12)
    other = served.submit(prompt(3), max_tokens=3)
    finish(served)
    assert request.generated == right(request.prompt, 12)
    assert other.generated == right(other.prompt, 3)


def test_a_request_that_can_never_be_served_is_rejected_at_once():
    served = engine(num_blocks=8)
    with pytest.raises(ValueError, match=r"`prompt` has 30 tokens and `max_tokens` is 4, 33 entries: .*cache 32"):
        served.submit(prompt(30), max_tokens=4)
    with pytest.raises(ValueError, match="table holds 96 and the cache 256"):
        engine().submit(prompt(97), max_tokens=1)
    with pytest.raises(ValueError, match="`prompt` is empty: expected one or more token ids from 0 to 96"):
        served.submit(())
    with pytest.raises(ValueError, match="`prompt` has token id 97: expected"):
        served.submit((3, 97))
    with pytest.raises(TypeError, match="`prompt` is 'hello': expected token ids; tokenize the text first"):
        served.submit("hello")
    for wrong in (3, None, [1.5], [[1]], [np.ones(2, int)]):
        with pytest.raises(TypeError, match=r"`prompt` is .*: expected token ids, which are integers"):
            served.submit(wrong)
    for wrong in (3, "x", ["x"]):
        with pytest.raises(TypeError, match=r"`stop` is .*: expected token ids"):
            served.submit([1], max_tokens=1, stop=wrong)
    with pytest.raises(TypeError, match="`sampling` is None: expected a Sampling"):
        served.submit([1], max_tokens=1, sampling=None)
    with pytest.raises(ValueError, match="`max_tokens` is 0"):
        served.submit((3,), max_tokens=0)
    assert served.submit(prompt(30), max_tokens=3).prompt == prompt(30)
    finish(served)


def test_a_stop_token_ends_a_request():
    tokens = right(prompt(11), 20)
    last = next(n for n, token in enumerate(tokens) if n > 4 and token not in tokens[:n])
    served = engine()
    stopped = served.submit(prompt(11), max_tokens=20, stop=[tokens[last]])
    other = served.submit(prompt(12), max_tokens=20)
    finish(served)
    assert (stopped.generated, stopped.finish_reason) == (tokens[: last + 1], "stop")
    assert (other.generated, other.finish_reason) == (right(prompt(12), 20), "length")


def test_the_checkpoints_stop_tokens_are_the_default():
    token = right(prompt(11), 8)[3]
    model = toy_model.ToyModel(PARAMS, toy_model.Config(stop_tokens=(token,)))
    served = Engine(model, num_blocks=16, block_size=BLOCK, max_requests=2, chunk=7)
    stopped, other = (served.submit(prompt(11), max_tokens=8, stop=stop) for stop in (None, ()))
    finish(served)
    assert stopped.generated == right(prompt(11), 8)[:4]
    assert other.generated == right(prompt(11), 8)


def test_logits_that_are_nan_end_only_their_request():
    bad = 5
    poisoned = {**PARAMS, "embedding": PARAMS["embedding"].copy()}
    poisoned["embedding"][bad] = np.nan
    served = Engine(toy_model.ToyModel(poisoned), num_blocks=16, block_size=BLOCK, max_requests=4, chunk=7)
    wrong = served.submit((1, bad, 2), max_tokens=4)
    fine = served.submit(prompt(9, seed=1), max_tokens=4)
    assert bad not in fine.prompt + tuple(right(fine.prompt, 4))
    finish(served)
    assert (wrong.generated, wrong.finish_reason) == ([], "nan")
    assert fine.generated == right(fine.prompt, 4)


DRAWS = [Sampling(0.8, 0.9, seed) for seed in range(3)] + [Sampling(2.0, 1.0, 7, top_k=50, min_p=0.1), Sampling()]


def test_drawn_tokens_depend_only_on_the_seed():
    def serve(order, **options):
        served = engine(**options)
        requests = {n: served.submit(prompt(13), max_tokens=24, sampling=DRAWS[n]) for n in order}
        finish(served)
        return [requests[n].generated for n in range(len(DRAWS))]

    together = serve(range(len(DRAWS)))
    assert together == serve(reversed(range(len(DRAWS))), max_requests=2, chunk=5)
    assert together == serve(range(len(DRAWS)), num_blocks=11)  # some are computed again
    assert len(set(map(tuple, together))) == len(DRAWS)
    assert together[-1] == right(prompt(13), 24)


def test_the_pool_rejects_blocks_that_nobody_holds():
    pool = BlockPool(2)
    block = pool.allocate()
    pool.share(block)
    assert pool.is_shared(block)
    pool.free(block)
    assert not pool.is_shared(block)
    pool.free(block)
    assert pool.num_free == 2
    for misuse in (pool.free, pool.share, pool.is_shared):
        with pytest.raises(ValueError, match=f"`block` is {block}, which is free"):
            misuse(block)
    with pytest.raises(ValueError, match="`block` is 2: expected one of the 2 blocks"):
        pool.free(2)
    assert {pool.allocate(), pool.allocate()} == {0, 1}
    with pytest.raises(RuntimeError, match="none of 2 blocks is free"):
        pool.allocate()
