"""`prefill_mla` of ragged batches: several prompts, and requests that are decoding."""

import re
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv.ops.prefill import _check_rows
from jaxkv_kernels.mosaic_gpu import cudnn
from support import oracle, scenes
from support.arrays import as_float64
from support.cases import each_value, on_layouts
from support.compare import assert_close, assert_same_bits
from support.suites.base import UNUSED_SUMS, with_unused_requests

HEADS, NOPE, VALUE, SCALE = 3, 24, 20, 0.17
LENGTHS = (7, 0, 64, 1, 63, 0, 65, 194)
Q_LENS = (1, 1, 1, 1, 40, 0, 65, 70)
"""The first four may be decoding."""
ENTRY = jaxkv.MLAEntry("f32", latent=128, rope=16)
FEW_BYTES = HEADS * (NOPE + 16 + VALUE) * 4 * 37
"""Of the expanded keys and values of 37 tokens in float32."""


@cache
def arguments(entry, rows, dtype, heads=HEADS, nope=NOPE, value=VALUE):
    """q_nope, q_pe, w_uk and w_uv."""
    rng = np.random.default_rng(5)
    latent, rope = entry.sizes
    shapes = (rows, heads, nope), (rows, heads, rope), (heads, nope, latent), (heads, value, latent)
    deviations = 1, 1, latent**-0.5, latent**-0.5
    return [
        jnp.asarray(deviation * rng.standard_normal(shape), dtype)
        for shape, deviation in zip(shapes, deviations, strict=True)
    ]


def prefill(scene, cache, given, q_lens, layer=1, **options):
    """out and lse."""
    tables, lengths = jnp.asarray(scene.tables), jnp.asarray(scene.lengths, jnp.int32)
    options = {"scale": SCALE, "return_lse": True, **scene.scale_arguments(), **options}
    cu = jnp.asarray(np.cumsum([0, *q_lens]), jnp.int32)

    def call(cache, layer, tables, lengths, cu):
        return jaxkv.prefill_mla(*given, cache, tables, lengths, layer=layer, cu_q_lens=cu, **options)

    return jax.jit(call)(cache, layer, tables, lengths, cu)


def truth(scene, given, q_lens):
    """out and lse in float64."""
    q_nope, q_pe, w_uk, w_uv = (as_float64(x) for x in given)
    heads = len(w_uk)
    out, lse = np.zeros((len(q_nope), heads, w_uv.shape[1])), np.full((len(q_nope), heads), -np.inf)
    first = 0
    for request, (length, count) in enumerate(zip(scene.lengths, q_lens, strict=True)):
        rows, first = slice(first, first + count), first + count
        latents, rope = scene.parts(request)
        latents, rope = latents[:, 0], np.broadcast_to(rope, (length, heads, rope.shape[-1]))
        k = np.concatenate([np.einsum("sr,hnr->shn", latents, w_uk), rope], axis=-1)
        q = np.concatenate([q_nope[rows], q_pe[rows]], axis=-1)
        seen = oracle.seen_by_last(length, count)
        out[rows], lse[rows] = oracle.attention(q, k, np.einsum("sr,hvr->shv", latents, w_uv), SCALE, seen=seen)
    return out, lse


def check(scene, cache, given, q_lens, **options):
    """Compares with the truth, and returns the result."""
    out, lse = prefill(scene, cache, given, q_lens, **options)
    right_out, right_lse = truth(scene, given, q_lens)
    # Expanded keys and values are rounded to the dtype of the queries, like P and the result.
    roundings = 64 if out.dtype == jnp.float32 else 6
    assert (out.dtype, lse.dtype) == (given[0].dtype, jnp.float32)
    assert_close(out, right_out, roundings=roundings, magnitude=1, what="out")
    assert_close(lse, right_lse, dtype=out.dtype, roundings=roundings, magnitude=4, what="lse")
    return out, lse


OPTIONS = {"expanded_bytes": FEW_BYTES, "num_decodes": 4}


