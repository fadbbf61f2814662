"""Blocks of one layout, or size, as blocks of another: every entry bit for bit, zeros everywhere else."""

from itertools import product

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

import jaxkv
from jaxkv.testing.buffers import to_bytes, to_cache
from jaxkv.testing.random_layouts import AXES, SMALL, draw_entry, draw_group, draw_strides
from support import scenes
from support.cases import random_numbers
from support.compare import assert_same_bits
from support.conversions import check_one, convert, layout_of
from support.suites.base import formats

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


SIZES_OF_BLOCKS = (16, 32, 48, 64, 128)
NAMES = [*scenes.layout_names(KV), *scenes.APART]
TOKENS = 140
"""More than the largest block, and a multiple of none of them."""
FORMATS = [*scenes.MLA_ENTRIES, *scenes.KV_ENTRIES, *scenes.MIXED_ENTRIES, *scenes.INDEXER_ENTRIES]


def of_size(name, block_size, entry=KV):
    return layout_of(name, entry, heads=1 if entry.one_head else 2, block_size=block_size, tokens=TOKENS)


def following(values, value):
    return values[(values.index(value) + 1) % len(values)]


@pytest.mark.parametrize("block_size", SIZES_OF_BLOCKS)
def test_every_size_to_another_and_back(block_size):
    other = following(SIZES_OF_BLOCKS, block_size)
    check_one(of_size("BLNHC", block_size), of_size("LBHNC", other), TOKENS)


@pytest.mark.parametrize("name", [NAMES[0], *(pytest.param(name, marks=pytest.mark.ci) for name in NAMES[1:])])
def test_every_layout_with_another_size_and_back(name):
    check_one(of_size(name, 16), of_size(following(NAMES, name), 48), TOKENS)


@pytest.mark.parametrize(
    "entry",
    [pytest.param(x, marks=() if x.label in ("fp8_v4", "nvfp4") else pytest.mark.ci, id=str(x)) for x in FORMATS],
)
def test_every_format_with_another_size_and_back(entry):
    check_one(of_size("BLNHC padded", 32, entry), of_size("packed, uint8", 48, entry), TOKENS)


@pytest.mark.slow
@pytest.mark.parametrize(("src", "dst"), [*product(SIZES_OF_BLOCKS, repeat=2)])
def test_all_pairs_of_sizes_and_some_layouts(src, dst):
    for name in NAMES:
        check_one(of_size(name, src), of_size("BHLNC", dst), TOKENS)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_all_pairs_of_layouts(name):
    for other in NAMES:
        check_one(of_size(name, 32), of_size(other, 48), TOKENS)


