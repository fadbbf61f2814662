"""Requests with several block tables: windows that expire, states, prefixes of all tables, offload, preemption."""

from functools import cache

import numpy as np
import pytest

from jaxkv.models.sampling import Sampling
from jaxkv.models.weights.fingerprint import fingerprint
from jaxkv.offload import DiskPool, HostPool
from jaxkv.serving import Engine
from serving.toy_engines import COMPILED, draw_ready, names_of
from support import toy_hybrid
from support.cases import further, slow
from support.toy_hybrid import Config, prompt

PARAMS = toy_hybrid.random_params()
BLOCK = 8
"""Tokens per block of the table ""; there are 4 in those of the others."""

ALL = ("full", "window", "state", "compressed")
WITHOUT_STATES = ("full", "window", "compressed")
kinds = pytest.mark.parametrize(
    "layers", [ALL, WITHOUT_STATES, *(slow(("full", kind)) for kind in ("state", "window"))], ids="+".join
)
"""Those with two tables are `slow`, because all of their tables are in the first."""


@pytest.fixture(autouse=True)
def _hybrid(monkeypatch):
    toy_hybrid.install(monkeypatch)


@cache
def model(layers=ALL, **config):
    return toy_hybrid.HybridModel(PARAMS, Config(layers=layers, **config))


def engine(layers=ALL, num_blocks=40, **options):
    defaults = {"block_size": BLOCK, "max_requests": 3, "chunk": 8, "max_num_batched_tokens": 27, "max_len": 64}
    return Engine(model(layers), num_blocks=num_blocks, **{**defaults, **options})


@cache
def right(tokens, count, layers=ALL):
    """The greedy continuation, without a cache."""
    return toy_hybrid.greedy_without_cache(PARAMS, tokens, count, layers)


def finish(served):
    list(served.run())
    assert served.pool.num_free == served.pool.num_blocks
    assert all((array == -1).all() for array in served.block_manager.arrays.values())


def serve(served, tokens, count=6, layers=ALL):
    """The continuation of a prompt, which must be right, and how many tokens were found for it."""
    before = served.prefix_stats.found
    request = served.submit(tokens, max_tokens=count)
    finish(served)
    assert request.generated == right(tuple(tokens), count, layers)
    return served.prefix_stats.found - before


@kinds
def test_requests_of_all_lengths(layers):
    served = engine(layers)
    requests = [served.submit(prompt(length), max_tokens=9) for length in (1, 4, 7, 8, 9, 24, 25, 40)]
    finish(served)
    for request in requests:
        assert request.generated == right(request.prompt, 9, layers)


def test_blocks_before_the_window_expire_and_requests_keep_few_states():
    served = engine()
    request = served.submit(prompt(30), max_tokens=30)
    most = {"window": 0, "state": 0}
    while not request.finish_reason:
        served.step()
        for name in most:
            if request.held:
                held = [block for block in request.held[name].blocks if block >= 0]
                most[name] = max(most[name], len(held))
                row = served.block_manager.arrays[name][request.place] if request.place >= 0 else np.array([-1])
                assert sorted(row[row >= 0]) == sorted(held)
    # A window of 9 tokens and a step of 8, in blocks of 4; the states before and after that step.
    assert most == {"window": 5, "state": 2}
    assert request.generated == right(prompt(30), 30)
    # The cache is too small for all window blocks of the request: it has 8 + 15 + 15 of them.
    small = engine(num_blocks=20)
    assert serve(small, prompt(30), count=30) == 0


def test_chunks_end_where_blocks_of_states_end():
    served = engine()
    request = served.submit(prompt(23), max_tokens=2)
    ends = []
    while not request.finish_reason:
        served.step()
        ends.append(request.cached)
    # A block of states has 4 tokens, a chunk up to 8.
    assert ends[:4] == [8, 16, 20, 23]
    assert request.generated == right(prompt(23), 2)


