"""Blocks in host memory: what is stored is loaded bit for bit, and what goes when there is no room."""

import hashlib
import re
import struct
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import offload
from jaxkv.offload import host as host_module
from jaxkv.offload import transfers
from jaxkv.ops import rows as rows_module
from offload.pools import ENTRY, LAYOUT, SIZES, blocks_of, filled, names, reopened
from support import scenes
from support.compare import assert_same_bits


@pytest.fixture
def long_chunks(monkeypatch):
    """Pools of these sizes would keep their blocks apart."""
    monkeypatch.setattr(host_module, "POOL_CHUNKS", 2)


class TestKeys:
    def keys(self, tokens, **options):
        return offload.prefix_keys(tokens, **{"block_size": 4, "layout_fingerprint": "f", "model": "m"} | options)

    def test_a_key_for_each_full_block(self):
        assert [len(self.keys(range(n))) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]
        assert {len(key) for key in self.keys(range(8))} == {32}

    def test_equal_prefixes_have_equal_keys(self):
        a, b = self.keys([1, 2, 3, 4, 5, 6, 7, 8]), self.keys([1, 2, 3, 4, 5, 6, 7, 9])
        assert a[0] == b[0]
        assert a[1] != b[1]

    def test_a_key_covers_all_tokens_before(self):
        a, b = self.keys([1, 2, 3, 4, 5, 6, 7, 8]), self.keys([0, 2, 3, 4, 5, 6, 7, 8])
        assert not set(a) & set(b)
        assert len(set(self.keys([7] * 16))) == 4

    @pytest.mark.parametrize("other", [{"layout_fingerprint": "g"}, {"model": "n"}, {"block_size": 2}])
    def test_a_key_covers_layout_and_model(self, other):
        assert not set(self.keys(range(8))) & set(self.keys(range(8), **other))

    def test_keys_are_the_same_in_every_process_and_for_every_dtype(self):
        root = hashlib.sha256(b'["jaxkv", 1, "m", "f", 4]').digest()
        expected = hashlib.sha256(root + struct.pack("<4q", 1, 2, 3, 4)).digest()
        for tokens in ([1, 2, 3, 4], (1, 2, 3, 4), np.asarray([1, 2, 3, 4], np.uint8), jnp.asarray([1, 2, 3, 4])):
            assert self.keys(tokens) == [expected]

    def test_misuse_is_reported(self):
        with pytest.raises(ValueError, match="`block_size` is 0: expected a positive int"):
            self.keys([1], block_size=0)
        with pytest.raises(ValueError, match=r"`tokens` is float64\[1\]: expected token ids, integers \[T\]"):
            self.keys([1.5])
        with pytest.raises(ValueError, match=r"`tokens` is int64\[1, 2\]: expected token ids"):
            self.keys([[1, 2]])
        for tokens in ([-1], np.asarray([2**64 - 1], np.uint64)):
            with pytest.raises(ValueError, match=r"`tokens` holds .*: expected token ids, at least 0 and below"):
                self.keys(tokens)
        with pytest.raises(ValueError, match="`layout_fingerprint` is a CacheLayout: expected a string"):
            self.keys([1], layout_fingerprint=LAYOUT)
        for after, found in (("abc", "is a str"), (b"", "has 0 bytes"), (b"a" * 31, "has 31 bytes"), (1, "is a int")):
            with pytest.raises(
                ValueError, match=f"`after` {found}: expected a key from `prefix_keys`, 32 bytes, or None"
            ):
                self.keys(range(4), after=after)

    def test_a_key_covers_each_part_of_the_salt(self):
        salts = (None, "", "a", "ab", ("a", "b"), ("ab", "c"), ("a", "bc"), ("abc",), ("a", ""), b"\xff", "\ud800")
        keys = [self.keys(range(8), cache_salt=salt) for salt in salts]
        assert len({key for found in keys for key in found}) == 2 * len(salts)
        assert self.keys(range(8), cache_salt=()) == keys[0]
        assert self.keys(range(8), cache_salt=["a", b"b"]) == self.keys(range(8), cache_salt=(b"a", "b")) == keys[4]
        assert self.keys(range(8), cache_salt="a", table="t") != self.keys(range(8), cache_salt="a")
        root = hashlib.sha256(b'["jaxkv", 1, "m", "f", 4, "", ["c3bc", "00"]]').digest()
        expected = hashlib.sha256(root + struct.pack("<4q", 1, 2, 3, 4)).digest()
        assert self.keys([1, 2, 3, 4], cache_salt=("\u00fc", b"\0")) == [expected]

    @pytest.mark.parametrize("salt", [7, ("a", None), {"a"}, bytearray(b"a")])
    def test_salts_that_are_rejected(self, salt):
        with pytest.raises(ValueError, match=r"`cache_salt` is .*: expected a string or bytes, a tuple of these,"):
            self.keys(range(4), cache_salt=salt)

    def test_a_prompt_can_be_continued(self):
        assert self.keys(range(4, 12), after=self.keys(range(4))[0]) == self.keys(range(12))[1:]


