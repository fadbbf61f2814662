"""`prefill_mla`: it is absorbed attention with other sums, whatever the chunks, and its memory is bounded."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import dispatch
from jaxkv_kernels.calls import ExpandedHeads
from jaxkv_kernels.mosaic_gpu import cudnn
from jaxkv_kernels.mosaic_gpu import prefill as mosaic_prefill
from jaxkv_kernels.mosaic_gpu.prefill import LEAST_WITH_CUDNN, LEAST_WITH_KERNEL
from jaxkv_kernels.xla import entries, expanded
from jaxkv_kernels.xla.prefill import least_by_flops
from support import oracle, scenes
from support.arrays import as_float64
from support.available import assume_available
from support.cases import each_value, further, on_layouts
from support.compare import assert_close, assert_same_bits

HEADS, NOPE, VALUE, SCALE = 3, 24, 20, 0.17
LENGTHS = (0, 1, 63, 64, 65, 194)
FEW_BYTES = len(LENGTHS) * HEADS * (NOPE + 16 + VALUE) * 4 * 37
"""Of the expanded keys and values of 37 tokens of each request in float32."""
ENTRY = jaxkv.MLAEntry("f32", latent=128, rope=16)


@cache
def arguments(entry, tokens, dtype, requests=6):
    """q_nope, q_pe, w_uk and w_uv."""
    rng = np.random.default_rng(5)
    latent, rope = entry.sizes
    shapes = (
        (requests, tokens, HEADS, NOPE),
        (requests, tokens, HEADS, rope),
        (HEADS, NOPE, latent),
        (HEADS, VALUE, latent),
    )
    deviations = 1, 1, latent**-0.5, latent**-0.5
    return [
        jnp.asarray(deviation * rng.standard_normal(shape), dtype)
        for shape, deviation in zip(shapes, deviations, strict=True)
    ]


def program(scene, given, **options):
    """A compiled function of a cache and a layer that returns out and lse."""
    requests = jnp.asarray(scene.tables), jnp.asarray(scene.lengths, jnp.int32)
    options = {"scale": SCALE, "return_lse": True, **scene.scale_arguments(), **options}
    return jax.jit(lambda cache, layer: jaxkv.prefill_mla(*given, cache, *requests, layer=layer, **options))


def prefill(scene, cache, given, layer, **options):
    """out and lse."""
    return program(scene, given, **options)(cache, layer)


def truth(scene, given):
    """out and lse in float64."""
    q_nope, q_pe, w_uk, w_uv = (as_float64(x) for x in given)
    found = []
    for request, length in enumerate(scene.lengths):
        latents, rope = scene.parts(request)
        latents, rope = latents[:, 0], np.broadcast_to(rope, (length, HEADS, rope.shape[-1]))
        k = np.concatenate([np.einsum("sr,hnr->shn", latents, w_uk), rope], axis=-1)
        q = np.concatenate([q_nope[request], q_pe[request]], axis=-1)
        seen = oracle.seen_by_last(length, len(q))
        found.append(oracle.attention(q, k, np.einsum("sr,hvr->shv", latents, w_uv), SCALE, seen=seen))
    return tuple(np.stack(x) for x in zip(*found, strict=True))


def check(scene, cache, given, **options):
    """Compares with the truth, and returns the result."""
    out, lse = prefill(scene, cache, given, 1, **options)
    right_out, right_lse = truth(scene, given)
    # Expanded keys and values are rounded to the dtype of the queries, like P and the result.
    roundings = 64 if out.dtype == jnp.float32 else 6
    assert out.dtype == given[0].dtype
    assert lse.dtype == jnp.float32
    assert_close(out, right_out, roundings=roundings, magnitude=1, what="out")
    assert_close(lse, right_lse, dtype=out.dtype, roundings=roundings, magnitude=4, what="lse")
    return out, lse


@cache
def of_packed_cache(entry):
    """out and lse, which are compared with those of every layout."""
    scene = scenes.scene(entry, lengths=LENGTHS)
    twin = scene.twin(scenes.layouts(entry)["BLNHC"])
    return prefill(scene, twin, arguments(entry, 70, entry.input_dtype), 0, expanded_bytes=FEW_BYTES)


@on_layouts(scenes.MLA_ENTRIES, few=True)
def test_equals_the_packed_cache_and_the_truth(entry, name):
    scene, layout = scenes.scene(entry, lengths=LENGTHS), scenes.layouts(entry)[name]
    found = check(scene, scene.cache(layout, 1), arguments(entry, 70, entry.input_dtype), expanded_bytes=FEW_BYTES)
    for actual, expected in zip(found, of_packed_cache(entry), strict=True):
        assert_same_bits(actual, expected)


@each_value(("tokens", "expanded_bytes"), [64, 1, 5, 200, 385], [1, FEW_BYTES, 2**28], default=3)
def test_query_tokens_and_chunks(tokens, expanded_bytes):
    """From one query token to more than the capacity of the tables, and from chunks of one token on."""
    scene = scenes.scene(ENTRY, lengths=LENGTHS)
    check(
        scene,
        scene.cache(scenes.layouts(ENTRY)["BLNHC"], 1),
        arguments(ENTRY, tokens, "float32"),
        expanded_bytes=expanded_bytes,
    )


@pytest.mark.parametrize("length", [1, 70, 71, 193])
def test_one_request(length):
    scene = scenes.scene(ENTRY, lengths=(length,))
    check(scene, scene.cache(scenes.layouts(ENTRY)["LBNHC"], 1), arguments(ENTRY, 70, "float32", 1))


@pytest.mark.parametrize("block_size", [1, 3, 61])
def test_odd_block_sizes(block_size):
    scene = scenes.scene(ENTRY, lengths=(0, 1, 3, 7), block_size=block_size, num_blocks=32)
    layout = scenes.layouts(ENTRY, block_size=block_size, num_blocks=32)["packed, uint8"]
    check(scene, scene.cache(layout, 1), arguments(ENTRY, 4, "float32", 4), expanded_bytes=FEW_BYTES)


def test_is_absorbed_attention_with_other_sums():
    scene = scenes.scene(ENTRY, lengths=LENGTHS)
    cache = scene.cache(scenes.layouts(ENTRY)["BLNHC"], 1)
    q_nope, q_pe, w_uk, w_uv = given = arguments(ENTRY, 70, "float32")
    product = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
    requests = jnp.asarray(scene.tables), jnp.asarray(scene.lengths, jnp.int32)
    q_latent = product("bqhn,hnr->bqhr", q_nope, w_uk)
    out, lse = jaxkv.decode_mla(q_latent, q_pe, cache, *requests, layer=1, scale=SCALE, return_lse=True)
    found, found_lse = prefill(scene, cache, given, 1)
    assert_close(found, product("bqhr,hvr->bqhv", out, w_uv), roundings=64, magnitude=1)
    assert_close(found_lse, lse, roundings=64, magnitude=4)


@pytest.mark.ci
@pytest.mark.parametrize("form", ["f32", "fp8", "fp8_ds_mla"])
def test_in_chunks_as_at_once(form):
    """A prompt that is prefilled in chunks sees the same entries, also those that are rounded by their format."""
    entry = jaxkv.MLAEntry(form, latent=128, rope=16)
    scene = scenes.scene(entry, lengths=(190, 150, 64))
    cache = scene.cache(scenes.layouts(entry)["BLNHC"], 1)
    *queries, w_uk, w_uv = arguments(entry, 190, "float32", 3)
    lengths, options = np.asarray(scene.lengths, np.int32), {"layer": 1, "scale": SCALE, **scene.scale_arguments()}
    whole = jaxkv.prefill_mla(*queries, w_uk, w_uv, cache, scene.tables, lengths, **options)
    for first in (0, 63, 126):
        last = min(first + 63, 190)
        chunk = [x[:, first:last] for x in queries]
        ends = np.maximum(lengths - (190 - last), 0)
        part = jaxkv.prefill_mla(*chunk, w_uk, w_uv, cache, scene.tables, ends, **options)
        assert_close(part, whole[:, first:last], roundings=64, magnitude=1)


def test_a_token_has_no_influence_on_those_before_it():
    scene = scenes.scene(ENTRY, lengths=(150, 90))
    layout, run = scenes.layouts(ENTRY)["BLNHC"], program(scene, arguments(ENTRY, 70, "float32", 2))
    expected = run(scene.cache(layout, 1), 1)
    for position in (120, 30):  # among the last 70 tokens, and before them
        bad = scene.holding(np.nan, 0, position)
        for found, right in zip(run(bad.cache(layout, 1), 1), expected, strict=True):
            first = max(position - 80, 0)
            assert np.isnan(found[0, first:]).all()
            assert_same_bits(found[0, :first], right[0, :first])
            assert_same_bits(found[1], right[1])


def temporary_bytes(tokens, columns, **options) -> int:
    """Temporary memory of a call that is compiled for one request with DeepSeek-V2-Lite's sizes."""
    layout = jaxkv.CacheLayout(num_layers=2, num_blocks=columns, block_size=64, entry=jaxkv.MLAEntry("f32"))
    shapes = (1, tokens, 16, 128), (1, tokens, 16, 64), (16, 128, 512), (16, 128, 512), (layout.size,)
    given = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    given += [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((1, columns), (1,))]

    def call(q_nope, q_pe, w_uk, w_uv, buffer, tables, lengths):
        cache = jaxkv.KVCache(buffer, layout)
        return jaxkv.prefill_mla(q_nope, q_pe, w_uk, w_uv, cache, tables, lengths, layer=1, scale=0.1, **options)

    return jax.jit(call).lower(*given).compile().memory_analysis().temp_size_in_bytes


