"""Layouts are equal where they address the same bytes; fingerprints are where blocks have the same bytes."""

import dataclasses
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from layout.small import INDEXER, KV, MLA, SIZES, addresses, same_but
from support.compare import assert_same_bits


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
            dict(shards=jaxkv.TokenShards(2)),
            dict(shards=jaxkv.TokenShards(2, 3)),
            dict(shards=jaxkv.TokenShards(4)),
            dict(dtype="uint8"),
            dict(entry=jaxkv.KVEntry("f16", head_dim=3, value_dim=2)),
            dict(entry=jaxkv.KVEntry("bf16", head_dim=2, value_dim=3)),
            dict(entry=jaxkv.MLAEntry("bf16", latent=3, rope=2), num_heads=1),
        ]
        found = [jaxkv.CacheLayout(**{**base, **other}).fingerprint for other in ({}, *others)]
        groups = {"self": jaxkv.Group(2, KV, 2), "other": jaxkv.Group(1, MLA)}
        shards = [jaxkv.TokenShards(), jaxkv.TokenShards(2), jaxkv.TokenShards(2, 3)]
        for each, divided in [(dict(reversed(groups.items())), shards[0]), *((groups, one) for one in shards)]:
            packed = jaxkv.PackedLayout(num_blocks=4, block_size=6, groups=each, shards=divided)
            found.append(packed.fingerprint)
            assert {layout.fingerprint for layout in packed.values()} == {packed.fingerprint}
        assert len(set(found)) == len(found)
        assert all(re.fullmatch("[0-9a-f]{32}", name) for name in found)

    def test_a_single_shard_has_all_tokens(self):
        sizes = dict(num_layers=2, num_blocks=4, block_size=6, entry=MLA)
        one = jaxkv.CacheLayout(**sizes, shards=jaxkv.TokenShards(1, 16))
        assert one == jaxkv.CacheLayout(**sizes)
        assert one.fingerprint == jaxkv.CacheLayout(**sizes).fingerprint
        two = dataclasses.replace(one, shards=jaxkv.TokenShards(2, 16))
        assert (two.strides, two.size) == (one.strides, one.size)
        assert two != one
        assert "tokens       1 of 2 devices' share, 16 consecutive tokens at a time" in str(two)
        assert "devices" not in str(one)