STRANGE = {
    "no bytes": (b"", "has 0 bytes"),
    "too many": (b"k" * 65, "has 65 bytes"),
    "a string": ("key", "is a str"),
    "an integer": (7, "is a int"),
    "a mutable": (bytearray(b"key"), "is a bytearray"),
    "None": (None, "is a NoneType"),
}


class TestStrangeKeys:
    @pytest.mark.parametrize(("key", "found"), STRANGE.values(), ids=STRANGE)
    def test_they_are_rejected_where_they_enter(self, key, found, disk, row):
        """By every method of both pools, in front of and behind good keys, and before anything is done."""
        cache, before = filled(LAYOUT)
        host, good = offload.HostPool(LAYOUT, 8, disk=disk), names(1)[0]
        host.store(cache, [0], [good])
        host.hold([good])
        host.flush()
        stats, message = replace(host.stats), f"` {found}: expected 1 to 64 bytes, as `prefix_keys` makes them"
        calls = [lambda: disk.file(key), lambda: disk.store(key, row), lambda: disk.load(key)]
        calls += [lambda: key in disk, lambda: key in host]
        for keys in ([good, key], [key, good]):
            calls += [partial(method, keys) for method in (host.matched, host.hold, host.release)]
            calls += [partial(method, cache, [1, 2], keys) for method in (host.store, host.load)]
        for call in calls:
            with pytest.raises(ValueError, match=message):
                call()
        assert host.stats == stats
        assert (len(host), len(disk), list(disk.file(good).parent.iterdir())) == (1, 1, [disk.file(good)])
        assert_same_bits(blocks_of(cache, range(16)), before)
        host.release([good])
        with pytest.raises(KeyError, match="is not held"):
            host.release([good])

    def test_keys_of_one_byte_and_of_the_most(self, disk, row, tmp_path):
        for key in (b"k", b"k" * 64):
            assert disk.store(key, row)
            assert_same_bits(reopened(tmp_path).load(key), row)

    def test_a_single_key_is_not_several(self):
        host = offload.HostPool(LAYOUT, 8)
        for method in (host.matched, host.hold, host.release):
            with pytest.raises(ValueError, match=r"`keys\[0\]` is a int"):
                method(names(1)[0])
            with pytest.raises(ValueError, match="`keys` is a int: expected keys of blocks"):
                method(1)


@pytest.mark.parametrize("name", scenes.layout_names(ENTRY))
def test_blocks_come_back_on_every_layout(name):
    layout = scenes.layouts(ENTRY, block_size=4)[name]
    cache, before = filled(layout)
    pool, keys = offload.HostPool(layout, 16), names(11)
    source, target = [5, 0, 9, 15, 1, 2, 3, 4, 6, 7, 8], [0, 1, 2, 15, 14, 13, 12, 11, 10, 9, 8]
    assert pool.store(cache, source, keys) == 11
    expected = before.copy()
    expected[target] = before[source]
    assert_same_bits(blocks_of(pool.load(cache, target, keys), range(16)), expected)


