"""Prefill with windows of one or both sides, without a causal mask, with logit caps and sinks; aligned and ragged."""

import itertools
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv_kernels.mosaic_gpu import cudnn
from support import oracle, scenes
from support.arrays import as_float64
from support.cases import each_value, further, slow
from support.compare import assert_close, assert_same_bits
from support.suites.base import UNUSED_SUMS, with_unused_requests

SCALE, LAYER = 0.2, 1
LENGTHS = (7, 0, 64, 1, 63, 65, 194)
Q_LENS = (1, 2, 5, 3, 63, 0, 70)
"""Of ragged batches: some requests have more query tokens than tokens, and one has none."""
TOKENS = 70
"""Of other batches."""
MASKS = (
    ((20, 3), False), (None, False), (50, True), ((-1, 2), False), ((30, -1), False), (1, True), ((0, 0), False),
    ((127, 5), True), (None, True), ((2**40, 65), False),
)  # fmt: skip
"""Values of `window` and `causal`."""
OPTIONS = "cap and sinks", "sinks", "cap"
CHUNKS = 9, 1, 37, 64, 2**20
"""Tokens per chunk, of each request or of all."""
EXTRA = 3
"""Rows of ragged batches that belong to no request."""

Q = sum(Q_LENS)
SUMS = np.cumsum([0, *Q_LENS])


class Latents:
    """`prefill_mla`."""

    entry, heads, nope, value = jaxkv.MLAEntry("f32", latent=128, rope=16), 3, 24, 20
    bytes_per_token = heads * (24 + 16 + 20) * 4

    @classmethod
    @cache
    def arguments(cls, *rows):
        """Queries, then weights."""
        rng, (latent, rope) = np.random.default_rng(5), cls.entry.sizes
        shapes = [(*rows, cls.heads, n) for n in (cls.nope, rope)]
        shapes += [(cls.heads, n, latent) for n in (cls.nope, cls.value)]
        deviations = 1, 1, latent**-0.5, latent**-0.5
        return [
            jnp.asarray(deviation * rng.standard_normal(shape), cls.entry.dtype)
            for shape, deviation in zip(shapes, deviations, strict=True)
        ]

    @staticmethod
    def call(arguments, *args, chunk_bytes, **options):
        return jaxkv.prefill_mla(*arguments, *args, expanded_bytes=chunk_bytes, **options)

    @classmethod
    def expanded(cls, scene, request, arguments, rows):
        """Queries, keys and values per head in float64."""
        q_nope, q_pe, w_uk, w_uv = (as_float64(x) for x in arguments)
        latents, rope = scene.parts(request)
        latents, rope = latents[:, 0], np.broadcast_to(rope, (len(latents), cls.heads, rope.shape[-1]))
        k = np.concatenate([np.einsum("sr,hnr->shn", latents, w_uk), rope], axis=-1)
        q = np.concatenate([q_nope[rows], q_pe[rows]], axis=-1)
        return q, k, np.einsum("sr,hvr->shv", latents, w_uv)


class KeysAndValues:
    """`prefill_kv`."""

    entry, heads = jaxkv.KVEntry("f32", head_dim=16, value_dim=8), 6
    bytes_per_token = 2 * (16 + 8) * 4

    @classmethod
    @cache
    def arguments(cls, *rows):
        """Queries."""
        shape = *rows, cls.heads, cls.entry.head_dim
        return [jnp.asarray(np.random.default_rng(5).standard_normal(shape), cls.entry.dtype)]

    @staticmethod
    def call(arguments, *args, chunk_bytes, **options):
        return jaxkv.prefill_kv(*arguments, *args, gathered_bytes=chunk_bytes, **options)

    @classmethod
    def expanded(cls, scene, request, arguments, rows):
        """Queries, keys and values in float64."""
        return as_float64(arguments[0])[rows], *scene.parts(request)


OPERATIONS = (Latents, KeysAndValues)


def options_of(name, operation):
    """The keyword arguments of a case of `OPTIONS`."""
    cap, sinks = "cap" in name, "sinks" in name
    return {
        "logit_cap": 2.0 if cap else None,
        "sinks": np.linspace(-3, 3, operation.heads, dtype=np.float32) if sinks else None,
    }


def scene_of(operation, lengths=LENGTHS):
    heads = 1 if operation.entry.one_head else 2
    scene = scenes.scene(operation.entry, num_heads=heads, lengths=lengths)
    return scene, scenes.layouts(operation.entry, num_heads=heads)["BLNHC"]


def prefill(operation, scene, cache, arguments, **options):
    """out and lse, by a compiled program."""
    tables, lengths = jnp.asarray(scene.tables), jnp.asarray(scene.lengths, jnp.int32)
    options = {"layer": LAYER, "scale": SCALE, "return_lse": True, **options}
    return jax.jit(lambda arguments, cache: operation.call(arguments, cache, tables, lengths, **options))(
        arguments, cache
    )


