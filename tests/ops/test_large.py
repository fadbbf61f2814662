"""Caches of more than 2**31 elements: what lies beyond is found, and nothing wraps round to the beginning."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv.testing.buffers import entry_bytes, get_entries, to_bytes
from jaxkv_kernels.addressing import Pages, entry_view, piece_view, row_view
from support.compare import assert_same_bits
from support.emitters import DEFAULT_EMITTERS

ENTRY = jaxkv.MLAEntry("fp8")  # 576 elements of one byte
BLOCK_SIZE = 64
SCALE = 0.02
IN_PLACE = {"donate_argnums": 0, "compiler_options": DEFAULT_EMITTERS}


def layout_of(order, num_layers, num_blocks, block_size=BLOCK_SIZE):
    sizes = dict(num_layers=num_layers, num_blocks=num_blocks, block_size=block_size)
    return jaxkv.CacheLayout(**sizes, entry=ENTRY, order=order, dtype="uint8")


def write(cache, kv_c, k_pe, slots, layer):
    return jaxkv.write_mla(cache, kv_c, k_pe, slots, layer=layer, kv_scale=SCALE)


def gather(cache, tables, total, layer):
    keywords = {"kv_scale": SCALE, "dtype": jnp.float32, "total": total}
    return jaxkv.gather_mla(cache, tables, jnp.asarray([0, total]), layer=layer, **keywords)


def decode(cache, q, tables, total, layer):
    keywords = {"scale": 0.1, "kv_scale": SCALE, "return_lse": True}
    return jaxkv.decode_mla(*q, cache, tables, jnp.asarray([total]), layer=layer, **keywords)


def blocks_at_edges(layout, layers):
    """The first and the last block, and those in which the elements 2**31 and 2**32 of the buffer lie."""
    offsets = [edge - layer * layout.strides.layer for edge in (2**31, 2**32) for layer in layers]
    inside = {offset // layout.strides.block for offset in offsets if offset > 0}
    return [0, *sorted(block for block in inside if 1 < block < layout.num_blocks - 2), layout.num_blocks - 1]


def check(layout, view, layers):
    """Writes, gathers, decodes and copies at both ends of the buffer and round the powers of two between."""
    assert layout.size > 2**31
    assert entry_view(layout.pages).shape == view
    blocks = blocks_at_edges(layout, layers)
    total = len(blocks) * BLOCK_SIZE - 3
    tables = jnp.asarray([blocks], jnp.int32)
    slots = jaxkv.slots_for(tables, jnp.arange(total)[None], layout)[0]

    rng = np.random.default_rng(0)
    q = [jnp.asarray(rng.standard_normal((1, 2, n)), jnp.bfloat16) for n in ENTRY.sizes]
    small = layout_of("LBNHC", 1, len(blocks))
    near = jnp.arange(len(blocks), dtype=jnp.int32)[None]
    store = jax.jit(write, **IN_PLACE)
    zeros = np.zeros(layout.size, layout.dtype)  # half the time of JAX's
    cache = jaxkv.KVCache(jax.device_put(zeros, may_alias=False), layout)
    del zeros
    twins = []
    for layer in layers:
        # No byte of an entry is 0, so that the bytes written can be counted.
        new = [jnp.asarray(np.abs(rng.standard_normal((total, n))) + 0.1, jnp.bfloat16) for n in ENTRY.sizes]
        cache = store(cache, *new, slots, layer)
        twin = store(jaxkv.KVCache.zeros(small), *new, jnp.arange(total), 0)
        for found, expected in (
            (gather(cache, tables, total, layer), gather(twin, near, total, 0)),
            (decode(cache, q, tables, total, layer), decode(twin, q, near, total, 0)),
        ):
            for a, b in zip(found, expected, strict=True):
                assert_same_bits(a, b)
        twins.append(get_entries(small, to_bytes(twin), 0))
        assert np.count_nonzero(twins[-1]) == total * ENTRY.nbytes

    # The last block over the last but one, and from there, as it travels, over block 1.
    last = layout.num_blocks - 1
    cache = jax.jit(jaxkv.copy_blocks, **IN_PLACE)(cache, jnp.asarray([last]), jnp.asarray([last - 1]))
    rows = jaxkv.read_blocks(cache, jnp.asarray([last - 1]))
    cache = jax.jit(jaxkv.write_blocks, **IN_PLACE)(cache, jnp.asarray([1]), rows)

    # Only now, for a buffer that NumPy looks at cannot be donated.
    everything = to_bytes(cache)
    (entries,) = entry_bytes(layout, everything)
    for layer, twin in zip(layers, twins, strict=True):
        assert_same_bits(entries[layer, blocks], twin)
        assert_same_bits(entries[layer, [last - 1, 1]], twin[[-1, -1]])
    written = sum(np.count_nonzero(twin) + 2 * np.count_nonzero(twin[-1]) for twin in twins)
    assert np.count_nonzero(everything) == written  # every other byte is 0 still
    cache.buffer.delete()


@pytest.mark.slow  # 20 seconds, most of which go into zeros; `.ci/run` runs it
def test_elements_beyond_2_31_are_found_and_nothing_wraps_round():
    # One after the other in one test, so that one such cache at a time is in memory: 2.2, 2.2 and 4.4 GB.
    block = BLOCK_SIZE * ENTRY.nbytes
    check(layout_of("BLNHC", 3, 20_000), (20_000, 3 * block), [0, 2])
    check(layout_of("LBNHC", 3, 20_000), (3, 20_000 * block), [0, 2])
    # A layer alone has more than 2**31 elements: the view has to part layers and blocks.
    check(layout_of("LBNHC", 2, 60_000), (2, 60_000, block), [0, 1])


def foreign_layout(tail, num_blocks=20_000):
    """A view of odd strides into a buffer that no stride divides; `tail` elements follow the last block."""
    block = 3 * BLOCK_SIZE * ENTRY.nbytes + 1
    strides = {"layer": BLOCK_SIZE * ENTRY.nbytes, "block": block, "head": ENTRY.nbytes, "token": ENTRY.nbytes}
    sizes = dict(num_layers=3, num_blocks=num_blocks, block_size=BLOCK_SIZE)
    return jaxkv.CacheLayout.from_strides(
        **sizes, entry=ENTRY, strides=strides, offset=5, size=5 + num_blocks * block + tail
    )


@pytest.mark.ci
def test_a_buffer_that_no_stride_divides_is_served_where_it_is():
    layout = foreign_layout(tail=12)
    with pytest.raises(ValueError, match=r"2211860017 elements .* outer strides must divide the size"):
        row_view(layout.pages)
    check(layout, (110_477, 20_021), [0, 2])


def test_a_size_that_int32_indices_cannot_reach_is_rejected_with_the_layout():
    # 2,211,860,011 is prime: there are no rows.
    with pytest.raises(
        ValueError, match=r"a buffer of 2211860011 elements .* expected another size, such as 2211860480"
    ):
        foreign_layout(tail=6)
    assert foreign_layout(tail=475).size == 2_211_860_480
    assert foreign_layout(tail=8, num_blocks=19_000).size == 2_101_267_013 < 2**31  # a prime number as well


def test_rows_are_counted_in_int32():
    """Eight small blocks at the beginning of a buffer of 2**33 elements are not seen as 2**32 rows of two elements."""
    pages = Pages(
        num_layers=1, num_blocks=8, num_heads=1, block_size=1, layer_stride=2, block_stride=2, head_stride=2,
        token_stride=2, offset=0, width=2, size=2**33,
    )  # fmt: skip
    with pytest.raises(ValueError, match="outer strides"):
        row_view(pages)
    assert max(entry_view(pages).shape) < 2**31


def test_blocks_of_more_than_2_31_elements_are_moved():
    """In pieces: default JAX would truncate the indices of so wide a row."""
    layout = layout_of("BLNHC", 61, 2, block_size=70_000)
    assert layout.strides.block > 2**31
    cache = jaxkv.KVCache(jax.ShapeDtypeStruct((layout.size,), layout.dtype), layout)
    ids = jax.ShapeDtypeStruct((1,), jnp.int32)
    rows = jax.eval_shape(jaxkv.read_blocks, cache, ids)
    assert rows.shape == (1, layout.strides.block)
    for function, arguments in ((jaxkv.copy_blocks, (ids, ids)), (jaxkv.write_blocks, (ids, rows))):
        assert jax.eval_shape(function, cache, *arguments).buffer.shape == (layout.size,)
    reasons = jaxkv.explain(jaxkv.read_blocks, cache, ids).reasons
    assert f"blocks of {layout.strides.block} elements: supports at most 2147475456" in reasons["triton"]


def drawn_pages(rng):
    """Token, head, layer and block axes with gaps or without, in a buffer of up to 2**37 elements with a tail."""
    stride, given = int(rng.choice([3, 16, 577, 1152])), {}
    width, counts = stride, {"token": 16, "head": int(rng.integers(1, 3)), "layer": 3}
    for axis, count in counts.items():
        given[f"{axis}_stride"] = stride
        stride = stride * count + int(rng.choice([0, 0, 1, 16]))
    size, offset = int(rng.choice([2**32, 2**35, 2**37])), int(rng.choice([0, 3, 16]))
    counts["block"] = min((size - offset) // stride, 2**27)
    tail = int(rng.integers(16, 1000))
    pages = Pages(
        num_layers=3, num_blocks=counts["block"], num_heads=counts["head"], block_size=16, block_stride=stride,
        width=width, offset=offset, size=offset + counts["block"] * stride + tail, **given,
    )  # fmt: skip
    return pages, counts


def test_pieces_lie_where_the_strides_say():
    rng, found = np.random.default_rng(0), set()
    for _ in range(200):
        pages, counts = drawn_pages(rng)
        try:
            view = piece_view(pages)
        except ValueError:  # a size without divisors
            continue
        rows, length = view.shape
        assert rows * length == pages.size
        assert rows < 2**31
        indices = {axis: np.asarray([0, n - 1, *rng.integers(0, n, 5)])[:, None] for axis, n in counts.items()}
        first = sum(i * getattr(pages, f"{axis}_stride") for axis, i in indices.items()) + pages.offset
        row, column = view.index(**{axis: i.astype(np.int32) for axis, i in indices.items()})
        assert row.dtype == column.dtype == np.int32
        np.testing.assert_array_equal(
            row.astype(np.int64) * length + column, first + np.arange(0, pages.width, view.window)
        )
        assert (column >= 0).all()
        assert (column + view.window <= length).all()
        found.add((view.window == pages.width, length > 2**15))
    assert len(found) > 2  # whole entries and pieces, in short rows and long ones