@cache
def of_packed_cache(entry):
    """out and lse, which are compared with those of every layout."""
    scene, given = scenes.scene(entry, lengths=LENGTHS), arguments(entry, sum(Q_LENS) + 5, entry.input_dtype)
    return prefill(scene, scene.twin(scenes.layouts(entry)["BLNHC"]), given, Q_LENS, layer=0, **OPTIONS)


@on_layouts(scenes.MLA_ENTRIES, few=True)
def test_equals_the_packed_cache_and_the_truth(entry, name):
    scene, layout = scenes.scene(entry, lengths=LENGTHS), scenes.layouts(entry)[name]
    given = arguments(entry, sum(Q_LENS) + 5, entry.input_dtype)
    found = check(scene, scene.cache(layout, 1), given, Q_LENS, **OPTIONS)
    for actual, expected in zip(found, of_packed_cache(entry), strict=True):
        assert_same_bits(actual, expected)


@each_value(("num_decodes", "expanded_bytes"), [0, 1, 4], [1, FEW_BYTES, 2**28])
def test_decoding_requests_and_chunks(num_decodes, expanded_bytes):
    """From no decoding request on, and from chunks of one token on."""
    scene = scenes.scene(ENTRY, lengths=LENGTHS)
    given = arguments(ENTRY, sum(Q_LENS), "float32")
    cache = scene.cache(scenes.layouts(ENTRY)["BLNHC"], 1)
    check(scene, cache, given, Q_LENS, num_decodes=num_decodes, expanded_bytes=expanded_bytes)


@pytest.mark.parametrize(
    ("q_lens", "num_decodes", "rows"),
    [
        ((1, 0, 64, 1, 63, 0, 65, 194), 0, 388),
        ((10, 3, 64, 5, 64, 2, 70, 200), 0, 420),  # more rows than tokens
        ((1,) * 8, 8, 8),
        ((1,) * 8, 8, 11),
        ((0,) * 8, 0, 3),
    ],
    ids=["whole prompts", "padding before tokens", "all decoding", "all decoding, padded", "only padding"],
)
def test_numbers_of_query_tokens(q_lens, num_decodes, rows):
    scene = scenes.scene(ENTRY, lengths=LENGTHS)
    cache = scene.cache(scenes.layouts(ENTRY)["LBNHC"], 1)
    check(scene, cache, arguments(ENTRY, rows, "float32"), q_lens, num_decodes=num_decodes)


def test_equals_aligned_batches():
    scene = scenes.scene(ENTRY, lengths=LENGTHS)
    cache = scene.cache(scenes.layouts(ENTRY)["BLNHC"], 1)
    q_nope, q_pe, *weights = arguments(ENTRY, 8 * 30, "float32")
    out, lse = prefill(scene, cache, [q_nope, q_pe, *weights], [30] * 8)
    q_nope, q_pe = (x.reshape(8, 30, *x.shape[1:]) for x in (q_nope, q_pe))
    index = jnp.asarray(scene.tables), jnp.asarray(scene.lengths, jnp.int32)
    options = {"layer": 1, "scale": SCALE, "return_lse": True}
    right, right_lse = jaxkv.prefill_mla(q_nope, q_pe, *weights, cache, *index, **options)
    assert_close(out, np.asarray(right.reshape(out.shape), np.float64), roundings=64, magnitude=1)
    assert_close(lse, np.asarray(right_lse.reshape(lse.shape), np.float64), roundings=64, magnitude=4)


