"""Writing and attending in one call, with tpu-inference's arguments."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxkv
from jaxkv.testing import assert_caches_equal
from jaxkv_kernels.formats.bits import FP8
from support import scenes
from support.cases import further
from support.compare import assert_close, assert_same_bits

BLOCK, COLUMNS, NEW, LENGTHS, USED = 16, 3, (1, 1, 0, 20, 5), (17, 1, 30, 41, 9), 4
"""Two decode steps, a sequence without new tokens, a chunk of a prompt, and a sequence that is not in use."""
LATENTS, HEADS = jaxkv.MLAEntry("f32", latent=32, rope=8), jaxkv.KVEntry("f32", head_dim=16, value_dim=8)
SUMS = np.cumsum([0, *NEW])


def arguments(entry, kv_heads=1):
    """A random cache, and the queries and new values of 30 tokens, of which 3 belong to no sequence."""
    rng, total = np.random.default_rng(0), SUMS[-1] + 3
    layout = jaxkv.CacheLayout(num_layers=2, num_blocks=20, block_size=BLOCK, num_heads=kv_heads, entry=entry)
    cache = jaxkv.KVCache(jnp.asarray(rng.standard_normal(layout.size), jnp.float32), layout)
    heads = () if entry.one_head else (kv_heads,)
    new = [jnp.asarray(rng.standard_normal((total, *heads, n)), jnp.float32) for n in entry.sizes]
    sizes = entry.sizes if entry.one_head else entry.sizes[:1]
    q = [jnp.asarray(rng.standard_normal((total, 4, n)), jnp.float32) for n in sizes]
    tables = rng.permutation(20)[: len(NEW) * COLUMNS].reshape(len(NEW), COLUMNS)
    return cache, q, new, tables


def paged(tables):
    """kv_lens, page_indices, cu_q_lens, distribution."""
    return *(jnp.asarray(x, jnp.int32) for x in (LENGTHS, tables.reshape(-1), SUMS)), jnp.asarray([2, 3, USED])


def step(write, decode, cache, q, new, tables, used=USED):
    """The cache and results of each sequence by the operations themselves."""
    slots = np.full(len(q[0]), -1)
    for s in range(used):
        positions = np.arange(LENGTHS[s] - NEW[s], LENGTHS[s])
        slots[SUMS[s] : SUMS[s + 1]] = tables[s, positions // BLOCK] * BLOCK + positions % BLOCK
    cache = write(cache, *new, jnp.asarray(slots), layer=1)
    for s in range(used):
        if NEW[s]:
            mine = [x[None, SUMS[s] : SUMS[s + 1]] for x in q]
            yield s, decode(*mine, cache, jnp.asarray(tables[s : s + 1]), jnp.asarray(LENGTHS[s : s + 1]), layer=1)[0]
    yield None, cache


def check(found, cache, right, used=USED):
    for s, expected in right:
        if s is None:
            assert_caches_equal(cache, expected, padding=True)
        else:
            assert_close(found[SUMS[s] : SUMS[s + 1]], expected, roundings=64, magnitude=1)
    assert not np.asarray(found[SUMS[used] :]).any()


@pytest.mark.parametrize("options", [{}, {"sliding_window": 18, "soft_cap": 5.0, "q_scale": 0.5}])
def test_latents(options):
    cache, q, new, tables = arguments(LATENTS)

    def decode(*args, **keywords):
        scale = 0.1 * options.get("q_scale", 1)
        return jaxkv.decode_mla(
            *args, **keywords, scale=scale, window=options.get("sliding_window"), logit_cap=options.get("soft_cap")
        )

    out, after = jaxkv.mla_ragged_paged_attention(*q, *new, cache, *paged(tables), layer=1, sm_scale=0.1, **options)
    check(out, after, step(jaxkv.write_mla, decode, cache, q, new, tables))


@pytest.mark.parametrize("causal", [True, False])
def test_keys_and_values(causal):
    cache, q, new, tables = arguments(HEADS, kv_heads=2)
    sinks = jnp.asarray([0.0, 1.0, -1.0, 3.0])

    def decode(*args, **keywords):
        return jaxkv.decode_kv(*args, **keywords, scale=0.3, causal=causal, sinks=sinks)

    out, after = jaxkv.ragged_paged_attention(
        *q, *new, cache, *paged(tables), sinks, layer=1, sm_scale=0.3, use_causal_mask=causal
    )
    check(out, after, step(jaxkv.write_kv, decode, cache, q, new, tables))


@pytest.mark.parametrize("operation", [jaxkv.ragged_paged_attention, further(jaxkv.mla_ragged_paged_attention)])
def test_layers_that_share_entries_store_none(operation):
    """Another layer, or this one, has stored the entries of the new tokens."""
    latents = operation is jaxkv.mla_ragged_paged_attention
    cache, q, new, tables = arguments(LATENTS) if latents else arguments(HEADS, kv_heads=2)
    options = {"layer": 1, "sm_scale": 0.3, "sliding_window": (18, -1)}
    right, stored = operation(*q, *new, cache, *paged(tables), **options)
    for values in ((None, None), (jnp.full_like(x, jnp.nan) for x in new)):
        out, after = operation(*q, *values, stored, *paged(tables), **options, update_kv_cache=False)
        assert_same_bits(out, right)
        assert_caches_equal(after, stored, padding=True)
    out, _ = operation(*q, None, None, stored, *paged(tables), **options, update_kv_cache=False, out_dtype="bfloat16")
    assert_same_bits(out, right.astype(jnp.bfloat16))


@pytest.mark.parametrize("operation", [jaxkv.ragged_paged_attention, further(jaxkv.mla_ragged_paged_attention)])
def test_options_for_tpus_are_ignored(operation):
    latents = operation is jaxkv.mla_ragged_paged_attention
    cache, q, new, tables = arguments(LATENTS) if latents else arguments(HEADS, kv_heads=2)
    options = {"mask_value": -1e30, "skip_kv_mask": True, "num_queries_per_block": 8, "vmem_limit_bytes": 1 << 20}
    call = partial(operation, *q, *new, cache, *paged(tables), layer=1, sm_scale=0.3)
    for found, right in zip(call(**options), call(), strict=True):
        assert_same_bits(*jax.tree.leaves((found, right)))
    with pytest.raises(TypeError, match=rf"{operation.__name__}\(\) got an unexpected keyword argument 'block_sizes'"):
        call(block_sizes=8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"update_kv_cache": 0}, "`update_kv_cache` is 0: expected True or False"),
        ({"out_dtype": "int8"}, "`out_dtype` is 'int8': expected one of bfloat16"),
        ({"sliding_window": 18, "use_causal_mask": False}, "`window` is 18: expected None or a tuple"),
        ({"keys": None}, "`keys` is a NoneType: expected an array [T, H, D]"),
        ({"keys": jnp.ones((30, 3, 16))}, "`keys` has shape (30, 3, 16): expected [T, H, D] = [30, 2, 16]"),
        (
            {"values": jnp.ones((29, 2, 8))},
            "`values` has shape (29, 2, 8): expected [T, H, Dv] = [30, 2, 8] (T is that",
        ),
        ({"queries": jnp.ones((30, 5, 16))}, "`queries` has 5 heads: expected a multiple of the cache's 2 heads"),
        ({"queries": jnp.ones((30, 4, 8))}, "`queries` has shape (30, 4, 8): expected [T, Hq, D] = [T, Hq, 16] (D is"),
    ],
)
def test_misuse_is_reported(options, message):
    cache, (q,), (keys, values), tables = arguments(HEADS, kv_heads=2)
    call = partial(jaxkv.ragged_paged_attention, kv_cache=cache, layer=1)
    names = "kv_lens", "page_indices", "cu_q_lens", "distribution"
    right = {"queries": q, "keys": keys, "values": values, **dict(zip(names, paged(tables), strict=True))}
    with pytest.raises(ValueError, match=re.escape(message)):
        call(**right | options)


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("q_pe", jnp.ones((30, 3, 8)), "`q_pe` has shape (30, 3, 8): expected [T, Hq, P] = [30, 4, 8] (Hq is that of"),
        ("new_kv_c", jnp.ones((29, 32)), "`new_kv_c` has shape (29, 32): expected [T, R] = [30, 32] (T is that of"),
        ("new_k_pe", None, "`new_k_pe` is a NoneType: expected an array [T, P]"),
    ],
)
def test_misuse_of_latents_is_reported(name, array, message):
    cache, q, new, tables = arguments(LATENTS)
    arrays = dict(zip(("ql_nope", "q_pe", "new_kv_c", "new_k_pe"), (*q, *new), strict=True)) | {name: array}
    with pytest.raises(ValueError, match=re.escape(message)):
        jaxkv.mla_ragged_paged_attention(*arrays.values(), cache, *paged(tables), layer=1)


def lens_with(sequence, length):
    return jnp.asarray(LENGTHS, jnp.int32).at[sequence].set(length)


@pytest.mark.parametrize(
    ("position", "message"),
    [
        ((3, 19), "`kv_lens`[3] is 19: it includes the 20 new tokens of the sequence"),
        ((0, -1), "`kv_lens`[0] is -1: it includes the 1 new tokens"),
        ((2, 49), "`kv_lens`[2] is 49: `page_indices` has 3 blocks per sequence, for 48 tokens"),
        ((4, 0), None),  # not in use
    ],
)
def test_lengths_are_checked(position, message):
    cache, q, new, tables = arguments(HEADS, kv_heads=2)
    _, *others = paged(tables)
    call = jaxkv.checked(partial(jaxkv.ragged_paged_attention, layer=1))
    arrays = *q, *new, cache, lens_with(*position), *others
    if message is None:
        call(*arrays)
        return
    with pytest.raises(ValueError, match=re.escape(message)):
        call(*arrays)


@pytest.mark.parametrize(("place", "wrong"), [((0, 1), 20), ((3, 2), -1)])
def test_blocks_of_new_tokens_are_checked(place, wrong):
    cache, q, new, tables = arguments(HEADS, kv_heads=2)
    tables[place] = wrong
    index = place[0] * COLUMNS + place[1]
    call = jaxkv.checked(partial(jaxkv.ragged_paged_attention, layer=1))
    with pytest.raises(
        ValueError, match=re.escape(f"`page_indices`[{index}] is {wrong}: the cache has blocks 0 to 19")
    ):
        call(*q, *new, cache, *paged(tables))


INT32 = np.iinfo(np.int32)
IN_USE = 3
"""The last two of the five sequences are padding."""


def with_garbage(tables, sums, other):
    """The arguments for `IN_USE` sequences; `sums` end `cu_q_lens`, and `other` is what else belongs to the others."""
    lens, pages = np.asarray(LENGTHS), tables.copy()
    lens[IN_USE:], pages[IN_USE:] = other, other
    cu_q_lens = np.r_[SUMS[: IN_USE + 1], sums]
    distribution = other, other, IN_USE
    return [jnp.asarray(x, jnp.int32) for x in (lens, pages.reshape(-1), cu_q_lens, distribution)]


@pytest.mark.parametrize("operation", [jaxkv.mla_ragged_paged_attention, jaxkv.ragged_paged_attention])
def test_sequences_that_are_not_in_use_are_ignored(operation):
    """Whatever their lengths, pages and running sums hold: tpu-inference's tests pad all of them with zeros."""
    latents = operation is jaxkv.mla_ragged_paged_attention
    cache, q, new, tables = arguments(LATENTS) if latents else arguments(HEADS, kv_heads=2)

    @jax.jit
    def run(index):
        out, after = operation(*q, *new, cache, *index, layer=1, sm_scale=0.1)
        return out, after.buffer

    end = SUMS[IN_USE]
    right = run(with_garbage(tables, [end, end], 0))
    write, decode = (jaxkv.write_mla, jaxkv.decode_mla) if latents else (jaxkv.write_kv, jaxkv.decode_kv)
    alone = step(write, partial(decode, scale=0.1), cache, q, new, tables, IN_USE)
    check(right[0], jaxkv.KVCache(right[1], cache.layout), alone, IN_USE)
    for sums in ([0, 0], [-1, -1], [INT32.min] * 2, [INT32.max] * 2, [end + 20, end], [end - 1, 0], [0, end + 7]):
        for other in (0, -1, INT32.min, INT32.max, 7):
            for x, expected in zip(run(with_garbage(tables, sums, other)), right, strict=True):
                assert_same_bits(x, expected, f"{sums}, {other}")