def test_all_groups_of_a_block_travel():
    groups = {"latent": jaxkv.Group(3, ENTRY), "indexer": jaxkv.Group(2, scenes.INDEXER_ENTRY)}
    packed = jaxkv.PackedLayout(num_blocks=16, block_size=4, groups=groups)
    cache, before = filled(packed["latent"])
    pool = offload.HostPool(packed, 16)
    pool.store(cache, [3, 4], names(2))
    loaded = pool.load(jaxkv.KVCache.zeros(packed["indexer"]), [0, 1], names(2))
    assert_same_bits(blocks_of(loaded, [0, 1, 2]), np.concatenate([before[[3, 4]], 0 * before[:1]]))


def packed_with(other, **options):
    groups = {"latent": jaxkv.Group(3, ENTRY), "other": jaxkv.Group(2, other)}
    return jaxkv.PackedLayout(**{"num_blocks": 16, "block_size": 4, "groups": groups, "dtype": "uint8"} | options)


def test_blocks_are_exchanged_only_where_all_their_groups_are_the_same():
    """The group that the cache views is the same in both, and so are the bytes of a block."""
    ours, theirs = packed_with(jaxkv.IndexerEntry("bf16", 16)), packed_with(jaxkv.IndexerEntry("f16", 16))
    assert ours["latent"].block_nbytes == theirs["latent"].block_nbytes
    assert ours["latent"] != theirs["latent"]
    message = re.escape("`cache` has other blocks than the pool") + f".*{theirs.fingerprint}.*{ours.fingerprint}"
    pool = offload.HostPool(ours, 8)
    for cache in (jaxkv.KVCache.zeros(theirs["latent"]), jaxkv.KVCache.zeros(theirs["latent"]).view(theirs["other"])):
        for operation in (pool.store, pool.load):
            with pytest.raises(ValueError, match=re.compile(message, re.DOTALL)):
                operation(cache, [0], names(1))
        with pytest.raises(ValueError, match=re.compile(message, re.DOTALL)):
            pool.warm_up(cache)
    cache = jaxkv.KVCache.zeros(packed_with(jaxkv.IndexerEntry("bf16", 16), num_blocks=5)["other"])
    assert pool.store(cache, [0], names(1)) == 1  # as many blocks as it has


def test_a_store_has_the_writes_before_it_and_none_after_it(long_chunks):
    write = jax.jit(jaxkv.write_blocks, donate_argnums=0)
    cache, before = filled(LAYOUT)
    pool = offload.HostPool(LAYOUT, 64)
    everywhere = jnp.arange(16)
    for turn in range(4):
        cache = write(cache, everywhere, jnp.asarray(np.roll(before, turn, axis=0)))
        pool.store(cache, range(16), names(16, f"{turn} "))
    for turn in range(4):
        cache = pool.load(cache, range(16), names(16, f"{turn} "))
        assert_same_bits(blocks_of(cache, range(16)), np.roll(before, turn, axis=0))


def test_a_block_may_be_loaded_to_several_places(long_chunks):
    cache, before = filled(LAYOUT)
    pool = offload.HostPool(LAYOUT, 16)
    pool.store(cache, range(8), names(8))
    keys = names(8)
    cache = pool.load(cache, [8, 9, 10, 11], [keys[2], keys[2], keys[5], keys[2]])
    assert_same_bits(blocks_of(cache, [8, 9, 10, 11]), before[[2, 2, 5, 2]])


def test_a_load_is_in_place_and_compiles_nothing_twice():
    cache, _ = filled(LAYOUT)
    traces = []
    step = jax.jit(lambda cache: (traces.append(1), cache.buffer.sum())[1])
    pool = offload.HostPool(LAYOUT, 16)
    pool.store(cache, range(4), names(4))
    step(cache)
    where = cache.buffer.unsafe_buffer_pointer()
    cache = pool.load(cache, range(4), names(4))
    assert cache.buffer.unsafe_buffer_pointer() == where
    step(cache)
    assert len(traces) == 1


def test_few_programs_serve_all_numbers_of_blocks(long_chunks):
    cache, _ = filled(LAYOUT)
    pool = offload.HostPool(LAYOUT, 16)
    before = [program._cache_size() for program in (rows_module._read_rows, rows_module._write_rows)]
    for count in range(1, 17):
        pool.store(cache, range(count), names(count, f"{count} "))
        cache = pool.load(cache, range(count), names(count, f"{count} "))
    after = [program._cache_size() for program in (rows_module._read_rows, rows_module._write_rows)]
    assert max(np.subtract(after, before)) <= 4  # of 1, 2, 4 and 8 blocks


