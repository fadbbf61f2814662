"""Blocks of one layout as blocks of another: every entry bit for bit, zeros everywhere else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

import jaxkv
from jaxkv.testing.buffers import to_bytes, to_cache
from jaxkv.testing.layouts import AXES, SMALL, draw_entry, draw_group, draw_strides
from support import scenes
from support.cases import random_numbers
from support.compare import assert_same_bits
from support.suites.base import formats

convert = jax.jit(jaxkv.convert_blocks, static_argnums=(1, 2))
MLA, KV, DS_MLA = scenes.MLA_ENTRIES[0], scenes.KV_ENTRIES[2], scenes.MLA_ENTRIES[4]


def check(src, dst, groups=("",)):
    """Blocks 2, 0 of a cache of random bytes become blocks 0, 1 of another."""
    sources, targets = ([layout[name] if name else layout for name in groups] for layout in (src, dst))
    before = scenes.garbage(sources[0], np.random.default_rng(4), "random")
    rows = jaxkv.read_blocks(to_cache(sources[0], before), jnp.asarray([2, 0]))
    converted = convert(rows, src, dst)
    after = jaxkv.write_blocks(jaxkv.KVCache.zeros(targets[0]), jnp.asarray([0, 1]), converted)
    expected = np.zeros(targets[0].nbytes, np.uint8)
    for source, target in zip(sources, targets, strict=True):
        for layer in range(source.num_layers):
            entries = scenes.fetch(target, expected, layer)
            entries[:2] = scenes.fetch(source, before, layer)[[2, 0]]
            scenes.place(target, expected, layer, entries)
    assert_same_bits(to_bytes(after), expected, f"{src} as {dst}")


def layouts(entry):
    return scenes.layouts(entry, num_heads=1 if entry.one_head else 2, num_blocks=3, block_size=4)


@pytest.mark.parametrize("name", scenes.layout_names(KV))
def test_every_layout_to_some_others_and_back(name):
    found = layouts(KV)
    names = [*found]
    following = names[(names.index(name) + 1) % len(names)]
    for src, dst in ((name, name), (name, following), (name, "BHLNC"), ("packed, uint8", name)):
        check(found[src], found[dst])


@formats([MLA, DS_MLA, scenes.INDEXER_ENTRY])
def test_entries_of_every_kind(entry):
    found = list(dict.fromkeys(layouts(entry).values()))
    for src, dst in zip(found, found[1:] + found[:1], strict=True):
        check(src, dst)


@pytest.mark.ci
@settings(max_examples=15)
@given(random_numbers)
def test_strides_of_every_kind(rng):
    entry = draw_entry(rng, (jaxkv.MLAEntry,), SMALL)
    sizes = {name: int(rng.integers(1, 6)) for name in AXES.values()}
    sizes |= {"num_blocks": 3, "num_heads": 1, "entry": entry}

    def draw():
        return draw_strides(rng, entry, sizes) if rng.random() < 0.7 else draw_group(rng, sizes)

    check(draw(), draw())


def test_layers_and_heads_that_interleave_within_a_block():
    page = 4 * KV.nbytes // 4
    # Pages at 0, 2, 4 and 0, 3: head 1 of layer 0 lies between the heads 0 of layers 1 and 2.
    within = jaxkv.CacheLayout.from_strides(
        num_layers=3, num_blocks=3, num_heads=2, block_size=4, entry=KV, size=24 * page,
        strides={"layer": 2 * page, "block": 8 * page, "head": 3 * page, "token": page // 4},
    )  # fmt: skip
    assert within.blocks_are_runs
    for other in (layouts(KV)["BLNHC"], layouts(KV)["packed, uint8"], within):
        check(within, other)
        check(other, within)


def packed_pair(**options):
    groups = {"latent": jaxkv.Group(3, MLA), "indexer": jaxkv.Group(2, scenes.INDEXER_ENTRY)}
    if options.pop("swapped", False):
        groups = dict(reversed(groups.items()))
    return jaxkv.PackedLayout(num_blocks=3, block_size=4, groups=groups, **options)


def test_all_groups_of_a_packed_block():
    variants = [packed_pair(), packed_pair(order="BHLNC", dtype="bfloat16"), packed_pair(swapped=True, order="BLHNC")]
    for src in variants:
        for dst in variants:
            check(src, dst, ("latent", "indexer"))


def test_no_blocks():
    found = layouts(MLA)
    rows = jaxkv.read_blocks(jaxkv.KVCache.zeros(found["LBNHC"]), jnp.zeros(0, jnp.int32))
    assert convert(rows, found["LBNHC"], found["packed, uint8"]).shape == (0, found["packed, uint8"].block_nbytes)


SIZES = {"num_layers": 3, "num_blocks": 3, "block_size": 4, "entry": MLA}


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"num_layers": 4}, "`num_layers` is 3 in `src` and 4 in `dst`"),
        ({"block_size": 8}, "`block_size` is 4 in `src` and 8 in `dst`"),
        (
            {"shards": jaxkv.TokenShards(2, 4)},
            r"`shards` is TokenShards\(num_shards=1.* in `src` and .*interleave=4\) in",
        ),
        ({"entry": DS_MLA}, "`entry` is MLAEntry.* in `src` and MLAEntry.*fp8_ds_mla.* in `dst`"),
    ],
)
def test_blocks_of_other_entries_are_rejected(other, message):
    src, dst = jaxkv.CacheLayout(**SIZES), jaxkv.CacheLayout(**SIZES | other)
    rows = jnp.zeros((1, src.block_nbytes // 2), src.dtype)
    with pytest.raises(ValueError, match=message):
        jaxkv.convert_blocks(rows, src, dst)


def test_groups_with_other_tokens_are_rejected():
    src, dst = (packed_pair(shards=jaxkv.TokenShards(2, interleave)) for interleave in (1, 4))
    rows = jnp.zeros((1, src["latent"].block_nbytes), src["latent"].dtype)
    with pytest.raises(
        ValueError, match=r"`shards` of group 'latent' is .*interleave=1\) in `src` and .*interleave=4\)"
    ):
        jaxkv.convert_blocks(rows, src, dst)


def test_misuse_is_told():
    layout = jaxkv.CacheLayout(**SIZES)
    rows = jnp.zeros((1, layout.block_nbytes // 2), layout.dtype)
    with pytest.raises(ValueError, match="`src` has one group and `dst` groups indexer, latent"):
        jaxkv.convert_blocks(rows, layout, packed_pair())
    with pytest.raises(ValueError, match="`dst` is 'BLNHC': expected a CacheLayout"):
        jaxkv.convert_blocks(rows, layout, "BLNHC")
    with pytest.raises(ValueError, match=r"`data` has shape .* the elements of a block of `src`"):
        jaxkv.convert_blocks(rows[:, 1:], layout, layout)
    with pytest.raises(ValueError, match="`data` has dtype uint8"):
        jaxkv.convert_blocks(rows.view(np.uint8)[:, : rows.shape[1]], layout, layout)
    heads = [jaxkv.CacheLayout(**SIZES | {"entry": KV}, num_heads=n) for n in (1, 2)]
    with pytest.raises(ValueError, match="`num_heads` is 1 in `src` and 2 in `dst`"):
        jaxkv.convert_blocks(jnp.zeros((1, heads[0].block_nbytes // heads[0].itemsize), KV.dtype), *heads)