def test_temporary_memory_is_bounded():
    """By `expanded_bytes` and the queries, not by the capacity of the tables."""
    token = 16 * 320 * 4
    few, many = (temporary_bytes(256, columns, expanded_bytes=512 * token) for columns in (68, 1028))
    assert many - few < 2**16
    more = temporary_bytes(256, 1028, expanded_bytes=4096 * token)
    # Of the additional tokens: keys and values, the products that they are made of, and a copy without those that no
    # query sees.
    assert 3584 * token < more - many < 4 * 3584 * token


@pytest.mark.parametrize(
    ("sizes", "least"), [((512, 128, 128), 171), ((512, 192, 256), 399), ((128, 16, 12), 16), ((64, 64, 64), None)]
)
def test_expansion_pays_from_a_number_of_query_tokens_on(sizes, least):
    latent, nope, value = sizes
    flops_absorbed, flops_expanded = 2 * (2 * latent), 2 * (nope + value)  # those of the rotary part are the same
    assert least_by_flops(ExpandedHeads(jnp.float32, latent, 0, nope, value)) == least
    for tokens in range(1, 2000):
        pays = tokens * flops_absorbed > tokens * flops_expanded + 2 * latent * (nope + value)
        assert pays == (least is not None and tokens >= least)


def test_on_a_gpu_expansion_needs_cudnn(monkeypatch):
    def least(value=128, implementation=None):
        return dispatch.least_prefill(ExpandedHeads(jnp.bfloat16, 512, 64, 128, value), implementation)

    if jax.default_backend() != "gpu":
        assert least() == 171
    assume_available(monkeypatch, "mosaic_gpu")
    monkeypatch.setattr(cudnn, "unsupported_reasons", lambda dtype, key, value: iter(["older"]))
    assert least() is None
    assert least(implementation="xla") == 171
    monkeypatch.setattr(cudnn, "unsupported_reasons", lambda dtype, key, value: iter([]))
    # The kernel needs a Hopper GPU.
    monkeypatch.setattr(mosaic_prefill, "unavailable_reasons", lambda capabilities: ["needs another GPU"])
    assert least() == LEAST_WITH_CUDNN
    monkeypatch.setattr(mosaic_prefill, "unavailable_reasons", lambda capabilities: [])
    assert least() == LEAST_WITH_KERNEL
    # Attention to other heads has no kernel of ours.
    assert least(value=64) == LEAST_WITH_CUDNN