class TestRoom:
    """Pools of 4 blocks, each in a chunk of its own."""

    def test_the_least_recently_used_go_first(self):
        cache, before = filled(LAYOUT)
        pool, keys = offload.HostPool(LAYOUT, 4), names(6)
        for block in range(4):
            pool.store(cache, [block], [keys[block]])
        pool.store(cache, [0], [keys[0]])  # used again
        cache = pool.load(cache, [9], [keys[2]])  # and this one
        pool.store(cache, [4, 5], keys[4:])
        assert [key in pool for key in keys] == [True, False, True, False, True, True]
        assert (len(pool), pool.stats.evicted) == (4, 2)
        assert_same_bits(blocks_of(pool.load(cache, [0, 1], [keys[5], keys[0]]), [0, 1]), before[[5, 0]])

    def test_the_last_blocks_of_a_prompt_go_first(self):
        cache, _ = filled(LAYOUT)
        pool = offload.HostPool(LAYOUT, 4)
        assert pool.store(cache, range(4), names(4)) == 4
        pool.store(cache, [5, 6], names(2, "b"))
        assert pool.matched(names(4)) == 2

    def test_more_blocks_than_room_store_the_first(self):
        cache, _ = filled(LAYOUT)
        pool = offload.HostPool(LAYOUT, 4)
        assert pool.store(cache, range(7), names(7)) == 4
        assert (pool.matched(names(7)), pool.stats.rejected) == (4, 3)

    def test_what_is_held_stays(self):
        cache, _ = filled(LAYOUT)
        pool = offload.HostPool(LAYOUT, 4)
        pool.store(cache, range(4), names(4))
        pool.hold(names(3))
        pool.hold(names(1))
        assert pool.store(cache, [4, 5], names(2, "b")) == 1
        assert pool.matched(names(4)) == 3
        pool.release(names(3))
        assert pool.store(cache, [4, 5, 6, 7], names(4, "c")) == 3
        assert names(1)[0] in pool
        pool.release(names(1))
        assert pool.store(cache, [4, 5, 6, 7], names(4, "c")) == 4
        with pytest.raises(KeyError, match=f"{names(1)[0].hex()} is not held"):
            pool.release(names(1))
        with pytest.raises(KeyError, match=names(1)[0].hex()):
            pool.hold(names(1))

    def test_keys_are_held_and_released_together_or_not_at_all(self):
        cache, _ = filled(LAYOUT)
        pool, (held, other, missing) = offload.HostPool(LAYOUT, 4), names(3)
        pool.store(cache, [0, 1], [held, other])
        pool.hold([held])
        for keys, message in (
            ([held, other], f"{other.hex()} is not held'"),
            ([held, held], f"{held.hex()} is not held 2 times, but 1"),
            ([held, missing], f"{missing.hex()} is not held'"),
        ):
            with pytest.raises(KeyError, match=message):
                pool.release(keys)
        with pytest.raises(KeyError, match=f"{missing.hex()} is not in the pool, which has"):
            pool.hold([other, missing])
        assert pool.store(cache, range(4), names(4, "b")) == 3
        assert [key in pool for key in (held, other)] == [True, False]
        pool.release([held])
        assert pool.store(cache, range(4), names(4, "c")) == 4

    def test_chunks_go_as_a_whole_and_one_hold_keeps_all(self, long_chunks):
        cache, before = filled(LAYOUT)
        pool = offload.HostPool(LAYOUT, 8)
        pool.store(cache, range(4), names(4))
        pool.store(cache, range(4), names(4, "b"))
        pool.hold(names(4)[1:2])
        pool.store(cache, [9], names(1, "c"))
        assert (pool.matched(names(4)), pool.matched(names(4, "b"))) == (4, 0)
        assert len(pool) == 5
        assert_same_bits(blocks_of(pool.load(cache, [9], names(4)[3:]), [9]), before[[3]])


