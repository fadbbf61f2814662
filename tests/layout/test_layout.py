"""Layouts: addresses against an enumeration, equality by bytes, fingerprints, refusals."""

import dataclasses
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxkv
from jaxkv.layout.overlap import overlapping_entries
from support import scenes
from support.compare import assert_same_bits

MLA = jaxkv.MLAEntry("bf16", latent=6, rope=2)
KV = jaxkv.KVEntry("bf16", head_dim=3, value_dim=2)
BYTE = jaxkv.MLAEntry("fp8", latent=2, rope=1)
INDEXER = jaxkv.IndexerEntry(head_dim=4)

SIZES = dict(num_layers=3, num_blocks=4, block_size=5)


def numbered(order, counts, width, padding):
    """First elements [L, B, H, N] of the entries: a buffer of its own addresses, cut up along the order."""
    axes = order[:-1]
    outer, inner = [counts[a] for a in axes[: axes.index("B")]], [counts[a] for a in axes[axes.index("B") + 1 :]]
    run = int(np.prod(inner)) * width
    size = int(np.prod(outer)) * counts["B"] * (run + padding)
    elements = np.arange(size).reshape(*outer, counts["B"], run + padding)[..., :run]
    elements = elements.reshape(*outer, counts["B"], *inner, width)[..., 0]
    return np.moveaxis(elements, [axes.index(a) for a in "LBHN"], range(4)), size


def addresses(layout):
    """First elements [L, B, H, N] of the entries, as the layout's formula has them."""
    strides = layout.strides
    counts = (layout.num_layers, layout.num_blocks, layout.num_heads, layout.block_size)
    steps = (strides.layer, strides.block, strides.head, strides.token)
    return layout.offset + sum(i * step for i, step in zip(np.indices(counts), steps, strict=True))


def elements(layout):
    """All elements [L, B, H, N, width] of the entries."""
    return addresses(layout)[..., None] + np.arange(layout.width)


def is_run(numbers):
    """Whether the numbers are consecutive, in some order."""
    return np.array_equal(np.sort(numbers, axis=None), numbers.min() + np.arange(numbers.size))


def same_but(layout, size=None, offset=None, **strides):
    """The layout from explicit strides, some of them replaced."""
    given = {axis: getattr(layout.strides, axis) for axis in ("layer", "block", "head", "token", "content")}
    return jaxkv.CacheLayout.from_strides(
        num_layers=layout.num_layers,
        num_blocks=layout.num_blocks,
        block_size=layout.block_size,
        num_heads=layout.num_heads,
        entry=layout.entry,
        strides={**given, **strides},
        offset=layout.offset if offset is None else offset,
        size=layout.size if size is None else size,
        dtype=layout.dtype,
    )


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


GROUPS = {
    "latent": jaxkv.Group(3, MLA),
    "heads": jaxkv.Group(2, KV, num_heads=3),
    "indexer": jaxkv.Group(1, INDEXER),
}


class TestPacked:
    @pytest.mark.parametrize("order", ["BLNHC", "BLHNC", "BHLNC"])
    def test_groups_lie_side_by_side_each_at_a_multiple_of_16_bytes(self, order):
        packed = jaxkv.PackedLayout(num_blocks=4, block_size=5, groups=GROUPS, order=order)
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

    def test_groups_of_one_dtype_share_it(self):
        groups = {"a": jaxkv.Group(1, MLA), "b": jaxkv.Group(2, KV)}
        packed = jaxkv.PackedLayout(num_blocks=2, block_size=3, groups=groups)
        assert packed["b"].dtype == jnp.bfloat16
        assert (packed["a"].offset, packed["b"].offset, packed["b"].size) == (0, 24, 2 * (24 + 32))
        in_bytes = jaxkv.PackedLayout(num_blocks=2, block_size=3, groups=groups, dtype="uint8")
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