def test_numbers_of_sequences_outside_the_arguments():
    cache, q, new, tables = arguments(LATENTS)
    *index, _ = paged(tables)
    run = jax.jit(lambda n: jaxkv.mla_ragged_paged_attention(*q, *new, cache, *index, n, layer=1))
    for number, same in ((99, 5), (INT32.max, 5), (-1, 0), (INT32.min, 0)):
        for x, expected in zip(*(jax.tree.leaves(run(jnp.asarray([0, 0, n]))) for n in (number, same)), strict=True):
            assert_same_bits(x, expected)


def test_tokens_beyond_the_table_are_not_stored():
    """And others keep their positions: 45 to 47 of a table of 48 are stored, 48 and 49 are not."""
    cache, q, new, _ = arguments(LATENTS)
    tables, index = jnp.asarray([[4, 9, 2]]), [jnp.asarray(x) for x in ([50], [4, 9, 2], [0, 5], [0, 0, 1])]
    q, new = ([x[:5] for x in some] for some in (q, new))
    _, after = jaxkv.mla_ragged_paged_attention(*q, *new, cache, *index, layer=1)
    slots = jaxkv.slots_for(tables, jnp.asarray([[45, 46, 47, -1, -1]]), cache)[0]
    assert_caches_equal(after, jaxkv.write_mla(cache, *new, slots, layer=1), padding=True)