class TestFailures:
    def test_a_missing_block_is_named_and_nothing_changes(self):
        cache, before = filled(LAYOUT)
        pool = offload.HostPool(LAYOUT, 4)
        pool.store(cache, [0, 1], names(2))
        with pytest.raises(KeyError, match=names(3)[2].hex()):
            pool.load(cache, [4, 5, 6], names(3))
        assert_same_bits(blocks_of(cache, range(16)), before)
        assert pool.stats.loaded == 0

    def test_a_store_that_stops_leaves_whole_blocks(self, monkeypatch):
        cache, before = filled(LAYOUT)
        pool = offload.HostPool(LAYOUT, 8)
        transfer, calls = transfers.to_host, []

        def fail_third(array):
            calls.append(1)
            if len(calls) == 3:
                raise RuntimeError("no memory")
            return transfer(array)

        monkeypatch.setattr(transfers, "to_host", fail_third)
        with pytest.raises(RuntimeError, match="no memory"):
            pool.store(cache, range(5), names(5))
        assert [key in pool for key in names(5)] == [True, True, False, False, False]
        assert_same_bits(blocks_of(cache, range(16)), before)
        assert_same_bits(blocks_of(pool.load(cache, [8, 9], names(2)), [8, 9]), before[:2])

    def test_a_transfer_that_fails_later_leaves_nothing(self, monkeypatch):
        cache, before = filled(LAYOUT)
        pool = offload.HostPool(LAYOUT, 8)
        pool.store(cache, [0], names(1))
        pool.flush()
        monkeypatch.setattr(offload.host.Chunk, "has_arrived", False)
        pool.store(cache, [1], names(1, "b"))

        def fail(arrays):
            raise RuntimeError("the link is down")

        with monkeypatch.context() as broken:
            broken.setattr(jax, "block_until_ready", fail)
            with pytest.raises(RuntimeError, match="the link is down"):
                pool.flush()
        assert names(1, "b")[0] not in pool
        assert_same_bits(blocks_of(pool.load(cache, [9], names(1)), [9]), before[:1])

    def test_a_load_that_stops_gives_the_cache_back(self, monkeypatch):
        cache, before = filled(LAYOUT)
        pool = offload.HostPool(LAYOUT, 8)
        pool.store(cache, range(5), names(5))
        transfer, calls = transfers.to_device, []

        def fail_fourth(array, sharding):
            calls.append(1)
            if len(calls) == 4:
                raise RuntimeError("no memory")
            return transfer(array, sharding)

        monkeypatch.setattr(transfers, "to_device", fail_fourth)
        with pytest.raises(offload.LoadFailed, match="a load of 5 blocks stopped half-way: no memory") as failed:
            pool.load(cache, range(8, 13), names(5))
        cache = failed.value.cache
        untouched = [*range(8), *range(13, 16)]
        assert_same_bits(blocks_of(cache, untouched), before[untouched])
        assert_same_bits(blocks_of(pool.load(cache, range(8, 13), names(5)), range(8, 13)), before[:5])

    def test_a_load_that_stops_after_its_last_transfer_gives_the_cache_back(self, monkeypatch):
        cache, before = filled(LAYOUT)
        pool = offload.HostPool(LAYOUT, 8)
        pool.store(cache, range(5), names(5))
        with monkeypatch.context() as patch:
            patch.setattr(pool._chunks, "use", lambda keys: 1 / 0)
            with pytest.raises(offload.LoadFailed, match="a load of 5 blocks stopped half-way: division") as failed:
                pool.load(cache, range(8, 13), names(5))
        assert_same_bits(blocks_of(failed.value.cache, range(8)), before[:8])
        assert_same_bits(blocks_of(pool.load(failed.value.cache, range(8, 13), names(5)), range(8, 13)), before[:5])

    def test_memory_that_cannot_be_pinned_is_reported(self, monkeypatch):
        def full(array, sharding):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")

        monkeypatch.setattr(transfers, "PINNING_PLATFORMS", ("cpu",))
        offload.HostPool(LAYOUT, 8)
        monkeypatch.setattr(transfers, "to_pinned", full)
        with pytest.raises(MemoryError, match=r"0\.0 GB of host memory cannot be pinned: make the pool smaller"):
            offload.HostPool(LAYOUT, 8)