class TestEquality:
    def test_layouts_that_address_the_same_bytes_are_equal(self):
        one_layer = dict(num_layers=1, num_blocks=4, block_size=5)
        same = [
            [jaxkv.CacheLayout(**one_layer, entry=MLA, order=order) for order in jaxkv.ORDERS],
            [jaxkv.CacheLayout(**SIZES, entry=MLA, order=order) for order in ("LBNHC", "LBHNC", "LHBNC")],
            [jaxkv.CacheLayout(**SIZES, entry=MLA, order=order) for order in ("BLNHC", "BLHNC", "BHLNC")],
            [
                jaxkv.CacheLayout(num_layers=3, num_blocks=4, block_size=1, num_heads=2, entry=KV, order=order)
                for order in ("BLNHC", "BLHNC")
            ],
            [jaxkv.CacheLayout(num_layers=3, num_blocks=1, block_size=5, entry=MLA, order=o) for o in jaxkv.ORDERS],
        ]
        for group in same:
            for layout in group:
                assert layout == group[0]
                assert hash(layout) == hash(group[0])
                assert layout.pages == group[0].pages
                assert layout.fingerprint == group[0].fingerprint
                assert np.array_equal(addresses(layout), addresses(group[0]))

    def test_layouts_that_differ_in_anything_are_unequal(self):
        base = dict(**SIZES, entry=MLA)
        others = [
            dict(num_layers=2),
            dict(num_blocks=5),
            dict(block_size=4),
            dict(order="LBNHC"),
            dict(block_padding=8),
            dict(dtype="uint8"),
            dict(dtype="float16"),
            dict(entry=jaxkv.MLAEntry("f16", latent=6, rope=2)),
            dict(entry=jaxkv.MLAEntry("bf16", latent=4, rope=4)),
            dict(entry=jaxkv.KVEntry("bf16", head_dim=6, value_dim=2)),
        ]
        found = [jaxkv.CacheLayout(**{**base, **other}) for other in ({}, *others)]
        found.append(same_but(found[0], size=found[0].size + 8))
        found.append(same_but(found[0], size=found[0].size + 8, offset=8))
        assert len(set(found)) == len(found)

    @pytest.mark.parametrize("absurd", [10**9, 2**40, 1, 0, -5])
    @pytest.mark.parametrize(
        "axes", [("layer",), ("block",), ("token",), ("head",), ("layer", "block", "head", "token")]
    )
    @pytest.mark.parametrize("entry", [KV, INDEXER], ids=["kv", "indexer"])
    def test_strides_of_axes_of_length_1_are_ignored(self, entry, axes, absurd):
        names = {"layer": "num_layers", "block": "num_blocks", "token": "block_size", "head": "num_heads"}
        sizes = dict(num_layers=3, num_blocks=4, block_size=5, num_heads=1 if entry.one_head else 2)
        sizes.update({names[axis]: 1 for axis in axes})
        layout = jaxkv.CacheLayout(**sizes, entry=entry)
        strange = same_but(layout, **dict.fromkeys(axes, absurd))
        assert strange == layout
        assert hash(strange) == hash(layout)
        assert strange.fingerprint == layout.fingerprint
        assert strange.pages == layout.pages
        assert strange.alignment == layout.alignment
        assert np.array_equal(addresses(strange), addresses(layout))

    def test_results_do_not_depend_on_strides_of_axes_of_length_1(self):
        layout = jaxkv.CacheLayout(num_layers=1, num_blocks=1, block_size=1, entry=MLA)
        strange = same_but(layout, layer=10**9, block=0, token=-5, head=2**40)
        kv_c, k_pe = jnp.full((1, 6), 1.5, jnp.bfloat16), jnp.full((1, 2), -2.0, jnp.bfloat16)
        tables, lengths = jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32)
        found = []
        for each in (layout, strange):
            cache = jaxkv.write_mla(jaxkv.KVCache.zeros(each), kv_c, k_pe, jnp.asarray([0]), layer=0)
            out = jaxkv.decode_mla(kv_c[None], k_pe[None], cache, tables, lengths, layer=0, scale=1.0)
            found.append((np.asarray(cache.buffer), np.asarray(out)))
        for a, b in zip(*found, strict=True):
            assert_same_bits(a, b)
        assert (found[0][0].astype(np.float32) == [1.5] * 6 + [-2] * 2).all()

    def test_layouts_are_frozen(self):
        layout = jaxkv.CacheLayout(**SIZES, entry=MLA)
        with pytest.raises(dataclasses.FrozenInstanceError):
            layout.num_layers = 4  # type: ignore[misc]
        with pytest.raises(dataclasses.FrozenInstanceError):
            layout.strides.layer = 4  # type: ignore[misc]

    def test_equal_layouts_are_one_static_argument(self):
        traces = []

        def first(layout, x):
            traces.append(layout)
            return x[layout.offset]

        jitted = jax.jit(first, static_argnums=0)
        layout = jaxkv.CacheLayout(num_layers=1, num_blocks=4, block_size=5, entry=MLA)
        x = jnp.arange(10.0)
        assert jitted(layout, x) == 0
        assert jitted(jaxkv.CacheLayout(num_layers=1, num_blocks=4, block_size=5, entry=MLA, order="LBNHC"), x) == 0
        assert jitted(same_but(layout, layer=-5), x) == 0
        assert len(traces) == 1
        assert jitted(same_but(layout, offset=8, size=layout.size + 8), x) == 8
        assert len(traces) == 2

    def test_equal_layouts_make_one_tree_structure(self):
        a = jaxkv.KVCache.zeros(jaxkv.CacheLayout(**SIZES, entry=MLA, order="BLNHC"))
        b = jaxkv.KVCache.zeros(jaxkv.CacheLayout(**SIZES, entry=MLA, order="BHLNC"))
        c = jaxkv.KVCache.zeros(jaxkv.CacheLayout(**SIZES, entry=MLA, order="LBNHC"))
        assert jax.tree.structure(a) == jax.tree.structure(b) != jax.tree.structure(c)
        assert [leaf.shape for leaf in jax.tree.leaves(a)] == [(a.layout.size,)]