class TestScales:
    """The scales mean what they mean in tpu-inference's kernels."""

    args = tuple(jnp.asarray(x) for x in ([20], np.arange(4), [0, 20], [0, 0, 1]))

    def heads(self, form, dtype="bfloat16"):
        """An empty cache, and queries, keys and values of 20 tokens; some queries are out of the range of e4m3."""
        entry, rng = scenes.entry_of(jaxkv.KVEntry, form, 32, 32), np.random.default_rng(0)
        layout = jaxkv.CacheLayout(num_layers=1, num_blocks=4, block_size=8, num_heads=2, entry=entry)
        q, k, v = (jnp.asarray(rng.standard_normal((20, 2, 32)), dtype) for _ in range(3))
        return jaxkv.KVCache.zeros(layout), q.at[3, 0, :5].set(300), k, v

    def attend(self, cache, q, k, v, **options):
        out, after = jaxkv.ragged_paged_attention(q, k, v, cache, *self.args, layer=0, **options)
        assert out.dtype == (q.dtype if q.dtype != FP8 else jnp.bfloat16)
        return out, after.buffer

    @pytest.mark.parametrize(("form", "dtype"), [("fp8", "bfloat16"), ("bf16", "float32"), ("f16", "bfloat16")])
    def test_queries_are_divided_by_q_scale_and_rounded_as_keys_are_stored(self, form, dtype):
        cache, q, k, v = self.heads(form, dtype)
        stored = {"fp8": ml_dtypes.float8_e4m3fn, "bf16": ml_dtypes.bfloat16, "f16": np.float16}[form]
        scales = {"k_scale": 1.0, "v_scale": 1.0} if form == "fp8" else {}
        wide = np.asarray(q.astype(jnp.float32)) / np.float32(0.375)
        largest = float(ml_dtypes.finfo(stored).max)
        wide = np.clip(wide, -largest, largest).astype(stored).astype(np.float32)
        found, _ = self.attend(cache, q, k, v, sm_scale=0.25, q_scale=0.375, **scales)
        right, _ = self.attend(cache, jnp.asarray(wide), k, v, sm_scale=0.25 * 0.375, **scales)
        assert_close(found, np.asarray(right, np.float64), roundings=2, magnitude=1)
        if form == "fp8":  # the rounding is seen in the result, and nothing else is
            left, _ = self.attend(cache, q, k, v, sm_scale=0.25, **scales)
            difference = np.abs(np.asarray(found - left, np.float32))
            assert 0 < difference.max() < 0.1

    def test_q_scale_needs_a_dtype_to_round_to(self):
        cache, q, k, v = self.heads("int8")
        with pytest.raises(ValueError, match=r"`q_scale` is given: expected None, .* 'int8' have no float dtype"):
            self.attend(cache, q, k, v, q_scale=0.5)
        cache, q, k, v = self.heads("bf16")
        for scale in (0, -1.0, float("inf"), "1"):
            with pytest.raises(ValueError, match="`q_scale` is"):
                self.attend(cache, q, k, v, q_scale=scale)

    def test_quantised_keys_and_values_are_stored_as_they_are(self):
        cache, q, k, v = self.heads("fp8")
        narrow = [x.astype(FP8) for x in (k, v)]
        wide = [x.astype(jnp.bfloat16) * scale for x, scale in zip(narrow, (0.5, 4), strict=True)]
        scales = {"k_scale": 0.5, "v_scale": 4.0}
        for x, expected in zip(
            self.attend(cache, q, *narrow, **scales), self.attend(cache, q, *wide, **scales), strict=True
        ):
            assert_same_bits(x, expected)
        for x, expected in zip(
            self.attend(cache, q.astype(FP8), *narrow),
            self.attend(cache, q.astype(FP8).astype(jnp.bfloat16), *narrow, k_scale=1.0, v_scale=1.0),
            strict=True,
        ):
            assert_same_bits(x, expected)
        plain = self.heads("bf16")[0]
        with pytest.raises(ValueError, match="`k` has dtype float8_e4m3fn"):
            self.attend(plain, q, *narrow)

    @pytest.mark.ci
    def test_quantised_keys_beside_values_of_another_format(self):
        cache, q, k, v = self.heads("fp8+bf16")
        wide = k.astype(FP8).astype(jnp.bfloat16) * 0.5
        for x, expected in zip(
            self.attend(cache, q, k.astype(FP8), v, k_scale=0.5),
            self.attend(cache, q, wide, v, k_scale=0.5),
            strict=True,
        ):
            assert_same_bits(x, expected)
        with pytest.raises(ValueError, match="`v` has dtype float8_e4m3fn"):
            self.attend(cache, q, k.astype(FP8), v.astype(FP8))
        with pytest.raises(ValueError, match=re.escape("`v_scale` is 0.5: expected None, as values of format 'bf16'")):
            self.attend(cache, q, k, v, k_scale=0.5, v_scale=0.5)
        with pytest.raises(
            ValueError, match=re.escape("`k_scale` is None: expected a number, as keys of format 'fp8'")
        ):
            self.attend(cache, q, k, v)

    def test_latents(self):
        entry = jaxkv.MLAEntry("fp8", latent=32, rope=8)
        layout = jaxkv.CacheLayout(num_layers=2, num_blocks=20, block_size=BLOCK, entry=entry)
        _, q, new, tables = arguments(LATENTS)

        def attend(*scales, q=q, new=new):
            options = dict(zip(("k_scale", "v_scale"), scales, strict=True))
            cache = jaxkv.KVCache.zeros(layout)
            return jaxkv.mla_ragged_paged_attention(*q, *new, cache, *paged(tables), layer=1, **options)[0]

        # Results are sums of stored latents, multiplied by `v_scale`.
        right = attend(0.5, 0.5)
        assert_same_bits(attend(0.5, 0.25), right / 2)
        assert_same_bits(attend(0.5, None), right * 2)
        narrow, few = [(x * 2).astype(FP8) for x in new], [x.astype(FP8) for x in q]
        assert_same_bits(attend(0.5, 0.5, new=narrow), right)
        assert_same_bits(attend(None, None, new=narrow), attend(1.0, 1.0, new=narrow))
        bfloat16 = [x.astype(jnp.bfloat16) for x in few]
        assert_same_bits(attend(0.5, 0.5, q=few), attend(0.5, 0.5, q=bfloat16))
        cache, *_ = arguments(LATENTS)
        with pytest.raises(ValueError, match=re.escape("`v_scale` is 0.5: expected None")):
            jaxkv.mla_ragged_paged_attention(*q, *new, cache, *paged(tables), layer=1, v_scale=0.5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({1: jnp.zeros(16, jnp.int32)}, "`page_indices` has 16 elements: expected a multiple of the 5 sequences"),
        ({2: jnp.zeros(5, jnp.int32)}, "`cu_q_lens` has shape (5,)"),
        ({3: jnp.zeros(2, jnp.int32)}, "`distribution` has shape (2,)"),
        ({0: jnp.zeros(5)}, "`kv_lens` has dtype float32"),
    ],
)
def test_wrong_arguments(change, message):
    cache, q, new, tables = arguments(LATENTS)
    args = list(paged(tables))
    for i, x in change.items():
        args[i] = x
    with pytest.raises(ValueError, match=re.escape(message)):
        jaxkv.mla_ragged_paged_attention(*q, *new, cache, *args, layer=1)
