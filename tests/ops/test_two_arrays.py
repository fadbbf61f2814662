"""Keys and values in an array each: every operation equals that on a packed cache, and updates both arrays in place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv.offload import HostPool
from jaxkv.parallel import transfer_blocks
from support import oracle, scenes
from support.available import assume_available
from support.cases import further
from support.compare import assert_same_bits

LAYER, HEADS = 1, 2
BF16, INT8 = jaxkv.KVEntry("bf16", 16, 8), jaxkv.KVEntry("int8", 16, 8)


def layout_of(entry, num_blocks=scenes.BLOCKS, **changed):
    """Keys [L, B, N, H, n] behind 8 other elements, and values [B, H, L, N, m], in blocks of 64 tokens."""
    key, value = (len(plane) // entry.dtype.itemsize for plane in oracle.planes(entry))
    page = 64 * HEADS
    given = {
        "strides": {"layer": num_blocks * page * key, "block": page * key, "token": HEADS * key, "head": key},
        "offset": 8,
        "size": 3 * num_blocks * page * key + 8,
        "value_strides": {"block": 3 * page * value, "head": 3 * 64 * value, "layer": 64 * value, "token": value},
        "value_size": 3 * num_blocks * page * value,
    }
    sizes = dict(num_layers=3, num_blocks=num_blocks, block_size=64, num_heads=HEADS, entry=entry)
    return jaxkv.CacheLayout.from_strides(**sizes, **{**given, **changed})


def views(layout, buffer):
    """The keys and the values [L, B, H, N, bytes] in the bytes of two arrays."""
    keys, values = (np.asarray(array).view(np.uint8) for array in buffer)
    shapes = (3, layout.num_blocks, 64, HEADS, -1), (layout.num_blocks, HEADS, 3, 64, -1)
    keys, values = keys[8 * layout.itemsize :].reshape(shapes[0]), values.reshape(shapes[1])
    return keys.swapaxes(2, 3), np.moveaxis(values, 2, 0)


def cache_of(scene, layout):
    """The scene as a layer of two arrays, NaN elsewhere."""
    buffer = [np.full(size * layout.itemsize, 0xFF, np.uint8) for size in (layout.size, layout.value_size)]
    for view, places in zip(views(layout, buffer), oracle.planes(layout.entry), strict=True):
        view[LAYER] = scene.entries[..., places]
    return jaxkv.KVCache(tuple(jnp.asarray(array.view(layout.dtype)) for array in buffer), layout)


def new_of(entry):
    rng = np.random.default_rng(3)
    return [jnp.asarray(rng.standard_normal((5, HEADS, n)), jnp.bfloat16) for n in entry.sizes]


SLOTS = np.asarray([130, -1, 7, 2000, 64], np.int32)


@pytest.mark.ci
@pytest.mark.parametrize("entry", [BF16, INT8], ids=["bf16", "int8"])
def test_reads_equal_those_of_a_packed_cache(entry):
    scene = scenes.scene(entry, num_heads=HEADS)
    layout = layout_of(entry)
    cache, twin = cache_of(scene, layout), scene.twin(layout)
    tables, lengths = jnp.asarray(scene.tables), jnp.asarray(scene.lengths, jnp.int32)
    sums = jnp.asarray(np.cumsum([0, *scene.lengths]), jnp.int32)
    q = jnp.asarray(np.random.default_rng(0).standard_normal((len(scene.lengths), 1, 6, 16)), jnp.bfloat16)
    calls = {
        "gather_kv": lambda cache, layer: jaxkv.gather_kv(cache, tables, sums, layer=layer, total=400, dtype="float32"),
        "gather_entries": lambda cache, layer: jaxkv.gather_entries(cache, tables, sums, layer=layer, total=400),
        "read_kv": lambda cache, layer: jaxkv.read_kv(cache, SLOTS, layer=layer, dtype="float32"),
        "decode_kv": lambda cache, layer: jaxkv.decode_kv(
            q, cache, tables, lengths, layer=layer, scale=0.3, return_lse=True
        ),
        "prefill_kv": lambda cache, layer: jaxkv.prefill_kv(q, cache, tables, lengths, layer=layer, scale=0.3),
    }
    for name, call in calls.items():
        found = jax.jit(call)(cache, LAYER), call(twin, 0)
        for one, other in zip(*map(jax.tree.leaves, found), strict=True):
            assert_same_bits(one, other, name)


@pytest.mark.parametrize("entry", [BF16, further(INT8)], ids=["bf16", "int8"])
def test_writes_touch_nothing_else_and_update_both_arrays_in_place(entry):
    layout, rng = layout_of(entry), np.random.default_rng(0)
    sizes = layout.size, layout.value_size
    before = [rng.integers(0, 256, size * layout.itemsize, np.uint8) for size in sizes]
    cache = jaxkv.KVCache(tuple(jnp.asarray(array.view(layout.dtype)) for array in before), layout)
    new = new_of(entry)
    write = jax.jit(lambda cache, k, v: jaxkv.write_kv(cache, k, v, SLOTS, layer=LAYER), donate_argnums=0)
    text = write.lower(cache, *new).as_text()
    assert text.count("tf.aliasing_output") == 2
    expected = [array.copy() for array in before]
    rows = oracle.encode(entry, [np.asarray(x.astype(jnp.float32)) for x in new])
    for view, places in zip(views(layout, expected), oracle.planes(entry), strict=True):
        for row, slot in zip(rows, SLOTS, strict=True):
            if 0 <= slot < layout.num_slots:
                view[LAYER, slot // 64, :, slot % 64] = row[:, places]
    after = write(cache, *new)
    for array, right, old in zip(after.buffer, expected, before, strict=True):
        assert_same_bits(np.asarray(array).view(np.uint8), right)
        assert (right != old).any()


@pytest.mark.ci
def test_blocks_are_copied_exported_and_converted():
    scene = scenes.scene(INT8, num_heads=HEADS)
    layout = layout_of(INT8)
    cache = cache_of(scene, layout)
    held = views(layout, cache.buffer)
    copied = jaxkv.copy_blocks(cache, jnp.asarray([1, 4]), jnp.asarray([4, 0]))
    for after, before in zip(views(layout, copied.buffer), held, strict=True):
        expected = before.copy()
        expected[:, 4], expected[:, 0] = before[:, 1], before[:, 4]
        assert_same_bits(after, expected)
    rows = jaxkv.read_blocks(cache, jnp.asarray([4, 2]))
    assert rows.shape == (2, layout.block_nbytes)
    back = jaxkv.write_blocks(jaxkv.KVCache.zeros(layout), jnp.asarray([4, 2]), rows)
    for after, before in zip(views(layout, back.buffer), held, strict=True):
        assert_same_bits(after[:, [4, 2]], before[:, [4, 2]])
        assert not after[:, [0, 1, 3]].any()
    plain = jaxkv.CacheLayout(num_layers=3, num_blocks=2, block_size=64, num_heads=HEADS, entry=INT8)
    moved = jaxkv.write_blocks(jaxkv.KVCache.zeros(plain), jnp.arange(2), jaxkv.convert_blocks(rows, layout, plain))
    entries = scenes.fetch(plain, moved.buffer, LAYER)
    for places, view in zip(oracle.planes(INT8), held, strict=True):
        assert_same_bits(entries[..., places], view[LAYER, [4, 2]])
    assert_same_bits(jaxkv.convert_blocks(jaxkv.read_blocks(moved, jnp.arange(2)), plain, layout), rows)


@pytest.mark.parametrize("implementation", ["mosaic_gpu", "triton"])
def test_kernels_support_them(implementation, monkeypatch):
    assume_available(monkeypatch, implementation)
    layout, ids = layout_of(jaxkv.KVEntry("bf16", 128, 64)), jnp.arange(3)
    cache, q = scenes.shapes_of(layout), jnp.ones((3, 1, 8, 128), jnp.bfloat16)
    calls = {
        jaxkv.write_kv: ((cache, *new_of(layout.entry), SLOTS), {"layer": 0}),
        jaxkv.gather_kv: ((cache, ids[:, None], jnp.arange(4)), {"layer": 0, "total": 3, "dtype": "bfloat16"}),
        jaxkv.read_kv: ((cache, SLOTS), {"layer": 0, "dtype": "float32"}),
        jaxkv.plan_decode: ((cache, ids[:, None], ids), {"num_heads": 8}),
        jaxkv.decode_kv: ((q, cache, ids[:, None], ids), {"layer": 0, "scale": 1.0}),
        jaxkv.prefill_kv: ((q, cache, ids[:, None], ids), {"layer": 0, "scale": 1.0}),
        jaxkv.read_blocks: ((cache, ids), {}),
        jaxkv.copy_blocks: ((cache, ids, ids), {}),
    }
    for operation, (args, keywords) in calls.items():
        assert not jaxkv.explain(operation, *args, **keywords).reasons[implementation], operation


def test_what_does_not_support_two_arrays_rejects_them():
    layout = layout_of(BF16)
    cache = jaxkv.KVCache.zeros(layout)
    refused = "`cache` has keys and values in arrays of 98312 and 49152 elements: expected one buffer"
    with pytest.raises(ValueError, match=refused):
        HostPool(layout, 2).store(cache, [0], [b"key"])
    with pytest.raises(ValueError, match=refused.replace("`cache`", "`source`")):
        transfer_blocks(cache, [0], cache, [1])
    with pytest.raises(ValueError, match="keys and values lie in an array each: a memory map shows one buffer"):
        layout.draw()
    assert "(values of 16 bytes, in an array of their own)" in str(layout)


@pytest.mark.parametrize(
    ("buffer", "message"),
    [
        (lambda keys, values: keys, r"`cache.buffer` is bfloat16\[98312\]: expected the pair \(keys, values\)"),
        (lambda keys, values: (keys, keys), r"`cache.buffer\[1\]` is bfloat16\[98312\]: .* bfloat16\[49152\]"),
        (
            lambda keys, values: (keys.astype("float16"), values),
            r"`cache.buffer\[0\]` is float16\[98312\]: .* bfloat16",
        ),
    ],
)
def test_buffers_that_do_not_fit(buffer, message):
    cache = jaxkv.KVCache.zeros(layout_of(BF16))
    wrong = jaxkv.KVCache(buffer(*cache.buffer), cache.layout)
    with pytest.raises(ValueError, match=message):
        jaxkv.write_kv(wrong, *new_of(BF16), SLOTS, layer=0)


def test_layouts():
    layout = layout_of(BF16)
    assert (layout.nbytes, layout.value_offset) == (2 * (layout.size + layout.value_size), 0)
    assert not any((layout.blocks_are_runs, layout.is_block_contiguous, layout.is_layer_contiguous))
    one = layout_of(BF16, value_size=None, value_offset=layout.size, size=layout.size + layout.value_size)
    assert one.fingerprint == layout.fingerprint, "blocks of one buffer and of two arrays have the same bytes"
    assert len({one, layout, layout_of(BF16, value_size=layout.value_size + 8)}) == 3
    with pytest.raises(ValueError, match=r"values lie in elements \[0, 49152\), the buffer has `size` 49144"):
        layout_of(BF16, value_size=49144)
    with pytest.raises(ValueError, match="`value_size` is 8: expected none of them without `strides`"):
        jaxkv.CacheLayout(num_layers=1, num_blocks=1, block_size=8, entry=BF16, value_size=8)
    other = jaxkv.KVCache.zeros(jaxkv.CacheLayout(num_layers=1, num_blocks=2, block_size=8, entry=BF16))
    with pytest.raises(ValueError, match="a buffer of 98312 and 49152 elements of bfloat16; this cache has 384 of bfl"):
        other.view(layout)