def test_several_prompts_are_prefilled_in_a_step_but_one_chunk_of_each(monkeypatch):
    sizes = []
    batches = Engine.batches

    def counting(self, schedule, shape):
        sizes.append([span.request for span in schedule.prefill])
        return batches(self, schedule, shape)

    monkeypatch.setattr(Engine, "batches", counting)
    served = engine()
    requests = [served.submit(prompt(24, seed=n), max_tokens=2) for n in range(3)]
    finish(served)
    assert sizes[:3] == [requests] * 3
    sizes.clear()
    served = engine(WITHOUT_STATES)
    request = served.submit(prompt(24), max_tokens=2)
    finish(served)
    assert sizes[0] == [request] * 3
    assert request.generated == right(prompt(24), 2, WITHOUT_STATES)


class TestPrefixes:
    @pytest.mark.parametrize(
        ("layers", "found"), [(ALL, (24, 24, 16)), (WITHOUT_STATES, (24, 24, 23))], ids=["states", "no states"]
    )
    def test_are_found_on_the_device(self, layers, found):
        served = engine(layers)
        assert serve(served, prompt(30), layers=layers) == 0
        assert serve(served, prompt(30), layers=layers) == found[0]
        assert serve(served, (*prompt(30)[:26], 1, 2, 3), layers=layers) == found[1]
        # Of a prompt that is known whole, the last token is computed.  States are those where chunks of 8 ended.
        assert serve(served, prompt(30)[:24], layers=layers) == found[2]
        assert serve(served, (*prompt(30)[:8], *prompt(9, seed=1)), layers=layers) == 8
        assert serve(served, prompt(17, seed=5), layers=layers) == 0

    def test_what_was_generated_is_found_too(self):
        served = engine()
        serve(served, prompt(13), count=20)
        # Decode steps store the state of every block: 32 of the 32 cached tokens are in whole blocks.
        assert serve(served, (*prompt(13), *right(prompt(13), 20), 7)) == 32

    def test_running_requests_share_blocks_and_wait_for_them(self):
        served = engine()
        prefix = prompt(25)
        requests = [served.submit(prefix + prompt(6, seed=n), max_tokens=5) for n in range(3)]
        finish(served)
        assert served.prefix_stats.found == 2 * 24
        for request in requests:
            assert request.generated == right(request.prompt, 5)

    @pytest.mark.parametrize("layers", [ALL, WITHOUT_STATES], ids="+".join)
    def test_of_a_window_only_the_last_blocks_are_needed(self, layers):
        served = engine(layers)
        tokens = prompt(33)
        serve(served, tokens, layers=layers)
        table = next(table for table in served.block_manager.tables if table.name == "window")
        keys = served.block_manager._keys(tokens, block_size=4, table="window")
        pool = served.pool

        def forget(index):
            block = pool.find(keys[index])
            del pool._blocks[pool._keys.pop(block)], pool._kept[block]
            pool._blank.append(block)

        for index in range(5):  # tokens 0 to 19; after 32 tokens, those from 23 on are needed
            forget(index)
        assert table.needed(32) == range(5, 8)
        assert serve(served, tokens, layers=layers) == 32
        forget(6)
        assert serve(served, tokens, layers=layers) == 0

    def test_without_a_state_the_prefix_is_shorter(self):
        served = engine()
        tokens = prompt(33)
        serve(served, tokens)
        keys, pool = served.block_manager._keys(tokens, block_size=4, table="state"), served.pool
        assert [pool.find(key) is not None for key in keys] == [False, True] * 4  # where chunks of 8 ended
        block = pool.find(keys[7])
        del pool._blocks[pool._keys.pop(block)], pool._kept[block]
        pool._blank.append(block)
        assert serve(served, tokens) == 24