class TestReplace:
    @pytest.mark.parametrize("name", scenes.LAYOUTS)
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

    @pytest.mark.parametrize("name", scenes.LAYOUTS)
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


class TestFingerprints:
    def test_are_stable(self):
        # Blocks that were sent or stored under these names must be readable for ever.
        real = jaxkv.CacheLayout(num_layers=61, num_blocks=4096, block_size=64, entry=jaxkv.MLAEntry("bf16"))
        heads = jaxkv.CacheLayout(
            num_layers=32,
            num_blocks=7,
            block_size=16,
            num_heads=8,
            entry=jaxkv.KVEntry("fp8"),
            order="BHLNC",
            block_padding=48,
        )
        groups = {
            "latent": jaxkv.Group(61, jaxkv.MLAEntry("fp8_ds_mla")),
            "indexer": jaxkv.Group(61, jaxkv.IndexerEntry()),
        }
        packed = jaxkv.PackedLayout(num_blocks=9, block_size=64, groups=groups)
        found = [real.fingerprint, heads.fingerprint, packed["indexer"].fingerprint, packed.fingerprint]
        assert found == [
            "66b6b876b13a860b9c56058481809b0c",
            "35c8e06d96c12b852b001dca47f384a3",
            "e1de458ad059f85a0543dce7f5dc5865",
            "e1de458ad059f85a0543dce7f5dc5865",
        ]

    def test_are_equal_where_blocks_may_be_exchanged(self):
        sizes = dict(num_layers=3, block_size=5, num_heads=2, entry=KV)
        block_major = jaxkv.CacheLayout(**sizes, num_blocks=4)
        more_blocks = jaxkv.CacheLayout(**sizes, num_blocks=9)
        layer_major = jaxkv.CacheLayout(**sizes, num_blocks=4, order="LBNHC")
        inside = same_but(block_major, offset=40, size=block_major.size + 80)  # no runs: entries alone travel
        assert {x.fingerprint for x in (block_major, more_blocks, layer_major, inside)} == {block_major.fingerprint}
        heads_first = [jaxkv.CacheLayout(**sizes, num_blocks=4, order=o) for o in ("BLHNC", "LBHNC", "LHBNC")]
        assert len({x.fingerprint for x in heads_first}) == 1

    def test_are_equal_exactly_where_blocks_of_the_same_bytes_travel(self):
        found = {}
        for layers, heads, tokens, order in itertools.product((1, 2), (1, 2), (1, 2), jaxkv.ORDERS):
            sizes = dict(num_layers=layers, num_heads=heads, block_size=tokens, entry=KV)
            dense = jaxkv.CacheLayout(**sizes, num_blocks=3, order=order)
            for layout in (dense, same_but(dense, offset=10, size=dense.size + 20)):
                found.setdefault(layout.fingerprint, set()).add(self.travelling(layout))
        assert len(found) > 10
        assert {len(descriptions) for descriptions in found.values()} == {1}
        assert len(set.union(*found.values())) == len(found)

    def travelling(self, layout):
        """Where the entries of a block lie in what `read_blocks` returns, and how long that is."""
        cache = jaxkv.KVCache(jnp.arange(layout.size, dtype=jnp.uint16).view(layout.dtype), layout)
        row = np.asarray(jaxkv.read_blocks(cache, jnp.asarray([1])).view(jnp.uint16))[0]
        places = np.searchsorted(row, addresses(layout)[:, 1], sorter=np.argsort(row))
        return layout.num_layers, layout.num_heads, row.size, tuple(np.argsort(row)[places].ravel().tolist())

    def test_are_unequal_where_they_may_not(self):
        base = dict(num_layers=2, num_blocks=4, block_size=6, num_heads=2, entry=KV)
        others = [
            dict(num_layers=3),
            dict(block_size=4),
            dict(num_heads=1),
            dict(num_layers=3, block_size=4),  # as many bytes
            dict(order="BLHNC"),
            dict(order="BHLNC"),
            dict(block_padding=5),
            dict(block_padding=10),
            dict(dtype="uint8"),
            dict(entry=jaxkv.KVEntry("f16", head_dim=3, value_dim=2)),
            dict(entry=jaxkv.KVEntry("bf16", head_dim=2, value_dim=3)),
            dict(entry=jaxkv.MLAEntry("bf16", latent=3, rope=2), num_heads=1),
        ]
        found = [jaxkv.CacheLayout(**{**base, **other}).fingerprint for other in ({}, *others)]
        groups = {"self": jaxkv.Group(2, KV, 2), "other": jaxkv.Group(1, MLA)}
        for each in (groups, dict(reversed(groups.items()))):
            packed = jaxkv.PackedLayout(num_blocks=4, block_size=6, groups=each)
            found.append(packed.fingerprint)
            assert {layout.fingerprint for layout in packed.values()} == {packed.fingerprint}
        assert len(set(found)) == len(found)
        assert all(re.fullmatch("[0-9a-f]{32}", name) for name in found)


