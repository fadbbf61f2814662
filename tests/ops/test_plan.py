"""Plans: every token is in one work tile, splits are numbered, work is balanced; misuse is reported."""

import re
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv_kernels.mosaic_gpu.mla_dense import MLADenseConfig
from jaxkv_kernels.mosaic_gpu.mla_dense_swap_ab import MLASwapABConfig
from jaxkv_kernels.mosaic_gpu.sizes import PAIR, TILE
from jaxkv_kernels.mosaic_gpu.tile_scheduler import make_plan
from support import scenes, suites
from support.cases import slow

PAIRS = {"step": PAIR, "costs": MLADenseConfig().split_costs}
TILES = {"step": TILE, "costs": MLASwapABConfig().split_costs}


def work_tiles_by_request(plan, batch, overhead=0):
    """(first step, end, split) of the work tiles of each request in order; and each partition's cost, in steps."""
    firsts, tiles = np.asarray(plan.partitions[:, 0]), np.asarray(plan.work_tiles)
    assert firsts[0] == 0
    assert (np.diff(firsts) >= 0).all()
    found, loads = [[] for _ in range(batch)], []
    for first, last in pairwise(firsts):
        for request, begin, end, _, _, split, _ in tiles[first:last]:
            found[request].append((int(begin), int(end), int(split)))
        loads.append(int(sum(end - begin + overhead for _, begin, end, *_ in tiles[first:last])))
    return found, loads


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("seed", [*range(4), *(slow(seed) for seed in range(4, 20))])
def test_work_tiles_cover_every_request(seed, batch_invariant):
    rng = np.random.default_rng(seed)
    batch, partitions, columns = int(rng.integers(1, 40)), int(rng.integers(1, 20)), int(rng.integers(1, 60))
    lengths = rng.integers(-3, 64 * columns + 100, batch) * (rng.random(batch) > 0.2)
    steps = (PAIRS, TILES)[seed % 2]
    plan = make_plan(
        jnp.asarray(lengths, jnp.int32), jnp.zeros((batch, columns), jnp.int32),
        partitions=partitions, tokens=1, block_size=64, num_blocks=4, batch_invariant=batch_invariant, **steps,
    )  # fmt: skip
    lengths = np.clip(lengths, 0, 64 * columns)
    sizes, overhead = np.maximum(-(-lengths // steps["step"]), 1), steps["costs"].overhead
    found, loads = work_tiles_by_request(plan, batch, overhead)
    split_requests = {int(n): (int(first), int(count)) for n, first, count in plan.split_requests if n >= 0}
    taken = set()
    for request, tiles in enumerate(found):
        edges = [begin for begin, _, _ in tiles] + [tiles[-1][1]]
        assert edges == [0, *(end for _, end, _ in tiles)]
        assert edges[-1] == sizes[request]
        assert all(a < b for a, b in pairwise(edges))
        if len(tiles) == 1:
            assert tiles[0][2] == -1
            assert request not in split_requests
            continue
        first, count = split_requests[request]
        numbers = range(first, first + count)
        assert [split for _, _, split in tiles] == [*numbers]
        assert not taken & {*numbers}
        taken |= {*numbers}
    assert all(split < plan.max_splits for split in taken)
    if not batch_invariant:  # an eighth of the partitions may stay empty, and each that begins a request pays for it
        assert max(loads) <= 8 / 7 * (sizes + overhead).sum() / partitions + overhead + 2


def test_requests_are_not_split_for_little():
    def plan(lengths, columns):
        tables = jnp.zeros((lengths.size, columns), jnp.int32)
        return make_plan(lengths, tables, partitions=66, tokens=1, block_size=64, num_blocks=4, **PAIRS)

    lengths = jnp.full(128, 4096, jnp.int32)
    assert (np.asarray(plan(lengths, 64).split_requests)[:, 0] < 0).all()
    one = plan(lengths[:1] * 16, 1024)
    assert np.asarray(one.split_requests)[0, 2] > 50  # a single long request is spread over all


def test_a_request_is_split_alike_in_any_batch():
    def splits(lengths, row):
        tables = jnp.zeros((len(lengths), 200), jnp.int32)
        plan = make_plan(
            jnp.asarray(lengths, jnp.int32), tables,
            partitions=66, tokens=1, block_size=64, num_blocks=4, batch_invariant=True, **PAIRS,
        )  # fmt: skip
        return [tile[:2] for tile in work_tiles_by_request(plan, len(lengths))[0][row]]

    assert splits([9000], 0) == splits([1, 0, 12800, 9000, 64], 3)
    assert len(splits([9000], 0)) == 8


@pytest.mark.parametrize(
    ("lengths", "heads", "form"),
    [
        ((2100, 0, 70), 16, "bf16"),
        slow((2100, 70), 17, "bf16"),
        slow((2100, 70), 64, "bf16"),
        *(slow((2100, 70), 20, form) for form in ("fp8", "fp8_ds_mla")),
    ],
)
def test_batch_invariant_bits(interpreted, lengths, heads, form):
    suites.assert_batch_invariant(lengths, heads, form)


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


def test_entries_without_batch_invariant_plans_are_named_with_what_to_do():
    message = (
        r"mosaic_gpu: .*entries of format 'f32': supports bf16, f16, fp8, fp8_ds_mla, .*no implementation can be "
        r"batch-invariant on this cache of MLAEntry\(format='f32', .*: plan without it, or use a cache that one of "
        r"them supports"
    )
    with pytest.raises(NotImplementedError, match=message):
        plan_batch_invariant("f32")


def test_the_device_that_a_batch_invariant_plan_needs_is_named():
    only = f"; only mosaic_gpu ({jaxkv.implementations()['mosaic_gpu']}) can be batch-invariant on this cache"
    message = re.escape(f"{only}: on other devices, call plan_decode without `batch_invariant`")
    with pytest.raises(NotImplementedError, match=message):
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
    with pytest.raises(ValueError, match=r"`window` is 5: expected None or a tuple \(left, right\), because with"):
        jaxkv.plan_decode(cache, tables, lengths, num_heads=4, window=5, causal=False)
    sums = jnp.asarray([0, 1, 2])
    with pytest.raises(ValueError, match="`total` is None: expected the number of query tokens with `cu_q_lens`"):
        jaxkv.plan_decode(cache, tables, lengths, num_heads=4, cu_q_lens=sums)
    with pytest.raises(ValueError, match="`q_len` is 2: expected 1, because `cu_q_lens` has the numbers of query tok"):
        jaxkv.plan_decode(cache, tables, lengths, num_heads=4, cu_q_lens=sums, total=4, q_len=2)
    ragged = jaxkv.plan_decode(cache, tables, lengths, num_heads=4, cu_q_lens=sums, total=4)
    with pytest.raises(ValueError, match=r"`plan` was made with `total` 4: expected None, .* no `cu_q_lens`"):
        jaxkv.decode_mla(*q, cache, tables, lengths, layer=0, scale=1.0, plan=ragged)
    with pytest.raises(
        ValueError, match=r"`plan` was made with `total` 4: expected 2, .* pass `cu_q_lens` and `total`"
    ):
        jaxkv.decode_mla(*q, cache, tables, lengths, layer=0, scale=1.0, cu_q_lens=sums, plan=ragged)
    keys = jaxkv.KVEntry("f32", head_dim=8)
    cache = jaxkv.KVCache.zeros(jaxkv.CacheLayout(num_layers=1, num_blocks=4, block_size=16, num_heads=3, entry=keys))
    with pytest.raises(ValueError, match="`num_heads` is 4: expected a multiple of the cache's 3 heads"):
        jaxkv.plan_decode(cache, tables, lengths, num_heads=4)


def of_other_queries(dtype):
    """A plan for an `fp8` cache and queries of `dtype`, and a function that decodes queries of any dtype."""
    layout = jaxkv.CacheLayout(num_layers=1, num_blocks=4, block_size=16, entry=jaxkv.MLAEntry("fp8"))
    cache, tables, lengths = jaxkv.KVCache.zeros(layout), jnp.zeros((2, 3), jnp.int32), jnp.full(2, 5, jnp.int32)
    plan = jaxkv.plan_decode(cache, tables, lengths, num_heads=8, dtype=dtype)

    def decode(dtype):
        q = [jnp.ones((2, 8, size), dtype) for size in (512, 64)]
        return jaxkv.decode_mla(*q, cache, tables, lengths, layer=0, scale=0.1, kv_scale=1.0, plan=plan)

    return plan, decode


def test_a_plan_for_queries_of_another_dtype_is_refused_while_tracing():
    plan, decode = of_other_queries(None)
    assert plan.shape.dtype == "bfloat16"
    message = (
        r"`plan` was made for queries of bfloat16, but those of this call are of float32: pass `dtype='float32'` to "
        r"plan_decode, or convert the queries"
    )
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda: decode("float32"))
    assert decode("bfloat16").shape == (2, 8, 512)


def test_a_plan_is_made_by_an_implementation_that_supports_the_queries(interpreted):
    plan, decode = of_other_queries("float32")
    assert plan.shape.dtype == "float32"
    assert plan.implementation != "mosaic_gpu"
    assert decode("float32").dtype == jnp.float32
    assert of_other_queries("bfloat16")[0].implementation == "mosaic_gpu"


@pytest.mark.parametrize(("entry", "supported"), [("fp8", "bfloat16"), ("f16", "float16")])
def test_explain_reports_queries_that_a_plan_does_not_support(interpreted, entry, supported):
    layout = jaxkv.CacheLayout(num_layers=1, num_blocks=4, block_size=16, entry=jaxkv.MLAEntry(entry))
    args = jaxkv.KVCache.zeros(layout), jnp.zeros((2, 3), jnp.int32), jnp.zeros(2, jnp.int32)
    found = jaxkv.explain(jaxkv.plan_decode, *args, num_heads=8, dtype=jnp.float32)
    expected = f"queries of float32: supports {supported} with entries of format '{entry}'"
    assert found.reasons["mosaic_gpu"] == (expected,)
    with pytest.raises(ValueError, match="`dtype` is 'int8': expected one of"):
        jaxkv.plan_decode(*args, num_heads=8, dtype="int8")


def test_a_plan_goes_through_jit():
    entry = jaxkv.MLAEntry("f32", latent=16, rope=8)
    cache = jaxkv.KVCache.zeros(jaxkv.CacheLayout(num_layers=1, num_blocks=4, block_size=16, entry=entry))
    plan = jax.jit(lambda cache, t, n: jaxkv.plan_decode(cache, t, n, num_heads=4, implementation="xla"))
    found = plan(cache, jnp.zeros((2, 3), jnp.int32), jnp.zeros(2, jnp.int32))
    assert found.implementation == "xla"
    assert found.shape.num_heads == 4