def test_decoding_requests_have_the_bits_of_decode_mla():
    scene = scenes.scene(ENTRY, lengths=LENGTHS)
    cache = scene.cache(scenes.layouts(ENTRY)["BLNHC"], 1)
    q_nope, q_pe, w_uk, w_uv = given = arguments(ENTRY, sum(Q_LENS), "float32")
    index = jnp.asarray(scene.tables)[:4], jnp.asarray(scene.lengths[:4], jnp.int32)
    plan = jaxkv.plan_decode(cache, *index, num_heads=HEADS, dtype="float32")
    found, lse = prefill(scene, cache, given, Q_LENS, num_decodes=4, plan=plan)

    @jax.jit
    def alone(cache):
        highest = jax.lax.Precision.HIGHEST
        q_latent = jnp.einsum("bhn,hnr->bhr", q_nope[:4], w_uk, precision=highest)
        out, lse = jaxkv.decode_mla(q_latent, q_pe[:4], cache, *index, layer=1, scale=SCALE, return_lse=True)
        return jnp.einsum("bhr,hvr->bhv", out, w_uv, precision=highest), lse

    for actual, expected in zip((found[:4], lse[:4]), alone(cache), strict=True):
        assert_close(actual, np.asarray(expected, np.float64), roundings=8, magnitude=4)


def test_requests_and_padding_have_no_influence_on_others():
    scene = scenes.scene(ENTRY, lengths=LENGTHS)
    layout = scenes.layouts(ENTRY)["BLNHC"]
    q_nope, q_pe, *weights = arguments(ENTRY, sum(Q_LENS) + 5, "float32")
    right = prefill(scene, scene.cache(layout, 1), [q_nope, q_pe, *weights], Q_LENS)
    bad = scene.holding(np.nan, 6, 30)
    rows = np.r_[sum(Q_LENS[:6]) : sum(Q_LENS[:7])]
    given = [q_nope.at[-5:].set(jnp.nan), q_pe.at[-5:].set(jnp.inf), *weights]
    for found, expected in zip(prefill(bad, bad.cache(layout, 1), given, Q_LENS), right, strict=True):
        assert np.isnan(found[rows[30:]]).all()
        assert_same_bits(jnp.delete(found, rows[30:], axis=0), jnp.delete(expected, rows[30:], axis=0))


def test_unused_requests_may_hold_anything():
    scene = scenes.scene(ENTRY, lengths=LENGTHS)
    cache, given = scene.cache(scenes.layouts(ENTRY)["BLNHC"], 1), arguments(ENTRY, sum(Q_LENS) + 5, "float32")
    unused = with_unused_requests(scene)
    tables, lengths = jnp.asarray(unused.tables), jnp.asarray(unused.lengths, jnp.int32)

    @jax.jit
    def run(cu_q_lens):
        options = {"scale": SCALE, "layer": 1, "num_decodes": 4, "return_lse": True}
        return jaxkv.prefill_mla(*given, cache, tables, lengths, cu_q_lens=cu_q_lens, **options)

    sums = np.cumsum([0, *Q_LENS])
    right = run(jnp.asarray([*sums, sums[-1], sums[-1]]))
    assert_close(right[0], truth(scene, given, Q_LENS)[0], roundings=64, magnitude=1)
    for tail in UNUSED_SUMS:
        for x, expected in zip(run(jnp.asarray([*sums, *tail])), right, strict=True):
            assert_same_bits(x, expected)


def test_query_tokens_past_the_last_row_are_left_out():
    scene = scenes.scene(ENTRY, lengths=LENGTHS)
    cache, given = scene.cache(scenes.layouts(ENTRY)["BLNHC"], 1), arguments(ENTRY, sum(Q_LENS), "float32")
    rows = sum(Q_LENS) - 70 - 30  # none of the last request, and not the last 30 of the one before it
    few = [x[:rows] for x in given[:2]] + given[2:]
    for x, expected in zip(prefill(scene, cache, few, Q_LENS), truth(scene, given, Q_LENS), strict=True):
        assert_close(x, expected[:rows], roundings=64, magnitude=4)


@pytest.mark.gpu(missing=tuple(cudnn.unsupported_reasons(jnp.bfloat16, 192, 128)))
class TestCuDNN:
    """What Hopper runs: cuDNN, and the kernel of `decode_mla` for requests that are decoding."""

    @each_value(("num_decodes", "expanded_bytes"), [0, 4], [2**20, 2**28])
    @pytest.mark.parametrize("format", ["bf16", "fp8"])
    def test_calls(self, format, num_decodes, expanded_bytes):
        entry = jaxkv.MLAEntry(format)
        scene = scenes.scene(entry, lengths=LENGTHS)
        given = arguments(entry, sum(Q_LENS) + 5, "bfloat16", heads=16, nope=128, value=128)
        options = {"num_decodes": num_decodes, "expanded_bytes": expanded_bytes}
        check(scene, scene.cache(scenes.layouts(entry)["BLNHC"], 1), given, Q_LENS, **options)