REFUSED = {
    "overlapping tokens": (
        lambda: same_but(LAYOUT, token=7, offset=8),
        ["overlap", "(layer 0, block 0, head 0, token 1) begins at element 15", "token 0) has elements [8, 16)", "n=7"],
    ),
    "overlapping layers": (lambda: same_but(LAYOUT, layer=39), ["overlap", "layer 1, block 0, head 0, token 0", "=39"]),
    "overlapping blocks": (lambda: same_but(LAYOUT, block=119), ["overlap", "block=119", "'block': 4"]),
    "overlapping heads": (
        lambda: same_but(jaxkv.CacheLayout(**SIZES, num_heads=2, entry=KV), head=4),
        ["overlap", "head 1, token 0) begins at element 4", "head 0, token 0) has elements [0, 5)"],
    ),
    "stride of 0": (lambda: same_but(LAYOUT, layer=0), ["`strides.layer` is 0", "at least 1", "3 steps"]),
    "negative stride": (lambda: same_but(LAYOUT, block=-120), ["`strides.block` is -120", "at least 1", "4 steps"]),
    "past the buffer": (lambda: same_but(LAYOUT, size=479), ["leave the buffer", "[0, 480)", "`size` 479"]),
    "offset past the buffer": (lambda: same_but(LAYOUT, offset=8), ["leave the buffer", "[8, 488)", "`size` 480"]),
    "stride past the buffer": (lambda: same_but(LAYOUT, block=1000), ["leave the buffer", "3120)", "`size` 480"]),
    "negative offset": (lambda: same_but(LAYOUT, offset=-8), ["leave the buffer", "[-8, 472)"]),
    "content stride": (lambda: same_but(LAYOUT, content=2), ["`strides.content` is 2", "1"]),
    "bf16 at an odd byte": (
        lambda: same_but(IN_BYTES, offset=1, size=IN_BYTES.size + 1),
        ["'bf16'", "multiples of 2 bytes", "offset 1", "keep only 1"],
    ),
    "bf16 at an odd stride": (
        lambda: same_but(IN_BYTES, block=241, size=4 * 241),
        ["'bf16'", "multiples of 2 bytes", "block=241", "keep only 1"],
    ),
    "fp8_ds_mla at offset 2": (
        lambda: same_but(jaxkv.CacheLayout(**SIZES, entry=DEEPSEEK), offset=2, size=10**6),
        ["'fp8_ds_mla'", "multiples of 4 bytes", "offset 2", "keep only 2"],
    ),
    "dtype that does not divide": (
        lambda: jaxkv.CacheLayout(**SIZES, entry=BYTE, dtype="bfloat16"),
        ["`dtype` is bfloat16", "2 bytes", "3 bytes"],
    ),
    "dtype that is none": (lambda: jaxkv.CacheLayout(**SIZES, entry=MLA, dtype="brain"), ["`dtype` is 'brain'"]),
    "unknown order": (lambda: jaxkv.CacheLayout(**SIZES, entry=MLA, order="NHD"), ["`order` is 'NHD'", *jaxkv.ORDERS]),
    "content not innermost": (lambda: jaxkv.CacheLayout(**SIZES, entry=MLA, order="BLNCH"), ["`order` is 'BLNCH'"]),
    "empty order": (lambda: jaxkv.CacheLayout(**SIZES, entry=MLA, order=""), ["`order` is ''", *jaxkv.ORDERS]),
    "order beside strides": (
        lambda: jaxkv.CacheLayout(**SIZES, entry=MLA, order="LBNHC", strides=LAYOUT.strides, size=480),
        ["`order` is 'LBNHC'", "beside `strides`"],
    ),
    "padding beside strides": (
        lambda: jaxkv.CacheLayout(**SIZES, entry=MLA, block_padding=8, strides=LAYOUT.strides, size=480),
        ["`block_padding` is 8", "beside `strides`"],
    ),
    "strides without a size": (
        lambda: jaxkv.CacheLayout(**SIZES, entry=MLA, strides=LAYOUT.strides),
        ["`size` is None", "an int"],
    ),
    "offset without strides": (
        lambda: jaxkv.CacheLayout(**SIZES, entry=MLA, offset=8),
        ["`offset` is 8", "without `strides`"],
    ),
    "negative padding": (
        lambda: jaxkv.CacheLayout(**SIZES, entry=MLA, block_padding=-1),
        ["`block_padding` is -1", "0 or more"],
    ),
    "padding of a half": (lambda: jaxkv.CacheLayout(**SIZES, entry=MLA, block_padding=0.5), ["`block_padding` is 0.5"]),
    "heads of latents": (
        lambda: jaxkv.CacheLayout(**SIZES, entry=MLA, num_heads=8),
        ["`num_heads` is 8", "MLAEntry", "one head"],
    ),
    "heads of indexer keys": (
        lambda: jaxkv.CacheLayout(**SIZES, entry=INDEXER, num_heads=2),
        ["`num_heads` is 2", "IndexerEntry", "one head"],
    ),
    "too many slots": (
        lambda: jaxkv.CacheLayout(num_layers=1, num_blocks=2**25, block_size=64, entry=MLA),
        ["33554432 blocks", "64 tokens", "2147483648 slots", "2147483647"],
    ),
    "apart indexer tokens": (
        lambda: same_but(jaxkv.CacheLayout(**SIZES, entry=INDEXER), token=12, layer=60, block=180, size=720),
        ["`strides.token` is 12", "5 * 8"],
    ),
    "no entry": (lambda: jaxkv.CacheLayout(**SIZES, entry="bf16"), ["`entry` is 'bf16'", "MLAEntry"]),
    "strides of a float": (lambda: same_but(LAYOUT, layer=40.0), ["`strides.layer` is 40.0", "an int"]),
    "strides missing": (
        lambda: jaxkv.CacheLayout.from_strides(**SIZES, entry=MLA, size=480, strides={"layer": 40}),
        ["`strides` is {'layer': 40}", "layer, block, head, token"],
    ),
    "strides of an unknown axis": (lambda: same_but(LAYOUT, width=3), ["`strides` is", "'width': 3"]),
    "no strides": (
        lambda: jaxkv.CacheLayout.from_strides(**SIZES, entry=MLA, size=480, strides=None),
        ["`strides` is None"],
    ),
    "size of a float": (lambda: same_but(LAYOUT, size=480.0), ["`size` is 480.0", "an int"]),
    "offset of a bool": (lambda: same_but(LAYOUT, offset=True), ["`offset` is True", "an int"]),
    "packed in a layer-major order": (
        lambda: jaxkv.PackedLayout(num_blocks=2, block_size=2, groups=GROUPS, order="LBNHC"),
        ["`order` is 'LBNHC'", "BLNHC, BLHNC or BHLNC"],
    ),
    "packed of nothing": (
        lambda: jaxkv.PackedLayout(num_blocks=2, block_size=2, groups={}),
        ["`groups` is {}", "at least one"],
    ),
    "packed of entries": (
        lambda: jaxkv.PackedLayout(num_blocks=2, block_size=2, groups={"a": MLA}),
        ["`groups` is {'a'", "Group"],
    ),
    "packed in a dtype that does not divide": (
        lambda: jaxkv.PackedLayout(num_blocks=2, block_size=2, groups={"a": jaxkv.Group(1, BYTE)}, dtype="bfloat16"),
        ["`dtype` is bfloat16", "3 bytes"],
    ),
    "packed with no layers": (
        lambda: jaxkv.PackedLayout(num_blocks=2, block_size=2, groups={"a": jaxkv.Group(0, MLA)}),
        ["`num_layers` is 0", "positive int"],
    ),
    "packed with no blocks": (
        lambda: jaxkv.PackedLayout(num_blocks=0, block_size=2, groups={"a": jaxkv.Group(1, MLA)}),
        ["`num_blocks` is 0", "positive int"],
    ),
}