class TestCudnn:
    """The calls of cuDNN, as far as a CPU can show."""

    @pytest.fixture(autouse=True)
    def supported(self, monkeypatch):
        monkeypatch.setattr(cudnn, "unavailable_reasons", lambda capabilities: [])
        monkeypatch.setattr(cudnn._library(), "check_cudnn_version", lambda: cudnn.LEAST_VERSION)
        monkeypatch.setattr(cudnn._library(), "check_compute_capability", lambda capability: True)

    @pytest.mark.parametrize(
        ("dtype", "key", "value", "fragment"),
        [
            ("float32", 192, 128, "float32"),
            ("bfloat16", 320, 128, "320"),
            ("bfloat16", 192, 100, "100"),
            ("bfloat16", 192, 128, None),
            ("float16", 128, 64, None),
        ],
    )
    def test_what_is_supported(self, dtype, key, value, fragment):
        reasons = [*cudnn.unsupported_reasons(jnp.dtype(dtype), key, value)]
        assert [fragment] * len(reasons) == [fragment for reason in reasons if fragment in reason]
        assert len(reasons) == (fragment is not None)

    def test_older_libraries_are_not_supported(self, monkeypatch):
        monkeypatch.setattr(cudnn._library(), "check_cudnn_version", lambda: 90900)
        assert [*cudnn.unsupported_reasons(jnp.bfloat16, 192, 128)] == ["cuDNN 90900: expected 91000 or later"]

    @pytest.mark.parametrize(
        ("options", "cudnn_calls", "kernels"),
        [
            # The kernels are that of earlier tokens, and those that gather the new ones and the earlier ones.
            ({}, 1, 3),
            ({"implementation": "xla"}, 0, 0),
            ({"implementation": ("xla",)}, 0, 0),
            further({"window": 100}, 1, 3),
            further({"logit_cap": 30.0}, 0, 3),
            # Without a causal mask, there are no new tokens.
            further({"causal": False}, 0, 2),
            further({"causal": False, "window": (50, 3), "logit_cap": 30.0}, 0, 2),
            further({"logit_cap": 65.0}, 0, 2),  # too large for the kernel
        ],
    )
    def test_lowers_for_cuda(self, options, cudnn_calls, kernels, monkeypatch):
        assume_available(monkeypatch, "mosaic_gpu")  # as on a Hopper GPU
        monkeypatch.setattr(mosaic_prefill, "unavailable_reasons", lambda capabilities: [])
        layout = jaxkv.CacheLayout(num_layers=2, num_blocks=8, block_size=64, entry=jaxkv.MLAEntry("bf16"))
        shapes = (2, 65, 4, 128), (2, 65, 4, 64), (4, 128, 512), (4, 128, 512), (layout.size,)
        given = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
        given += [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((2, 4), (2,))]

        def call(q_nope, q_pe, w_uk, w_uv, buffer, *requests):
            cache = jaxkv.KVCache(buffer, layout)
            return jaxkv.prefill_mla(q_nope, q_pe, w_uk, w_uv, cache, *requests, layer=1, scale=0.1, **options)

        text = jax.jit(call).trace(*given).lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("@__cudnn$fmhaSoftmax(") == cudnn_calls
        assert text.count("custom_call @mosaic_gpu") == kernels

    def test_results_without_keys_are_replaced(self, monkeypatch):
        def attention(
            q, k, v, *, q_seqlen=None, kv_seqlen=None, scale, mask_type, sliding_window_length=None, return_residual
        ):
            """What cuDNN computes, and NaN where its results are not specified."""
            assert return_residual
            assert sliding_window_length is None
            causal = {"PADDING": False, "CAUSAL": True}[mask_type.name]
            if causal:
                assert q_seqlen is kv_seqlen is None
                q_seqlen = kv_seqlen = jnp.full(len(q), q.shape[1], jnp.int32)
            out, lse = expanded.attention(q, k, v, q_seqlen, kv_seqlen, scale=scale, ahead=0 if causal else None)
            seen = jnp.isfinite(lse)
            return jnp.where(seen[..., None], out, jnp.nan), jnp.swapaxes(jnp.where(seen, lse, jnp.nan), 1, 2)

        monkeypatch.setattr(cudnn._library(), "dot_product_attention", attention)
        as_on_hopper(monkeypatch)
        entry = jaxkv.MLAEntry("bf16", latent=128, rope=8)
        scene = scenes.scene(entry, lengths=LENGTHS)
        *given, w_uv = arguments(entry, 70, "bfloat16")
        check(scene, scene.cache(scenes.layouts(entry)["BLNHC"], 1), [*given, w_uv[:, :16]], expanded_bytes=FEW_BYTES)