@pytest.mark.parametrize(
    ("changes", "fragments"),
    [
        ({"num_decodes": 9}, ["`num_decodes` is 9", "8 requests"]),
        ({"num_decodes": -1}, ["`num_decodes` is -1", "0 or more"]),
        ({"num_decodes": True}, ["`num_decodes` is True"]),
        ({"cu_q_lens": None}, ["`q_nope`", "[B, Q"]),
        ({"cu_q_lens": jnp.zeros(8, jnp.int32)}, ["`cu_q_lens`", "9", "one more"]),
        ({"cu_q_lens": jnp.zeros(9)}, ["`cu_q_lens`", "float32"]),
        ({"plan": 3, "num_decodes": 4}, ["`plan` is a int", "DecodePlan"]),
        ({"plan": 3}, ["`plan`", "`num_decodes` is 0"]),
    ],
)
def test_misuse_is_reported(changes, fragments):
    scene = scenes.scene(ENTRY, lengths=LENGTHS)
    cache, given = scene.cache(scenes.layouts(ENTRY)["BLNHC"], 1), arguments(ENTRY, sum(Q_LENS), "float32")
    options = {"cu_q_lens": jnp.asarray(np.cumsum([0, *Q_LENS])), "layer": 1, "scale": SCALE, **changes}
    with pytest.raises(ValueError, match=".*".join(map(re.escape, fragments))):
        jaxkv.prefill_mla(*given, cache, jnp.asarray(scene.tables), jnp.asarray(scene.lengths), **options)


def test_aligned_batches_have_no_decoding_requests():
    scene = scenes.scene(ENTRY, lengths=(3,))
    q_nope, q_pe, *weights = arguments(ENTRY, 2, "float32")
    cache = scene.cache(scenes.layouts(ENTRY)["BLNHC"], 1)
    index = jnp.asarray(scene.tables), jnp.asarray(scene.lengths)
    with pytest.raises(ValueError, match="pass `cu_q_lens`"):
        jaxkv.prefill_mla(q_nope[None], q_pe[None], *weights, cache, *index, layer=1, scale=SCALE, num_decodes=1)


@pytest.mark.ci
def test_checked():
    scene = scenes.scene(ENTRY, lengths=(3, 9))
    given, cache = arguments(ENTRY, 7, "float32"), scene.cache(scenes.layouts(ENTRY)["BLNHC"], 1)
    tables, lengths = jnp.asarray(scene.tables), jnp.asarray(scene.lengths, jnp.int32)

    def call(cu):
        options = {"layer": 1, "scale": SCALE, "cu_q_lens": cu, "num_decodes": 1}
        return jaxkv.prefill_mla(*given, cache, tables, lengths, **options)

    cu = jnp.asarray([0, 1, 5])
    checked = jaxkv.checked(call)
    assert_same_bits(checked(cu), jax.jit(call)(cu))
    with pytest.raises(ValueError, match=r"`cu_q_lens`\[1\] is 2: each of the first 1 requests has one row"):
        checked(cu.at[1].set(2))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ([1, 1, 2], r"`cu_q_lens`\[0\] is 1: a running sum starts at 0"),
        ([0, 1, 0], r"`cu_q_lens`\[2\] is 0: a running sum never falls"),
        ([0, 1, 9], r"`cu_q_lens`\[2\] is 9: there are 7 query tokens"),
    ],
)
def test_running_sums_are_checked(wrong, message):
    def check(cu):
        _check_rows(cu, 7, 1)
        return cu

    with pytest.raises(ValueError, match=message):
        jaxkv.checked(check)(jnp.asarray(wrong))