LAYOUT = jaxkv.CacheLayout(**SIZES, entry=MLA)
IN_BYTES = jaxkv.CacheLayout(**SIZES, entry=MLA, dtype="uint8")
DEEPSEEK = jaxkv.MLAEntry("fp8_ds_mla", latent=128, rope=2)


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_with_the_numbers(case):
    build, fragments = REFUSED[case]
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the fragments are the match)
        build()
    for fragment in fragments:
        assert fragment in str(caught.value)


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "3", None])
@pytest.mark.parametrize("name", ["num_layers", "num_blocks", "block_size", "num_heads"])
def test_sizes_are_positive_ints(name, value):
    with pytest.raises(ValueError, match=f"`{name}` is {re.escape(repr(value))}: expected a positive int"):
        jaxkv.CacheLayout(**{**SIZES, "entry": KV, "num_heads": 2, name: value})


def test_as_many_slots_as_int32_holds_are_taken():
    layout = jaxkv.CacheLayout(num_layers=61, num_blocks=2**25 - 1, block_size=64, entry=MLA)
    assert layout.num_slots == 2**31 - 64
    assert layout.size == 61 * 8 * (2**31 - 64)
    assert jaxkv.CacheLayout(num_layers=1, num_blocks=2**31 - 1, block_size=1, entry=MLA).num_slots == 2**31 - 1