def as_on_hopper(monkeypatch):
    """Calls run on `mosaic_gpu`, except that XLA reads the cache."""
    assume_available(monkeypatch, "mosaic_gpu")
    monkeypatch.setattr(mosaic_prefill.entries, "gather", entries.gather_mla)


def test_rotary_keys_in_an_array_of_their_own(monkeypatch):
    """What the kernel for keys whose rotary part is shared is given, and what becomes of its splits."""
    calls = []

    def attend(q, k_nope, k_pe, v, kv_lens, *, scale, logit_cap):
        """What `attend_expanded` returns, in two splits."""
        assert k_nope.shape[1] % mosaic_prefill.TILE_ROWS == 0
        assert logit_cap is None
        calls.append(q.shape)
        k_pe = jnp.broadcast_to(k_pe[:, :, None], (*k_nope.shape[:3], k_pe.shape[-1]))
        k, first = jnp.concatenate([k_nope, k_pe], axis=-1), 72
        q_lens = jnp.full(len(q), q.shape[1])
        lengths = jnp.minimum(kv_lens, first), jnp.maximum(kv_lens - first, 0)
        halves = zip((slice(first), slice(first, None)), lengths, strict=True)
        parts = [
            expanded.attention(q, k[:, own], v[:, own], q_lens, length, scale=scale, ahead=None)
            for own, length in halves
        ]
        return tuple(map(jnp.stack, zip(*parts, strict=True)))

    monkeypatch.setattr(cudnn, "unsupported_reasons", lambda *args: iter([]))
    monkeypatch.setattr(mosaic_prefill, "CUDNN", mosaic_prefill.CUDNN._replace(attention=expanded.attention))
    monkeypatch.setattr(mosaic_prefill, "unsupported_reasons", lambda *args: iter([]))
    monkeypatch.setattr(mosaic_prefill, "attend_expanded", attend)
    as_on_hopper(monkeypatch)
    scene = scenes.scene(ENTRY, lengths=LENGTHS)
    check(scene, scene.cache(scenes.layouts(ENTRY)["BLNHC"], 1), arguments(ENTRY, 70, "float32"))
    assert calls == [(len(LENGTHS), 70, HEADS, NOPE + 16)]