@pytest.mark.ci
@settings(max_examples=15)
@given(random_numbers)
def test_random_layouts_and_sizes(rng):
    entry = draw_entry(rng, (jaxkv.MLAEntry, jaxkv.KVEntry, jaxkv.IndexerEntry), SMALL)
    sizes = {"num_layers": int(rng.integers(1, 4)), "num_heads": 1 if entry.one_head else int(rng.integers(1, 4))}
    tokens = int(rng.integers(1, 40))

    def draw():
        block_size = int(rng.integers(1, 20))
        blocks = {"num_blocks": -(-tokens // block_size) + 1, "block_size": block_size, "entry": entry}
        return draw_strides(rng, entry, sizes | blocks) if rng.random() < 0.7 else draw_group(rng, sizes | blocks)

    check_one(draw(), draw(), tokens)


class TestNumberOfTokens:
    src, dst = (jaxkv.CacheLayout(num_layers=1, num_blocks=9, block_size=n, entry=MLA) for n in (4, 6))
    rows = jnp.ones((5, src.block_nbytes // 2), src.dtype)

    def ones_in(self, **options):
        found = convert(self.rows, self.src, self.dst, **options)
        slots = np.asarray(found, np.float32).reshape(-1, self.dst.width)
        assert len(slots) == 6 * len(found)
        assert ((slots == 1).all(1) | (slots == 0).all(1)).all()
        return len(found), slots.any(1).sum()

    def test_all_by_default(self):
        assert self.ones_in() == (4, 20)

    @pytest.mark.parametrize(("tokens", "rows"), [(0, 0), (1, 1), (6, 1), (7, 2), (np.int64(18), 3), (20, 4)])
    def test_fewer(self, tokens, rows):
        assert self.ones_in(num_tokens=tokens) == (rows, tokens)

    def test_of_blocks_of_the_same_size(self):
        found = convert(self.rows, self.src, self.src, num_tokens=6)
        assert_same_bits(found[0], self.rows[0])
        assert_same_bits(found[1, : 2 * self.src.width], self.rows[1, : 2 * self.src.width])
        assert len(found) == 2
        assert not found[1, 2 * self.src.width :].any()

    @pytest.mark.parametrize("tokens", [-1, 21, 4.0, True, "4"])
    def test_invalid(self, tokens):
        with pytest.raises(ValueError, match=r"`num_tokens` is .*: expected an int .* from 0 to 20, the tokens of 5 b"):
            jaxkv.convert_blocks(self.rows, self.src, self.dst, num_tokens=tokens)


GROUPS = {
    "latent": jaxkv.Group(2, MLA, rate=2),
    "keys": jaxkv.Group(1, scenes.INDEXER_ENTRY, rate=4),
    "window": jaxkv.Group(1, KV, 2, table="window", window=24),
}


class TestGroupsOfOtherSizes:
    """Two compressed groups in one table, and states in another."""

    def layout(self, block_size, **options):
        state = jaxkv.Group(1, jaxkv.StateEntry({"sums": ((3,), "float32")}), rate=block_size, table="state", window=1)
        sizes = {"": block_size, "window": block_size // 2, "state": block_size}
        return jaxkv.PackedLayout(num_blocks=7, block_size=sizes, groups=GROUPS | {"state": state}, **options)

    @pytest.mark.parametrize("table", ["", "window"])
    def test_entries_in_order(self, table):
        src, dst = self.layout(16), self.layout(24, order="BHLNC", dtype="uint8")
        names, blocks, tokens = src.tables[table].groups, [4, 1, 5], 42 if not table else 20
        before = scenes.garbage(src["latent"], np.random.default_rng(3), "random")
        rows = jaxkv.read_blocks(to_cache(src["latent"], before), jnp.asarray(blocks))
        rows = convert(rows, src, dst, table=table, num_tokens=tokens)
        assert len(rows) == 2
        after = to_bytes(jaxkv.write_blocks(jaxkv.KVCache.zeros(dst["latent"]), jnp.asarray([6, 2]), rows))
        expected = np.zeros(after.size, np.uint8)
        for name in names:
            count = -(-tokens // src.groups[name].rate)
            for layer in range(src[name].num_layers):
                pages = scenes.fetch(src[name], before, layer)[blocks].swapaxes(1, 2)  # [blocks, tokens, heads, bytes]
                flat = pages.reshape(-1, *pages.shape[2:])[:count]
                target = np.zeros((7, dst[name].block_size, *flat.shape[1:]), np.uint8)
                for slot, entry in enumerate(flat):
                    target[[6, 2][slot // dst[name].block_size], slot % dst[name].block_size] = entry
                scenes.place(dst[name], expected, layer, target.swapaxes(1, 2))
        assert_same_bits(after, expected)

    def test_states_of_blocks_are_rejected(self):
        src, dst = self.layout(16), self.layout(24)
        rows = jnp.zeros((1, src["state"].block_nbytes // src["state"].itemsize), src["state"].dtype)
        with pytest.raises(ValueError, match=r"`rate` of group 'state' is 16 in `src` and 24 in `dst`: entries that "):
            jaxkv.convert_blocks(rows, src, dst, table="state")

    def test_states_of_tables_with_blocks_of_the_same_size(self):
        src, dst = self.layout(16), self.layout(16, dtype="uint8")
        rows = jnp.ones((2, src["state"].block_nbytes // src["state"].itemsize), src["state"].dtype)
        found = convert(rows, src, dst, table="state")
        assert (found.view(src["state"].dtype)[:, :3] == 1).all()


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
    message = r"`num_heads` is 1 in `src` and 2 in `dst`.*jaxkv\.parallel\.convert_blocks"
    with pytest.raises(ValueError, match=message):
        jaxkv.convert_blocks(jnp.zeros((1, heads[0].block_nbytes // heads[0].itemsize), KV.dtype), *heads)