@st.composite
def explicit(draw):
    """Counts, strides, offset and size, most of them of nested axes, some a little too tight."""
    counts = {axis: draw(st.integers(1, 3)) for axis in ("layer", "block", "head", "token")}
    extent, strides = 3, {}
    for axis in draw(st.permutations(list(counts))):
        gap = draw(st.sampled_from([0, 0, 0, 1, 5, -1, -2]))
        strides[axis] = extent + gap if counts[axis] > 1 else draw(st.integers(-5, 50))
        extent = extent + (counts[axis] - 1) * strides[axis] if counts[axis] > 1 else extent
    offset = draw(st.integers(-1, 4))
    return counts, strides, offset, extent + offset + draw(st.sampled_from([0, 0, 1, 9, -1]))


def enumerate_elements(counts, strides, offset):
    """Every element of every entry of three elements."""
    starts = [sum(i * strides[axis] for i, axis in zip(index, counts, strict=True)) for index in _indices(counts)]
    return offset + np.asarray(starts)[:, None] + np.arange(3)


def _indices(counts):
    return itertools.product(*map(range, counts.values()))


def build(counts, strides, offset, size):
    """The layout, or why it is refused."""
    try:
        return jaxkv.CacheLayout.from_strides(
            num_layers=counts["layer"],
            num_blocks=counts["block"],
            num_heads=counts["head"],
            block_size=counts["token"],
            entry=jaxkv.KVEntry("fp8", head_dim=2, value_dim=1),
            strides=strides,
            offset=offset,
            size=size,
        )
    except ValueError as error:
        return str(error)