@pytest.mark.parametrize("block", [-1, 2**31 - 1])
def test_tokens_of_a_block_outside_the_cache_have_entries_of_zeros(block):
    scene = scenes.scene(ENTRY, lengths=(194,))
    cache, given = scene.cache(scenes.layouts(ENTRY)["BLNHC"], 1), arguments(ENTRY, 70, "float32", 1)
    size, tables, lengths = cache.layout.block_size, jnp.asarray(scene.tables), jnp.asarray([194])
    slots, zeros = tables[0, 1] * size + jnp.arange(size), [jnp.zeros((size, n)) for n in ENTRY.sizes]
    cleared = jaxkv.write_mla(cache, *zeros, slots, layer=1)
    right = jaxkv.prefill_mla(*given, cleared, tables, lengths, layer=1, scale=SCALE)
    found = jaxkv.prefill_mla(*given, cache, tables.at[0, 1].set(block), lengths, layer=1, scale=SCALE)
    assert_same_bits(found, right)
    assert (found != jaxkv.prefill_mla(*given, cache, tables, lengths, layer=1, scale=SCALE)).any()


@pytest.mark.ci
def test_checked():
    scene = scenes.scene(ENTRY, lengths=(150, 90))
    given, layout = arguments(ENTRY, 70, "float32", 2), scenes.layouts(ENTRY)["BLNHC"]

    def call(cache, lengths):
        return jaxkv.prefill_mla(*given, cache, jnp.asarray(scene.tables), lengths, layer=1, scale=SCALE)

    good = scene.cache(layout, 1)
    assert_same_bits(jaxkv.checked(call)(good, jnp.asarray([150, 90])), jax.jit(call)(good, jnp.asarray([150, 90])))
    with pytest.raises(ValueError, match=r"`seq_lens`\[1\] is 999"):
        jaxkv.checked(call)(good, jnp.asarray([150, 999]))
    with pytest.raises(ValueError, match="holds NaN and is attended to"):
        jaxkv.checked(call)(scene.holding(np.nan, 0, 3).cache(layout, 1), jnp.asarray([150, 90]))
