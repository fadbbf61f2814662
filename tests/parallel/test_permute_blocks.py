"""`permute_blocks`: blocks between the caches of devices, compared with copies by NumPy and by `transfer_blocks`."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxkv
from jaxkv import parallel
from jaxkv.parallel.permute import PIECE_BYTES, PIECES, _pieces
from jaxkv.testing.buffers import entry_bytes, to_bytes
from support import scenes
from support.cases import on_layouts
from support.compare import assert_same_bits
from support.emitters import DEFAULT_EMITTERS
from support.many_devices import mesh_of, on_several_devices
from support.suites.base import layout_of

pytestmark = on_several_devices

ENTRIES = (scenes.MLA_ENTRIES[0], scenes.KV_ENTRIES[2], scenes.KV_ENTRIES[3], scenes.INDEXER_ENTRY)
MLA = jaxkv.MLAEntry("bf16", latent=8, rope=4)
SMALL = jaxkv.CacheLayout(num_layers=2, num_blocks=8, block_size=4, entry=MLA)
TO_NEXT = [(0, 1), (1, 2), (2, 0)]
ONE_WAY = [(1, 0)]


def permute(layout, buffers, sources, targets, perm, **options):
    """The buffers of all devices, as bytes, after each device has sent its `sources` [devices, n] to its `targets`."""
    mesh = mesh_of(len(buffers))
    placed = partial(jax.device_put, device=NamedSharding(mesh, P("x")))

    @partial(jax.jit, donate_argnums=0, compiler_options=DEFAULT_EMITTERS)
    @partial(jax.shard_map, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    def permuted(cache, sources, targets):
        return parallel.permute_blocks(cache, sources[0], targets[0], perm, axis="x", **options)

    cache = jaxkv.KVCache(placed(np.concatenate(buffers).view(layout.dtype)), layout)
    ids = [placed(np.asarray(ids, np.int32)) for ids in (sources, targets)]
    return np.split(np.asarray(permuted(cache, *ids).buffer).view(np.uint8), len(buffers))


def blocks(layout, buffer):
    """What belongs to each block: arrays of bytes [B, ...]."""
    if layout.blocks_are_runs:
        return [buffer.reshape(layout.num_blocks, -1)]
    return [np.moveaxis(view, 1, 0) for view in entry_bytes(layout, buffer)]


def by_numpy(layout, buffers, sources, targets, perm):
    after = [buffer.copy() for buffer in buffers]
    for sender, receiver in perm:
        for there, here in zip(blocks(layout, after[receiver]), blocks(layout, buffers[sender]), strict=True):
            for source, target in zip(sources[sender], targets[sender], strict=True):
                if 0 <= source < layout.num_blocks and 0 <= target < layout.num_blocks:
                    there[target] = here[source]
    return after


@pytest.mark.parametrize("perm", [TO_NEXT, ONE_WAY])
@on_layouts(ENTRIES)
def test_every_layout(entry, name, perm):
    """Devices send blocks that they receive; ids outside the cache send and change nothing."""
    layout, rng = layout_of(name, entry, num_heads=1 if entry.one_head else 2), np.random.default_rng(0)
    buffers = [scenes.garbage(layout, rng, "random") for _ in range(3)]
    last, huge = layout.num_blocks - 1, 2**31 - 1
    sources = [[3, 1, last, 0, -1, 2, 5], [0, 4, 1, layout.num_blocks, 2, 3, 3], [last, 2, 2, 4, 5, huge, 0]]
    targets = [[1, 3, 0, last, 4, -1, 5], [2, 3, last, 0, 1, layout.num_blocks, 5], [0, 1, 4, huge, -2, 2, 3]]
    found = permute(layout, buffers, sources, targets, perm, pieces=3)
    for one, right in zip(found, by_numpy(layout, buffers, sources, targets, perm), strict=True):
        assert_same_bits(one, right)


@pytest.mark.parametrize("pieces", [None, 1, 2, 5, 99])
@pytest.mark.parametrize("count", [0, 1, 5])
def test_any_number_of_pieces(count, pieces):
    rng = np.random.default_rng(1)
    buffers = [scenes.garbage(SMALL, rng, "random") for _ in range(2)]
    sources, targets = ([rng.permutation(8)[:count] for _ in range(2)] for _ in range(2))
    found = permute(SMALL, buffers, sources, targets, [(0, 1), (1, 0)], pieces=pieces)
    for one, right in zip(found, by_numpy(SMALL, buffers, sources, targets, [(0, 1), (1, 0)]), strict=True):
        assert_same_bits(one, right)


def test_as_transfer_blocks():
    rng = np.random.default_rng(2)
    buffers = [scenes.garbage(SMALL, rng, "random") for _ in range(2)]
    devices = mesh_of(2).devices
    caches = [
        jaxkv.KVCache(jax.device_put(buffer.view(SMALL.dtype), device), SMALL)
        for buffer, device in zip(buffers, devices, strict=True)
    ]
    right = parallel.transfer_blocks(caches[0], [7, 0, 3], caches[1], [1, 2, 0])
    found = permute(SMALL, buffers, [[7, 0, 3]] * 2, [[1, 2, 0]] * 2, [(0, 1)])
    assert_same_bits(found[0], buffers[0])
    assert_same_bits(found[1], to_bytes(right))


def test_the_default_number_of_pieces():
    """At most five, of at least 32 MiB."""
    sizes = [(0, 1), (1, 2**40), (3, PIECE_BYTES - 1), (4, PIECE_BYTES), (512, 27 * 64 * 1152)]
    assert [_pieces(None, *size) for size in sizes] == [1, 1, 2, 4, PIECES]


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (([0.5], [0]), {}, "`source_blocks` has dtype float32: expected int32"),
        (([0], [[0]]), {}, r"`target_blocks` has shape \(1, 1\): expected \[n\]"),
        (([0], [0, 1]), {}, r"`target_blocks` has shape \(2,\): expected \[n\] = \[1\]"),
        (([0], [0]), {"pieces": 0}, "`pieces` is 0: expected None or an int from 1"),
        (([0], [0]), {"pieces": 1.5}, "`pieces` is 1.5: expected None or an int from 1"),
    ],
)
def test_mistakes(arguments, options, message):
    def permuted(cache):
        return parallel.permute_blocks(cache, *map(jnp.asarray, arguments), [(0, 1)], axis="x", **options)

    mesh = mesh_of(2)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(
            jax.shard_map(permuted, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False),
            parallel.zeros(SMALL, mesh, "x"),
        )


def test_what_is_no_cache():
    with pytest.raises(ValueError, match="`cache` is a NoneType: expected a KVCache"):
        parallel.permute_blocks(None, jnp.zeros(1, int), jnp.zeros(1, int), [(0, 1)], axis="x")


def test_checked():
    """Negative targets say that there is nothing to send; other ids outside the cache are mistakes."""
    mesh = mesh_of(2, axis_type=AxisType.Auto)

    def permuted(cache, sources, targets):
        def one(cache, sources, targets):
            return parallel.permute_blocks(cache, sources, targets, [(0, 1)], axis="x")

        return jax.shard_map(one, mesh=mesh, in_specs=(P("x"), P(), P()), out_specs=P("x"), check_vma=False)(
            cache, sources, targets
        )

    cache = parallel.zeros(SMALL, mesh, "x")
    check = jaxkv.checked(permuted)
    check(cache, np.asarray([1, -1], np.int32), np.asarray([2, -1], np.int32))
    with pytest.raises(ValueError, match=r"`source_blocks`\[1\] is 8: the cache has blocks 0 to 7"):
        check(cache, np.asarray([1, 8], np.int32), np.asarray([2, 3], np.int32))
    with pytest.raises(ValueError, match=r"`target_blocks`\[1\] is 2: this block is written twice"):
        check(cache, np.asarray([1, 3], np.int32), np.asarray([2, 2], np.int32))


def test_no_program_copies_the_cache():
    layout = jaxkv.CacheLayout(num_layers=8, num_blocks=2**10, block_size=64, entry=jaxkv.MLAEntry("bf16"))
    mesh = mesh_of(2)

    def permuted(cache, blocks):
        return parallel.permute_blocks(cache, blocks, blocks, [(0, 1), (1, 0)], axis="x", pieces=4)

    program = jax.jit(
        jax.shard_map(permuted, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"), check_vma=False), donate_argnums=0
    )
    buffer = jax.ShapeDtypeStruct((2 * layout.size,), layout.dtype, sharding=NamedSharding(mesh, P("x")))
    blocks = jax.ShapeDtypeStruct((8,), jnp.int32, sharding=NamedSharding(mesh, P()))
    memory = program.lower(jaxkv.KVCache(buffer, layout), blocks).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= layout.nbytes
    assert memory.temp_size_in_bytes < layout.nbytes / 10
