"""Pools whose blocks are others than those of the cache: of another size, order or dtype, but of the same entries."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import offload
from jaxkv.offload import transfers
from jaxkv.testing.buffers import to_bytes, to_cache
from offload.pools import filled
from support import scenes
from support.cases import further
from support.compare import assert_same_bits
from support.conversions import ONE, buffers_of, entries_of, noise

KV = scenes.KV_ENTRIES[0]
PROMPT = 150
"""Tokens of the prompt."""
SIZES = [(48, 16), (16, 48), *(further(*sizes) for sizes in [(32, 48), (48, 32), (128, 16), (16, 128), (64, 64)])]


def layout_of(block_size, *, order="BLNHC", entry=KV, tokens=2 * PROMPT, blocks=None, **options):
    heads = {} if entry.one_head else {"num_heads": 2}
    blocks = blocks or -(-tokens // block_size) + 1
    return jaxkv.CacheLayout(
        num_layers=2, num_blocks=blocks, block_size=block_size, entry=entry, order=order, **heads, **options
    )


def keys_of(layout, tokens):
    about = {"layout_fingerprint": layout.fingerprint, "model": "m", "block_size": layout.block_size}
    return offload.prefix_keys(range(tokens), **about)


def needed(layout, tokens):
    """Ids for so many tokens, not in order, from either end of the cache."""
    count = -(-tokens // layout.block_size)
    return list(range(layout.num_blocks))[::-1][:count], list(range(count))


def on_device(layout, buffer):
    cache = to_cache(layout, buffer)
    return jaxkv.KVCache(jax.device_put(cache.buffer, jax.devices()[0]), layout)


def replaced(layout, buffer, blocks, entries):
    """The bytes of a cache after the entries of a prompt were loaded into blocks, and nothing else has changed."""
    after = buffer.copy()
    (fresh,) = buffers_of(layout, ONE, entries, blocks)
    (written,) = buffers_of(layout, ONE, np.full_like(entries, 1), blocks)
    after[written == 1] = fresh[written == 1]
    return after


def check(storing, loading, first, second):
    """A prompt is stored by one pool and loaded by another, or the same: every bit of it, and no other.

    `first` and `second` are the layouts of the caches.
    """
    keys = keys_of(storing.layout, PROMPT)
    tokens = len(keys) * storing.layout.block_size
    (blocks, _), (_, others) = needed(first, tokens), needed(second, tokens)
    source, target = noise(first, 1), noise(second, 2)
    cache = on_device(first, source)
    assert storing.store(cache, blocks, keys) == len(keys)
    assert_same_bits(to_bytes(cache), source)
    storing.flush()
    assert loading.matched(keys) == len(keys)
    cache = loading.load(on_device(second, target), others, keys)
    entries = entries_of(first, ONE, [source], blocks, tokens)
    assert_same_bits(to_bytes(cache), replaced(second, target, others, entries))
    assert loading.stats.loaded == storing.stats.stored == len(keys)


@pytest.mark.parametrize(("own", "theirs"), SIZES)
def test_blocks_of_another_size(own, theirs):
    """Pools are made of layouts of any number of blocks."""
    layout, cache_layout = layout_of(own, order="BLHNC", tokens=1), layout_of(theirs, order="LBNHC")
    of_one_block = layout_of(theirs, order="LBNHC", blocks=1)
    pool = offload.HostPool(layout, 16, cache_layout=of_one_block)
    check(pool, pool, cache_layout, cache_layout)


def test_caches_of_two_sizes_share_a_folder(tmp_path):
    """A pool on disk of blocks of 48 tokens, written from a cache with blocks of 16, read by one with blocks of 32."""
    layout, disk = layout_of(48), offload.DiskPool(tmp_path, layout_of(48), model="m")
    caches = [layout_of(size) for size in (16, 32)]
    storing, loading = (offload.HostPool(layout, 8, cache_layout=own, disk=disk) for own in caches)
    check(storing, loading, *caches)
    assert loading.stats.read == len(keys_of(layout, PROMPT))


def test_the_rest_of_a_last_block_keeps_its_contents():
    """Two blocks of 16 tokens are part of one of 48, whose other tokens `check` finds unchanged."""
    layout, cache_layout = layout_of(16), layout_of(48)
    pool = offload.HostPool(layout, 16, cache_layout=cache_layout)
    keys, source, target = keys_of(layout, 32), noise(cache_layout, 1), noise(cache_layout, 2)
    pool.store(on_device(cache_layout, source), [3], keys)
    cache = pool.load(on_device(cache_layout, target), [5], keys)
    entries = entries_of(cache_layout, ONE, [source], [3], 32)
    assert_same_bits(to_bytes(cache), replaced(cache_layout, target, [5], entries))


def packed(block_size, num_blocks=12, **options):
    groups = {"latent": jaxkv.Group(2, scenes.MLA_ENTRIES[0]), "keys": jaxkv.Group(1, scenes.INDEXER_ENTRY)}
    return jaxkv.PackedLayout(num_blocks=num_blocks, block_size=block_size, groups=groups, **options)


def test_all_groups_of_a_packed_block():
    layout, cache_layout = packed(12), packed(8, order="BHLNC")
    pool = offload.HostPool(layout, 8, cache_layout=packed(8, 1, order="BHLNC"))
    first = cache_layout["latent"]
    source = noise(first, 1)
    keys = keys_of_packed(layout, 12, 24)
    pool.store(on_device(first, source), [4, 2, 9], keys)
    cache = pool.load(jaxkv.KVCache.zeros(cache_layout["keys"], device=jax.devices()[0]), [0, 1, 2], keys)
    for own in cache_layout.values():
        found = entries_of(own, ONE, [to_bytes(cache)], [0, 1, 2], 24)
        assert_same_bits(found, entries_of(own, ONE, [source], [4, 2, 9], 24))


def keys_of_packed(layout, block_size, tokens):
    about = {"layout_fingerprint": layout.fingerprint, "model": "m"}
    return offload.prefix_keys(range(tokens), block_size=block_size, **about)


def test_the_same_blocks_are_copied_as_they_are():
    """Padding included."""
    layout = layout_of(16, block_padding=8)
    pool = offload.HostPool(layout, 8, cache_layout=layout_of(16, block_padding=8, tokens=100))
    cache, rows = filled(layout)
    pool.store(cache, [3, 4], [b"a", b"b"])
    cache = pool.load(jaxkv.KVCache.zeros(layout, device=jax.devices()[0]), [1, 2], [b"a", b"b"])
    assert_same_bits(jaxkv.read_blocks(cache, jnp.asarray([1, 2])), rows[[3, 4]])


def test_eviction_and_holds():
    layout, cache_layout = layout_of(48), layout_of(16)
    pool = offload.HostPool(layout, 2, cache_layout=cache_layout)
    cache = on_device(cache_layout, noise(cache_layout, 1))
    assert pool.store(cache, range(6), [b"a", b"b"]) == 2
    pool.hold([b"a"])
    assert pool.store(cache, range(6, 12), [b"c", b"d"]) == 1
    assert pool.matched([b"a", b"c"]) == 2
    assert b"b" not in pool
    assert len(pool) == 2


def test_few_programs_serve_all_numbers_of_blocks():
    layout, cache_layout = layout_of(48), layout_of(16)
    pool = offload.HostPool(layout, 16, cache_layout=cache_layout)
    cache = pool.warm_up(on_device(cache_layout, noise(cache_layout, 1)))
    before = [program._cache_size() for program in (transfers.read_converted, transfers.write_converted)]
    for count in range(1, 7):
        keys = [f"{count} {n}".encode() for n in range(count)]
        pool.store(cache, range(3 * count), keys)
        cache = pool.load(cache, range(3 * count), keys)
    assert [program._cache_size() for program in (transfers.read_converted, transfers.write_converted)] == before


@pytest.mark.parametrize("order", ["BLNHC", "LBHNC"])
def test_the_cache_is_updated_in_place(order):
    """What the programs of stores and loads need beside the cache is about as large as the blocks that they move."""
    cache_layout, layout = layout_of(16, order=order, tokens=16 * 4000), layout_of(48)
    conversion = transfers.conversion_between(cache_layout, layout)
    cache = jax.eval_shape(lambda: jaxkv.KVCache.zeros(cache_layout))
    units = jax.ShapeDtypeStruct((2, 3), jnp.int32)
    rows = jax.ShapeDtypeStruct((2, layout.pages.block_elements), layout.dtype)
    for program, given in ((transfers.read_converted, (units,)), (transfers.write_converted, (units, rows))):
        needed = program.lower(conversion, cache, *given).compile().memory_analysis()
        assert needed.temp_size_in_bytes < cache_layout.nbytes / 50
    assert needed.alias_size_in_bytes == cache_layout.nbytes


STATE = jaxkv.StateEntry({"sums": ((3,), "float32")})
MISTAKES = {
    "several tables": (
        lambda: [
            jaxkv.PackedLayout(
                num_blocks=4,
                block_size={"": size, "more": 4},
                groups={"a": jaxkv.Group(1, KV, 2), "b": jaxkv.Group(1, KV, 2, table="more")},
            )
            for size in (4, 8)
        ],
        "`cache_layout` has the tables '', 'more' and other blocks than `layout`: expected the same blocks in both",
    ),
    "states of blocks": (
        lambda: [
            jaxkv.PackedLayout(num_blocks=4, block_size=size, groups={"a": jaxkv.Group(1, STATE, rate=size)})
            for size in (4, 8)
        ],
        "`rate` of group 'a' is 8 in `cache_layout` and 4 in `layout`: entries that cover other numbers of tokens",
    ),
    "other entries": (
        lambda: [layout_of(16), layout_of(16, entry=scenes.KV_ENTRIES[1])],
        "`entry` is .* in `cache_layout` and .* in `layout`",
    ),
    "other heads": (
        lambda: [layout_of(16), jaxkv.CacheLayout(num_layers=2, num_blocks=4, block_size=16, num_heads=4, entry=KV)],
        "`num_heads` is 4 in `cache_layout` and 2 in `layout`",
    ),
    "shares of tokens": (
        lambda: [layout_of(16), layout_of(16, shards=jaxkv.TokenShards(2))],
        "`shards` is .* in `cache_layout` and .* in `layout`",
    ),
    "one of several groups": (
        lambda: [packed(8)["latent"], packed(16)["latent"]],
        "`cache_layout` is one of several groups of a PackedLayout: expected the PackedLayout",
    ),
    "two arrays": (
        lambda: [layout_of(16), scenes.apart(KV, "two arrays", num_heads=2, num_layers=2, block_size=16)],
        "`cache_layout` has keys and values in arrays of",
    ),
    "no layout": (lambda: [layout_of(16), 16], "`cache_layout` is 16: expected a CacheLayout or a PackedLayout"),
}


@pytest.mark.parametrize(("layouts", "message"), MISTAKES.values(), ids=MISTAKES)
def test_layouts_that_are_rejected(layouts, message):
    layout, cache_layout = layouts()
    with pytest.raises(ValueError, match=message):
        offload.HostPool(layout, 4, cache_layout=cache_layout)


def test_calls_that_are_rejected():
    layout, cache_layout = layout_of(48), layout_of(16)
    pool = offload.HostPool(layout, 4, cache_layout=cache_layout)
    cache = on_device(cache_layout, noise(cache_layout, 1))
    message = "`blocks` has 2 ids and `keys` 1: expected 3 ids, because keys are of blocks of 48 tokens, and ids of bl"
    for call in (pool.store, pool.load):
        with pytest.raises(ValueError, match=message):
            call(cache, [1, 2], [b"a"])
        with pytest.raises(ValueError, match="`cache` has other blocks than the pool"):
            call(jaxkv.KVCache.zeros(layout), [1], [b"a"])
    with pytest.raises(ValueError, match="`blocks` contains 2 more than once"):
        pool.load(cache, [2, 1, 2], [b"a"])
    assert not cache.buffer.is_deleted()
