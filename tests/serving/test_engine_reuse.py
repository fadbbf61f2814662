"""Prefixes that are found on the device, on the host or on disk: fewer tokens computed, the same tokens drawn."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.models.weights.fingerprint import fingerprint
from jaxkv.offload import HostPool, transfers
from jaxkv.serving import tiers
from jaxkv.serving.engine import Engine
from jaxkv.serving.pool import BlockPool
from serving.toy_engines import (
    BLOCK,
    COMPILED,
    MODEL,
    PARAMS,
    disk_pool,
    engine,
    fail,
    host_pool,
    join_compilers,
    names_of,
    right,
    serve,
)
from support import forged_blocks, toy_model
from support.toy_model import prompt

pytestmark = pytest.mark.usefixtures("toy")


@pytest.fixture
def calls(monkeypatch):
    """How many chunks were prefilled, and how many tokens decoded."""
    counted = Counter()
    batches = Engine.batches

    def counting(self, schedule, shape):
        counted.update({"chunks": len(schedule.prefill), "decoded": len(schedule.decode)})
        return batches(self, schedule, shape)

    monkeypatch.setattr(Engine, "batches", counting)
    return counted


def test_a_prefix_outlives_its_request_on_the_device(calls):
    served = engine()
    assert serve(served, prompt(22)) == 0
    assert calls.pop("chunks") == 4
    # All but the last token, and what was generated: 22 + 6 - 1 entries.
    assert serve(served, prompt(22)) == 21
    assert calls.pop("chunks") == 0
    assert serve(served, (*prompt(22), *right(prompt(22), 6), 5)) == 27
    assert serve(served, (*prompt(10), *prompt(12, seed=1))) == 0
    assert serve(served, prompt(22)[:13]) == 12
    assert served.prefix_stats.tokens == 22 + 22 + 29 + 22 + 13
    assert served.prefix_stats.loaded == 0


def test_of_a_prompt_that_is_known_whole_the_last_token_is_computed_in_place(calls):
    served = engine(num_blocks=5)
    assert serve(served, prompt(20), count=1) == 0
    calls.clear()
    assert serve(served, prompt(20), count=1) == 19
    assert calls == {"chunks": 0, "decoded": 1}


def test_who_shares_a_known_block_with_another_copies_it():
    served = engine()
    serve(served, prompt(8))
    first, second = (served.submit(prompt(8), max_tokens=count) for count in (9, 6))
    while served.waiting:
        served.step()
    assert first.blocks[0] == second.blocks[0]
    assert first.blocks[1] != second.blocks[1]
    for _ in served.run():
        pass
    assert first.generated == right(prompt(8), 9)
    assert second.generated == right(prompt(8), 6)


def test_the_longest_unused_goes_first_and_of_it_the_end():
    served = engine(num_blocks=12)
    old, new = prompt(16, seed=1), prompt(16, seed=2)
    for tokens in (old, new):
        serve(served, tokens, count=1)
    # Four blocks were never used; two more are needed.
    assert serve(served, prompt(24, seed=3), count=1) == 0
    assert serve(served, new, count=1) == 15
    assert serve(served, old, count=1) == 8


@pytest.mark.parametrize("order", ["BLNHC", "LBNHC"])
def test_another_engine_finds_a_prefix_on_the_host(order, calls):
    host = host_pool(order=order)
    assert serve(engine(order=order, connectors=[host]), prompt(22)) == 0
    calls.clear()
    other = engine(order=order, connectors=[host])
    assert serve(other, prompt(22)) == 20
    assert calls["chunks"] == 1
    assert other.prefix_stats.loaded == 20
    assert host.stats.loaded == 5
    # Now it is on the device, with the block that generated tokens filled.
    assert serve(other, prompt(22)) == 21
    assert host.stats.loaded == 5


def test_what_left_the_device_is_on_the_host():
    host = host_pool()
    served = engine(num_blocks=6, connectors=[host])
    for _ in range(2):
        for seed in range(3):
            serve(served, prompt(17, seed), count=3)
    assert served.prefix_stats.found == 3 * 16
    assert served.prefix_stats.loaded == 3 * 16


def test_a_prefix_is_put_together_from_device_and_host():
    host = host_pool()
    served = engine(num_blocks=8, connectors=[host])
    serve(served, prompt(24), count=1)
    serve(served, prompt(12, seed=1), count=1)
    # The last block went.
    assert serve(served, prompt(24), count=1) == 23
    assert served.prefix_stats.loaded == 4


def test_a_later_engine_finds_a_prefix_on_disk(tmp_path, calls):
    host = host_pool(disk=disk_pool(tmp_path))
    serve(engine(connectors=[host]), prompt(22))
    host.flush()
    calls.clear()
    host = host_pool(num_blocks=2, disk=disk_pool(tmp_path))
    other = engine(connectors=[host])
    assert serve(other, prompt(22)) == 20
    assert calls["chunks"] == 1
    assert host.stats.read == 5


def test_a_damaged_file_costs_the_blocks_from_there_on(tmp_path):
    disk = disk_pool(tmp_path)
    host = host_pool(disk=disk)
    served = engine(connectors=[host])
    serve(served, prompt(22))
    host.flush()
    keys = [key for key in map(served.pool._keys.get, range(16)) if key]
    file = disk.file(keys[2])
    contents = bytearray(file.read_bytes())
    contents[-1] ^= 1
    file.write_bytes(contents)
    host = host_pool(disk=disk_pool(tmp_path))
    other = engine(connectors=[host])
    assert serve(other, prompt(22)) == 2 * BLOCK
    assert (other.tiers.failures, host.stats.damaged) == (1, 1)
    assert file.with_suffix(".damaged").read_bytes() == contents
    # It was computed, and written again.
    host.flush()
    assert serve(engine(connectors=[host_pool(disk=disk_pool(tmp_path))]), prompt(22)) == 5 * BLOCK


@pytest.mark.ci
@pytest.mark.parametrize("secret", [None, b"s" * 32], ids=["checksum", "secret"])
def test_files_that_were_forged_change_no_token(secret, tmp_path):
    """Every file of the folder, in a way drawn at random; with a secret also blocks of other contents."""
    prompts, rng = [prompt(38, seed) for seed in range(4)], np.random.default_rng(0)
    kinds = [*forged_blocks.KINDS, forged_blocks.another_block] if secret else forged_blocks.KINDS

    def host(num_blocks=4):
        return host_pool(num_blocks=num_blocks, disk=disk_pool(tmp_path, secret=secret))

    writer = host(num_blocks=40)  # the engine stores no blocks while the pool is full of those that the disk lacks
    first = engine(connectors=[writer])
    for tokens in prompts:
        assert serve(first, tokens) == 0
    writer.flush()
    files = list(tmp_path.glob("*/*.block"))
    assert len(files) == 40
    damaged = found = 0
    for _ in range(5):
        whole = {file: file.read_bytes() for file in files}
        for file, contents in whole.items():
            file.write_bytes(forged_blocks.forged(rng, contents, kinds))
        # Each load stops at one file: until all were met, there are more.
        for _ in range(6):
            reader = host()
            served = engine(connectors=[reader])
            for tokens in prompts:
                found += serve(served, tokens)
            damaged += reader.stats.damaged
            reader.flush()
        for file in files:
            file.write_bytes(whole[file])
    assert min(damaged, found) > 20


def test_a_store_that_fails_is_missed_and_comes_later(monkeypatch):
    host = host_pool()
    with monkeypatch.context() as broken:
        broken.setattr(transfers, "to_host", fail)
        served = engine(connectors=[host])
        serve(served, prompt(22))
        assert served.tiers.failures > 0
    assert len(host) == 0
    serve(engine(connectors=[host]), prompt(22))
    assert serve(engine(connectors=[host]), prompt(22)) == 20


@pytest.mark.parametrize(("module", "transfer"), [(transfers, "to_device"), (tiers, "write_rows")])
def test_a_load_that_fails_is_computed_and_stored_again(module, transfer, monkeypatch):
    host = host_pool()
    serve(engine(connectors=[host]), prompt(22))
    other = engine(connectors=[host])
    with monkeypatch.context() as broken:
        broken.setattr(module, transfer, fail)
        assert serve(other, prompt(22)) == 0
    assert other.tiers.failures == 1
    serve(other, prompt(40, seed=1))
    assert serve(other, prompt(22)) == 20
    assert other.prefix_stats.loaded > 0


def test_a_load_that_stops_half_way_leaves_nothing_half_visible(monkeypatch):
    host = host_pool()
    serve(engine(connectors=[host]), prompt(22))
    write, left = tiers.write_rows, [1]

    def once(*args, **kwargs):
        return write(*args, **kwargs) if left and left.pop() else fail()

    other = engine(connectors=[host])
    with monkeypatch.context() as broken:
        broken.setattr(tiers, "write_rows", once)
        assert serve(other, prompt(22)) == 0
    assert not left
    assert serve(other, prompt(22)) == 21


@pytest.mark.parametrize("lookups", range(0, 36, 3))
def test_a_block_that_goes_while_a_prefix_is_looked_up(lookups):
    """Other threads and processes change what is in a pool: a prefix must be that of one moment."""
    host = host_pool()
    serve(engine(connectors=[host]), prompt(22))
    gone, left = list(host._chunks._places)[2], [True] * lookups

    class Changing(HostPool):
        def __contains__(self, key):
            return super().__contains__(key) and (key != gone or bool(left and left.pop()))

    host.__class__ = Changing
    served = engine(connectors=[host])
    serve(served, prompt(22))
    assert served.prefix_stats.found in (8, 20)


def test_who_was_sent_back_finds_what_it_had():
    served = engine(num_blocks=8, connectors=[host_pool()], max_requests=2)
    requests = [served.submit(prompt(9, seed=n), max_tokens=16) for n in range(2)]
    for _ in served.run():
        pass
    # The second joins twice; the second time with all its full blocks.
    assert served.prefix_stats.tokens > 9 + 9
    assert served.prefix_stats.found >= served.prefix_stats.tokens - 9 - 9 - BLOCK
    for request in requests:
        assert request.generated == right(request.prompt, 16)


def test_nan_is_not_passed_on():
    poisoned = {**PARAMS, "embedding": PARAMS["embedding"].copy()}
    poisoned["embedding"][5] = np.nan
    host = HostPool(MODEL.layout(1, BLOCK), 8)
    served = Engine(
        toy_model.ToyModel(poisoned), num_blocks=8, block_size=BLOCK, max_len=32, chunk=4, connectors=[host]
    )
    request = served.submit((1, 2, 3, 4, 5, 6, 7, 8, 9), max_tokens=2)
    for _ in served.run():
        pass
    assert request.finish_reason == "nan"
    assert len(host) == 1


@pytest.fixture
def compiled():
    """The names of the programs that are compiled."""
    with names_of(COMPILED) as names:
        yield names


def test_after_the_warm_up_nothing_is_compiled(compiled, monkeypatch):
    monkeypatch.setattr(toy_model, "ROOM", 65)  # no other test has compiled for this size
    served = engine(num_blocks=15, max_requests=2, max_num_batched_tokens=16, connectors=[host_pool()])
    served.warm_up(wait=False)
    serve(served, prompt(9, 2))  # while others are compiled
    join_compilers()
    assert served.buckets.ready == {*served.buckets.shapes}
    assert {"jit(run_layers)", "jit(_read_rows)", "jit(_write_rows)"} <= set(compiled)
    compiled.clear()
    for seed in (0, 1, 0):
        serve(served, prompt(29, seed), count=20)
    assert served.prefix_stats.loaded > 0
    assert compiled == []


def test_models_of_one_layout_do_not_find_each_others_blocks():
    host = host_pool()
    serve(engine(connectors=[host]), prompt(22))
    other = toy_model.ToyModel(toy_model.random_params(seed=1))
    served = Engine(other, num_blocks=16, block_size=BLOCK, max_requests=3, chunk=7, max_len=48, connectors=[host])
    served.submit(prompt(22), max_tokens=1)
    for _ in served.run():
        pass
    assert served.prefix_stats.found == 0
    assert len(host) == 11


def test_blocks_of_another_layout_are_rejected():
    with pytest.raises(ValueError, match=r"`connectors\[0\]` has other blocks\n"):
        engine(connectors=[host_pool(order="LBNHC")], order="BHLNC", block_size=8)


def test_a_pool_that_converts_blocks_is_rejected():
    """Its keys are those of its own blocks, which the engine does not have."""
    layout, stored = (MODEL.layout(1, size) for size in (BLOCK, 3 * BLOCK))
    with pytest.raises(ValueError, match=r"`connectors\[0\]` stores other blocks than the engine has, by keys of"):
        engine(connectors=[HostPool(stored, 2, cache_layout=layout)])


def test_the_pool_finds_what_was_named_until_its_room_is_needed():
    pool = BlockPool(3)
    first, second, third = (pool.allocate() for _ in range(3))
    pool.name(first, b"first")
    pool.name(second, b"second")
    pool.name(third, b"second")  # as well: one is enough
    pool.name(second, b"second")
    with pytest.raises(ValueError, match=f"`block` is {first}, which contains {b'first'.hex()}: expected"):
        pool.name(first, b"other")
    for block in (second, first, third):
        pool.free(block)
    assert pool.num_free == 3
    assert (pool.find(b"first"), pool.find(b"second"), pool.find(b"third")) == (first, second, None)
    assert pool.is_free(first)
    assert pool.share(first) == first
    assert not pool.is_free(first)
    assert pool.num_free == 2
    with pytest.raises(ValueError, match=f"`block` is {third}, which is free"):
        pool.share(third)
    with pytest.raises(ValueError, match=f"`block` is {second}, which is free"):
        pool.name(second, b"second")
    assert pool.allocate() == third
    assert pool.allocate() == second
    assert pool.find(b"second") is None
    assert pool.find(b"first") == first


def test_a_model_is_known_by_its_weights_and_configuration():
    known = fingerprint(MODEL)
    assert fingerprint(toy_model.ToyModel(jax.tree.map(jnp.asarray, PARAMS))) == known
    assert fingerprint(toy_model.ToyModel(PARAMS, toy_model.Config(max_position_embeddings=511))) != known
    others = {known}
    for name, weight in PARAMS.items():
        for change in (lambda flat: flat, np.flip, lambda flat: np.roll(flat, 1)):
            altered = np.ascontiguousarray(change(weight.reshape(-1)).reshape(weight.shape))
            others.add(fingerprint(toy_model.ToyModel({**PARAMS, name: altered})))
        bit = weight.copy()
        bit.reshape(-1).view(np.uint32)[weight.size // 2] ^= 1
        others.add(fingerprint(toy_model.ToyModel({**PARAMS, name: bit})))
        others |= {fingerprint(toy_model.ToyModel({**PARAMS, name: weight * factor})) for factor in (-1, 2, 0.5)}
    assert len(others) == 1 + 6 * len(PARAMS)


def test_a_block_that_another_shares_by_then_is_copied_when_there_is_room():
    served = engine(num_blocks=3)
    serve(served, range(1, 9), count=1)
    requests = [served.submit(tokens, max_tokens=1) for tokens in (range(1, 9), range(1, 10))]
    for _ in served.run():
        pass
    assert [request.generated for request in requests] == [right(tuple(request.prompt), 1) for request in requests]
    assert served.pool.num_free == 3


def test_who_must_copy_a_shared_block_waits_for_room():
    served = engine(num_blocks=3)
    requests = [served.submit(prompt(8), max_tokens=count) for count in (5, 1)]
    for _ in served.run():
        pass
    assert [request.generated for request in requests] == [right(prompt(8), count) for count in (5, 1)]


def test_an_interrupted_load_gives_its_blocks_back(monkeypatch):
    host = host_pool()
    serve(engine(connectors=[host]), range(20))
    served = engine(connectors=[host])

    def interrupted(*args):
        raise KeyboardInterrupt

    request = served.submit(range(20), max_tokens=1)
    with monkeypatch.context() as patch:
        patch.setattr(transfers, "to_device", interrupted)
        with pytest.raises(KeyboardInterrupt):
            served.step()
    assert served.pool.num_free == served.pool.num_blocks
    assert not any(host._held.maps)
    for _ in served.run():
        pass
    assert request.generated == right(tuple(range(20)), 1)
    assert served.prefix_stats.loaded == 20


def test_anything_but_a_host_pool_is_rejected(tmp_path):
    with pytest.raises(ValueError, match=r"`connectors\[0\]` is a DiskPool: expected a Connector"):
        engine(connectors=[disk_pool(tmp_path)])