class TestStates:
    """Of a table that requests keep, in blocks of 8 tokens, and one of states, in blocks of 4."""

    LAYERS = ("full", "state")

    def serve(self, served, tokens, count=2):
        return serve(served, tokens, count, self.LAYERS)

    @pytest.mark.parametrize(("chunk", "found"), [(8, 16), further(24, 0)])
    def test_are_stored_where_prefixes_part(self, chunk, found, monkeypatch):
        served, ends, launched = engine(self.LAYERS, chunk=chunk), [], Engine.launched

        def recording(self, schedule, shape, found):
            ends.extend(span.end for span in schedule.prefill)
            launched(self, schedule, shape, found)

        monkeypatch.setattr(Engine, "launched", recording)
        tokens = prompt(30)
        assert self.serve(served, tokens) == 0
        assert (20 in ends, 24 in ends) == (False, True)
        # The entries of 21 tokens are found, but the last state before is that at the end of a chunk.
        assert self.serve(served, tokens[:21] + prompt(7, seed=1)) == found
        assert 20 in ends
        assert self.serve(served, tokens[:21] + prompt(9, seed=2)) == 20
        assert self.serve(served, tokens[:20]) == found
        assert self.serve(served, tokens) == 28

    def test_are_found_after_the_last_tokens_of_a_request(self):
        served = engine(self.LAYERS)
        for end in (30, 29, 33):
            tokens = prompt(13, seed=end)
            self.serve(served, tokens, end - 12)  # it has `end` cached tokens
            assert self.serve(served, (*tokens, *right(tokens, end - 12, self.LAYERS), 7)) == end // 4 * 4

    def test_of_a_running_request_are_used_with_a_copy_of_its_block(self):
        served = engine(self.LAYERS)
        first = served.submit(prompt(13), max_tokens=20)
        while len(first.generated) < 9:
            served.step()
        second = served.submit((*first.tokens, 5), max_tokens=3)
        finish(served)
        assert served.prefix_stats.found == 20
        for request in (first, second):
            assert request.generated == right(request.prompt, request.max_tokens, self.LAYERS)


class TestTiers:
    @kinds
    def test_host_and_disk(self, layers, tmp_path):
        def host(num_blocks=64):
            disk = DiskPool(tmp_path, model(layers).layout(1, BLOCK), model=fingerprint(model(layers)))
            return HostPool(model(layers).layout(1, BLOCK), num_blocks, disk=disk)

        first = host()
        assert serve(engine(layers, connectors=[first]), prompt(30), layers=layers) == 0
        other = engine(layers, connectors=[first])
        assert serve(other, prompt(30), layers=layers) == 24
        assert other.prefix_stats.loaded == 24
        first.flush()
        later = host(num_blocks=4)
        assert serve(engine(layers, connectors=[later]), prompt(30), layers=layers) == 24
        assert later.stats.read >= 3

    def test_they_get_what_is_needed_where_blocks_end_that_requests_keep(self):
        """After 32 tokens, a window needs those from 23 on, and one token before if the last is computed again."""
        pool = HostPool(model().layout(1, 32), 64)
        served = engine(block_size=32, chunk=4, connectors=[pool])
        assert serve(served, prompt(41)) == 0
        tokens, sizes = (*prompt(41), *right(prompt(41), 6)), {"": 32, "window": 4, "state": 4}
        keys = {name: served.block_manager._keys(tokens, block_size=size, table=name) for name, size in sizes.items()}
        assert {name: len(found) for name, found in keys.items()} == {"": 1, "window": 11, "state": 11}
        kept = {name: [n for n, key in enumerate(found) if key in pool] for name, found in keys.items()}
        assert kept == {"": [0], "window": [5, 6, 7], "state": [7]}
        assert len(pool) == 5
        other = engine(block_size=32, chunk=4, connectors=[pool])
        assert serve(other, prompt(41)) == 32
        assert other.prefix_stats.loaded == 32

    def test_a_damaged_state_costs_the_prefix_that_needs_it(self, tmp_path):
        def host():
            disk = DiskPool(tmp_path, model().layout(1, BLOCK), model=fingerprint(model()))
            return HostPool(model().layout(1, BLOCK), 64, disk=disk), disk

        pool, disk = host()
        served = engine(connectors=[pool])
        serve(served, prompt(30))
        pool.flush()
        file = disk.file(served.block_manager._keys(prompt(30), block_size=4, table="state")[5])
        contents = bytearray(file.read_bytes())
        contents[-1] ^= 1
        file.write_bytes(contents)
        pool, _ = host()
        served = engine(connectors=[pool])
        assert serve(served, prompt(30)) == 16
        assert (served.tiers.failures, pool.stats.damaged) == (1, 1)

    def test_a_pool_of_other_tables_is_rejected(self):
        with pytest.raises(ValueError, match=r"`connectors\[0\]` has other blocks\n"):
            engine(connectors=[HostPool(model(window_block=2).layout(1, BLOCK), 8)])


