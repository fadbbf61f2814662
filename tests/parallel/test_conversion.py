"""Payloads of caches that divide heads or tokens over devices, as those of caches that divide them otherwise."""

from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxkv
from jaxkv import parallel
from support import scenes
from support.cases import random_numbers
from support.compare import assert_same_bits
from support.conversions import Division, check, convert, convert_divided, layout_of
from support.many_devices import mesh_of, on_several_devices

HEADS, TOKENS = 4, 70
KV, MLA = scenes.KV_ENTRIES[0], scenes.MLA_ENTRIES[0]
DIVISIONS = {
    "one device": Division(),
    "2 of heads": Division(2),
    "4 of heads": Division(4),
    "2 of tokens": Division(1, jaxkv.TokenShards(2)),
    "3 of tokens, interleaved by 16": Division(1, jaxkv.TokenShards(3, 16)),
    "2 of heads, 2 of tokens": Division(2, jaxkv.TokenShards(2, 5)),
}
SIZES = (16, 32, 48, 64, 128)
"""Tokens per block."""


def convert_one_way(src, dst, *, sizes=(16, 48), names=("BLNHC", "LBHNC"), entry=KV, tokens=TOKENS):
    """The prompt goes from one division to the other, and back."""
    divisions, heads = (DIVISIONS[src], DIVISIONS[dst]), 1 if entry.one_head else HEADS
    layouts = [
        layout_of(name, entry, heads=heads, division=division, block_size=size, tokens=tokens)
        for name, division, size in zip(names, divisions, sizes, strict=True)
    ]
    check(*layouts, tokens, divisions)


def following(values, value):
    values = [*values]
    return values[(values.index(value) + 1) % len(values)]


@pytest.mark.parametrize("name", DIVISIONS)
def test_every_division_to_another_and_back(name):
    convert_one_way(name, following(DIVISIONS, name))


def test_one_head_between_tokens_and_none():
    convert_one_way("one device", "3 of tokens, interleaved by 16", entry=MLA)


@pytest.mark.slow
@pytest.mark.parametrize(("src", "dst"), [*product(DIVISIONS, repeat=2)])
def test_all_pairs_of_divisions_and_sizes(src, dst):
    for sizes in product(SIZES, repeat=2):
        convert_one_way(src, dst, sizes=sizes)


@pytest.mark.slow
@pytest.mark.parametrize("division", DIVISIONS)
def test_all_divisions_on_all_layouts(division):
    for name in [*scenes.layout_names(KV), *scenes.APART]:
        convert_one_way(division, following(DIVISIONS, division), names=(name, "BLNHC"))
        convert_one_way(division, following(DIVISIONS, division), names=("BLNHC", name))


@pytest.mark.ci
@settings(max_examples=15)
@given(random_numbers)
def test_random_divisions(rng):
    tokens, heads = int(rng.integers(1, 60)), int(rng.choice([1, 2, 4, 6]))
    divisors = [n for n in range(1, heads + 1) if heads % n == 0]

    def draw():
        shards = jaxkv.TokenShards(int(rng.integers(1, 4)), int(rng.integers(1, 9)))
        division, block_size = Division(int(rng.choice(divisors)), shards), int(rng.integers(1, 20))
        name = rng.choice([*scenes.layout_names(KV), *scenes.APART])
        return layout_of(name, KV, heads=heads, division=division, block_size=block_size, tokens=tokens), division

    (src, source), (dst, target) = draw(), draw()
    check(src, dst, tokens, (source, target))


def sizes(**changes):
    return dict(num_layers=1, num_blocks=9, block_size=4, entry=KV) | changes


def layout(**changes):
    return jaxkv.CacheLayout(**sizes(**changes))


