"""Plans: every token of every request lies in one item, pieces are numbered, work is shared out; misuse is told."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv_kernels.mosaic_gpu.attention.plan_decode import PAIRS, TILES, make_plan
from support import scenes, suites


def items_by_request(plan, batch, steps=PAIRS):
    """(first step, end, piece) of the items of each request in order; and the cost of each part, in steps."""
    starts, items = np.asarray(plan.starts[:, 0]), np.asarray(plan.items)
    assert starts[0] == 0
    assert (np.diff(starts) >= 0).all()
    found, loads = [[] for _ in range(batch)], []
    for first, end in pairwise(starts):
        for request, begin, stop, _, _, piece, _ in items[first:end]:
            found[request].append((int(begin), int(stop), int(piece)))
        loads.append(int(sum(stop - begin + steps.overhead for _, begin, stop, *_ in items[first:end])))
    return found, loads


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_items_cover_every_request(seed, batch_invariant):
    rng = np.random.default_rng(seed)
    batch, parts, columns = int(rng.integers(1, 40)), int(rng.integers(1, 20)), int(rng.integers(1, 60))
    lengths = rng.integers(-3, 64 * columns + 100, batch) * (rng.random(batch) > 0.2)
    steps = (PAIRS, TILES)[seed % 2]
    plan = make_plan(
        jnp.asarray(lengths, jnp.int32), jnp.zeros((batch, columns), jnp.int32),
        parts=parts, tokens=1, block_size=64, num_blocks=4, batch_invariant=batch_invariant, steps=steps,
    )  # fmt: skip
    lengths = np.clip(lengths, 0, 64 * columns)
    sizes = np.maximum(-(-lengths // steps.tokens), 1)
    found, loads = items_by_request(plan, batch, steps)
    cuts = {int(request): (int(first), int(count)) for request, first, count in plan.cuts if request >= 0}
    taken = set()
    for request, pieces in enumerate(found):
        edges = [begin for begin, _, _ in pieces] + [pieces[-1][1]]
        assert edges == [0, *(stop for _, stop, _ in pieces)]
        assert edges[-1] == sizes[request]
        assert all(a < b for a, b in pairwise(edges))
        if len(pieces) == 1:
            assert pieces[0][2] == -1
            assert request not in cuts
            continue
        first, count = cuts[request]
        numbers = range(first, first + count)
        assert [piece for _, _, piece in pieces] == [*numbers]
        assert not taken & {*numbers}
        taken |= {*numbers}
    assert all(piece < plan.pieces for piece in taken)
    if not batch_invariant:  # an eighth of the parts may stay empty, and whoever starts a request pays for it
        assert max(loads) <= 8 / 7 * (sizes + steps.overhead).sum() / parts + steps.overhead + 2


def test_requests_are_not_cut_for_little():
    lengths = jnp.full(128, 4096, jnp.int32)
    plan = make_plan(lengths, jnp.zeros((128, 64), jnp.int32), parts=66, tokens=1, block_size=64, num_blocks=4)
    assert (np.asarray(plan.cuts)[:, 0] < 0).all()
    one = make_plan(lengths[:1] * 16, jnp.zeros((1, 1024), jnp.int32), parts=66, tokens=1, block_size=64, num_blocks=4)
    assert np.asarray(one.cuts)[0, 2] > 50  # a single long request is spread over all


def test_a_request_is_cut_alike_in_any_company():
    def cuts(lengths, row):
        tables = jnp.zeros((len(lengths), 200), jnp.int32)
        plan = make_plan(
            jnp.asarray(lengths, jnp.int32), tables,
            parts=66, tokens=1, block_size=64, num_blocks=4, batch_invariant=True,
        )  # fmt: skip
        return [item[:2] for item in items_by_request(plan, len(lengths))[0][row]]

    assert cuts([9000], 0) == cuts([1, 0, 12800, 9000, 64], 3)
    assert len(cuts([9000], 0)) == 8


@pytest.mark.parametrize(("lengths", "heads"), [((2100, 0, 70), 16), ((2100, 70), 64)])
def test_batch_invariant_bits(interpreted, lengths, heads):
    suites.assert_batch_invariant(lengths, heads)


def test_only_some_implementations_have_batch_invariant_plans(interpreted):
    entry = jaxkv.MLAEntry("bf16")
    scene = scenes.scene(entry, lengths=(70, 0))
    cache, q = scene.cache(suites.layout_of("BLNHC", entry), 1), suites.queries(entry, 2, 1, 16)
    tables, lengths = jnp.asarray(scene.tables), jnp.asarray(scene.lengths)
    plan = jaxkv.plan_decode(cache, tables, lengths, num_heads=16, batch_invariant=True)
    args, options = (*q, cache, tables, lengths), {"layer": 1, "scale": 0.11, "plan": plan}
    assert jaxkv.explain(jaxkv.decode_mla, *args, **options).chosen == "mosaic_gpu"
    with pytest.raises(ValueError, match=r"`plan` is batch-invariant on mosaic_gpu only: .*'xla'"):
        jaxkv.decode_mla(*args, **options, implementation="xla")
    with pytest.raises(NotImplementedError, match="cannot be batch-invariant"):
        jaxkv.plan_decode(cache, tables, lengths, num_heads=16, batch_invariant=True, implementation="xla")


def plan_batch_invariant(form):
    layout = jaxkv.CacheLayout(num_layers=1, num_blocks=4, block_size=16, entry=jaxkv.MLAEntry(form))
    tables, lengths = jnp.zeros((2, 3), jnp.int32), jnp.zeros(2, jnp.int32)
    return jaxkv.plan_decode(jaxkv.KVCache.zeros(layout), tables, lengths, num_heads=8, batch_invariant=True)


@pytest.mark.parametrize("form", ["fp8", "fp8_ds_mla", "f32"])
def test_entries_without_batch_invariant_plans_are_named_with_what_to_do(form):
    told = (
        rf"mosaic_gpu: .*entries of format '{form}': supports bf16, f16; .*no implementation can be batch-invariant on "
        rf"this cache of MLAEntry\(format='{form}', .*: plan without it, or use a cache that one of them supports"
    )
    with pytest.raises(NotImplementedError, match=told):
        plan_batch_invariant(form)


def test_the_device_that_a_batch_invariant_plan_needs_is_named():
    told = r"; only mosaic_gpu \(NVIDIA Hopper\) can be batch-invariant on this cache: elsewhere, plan without it"
    with pytest.raises(NotImplementedError, match=told):
        plan_batch_invariant("f16")


def test_a_plan_for_another_kind_of_cache_is_refused():
    """Its steps are others: pairs of tiles, where an MLA call with few rows takes single ones."""
    mla = jaxkv.CacheLayout(num_layers=1, num_blocks=4, block_size=16, entry=jaxkv.MLAEntry("bf16"))
    kv = jaxkv.CacheLayout(num_layers=1, num_blocks=4, block_size=16, entry=jaxkv.KVEntry("bf16"), num_heads=4)
    tables, lengths = jnp.zeros((2, 3), jnp.int32), jnp.zeros(2, jnp.int32)
    plan, q = jaxkv.plan_decode(jaxkv.KVCache.zeros(mla), tables, lengths, num_heads=8), jnp.zeros((2, 8, 128))
    with pytest.raises(ValueError, match=r"`plan` was made for .*kv_heads=1,.*MLAEntry.*expected .*kv_heads=4,"):
        jaxkv.decode_kv(q, jaxkv.KVCache.zeros(kv), tables, lengths, layer=0, scale=1.0, plan=plan)


def test_a_plan_for_other_calls_is_refused():
    entry = jaxkv.MLAEntry("f32", latent=16, rope=8)
    cache = jaxkv.KVCache.zeros(jaxkv.CacheLayout(num_layers=1, num_blocks=4, block_size=16, entry=entry))
    tables, lengths = jnp.zeros((2, 3), jnp.int32), jnp.zeros(2, jnp.int32)
    q = [jnp.zeros((2, 4, n)) for n in entry.sizes]
    plan = jaxkv.plan_decode(cache, tables, lengths, num_heads=8)
    with pytest.raises(ValueError, match=r"`plan` was made for Shape.*num_heads=8.*expected one for .*num_heads=4"):
        jaxkv.decode_mla(*q, cache, tables, lengths, layer=0, scale=1.0, plan=plan)
    with pytest.raises(ValueError, match="`plan` is a int"):
        jaxkv.decode_mla(*q, cache, tables, lengths, layer=0, scale=1.0, plan=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`window` is 5: decode_mla has none"):
        jaxkv.plan_decode(cache, tables, lengths, num_heads=4, window=5)
    keys = jaxkv.KVEntry("f32", head_dim=8)
    cache = jaxkv.KVCache.zeros(jaxkv.CacheLayout(num_layers=1, num_blocks=4, block_size=16, num_heads=3, entry=keys))
    with pytest.raises(ValueError, match="`num_heads` is 4: expected a multiple of the cache's 3 heads"):
        jaxkv.plan_decode(cache, tables, lengths, num_heads=4)


def test_a_plan_goes_through_jit():
    entry = jaxkv.MLAEntry("f32", latent=16, rope=8)
    cache = jaxkv.KVCache.zeros(jaxkv.CacheLayout(num_layers=1, num_blocks=4, block_size=16, entry=entry))
    plan = jax.jit(lambda cache, t, n: jaxkv.plan_decode(cache, t, n, num_heads=4, implementation="xla"))
    found = plan(cache, jnp.zeros((2, 3), jnp.int32), jnp.zeros(2, jnp.int32))
    assert found.implementation == "xla"
    assert found.shape.num_heads == 4