@pytest.mark.parametrize("num_blocks", [17, 21, 26])
def test_out_of_blocks_requests_are_preempted_and_recomputed(num_blocks, monkeypatch):
    served = engine(num_blocks=num_blocks)
    left, leave = [], served._leave
    monkeypatch.setattr(served, "_leave", lambda request: left.append(request) or leave(request))
    requests = [served.submit(prompt(20, seed=n), max_tokens=24) for n in range(4)]
    finish(served)
    assert len(left) > len(requests), "no request was preempted"
    for request in requests:
        assert request.generated == right(request.prompt, 24)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("layers", [ALL, WITHOUT_STATES, slow(("full", "state"))], ids="+".join)
def test_random_walks_give_the_tokens_of_an_engine_without_reuse(layers, seed):
    rng = np.random.default_rng(seed)
    host = HostPool(model(layers).layout(1, BLOCK), 24)
    served = engine(layers, num_blocks=24, connectors=[host])
    requests = []
    for _ in range(150):
        if len(served.waiting) < 4 and rng.random() < 0.3:
            whole = prompt(32, seed=int(rng.integers(3)))
            end = prompt(int(rng.integers(6)), seed=int(rng.integers(4)))
            tokens = (*whole[: rng.integers(1, 33)], *end)
            priority = int(rng.integers(2))
            requests.append(served.submit(tokens, max_tokens=int(rng.integers(1, 11)), priority=priority))
        draw_ready(served, rng)
        if rng.random() < 0.02 and (alive := [*served.waiting, *served.running]):
            served.cancel(alive[rng.integers(len(alive))])
        served.step()
    finish(served)
    for request in requests:
        assert request.generated == right(request.prompt, 10, layers)[: len(request.generated)]
        assert request.finish_reason == "cancelled" or len(request.generated) == request.max_tokens
    reuse = served.prefix_stats
    assert reuse.found > reuse.tokens / 8
    assert reuse.loaded > 0


def test_a_request_that_can_never_be_served_is_rejected_at_once():
    # 24 tokens take 3 blocks of "", 6 of windows, and up to 3 of states.
    served = engine(num_blocks=13)
    with pytest.raises(ValueError, match="25 entries: a request's table holds 64 and the cache 24"):
        served.submit(prompt(24), max_tokens=2)
    assert serve(served, prompt(23), count=2) == 0


def test_sampled_tokens_do_not_depend_on_the_batch():
    def drawn(**options):
        served = engine(**options)
        requests = [served.submit(prompt(13), max_tokens=12, sampling=Sampling(1.0, 1.0, seed)) for seed in range(3)]
        finish(served)
        return [request.generated for request in requests]

    assert drawn() == drawn(num_blocks=16)


def test_after_the_warm_up_nothing_is_compiled():
    served = engine(
        num_blocks=39, max_requests=1, max_num_batched_tokens=9, connectors=[HostPool(model().layout(1, BLOCK), 64)]
    )
    served.warm_up()
    with names_of(COMPILED) as names:
        for seed in (0, 1, 0):
            serve(served, prompt(29, seed), count=20)
    assert names == []


def test_a_prompt_that_is_cached_to_its_last_token():
    """That token is computed again: it counts once, and blocks that expired before it are not needed."""
    served = engine(num_blocks=64)
    for _ in range(2):
        for length in (8, 9, 16, 17, 32, 33, 40):
            found = serve(served, prompt(40)[:length], count=3)
    assert found == 32
