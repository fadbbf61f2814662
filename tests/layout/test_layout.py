"""Addresses of layouts against an enumeration: orders, packed groups, contiguity, alignment."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from layout.small import GROUPS, INDEXER, KV, MLA, SIZES, addresses, elements, is_run, same_but
from support import scenes


def numbered(order, counts, width, padding):
    """First elements [L, B, H, N] of the entries: a buffer of its own addresses, cut up along the order."""
    axes = order[:-1]
    outer, inner = [counts[a] for a in axes[: axes.index("B")]], [counts[a] for a in axes[axes.index("B") + 1 :]]
    run = int(np.prod(inner)) * width
    size = int(np.prod(outer)) * counts["B"] * (run + padding)
    elements = np.arange(size).reshape(*outer, counts["B"], run + padding)[..., :run]
    elements = elements.reshape(*outer, counts["B"], *inner, width)[..., 0]
    return np.moveaxis(elements, [axes.index(a) for a in "LBHN"], range(4)), size


@pytest.mark.parametrize("padding", [0, 7])
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("order", jaxkv.ORDERS)
def test_orders_put_entries_where_a_numbered_buffer_has_them(order, heads, padding):
    layout = jaxkv.CacheLayout(**SIZES, num_heads=heads, entry=KV, order=order, block_padding=padding)
    expected, size = numbered(order, {"L": 3, "B": 4, "N": 5, "H": heads}, 5, padding)
    assert np.array_equal(addresses(layout), expected)
    assert (layout.size, layout.nbytes, layout.width, layout.itemsize) == (size, 2 * size, 5, 2)
    assert (layout.num_slots, layout.offset, layout.strides.content) == (20, 0, 1)


def test_the_cross_layer_order_is_the_default():
    assert jaxkv.CacheLayout(**SIZES, entry=MLA) == jaxkv.CacheLayout(**SIZES, entry=MLA, order="BLNHC")


@pytest.mark.parametrize("order", jaxkv.ORDERS)
def test_the_order_is_read_off_the_strides(order):
    layout = jaxkv.CacheLayout(**SIZES, num_heads=2, entry=KV, order=order)
    assert layout.order == order
    assert same_but(layout).order == order


def test_elements_of_another_dtype_scale_the_addresses():
    natural = jaxkv.CacheLayout(**SIZES, entry=MLA, block_padding=2)
    in_bytes = jaxkv.CacheLayout(**SIZES, entry=MLA, block_padding=4, dtype="uint8")
    in_words = jaxkv.CacheLayout(**SIZES, entry=MLA, block_padding=1, dtype=jnp.float32)
    assert (natural.width, in_bytes.width, in_words.width) == (8, 16, 4)
    assert natural.nbytes == in_bytes.nbytes == in_words.nbytes
    assert np.array_equal(addresses(natural) * 2, addresses(in_bytes))
    assert np.array_equal(addresses(natural) * 2, addresses(in_words) * 4)


def test_explicit_strides_say_what_an_order_says():
    for order, heads in itertools.product(jaxkv.ORDERS, (1, 2)):
        layout = jaxkv.CacheLayout(**SIZES, num_heads=heads, entry=KV, order=order, block_padding=3)
        assert same_but(layout) == layout
        as_strides = jaxkv.CacheLayout.from_strides(
            **SIZES, num_heads=heads, entry=KV, strides=layout.strides, size=layout.size
        )
        assert as_strides == layout
        assert hash(as_strides) == hash(layout)


def test_strides_and_sizes_of_numpy_are_ints():
    layout = jaxkv.CacheLayout(**SIZES, num_heads=2, entry=KV)
    given = {axis: np.int64(getattr(layout.strides, axis)) for axis in ("layer", "block", "head", "token")}
    sizes = {name: np.int32(size) for name, size in SIZES.items()}
    found = jaxkv.CacheLayout.from_strides(
        **sizes, num_heads=np.int8(2), entry=KV, strides=given, size=np.int64(layout.size), offset=np.int64(0)
    )
    assert found == layout
    assert found.fingerprint == layout.fingerprint
    numbers = [*vars(found.strides).values(), found.size, found.offset, found.num_layers, found.num_heads]
    assert {type(number) for number in numbers} == {int}


def test_sizes_of_numpy_do_not_overflow():
    entry, i = jaxkv.MLAEntry("bf16"), np.int32
    sizes = {"num_layers": 61, "num_blocks": 2**20, "block_size": 64}
    of_numpy = {name: i(size) for name, size in sizes.items()}
    assert jaxkv.MLAEntry("bf16", latent=i(512), rope=np.uint8(64)) == entry
    assert jaxkv.CacheLayout(**of_numpy, entry=entry, block_padding=i(8)) == jaxkv.CacheLayout(
        **sizes, entry=entry, block_padding=8
    )
    with pytest.raises(ValueError, match="4294967296 slots: slots are int32"):
        jaxkv.CacheLayout(num_layers=i(1), num_blocks=i(2**26), block_size=i(64), entry=entry)
    packed, plain = (
        jaxkv.PackedLayout(num_blocks=blocks, block_size=size, groups={"a": jaxkv.Group(layers, entry)})
        for layers, blocks, size in (of_numpy.values(), sizes.values())
    )
    assert packed == plain


def test_a_cache_has_the_bytes_of_its_buffer_whatever_the_array():
    layout = jaxkv.CacheLayout(
        num_layers=2, num_blocks=3, block_size=4, entry=jaxkv.MLAEntry("bf16", latent=24, rope=8)
    )
    cache = jaxkv.KVCache.zeros(layout)
    assert cache.nbytes == cache.buffer.nbytes == 2 * 3 * 4 * 32 * 2
    assert jax.eval_shape(lambda: cache).nbytes == cache.nbytes


def test_entries_inside_a_combined_entry_have_gaps():
    # K and V of somebody's combined entry of 8 + 8 elements, as two latents in one buffer.
    sizes = dict(**SIZES, entry=MLA, size=3 * 4 * 5 * 16)
    strides = {"layer": 5 * 16, "block": 3 * 5 * 16, "head": 16, "token": 16}
    first, second = (jaxkv.CacheLayout.from_strides(**sizes, strides=strides, offset=offset) for offset in (0, 8))
    both = np.concatenate([elements(first).ravel(), elements(second).ravel()])
    assert is_run(both)
    assert not first.is_block_contiguous
    assert first.blocks_are_runs
    assert second.blocks_are_runs
    assert first != second


class TestPacked:
    @pytest.mark.parametrize("order", ["BLNHC", "BLHNC", "BHLNC"])
    def test_groups_lie_side_by_side_each_at_a_multiple_of_16_bytes(self, order):
        packed = jaxkv.PackedLayout(num_blocks=4, block_size=5, groups=GROUPS, order=order, alignment=16)
        # 3 * 5 * 16 = 240 bytes; 2 * 5 * 3 * 10 = 300, rounded up to 304; 1 * 5 * 8 = 40, rounded up to 48.
        assert [packed[name].offset for name in packed] == [0, 240, 544]
        assert {layout.dtype for layout in packed.values()} == {jnp.dtype("uint8")}
        assert {layout.size for layout in packed.values()} == {4 * 592}
        assert {layout.strides.block for layout in packed.values()} == {592}
        assert all(layout.blocks_are_runs for layout in packed.values())
        used = np.concatenate([elements(layout).ravel() for layout in packed.values()])
        assert np.unique(used).size == used.size == 4 * (240 + 300 + 40)
        for name, layout in packed.items():
            alone = jaxkv.CacheLayout(
                num_layers=GROUPS[name].num_layers,
                num_blocks=4,
                block_size=5,
                num_heads=GROUPS[name].num_heads,
                entry=GROUPS[name].entry,
                order=order,
                dtype="uint8",
            )
            assert np.array_equal(addresses(layout)[:, 0] - layout.offset, addresses(alone)[:, 0])
            assert np.array_equal(addresses(layout), addresses(layout)[:, :1] + 592 * np.arange(4).reshape(1, 4, 1, 1))

    def test_groups_lie_at_multiples_of_a_cache_line(self):
        packed = jaxkv.PackedLayout(num_blocks=4, block_size=5, groups=GROUPS)
        assert [packed[name].offset for name in packed] == [0, 256, 640]
        assert packed["latent"].strides.block == 768
        assert packed != jaxkv.PackedLayout(num_blocks=4, block_size=5, groups=GROUPS, alignment=16)

    def test_groups_of_one_dtype_share_it(self):
        groups = {"a": jaxkv.Group(1, MLA), "b": jaxkv.Group(2, KV)}
        packed = jaxkv.PackedLayout(num_blocks=2, block_size=3, groups=groups, alignment=16)
        assert packed["b"].dtype == jnp.bfloat16
        assert (packed["a"].offset, packed["b"].offset, packed["b"].size) == (0, 24, 2 * (24 + 32))
        in_bytes = jaxkv.PackedLayout(num_blocks=2, block_size=3, groups=groups, dtype="uint8", alignment=16)
        assert (in_bytes["b"].offset, in_bytes["b"].size) == (48, 4 * (24 + 32))

    def test_it_is_a_mapping_of_its_groups(self):
        packed = jaxkv.PackedLayout(num_blocks=4, block_size=5, groups=GROUPS)
        assert list(packed) == list(GROUPS)
        assert len(packed) == 3
        assert packed == jaxkv.PackedLayout(num_blocks=4, block_size=5, groups=GROUPS)
        assert packed != jaxkv.PackedLayout(num_blocks=3, block_size=5, groups=GROUPS)
        with pytest.raises(KeyError):
            packed["keys"]

    def test_one_block_and_one_group_are_no_special_case(self):
        packed = jaxkv.PackedLayout(num_blocks=1, block_size=5, groups={"only": jaxkv.Group(3, INDEXER)})
        # 3 layers of 5 tokens of 8 bytes are 120, and the block is rounded up to 128.
        assert packed["only"] == jaxkv.CacheLayout(
            num_layers=3, num_blocks=1, block_size=5, entry=INDEXER, block_padding=8
        )


class TestReplace:
    @pytest.mark.parametrize("name", scenes.layout_names(KV))
    def test_nothing_replaced_is_the_same_layout(self, name):
        layout = scenes.layouts(KV, num_heads=2, num_blocks=3, block_size=2)[name]
        replaced = dataclasses.replace(layout)
        assert (replaced.pages, replaced.entry, replaced.dtype) == (layout.pages, layout.entry, layout.dtype)
        assert (replaced == layout) == (layout.packed is None), "a group of a packed block becomes a layout of its own"

    def test_strides_offset_and_size_stay_where_they_are_not_replaced(self):
        layout = jaxkv.CacheLayout(**SIZES, entry=MLA, order="LBNHC", block_padding=8)
        fewer = dataclasses.replace(layout, num_blocks=2)
        assert (fewer.num_blocks, fewer.strides, fewer.size) == (2, layout.strides, layout.size)
        assert dataclasses.replace(layout, offset=8, size=layout.size + 8) == same_but(
            layout, offset=8, size=layout.size + 8
        )

    def test_the_result_is_checked(self):
        layout = jaxkv.CacheLayout(**SIZES, entry=MLA)
        with pytest.raises(ValueError, match=r"strides leave the buffer: .* \[0, 600\), the buffer has `size` 480"):
            dataclasses.replace(layout, num_blocks=5)
        with pytest.raises(ValueError, match="entries overlap"):
            dataclasses.replace(layout, block_size=6)


class TestContiguity:
    @pytest.mark.parametrize(
        ("order", "block", "layer", "runs"),
        [
            ("LBNHC", False, True, False),
            ("LBHNC", False, True, False),
            ("LHBNC", False, True, False),
            ("BLNHC", True, False, True),
            ("BLHNC", True, False, True),
            ("BHLNC", True, False, True),
        ],
    )
    def test_of_the_six_orders(self, order, block, layer, runs):
        layout = jaxkv.CacheLayout(**SIZES, num_heads=2, entry=KV, order=order)
        found = (layout.is_block_contiguous, layout.is_layer_contiguous, layout.blocks_are_runs)
        assert found == (block, layer, runs)
        padded = jaxkv.CacheLayout(**SIZES, num_heads=2, entry=KV, order=order, block_padding=4)
        # What follows a block belongs to its run; what follows a layer's block parts the layer.
        assert (padded.is_block_contiguous, padded.is_layer_contiguous) == (block, False)
        assert padded.blocks_are_runs == runs

    @pytest.mark.parametrize("padding", [0, 3])
    @pytest.mark.parametrize("order", jaxkv.ORDERS)
    def test_is_what_an_enumeration_of_the_addresses_finds(self, order, padding):
        for layers, blocks, heads, tokens in itertools.product((1, 2), (1, 3), (1, 2), (1, 2)):
            layout = jaxkv.CacheLayout(
                num_layers=layers,
                num_blocks=blocks,
                num_heads=heads,
                block_size=tokens,
                entry=KV,
                order=order,
                block_padding=padding,
            )
            self.check(layout)

    @pytest.mark.parametrize("name", scenes.layout_names(KV))
    def test_of_every_kind_of_layout(self, name):
        for entry, heads in ((MLA, 1), (KV, 2)):
            self.check(scenes.layouts(entry, num_heads=heads, num_blocks=3, block_size=2)[name])

    def test_of_a_view_into_a_larger_buffer(self):
        layout = jaxkv.CacheLayout(**SIZES, entry=MLA)
        for size, offset in ((layout.size + 8, 0), (layout.size + 8, 8), (layout.size * 2, layout.size)):
            self.check(same_but(layout, size=size, offset=offset))

    def check(self, layout):
        found = elements(layout)
        blocks = layout.num_blocks
        assert layout.is_block_contiguous == all(is_run(found[:, b]) for b in range(blocks))
        assert layout.is_layer_contiguous == all(is_run(found[layer]) for layer in range(layout.num_layers))
        stride = layout.strides.block
        owner = np.arange(blocks).reshape(1, -1, 1, 1, 1)
        runs = layout.size == blocks * stride and bool((found // stride == owner).all())
        assert layout.blocks_are_runs == runs
        assert layout.block_nbytes == (layout.size // blocks if runs else found[:, 0].size) * layout.itemsize


@pytest.mark.parametrize("dtype", ["bfloat16", "uint8", "float32"])
@pytest.mark.parametrize("offset", [0, 4, 8, 64])
@pytest.mark.parametrize("padding", [0, 4, 12, 64])
@pytest.mark.parametrize("order", ["BLNHC", "LHBNC"])
def test_alignment_is_that_of_the_worst_entry(order, padding, offset, dtype):
    packed = jaxkv.CacheLayout(**SIZES, num_heads=2, entry=jaxkv.KVEntry("bf16", 4), order=order, dtype=dtype)
    padded = jaxkv.CacheLayout(
        **SIZES, num_heads=2, entry=packed.entry, order=order, dtype=dtype, block_padding=padding
    )
    layout = same_but(padded, size=padded.size + offset, offset=offset)
    in_bytes = addresses(layout).ravel() * layout.itemsize
    assert layout.alignment == (in_bytes[in_bytes > 0] & -in_bytes[in_bytes > 0]).min()