def truth(operation, scene, arguments, rows, window, causal, logit_cap, sinks):
    """out and lse of each request's `rows` in float64."""
    for request, (own, length) in enumerate(zip(rows, scene.lengths, strict=True)):
        q, k, v = operation.expanded(scene, request, arguments, own)
        seen = oracle.seen_by_last(length, len(q), window, causal=causal)
        yield oracle.attention(q, k, v, SCALE, seen=seen, logit_cap=logit_cap, sinks=sinks)


def check(found, right):
    dtype = str(found[0].dtype)
    for x, expected, magnitude in zip(found, right, (1, 4), strict=True):
        # Keys and values are rounded to the dtype of the queries, like P and the result.
        assert_close(x, expected, dtype=dtype, roundings=64 if dtype == "float32" else 6, magnitude=magnitude)


@each_value(("operation", "mask", "options", "chunk"), OPERATIONS, MASKS, OPTIONS, CHUNKS, default=2)
def test_aligned(operation, mask, options, chunk):
    scene, layout = scene_of(operation)
    arguments, (window, causal) = operation.arguments(len(LENGTHS), TOKENS), mask
    masks = {"window": window, "causal": causal, **options_of(options, operation)}
    chunk_bytes = chunk * len(LENGTHS) * operation.bytes_per_token
    found = prefill(operation, scene, scene.cache(layout, LAYER), arguments, chunk_bytes=chunk_bytes, **masks)
    rows = [(request,) for request in range(len(LENGTHS))]
    check(found, map(np.stack, zip(*truth(operation, scene, arguments, rows, **masks), strict=True)))


@each_value(("operation", "mask", "options", "chunk"), OPERATIONS[::-1], MASKS, OPTIONS, CHUNKS, default=2)
def test_ragged(operation, mask, options, chunk):
    scene, layout = scene_of(operation)
    arguments, (window, causal) = operation.arguments(Q + EXTRA), mask
    masks = {"window": window, "causal": causal, **options_of(options, operation)}
    chunk_bytes, sums = chunk * operation.bytes_per_token * 5, jnp.asarray(SUMS)
    if chunk == 1 and operation.entry.one_head:  # the first request is decoding, by `decode_mla`
        masks["num_decodes"] = 1
    cache = scene.cache(layout, LAYER)
    found = prefill(operation, scene, cache, arguments, chunk_bytes=chunk_bytes, cu_q_lens=sums, **masks)
    masks.pop("num_decodes", None)
    rows = [slice(a, b) for a, b in itertools.pairwise(SUMS)]
    right = zip(*truth(operation, scene, arguments, rows, **masks), strict=True)
    check([x[:Q] for x in found], map(np.concatenate, right))
    assert not np.asarray(found[0][Q:]).any()
    assert (np.asarray(found[1][Q:]) == -np.inf).all()


class LatentsOfModels(Latents):
    """In the sizes of jaxkv's kernel."""

    entry, heads, nope, value = jaxkv.MLAEntry("bf16"), 4, 128, 128
    bytes_per_token = heads * (128 + 64 + 128) * 2


class KeysAndValuesOfModels(KeysAndValues):
    """In sizes that cuDNN supports."""

    entry, heads = jaxkv.KVEntry("bf16", head_dim=128), 8
    bytes_per_token = 2 * 256 * 2


@pytest.mark.gpu(missing=tuple(cudnn.unsupported_reasons(jnp.bfloat16, 192, 128)))
@pytest.mark.parametrize("operation", [LatentsOfModels, KeysAndValuesOfModels])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("mask", MASKS)
class TestHopper:
    """What Hopper runs: cuDNN, jaxkv's kernel, and XLA for the rest."""

    def test_aligned(self, operation, mask, options):
        test_aligned(operation, mask, options, 37)

    def test_ragged(self, operation, mask, options):
        test_ragged(operation, mask, options, 37)


@pytest.mark.parametrize(
    ("operation", "mask"),
    [
        slow(Latents, (None, True)),
        slow(Latents, (None, False)),
        slow(Latents, ((20, 3), False)),
        further(KeysAndValues, (None, True)),
        slow(KeysAndValues, (None, False)),
        further(KeysAndValues, ((20, 3), False)),
    ],
)
def test_query_tokens_past_the_last_row_are_left_out(operation, mask):
    scene, layout = scene_of(operation)
    arguments, rows, (window, causal) = operation.arguments(Q), Q - 30, mask
    masks = {"window": window, "causal": causal, "logit_cap": None, "sinks": None}
    few = [x[:rows] if len(x) == Q else x for x in arguments]
    cache, options = scene.cache(layout, LAYER), {"chunk_bytes": 2**16, "cu_q_lens": jnp.asarray(SUMS)}
    found = prefill(operation, scene, cache, few, **options, **masks)
    own = [slice(a, b) for a, b in itertools.pairwise(SUMS)]
    right = map(np.concatenate, zip(*truth(operation, scene, arguments, own, **masks), strict=True))
    check(found, [x[:rows] for x in right])