def test_a_share_of_the_tokens_is_not_exchanged(tmp_path):
    """Under context parallelism, blocks of the same bytes hold other tokens, and keys do not say which."""
    shares = replace(LAYOUT, shards=jaxkv.TokenShards(2, 4))
    for make in (partial(offload.HostPool, shares, 8), partial(offload.DiskPool, tmp_path, shares, model="m")):
        with pytest.raises(ValueError, match=r"`layout` is that of a share of the tokens, TokenShards\(num_shards=2"):
            make()
    pool, cache = offload.HostPool(LAYOUT, 8), jaxkv.KVCache.zeros(shares)
    for operation in (pool.store, pool.load):
        with pytest.raises(ValueError, match="`cache` has other blocks than the pool"):
            operation(cache, [0], names(1))
    with pytest.raises(ValueError, match="`cache` has other blocks than the host memory"):
        offload.HostEntries(LAYOUT).store(cache, [0], [0])
    keys = [
        offload.prefix_keys(range(4), block_size=4, layout_fingerprint=layout.fingerprint, model="m")
        for layout in (LAYOUT, shares, replace(LAYOUT, shards=jaxkv.TokenShards(2, 1)))
    ]
    assert len({key for (key,) in keys}) == 3


def test_numpy_where_there_is_no_pinned_memory(monkeypatch):
    monkeypatch.setattr(transfers, "has_pinned_memory", lambda sharding: False)
    cache, before = filled(LAYOUT)
    pool = offload.HostPool(LAYOUT, 8)
    pool.store(cache, range(5), names(5))
    assert isinstance(next(iter(pool._chunks)).rows, np.ndarray)
    assert_same_bits(blocks_of(pool.load(cache, range(8, 13), names(5)), range(8, 13)), before[:5])
    pool.flush()


def test_what_has_been_done_is_counted():
    cache, _ = filled(LAYOUT)
    pool = offload.HostPool(LAYOUT, 8)
    pool.store(cache, range(3), names(3))
    assert pool.store(cache, [7, 8], names(2)) == 2  # there already
    cache = pool.load(cache, [4, 5], names(2))
    assert pool.matched([*names(2), b"?", *names(3)[2:]]) == 2
    nbytes = LAYOUT.block_nbytes
    counts = dict(stored=3, stored_bytes=3 * nbytes, loaded=2, loaded_bytes=2 * nbytes, host_hits=2, misses=2)
    assert pool.stats == offload.Stats(**counts)
    assert (pool.stats.read_rate, pool.stats.write_rate) == (0, 0)


def test_misuse_is_reported():
    cache, before = filled(LAYOUT)
    pool = offload.HostPool(LAYOUT, 8)
    with pytest.raises(ValueError, match="`layout` is 3: expected a CacheLayout or a PackedLayout"):
        offload.HostPool(3, 8)
    with pytest.raises(ValueError, match="`num_blocks` is 0: expected a positive int"):
        offload.HostPool(LAYOUT, 0)
    with pytest.raises(ValueError, match="`blocks` has 2 ids and `keys` 1: expected as many"):
        pool.store(cache, [0, 1], names(1))
    with pytest.raises(ValueError, match="`blocks` contains 3 more than once: expected distinct blocks"):
        pool.load(cache, [3, 3], names(2))
    with pytest.raises(ValueError, match="`disk` is a str: expected a DiskPool, or None"):
        offload.HostPool(LAYOUT, 8, disk="folder")
    for operation in (pool.store, pool.load):
        with pytest.raises(ValueError, match="`blocks` contains 16: expected block ids of the cache, from 0 to 15"):
            operation(cache, [16], names(1))
        other = jaxkv.KVCache.zeros(jaxkv.CacheLayout(**SIZES, entry=ENTRY, order="BHLNC", block_padding=8))
        message = re.escape("`cache` has other blocks than the pool") + ".*" + other.layout.fingerprint
        with pytest.raises(ValueError, match=re.compile(message, re.DOTALL)):
            operation(other, [0], names(1))
    assert_same_bits(blocks_of(cache, range(16)), before)