def rows_of(layout, devices, count, value=1.0):
    return jnp.full((devices, count, layout.block_nbytes // layout.itemsize), value, layout.dtype)


def test_both_groups_of_a_packed_block():
    """Latents and the indexer's keys, from one device to three."""
    groups = {"latent": jaxkv.Group(2, MLA), "keys": jaxkv.Group(1, scenes.INDEXER_ENTRY)}
    shards = jaxkv.TokenShards(3, 2)
    src = jaxkv.PackedLayout(num_blocks=9, block_size=8, groups=groups)
    dst = jaxkv.PackedLayout(num_blocks=9, block_size=4, groups=groups, shards=shards, order="BHLNC")
    rows = rows_of(src["latent"], 1, 3, 1)
    whole = convert(rows[0], src, src)  # without the bytes of padding
    found = convert_divided(rows, src, dst)
    assert found.shape[:2] == (3, 2)  # of 24 tokens, 8 are on each device
    assert_same_bits(convert_divided(found, dst, src, num_tokens=24)[0], whole)


def test_all_tokens_by_default():
    """Until the blocks of device 0 are full: of its 8 tokens, it has 6 before the other device has its second 6."""
    src = layout(shards=jaxkv.TokenShards(2, 6))
    assert convert_divided(rows_of(src, 2, 2), src, layout()).shape[:2] == (1, 4)
    found = convert_divided(rows_of(src, 2, 2), src, layout(block_size=1))
    assert found.shape[:2] == (1, 14)
    assert (found == 1).all()


def test_every_device_has_the_rows_that_device_0_needs():
    dst = layout(shards=jaxkv.TokenShards(2, 6))
    for tokens, rows in ((4, 1), (5, 2), (6, 2), (12, 2), (14, 2), (15, 3)):
        run = partial(parallel.convert_blocks, src=layout(), dst=dst, num_tokens=tokens)
        assert jax.eval_shape(run, rows_of(layout(), 1, 4)).shape[:2] == (2, rows)


def test_arrays_in_a_list():
    src, dst = layout(num_heads=2), layout(num_heads=4)
    rows = rows_of(src, 2, 3, jnp.arange(6.0).reshape(2, 3, 1))
    assert_same_bits(convert_divided([*rows], src, dst), convert_divided(rows, src, dst))
    assert_same_bits(convert_divided((rows[0],), src, src), rows[:1])


@on_several_devices
def test_from_devices_to_devices():
    """Two caches of half of the heads, which a model has written, are read as two of half of the tokens."""
    mesh, tokens = mesh_of(2, axis_type=AxisType.Auto), 27
    of_heads, shards = layout(num_heads=2), jaxkv.TokenShards(2, 3)
    of_tokens = layout(num_heads=4, block_size=8, shards=shards)
    on_each = partial(jax.shard_map, mesh=mesh, check_vma=False)
    k, v = np.random.default_rng(0).standard_normal((2, tokens, 4, 16)).astype(np.float32)
    v = v[..., :8]
    blocks, others = jnp.arange(7)[::-1], jnp.asarray([5, 2])
    slots = jaxkv.slots_for(blocks[None], jnp.arange(tokens)[None], of_heads)[0]

    @jax.jit
    @partial(on_each, in_specs=(P("x"), P(None, "x"), P(None, "x")), out_specs=(P("x"), P("x")))
    def write_and_read(cache, k, v):
        cache = jaxkv.write_kv(cache, k, v, slots, layer=0)
        return cache, jaxkv.read_blocks(cache, blocks)

    cache, rows = write_and_read(parallel.zeros(of_heads, mesh, "x"), k, v)
    rows = parallel.convert_blocks(rows.reshape(2, len(blocks), -1), of_heads, of_tokens, num_tokens=tokens)
    write = on_each(jaxkv.write_blocks, in_specs=(P("x"), P(), P("x")), out_specs=P("x"))
    cache = write(parallel.zeros(of_tokens, mesh, "x"), others, rows.reshape(-1, rows.shape[-1]))

    @jax.jit
    @partial(on_each, in_specs=P("x"), out_specs=(P("x"), P("x")))
    def tokens_of(cache):
        positions = jnp.arange(tokens)[None]
        mine = parallel.context.local_slots(others[None], positions, layout=of_tokens, shard=jax.lax.axis_index("x"))
        return jaxkv.read_kv(cache, mine[0], layer=0, dtype="float32")

    for found, values in zip(tokens_of(cache), (k, v), strict=True):
        found = np.asarray(found).reshape(2, tokens, 4, -1)
        expected = np.asarray(values.astype(jnp.bfloat16), np.float32)
        mine = np.arange(tokens) // 3 % 2
        for device in range(2):
            assert_same_bits(found[device], np.where((mine == device)[:, None, None], expected, 0))


PACKED = jaxkv.PackedLayout(
    num_blocks=2, block_size=4, groups={"kv": jaxkv.Group(1, KV, 2), "latent": jaxkv.Group(1, MLA)}
)
UNEQUAL = [
    jaxkv.PackedLayout(num_blocks=2, block_size=4, groups={"a": jaxkv.Group(1, KV, a), "b": jaxkv.Group(1, KV, b)})
    for a, b in ((4, 4), (2, 4))
]
MISTAKES = {
    "no multiple of the shards": (
        lambda: (layout(shards=jaxkv.TokenShards(2)), layout(), 3),
        "`data` is of 3 devices, and `src` is the layout of one of TokenShards.*: expected a multiple of 2 devices",
    ),
    "several replicas": (
        lambda: (layout(entry=MLA), layout(entry=MLA), 4),
        "`data` is of 4 devices, and the MLAEntry has one head, which is replicated .* those of one device",
    ),
    "several replicas of shards": (
        lambda: (layout(entry=MLA, shards=jaxkv.TokenShards(2)), layout(entry=MLA), 4),
        "`data` is of 4 devices, and the MLAEntry .* those of 2 devices",
    ),
    "replicas of one of the groups": (
        lambda: (PACKED, PACKED, 2),
        "`data` is of 2 devices, and the MLAEntry has one head",
    ),
    "heads that are no divisor": (
        lambda: (layout(num_heads=2), layout(num_heads=3), 2),
        r"`dst` has 3 heads per device, and the source has 4 .* \(2 on each of 2\): expected a divisor of 4",
    ),
    "more heads": (
        lambda: (layout(num_heads=2), layout(num_heads=4), 1),
        "`dst` has 4 heads per device, and the source has 2 on all devices together",
    ),
    "groups that are divided in two ways": (
        lambda: (*UNEQUAL, 1),
        "`dst` divides 4 heads into parts of 2 and 4 heads into parts of 4: expected as many parts in every group",
    ),
    "other layers": (
        lambda: (layout(num_layers=1), layout(num_layers=2), 1),
        "`num_layers` is 1 in `src` and 2 in `dst`: only block size, heads, shards, order, strides.* may differ",
    ),
}


@pytest.mark.parametrize(("case", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes(case, message):
    src, dst, devices = case()
    first = src if isinstance(src, jaxkv.CacheLayout) else next(iter(src.values()))
    with pytest.raises(ValueError, match=message):
        parallel.convert_blocks(rows_of(first, devices, 2), src, dst)


def test_mistakes_of_data():
    src = layout(shards=jaxkv.TokenShards(2, 3))
    rows = rows_of(src, 2, 2)
    for data, message in (
        (rows[0], r"`data` has shape \(2, 96\): expected \[devices, n, E\] = \[devices, n, 96\]"),
        (rows[:, :, 1:], r"`data` has shape .* \(E is the elements of a block of `src`\)"),
        ([rows[0], rows[1, 1:]], r"`data\[1\]` has shape \(1, 96\)"),
        ([], "`data` is empty: expected an array"),
        (rows.astype(jnp.float32), "`data` has dtype float32"),
    ):
        with pytest.raises(ValueError, match=message):
            parallel.convert_blocks(data, src, src)
    message = (
        r"`num_tokens` is 15: expected an int .* from 0 to 14, the tokens of 2 blocks of 4 tokens on each of 2 dev"
    )
    with pytest.raises(ValueError, match=message):
        parallel.convert_blocks(rows, src, src, num_tokens=15)