@pytest.mark.ci
def test_unused_requests_may_hold_anything():
    scene, layout = scene_of(KeysAndValues)
    cache, unused, arguments = scene.cache(layout, LAYER), with_unused_requests(scene), KeysAndValues.arguments(Q)
    tables, lengths = jnp.asarray(unused.tables), jnp.asarray(unused.lengths, jnp.int32)

    @jax.jit
    def run(cu_q_lens):
        options = {"scale": SCALE, "layer": LAYER, "window": (20, 3), "causal": False, "return_lse": True}
        return jaxkv.prefill_kv(*arguments, cache, tables, lengths, cu_q_lens=cu_q_lens, **options)

    right = run(jnp.asarray([*SUMS, SUMS[-1], SUMS[-1]]))
    for tail in UNUSED_SUMS:
        for x, expected in zip(run(jnp.asarray([*SUMS, *tail])), right, strict=True):
            assert_same_bits(x, expected)


@pytest.mark.parametrize(
    ("operation", "ragged"),
    [further(Latents, False), slow(Latents, True), slow(KeysAndValues, False), further(KeysAndValues, True)],
)
def test_tokens_outside_the_windows_do_not_matter(operation, ragged):
    """The last 9 of 150 tokens see tokens 121 to 149 of their own request: neither those before, nor other ones."""
    scene, layout = scene_of(operation, (150, 90))
    options = {"window": (20, 1), "causal": False, "chunk_bytes": 7 * 2 * operation.bytes_per_token}
    arguments = operation.arguments(*((18,) if ragged else (2, 9)))
    if ragged:
        options["cu_q_lens"] = jnp.asarray([0, 9, 18])
    bad = scene.holding(np.nan, 0, 120).holding(np.nan, 0, 3).holding(np.nan, 1, 60)
    right = prefill(operation, scene, scene.cache(layout, LAYER), arguments, **options)
    for x, expected in zip(prefill(operation, bad, bad.cache(layout, LAYER), arguments, **options), right, strict=True):
        assert_same_bits(x, expected)
    bad = scene.holding(np.nan, 0, 146)  # which only tokens 145 to 149 see
    found, _ = prefill(operation, bad, bad.cache(layout, LAYER), arguments, **options)
    found, expected = (np.reshape(x, (18, -1)) for x in (found, right[0]))
    assert np.isnan(found[4:9]).all()
    assert_same_bits(np.delete(found, np.s_[4:9], axis=0), np.delete(expected, np.s_[4:9], axis=0))


@pytest.mark.slow
def test_decoding_requests_have_a_plan_with_the_window():
    scene, layout = scene_of(Latents)
    cache, arguments = scene.cache(layout, LAYER), Latents.arguments(Q)
    tables, lengths = jnp.asarray(scene.tables), jnp.asarray(scene.lengths, jnp.int32)
    plan = jaxkv.plan_decode(cache, tables[:1], lengths[:1], num_heads=3, window=5, dtype="float32")
    options = {"cu_q_lens": jnp.asarray(SUMS), "num_decodes": 1, "window": 5, "chunk_bytes": 2**20}
    planned = prefill(Latents, scene, cache, arguments, plan=plan, **options)
    for x, expected in zip(planned, prefill(Latents, scene, cache, arguments, **options), strict=True):
        assert_same_bits(x, expected)
    with pytest.raises(ValueError, match=r"`plan` was made for .*window=5"):
        prefill(Latents, scene, cache, arguments, plan=plan, **{**options, "window": 6})


@pytest.mark.ci
def test_checked():
    scene, layout = scene_of(KeysAndValues, (150, 90))
    tables, lengths = jnp.asarray(scene.tables), jnp.asarray(scene.lengths, jnp.int32)
    arguments, good = KeysAndValues.arguments(18), scene.cache(layout, LAYER)

    @jaxkv.checked
    def call(cache, sums):
        options = {"window": (20, 1), "causal": False, "cu_q_lens": sums, "scale": SCALE}
        return jaxkv.prefill_kv(*arguments, cache, tables, lengths, layer=LAYER, **options)

    sums = jnp.asarray([0, 9, 18])
    call(good, sums)
    call(scene.holding(np.nan, 0, 120).cache(layout, LAYER), sums)  # no window includes the token
    with pytest.raises(ValueError, match="holds NaN and is attended to"):
        call(scene.holding(np.nan, 0, 121).cache(layout, LAYER), sums)
    with pytest.raises(ValueError, match=r"`cu_q_lens`\[2\] is 19: there are 18 query tokens"):
        call(good, sums.at[2].set(19))