@settings(max_examples=200)
@given(explicit())
def test_nested_strides_are_taken_exactly_if_entries_are_disjoint_and_inside(given_strides):
    counts, strides, offset, size = given_strides
    found = enumerate_elements(counts, strides, offset)
    good = found.min() >= 0 and found.max() < size and np.unique(found).size == found.size
    layout = build(counts, strides, offset, size)
    if isinstance(layout, jaxkv.CacheLayout):
        assert good
        assert np.array_equal(np.sort(elements(layout), axis=None), np.sort(found, axis=None))
    else:
        assert re.search("overlap|leave the buffer|expected at least 1", layout)
        assert not good


def test_random_strides_are_taken_exactly_where_no_two_entries_share_an_element():
    rng, seen = np.random.default_rng(0), {"nested": 0, "interleaved": 0, "overlapping": 0}
    for _ in range(3000):
        limits = 6, int(rng.choice([16, 60, 200]))
        numbers = (rng.integers(1, limit, 4).tolist() for limit in limits)
        counts, strides = (dict(zip(("layer", "block", "head", "token"), four, strict=True)) for four in numbers)
        starts = np.sort(enumerate_elements(counts, strides, 0)[:, 0])
        good = bool((np.diff(starts) >= 3).all())
        layout = build(counts, strides, 0, int(starts[-1]) + 3)
        assert isinstance(layout, jaxkv.CacheLayout) == good, (counts, strides, layout)
        if not good:
            assert_collision(layout, counts, strides)
        extent, nested = 3, True
        for stride, count in sorted((strides[axis], counts[axis]) for axis in counts if counts[axis] > 1):
            nested, extent = nested and stride >= extent, extent + stride * (count - 1)
        seen["overlapping" if not good else "nested" if nested else "interleaved"] += 1
    assert min(seen.values()) > 200, seen


def assert_collision(message, counts, strides):
    """The two entries that the message names are different ones of the layout, and share an element."""
    found = re.findall(r"\(layer (\d+), block (\d+), head (\d+), token (\d+)\)", message)
    later, first = ([int(i) for i in entry] for entry in found)
    assert later != first
    assert all(0 <= i < count for entry in (first, later) for i, count in zip(entry, counts.values(), strict=True))
    begins = [sum(i * stride for i, stride in zip(entry, strides.values(), strict=True)) for entry in (first, later)]
    assert begins[0] <= begins[1] < begins[0] + 3
    assert f"begins at element {begins[1]}, and" in message
    assert f"has elements [{begins[0]}, {begins[0] + 3})" in message


@pytest.mark.parametrize("more", [0, 1])
def test_overlap_of_a_billion_blocks_is_found_or_excluded(more):
    # Entries at p * block + q * token meet where block is q and token is p steps apart, and nowhere else.
    p, q = 10**9 + 7, 10**9 + 9
    found = overlapping_entries({"block": (2**31 - 1, p), "token": (p + more, q)}, 1)
    assert found == (({"block": q, "token": 0}, {"block": 0, "token": p}) if more else None)


def test_interleaving_entries_are_taken_and_read():
    # Layers at 0, 6, 12 and blocks at 0, 9, 18, 27, in units of a page of 3 elements.
    layout = jaxkv.CacheLayout.from_strides(
        num_layers=3, num_blocks=4, block_size=1, entry=jaxkv.MLAEntry("bf16", latent=2, rope=1), size=42,
        strides={"layer": 6, "block": 9, "head": 0, "token": 0},
    )  # fmt: skip
    cache = jaxkv.KVCache(jnp.arange(42, dtype=jnp.bfloat16), layout)
    tables, ends = jnp.asarray([[3, 0, 2, 1]]), jnp.asarray([0, 4])
    for layer in range(3):
        kv_c, _ = jaxkv.gather_mla(cache, tables, ends, layer=layer, total=4)
        assert kv_c[:, 0].tolist() == [6 * layer + 9 * block for block in (3, 0, 2, 1)]
    assert "layer" in str(layout)
    assert layout._repr_svg_() is None
    with pytest.raises(ValueError, match="the 4 blocks interleave, one every 18 B, each over 30 B"):
        layout.draw()
