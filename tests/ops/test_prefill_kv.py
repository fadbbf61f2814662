"""`prefill_kv`: it is the attention of `decode_kv`, whatever the chunks, windows and heads, in bounded memory."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv_kernels.mosaic_gpu import cudnn
from jaxkv_kernels.xla import expanded
from support import oracle, scenes
from support.arrays import as_float64
from support.available import assume_available
from support.cases import each_value, further, on_layouts
from support.compare import assert_close, assert_same_bits

SCALE, HEADS, QUERY_HEADS = 0.3, 2, 6
LENGTHS = (0, 1, 63, 64, 65, 194)
ENTRY = jaxkv.KVEntry("f32", head_dim=16, value_dim=8)
FEW_BYTES = len(LENGTHS) * HEADS * (16 + 8) * 4 * 37
"""Of the keys and values of 37 tokens of each request in float32."""


@cache
def queries(entry, tokens, dtype, requests=6, heads=QUERY_HEADS):
    shape = requests, tokens, heads, entry.head_dim
    return jnp.asarray(np.random.default_rng(5).standard_normal(shape), dtype)


def program(scene, **options):
    """A compiled function of queries, a cache and a layer that returns out and lse."""
    requests = jnp.asarray(scene.tables), jnp.asarray(scene.lengths, jnp.int32)
    options = {"scale": SCALE, "return_lse": True, **scene.scale_arguments(), **options}
    return jax.jit(lambda q, cache, layer: jaxkv.prefill_kv(q, cache, *requests, layer=layer, **options))


def prefill(scene, cache, q, layer, **options):
    """out and lse."""
    return program(scene, **options)(q, cache, layer)


def check(scene, cache, q, *, window=None, sinks=None, **options):
    """Compares with the truth in float64, and returns the result."""
    out, lse = prefill(scene, cache, q, 1, window=window, sinks=sinks, **options)
    wide, found = as_float64(q), []
    for request, length in enumerate(scene.lengths):
        seen = oracle.seen_by_last(length, q.shape[1], window)
        found.append(oracle.attention(wide[request], *scene.parts(request), SCALE, seen=seen, sinks=sinks))
    right_out, right_lse = (np.stack(x) for x in zip(*found, strict=True))
    # Keys and values are rounded to the dtype of the queries, like P and the result.
    roundings = 64 if out.dtype == jnp.float32 else 6
    assert (out.dtype, lse.dtype) == (q.dtype, jnp.float32)
    assert_close(out, right_out, roundings=roundings, magnitude=1, what="out")
    assert_close(lse, right_lse, dtype=out.dtype, roundings=roundings, magnitude=4, what="lse")
    return out, lse


@cache
def of_packed_cache(entry):
    """out and lse, which are compared with those of every layout."""
    scene = scenes.scene(entry, num_heads=HEADS, lengths=LENGTHS)
    twin = scene.twin(scenes.layouts(entry, num_heads=HEADS)["BLNHC"])
    return prefill(scene, twin, queries(entry, 70, entry.input_dtype), 0, gathered_bytes=FEW_BYTES)


@on_layouts(scenes.KV_ENTRIES, few=True)
def test_equals_the_packed_cache_and_the_truth(entry, name):
    scene = scenes.scene(entry, num_heads=HEADS, lengths=LENGTHS)
    layout = scenes.layouts(entry, num_heads=HEADS)[name]
    q = queries(entry, 70, entry.input_dtype)
    found = check(scene, scene.cache(layout, 1), q, gathered_bytes=FEW_BYTES)
    for actual, expected in zip(found, of_packed_cache(entry), strict=True):
        assert_same_bits(actual, expected)


def setting(entry=ENTRY, name="BLNHC", heads=HEADS, lengths=LENGTHS):
    scene = scenes.scene(entry, num_heads=heads, lengths=lengths)
    return scene, scene.cache(scenes.layouts(entry, num_heads=heads)[name], 1)


@each_value(
    ("tokens", "gathered_bytes", "window"),
    [64, 1, 5, 200, 385],
    [FEW_BYTES, 1, 2**28],
    [None, 1, 2, 50, 64, 193, 2**40],
    default=3,
)
def test_query_tokens_chunks_and_windows(tokens, gathered_bytes, window):
    """From one query token to more than the capacity of the tables, and from chunks of one token on."""
    scene, cache = setting()
    check(scene, cache, queries(ENTRY, tokens, "float32"), gathered_bytes=gathered_bytes, window=window)


@pytest.mark.parametrize(("window", "same"), [((63, -1), 64), further((49, 7), 50), further((-1, 0), None)])
def test_windows_of_both_sides_end_at_the_query_token(window, same):
    scene, cache = setting()
    q = queries(ENTRY, 5, "float32")
    for found, expected in zip(
        prefill(scene, cache, q, 1, window=window), check(scene, cache, q, window=same), strict=True
    ):
        assert_same_bits(found, expected)


@pytest.mark.parametrize(("heads", "query_heads"), [(4, 4), (4, 32), (1, 5)])
def test_mha_gqa_mqa(heads, query_heads):
    scene, cache = setting(heads=heads, name="BHLNC")
    check(scene, cache, queries(ENTRY, 9, "float32", heads=query_heads), window=70)


@pytest.mark.parametrize("window", [None, 20])
def test_sinks(window):
    scene, cache = setting()
    sinks = np.asarray([-30, -1, 0, 1, 3, 30], np.float32)
    _, lse = check(scene, cache, queries(ENTRY, 9, "float32"), sinks=sinks, window=window)
    assert_same_bits(lse, prefill(scene, cache, queries(ENTRY, 9, "float32"), 1, window=window)[1])


def test_scales_per_head():
    entry = jaxkv.KVEntry("fp8", head_dim=16, value_dim=8)
    scene, cache = setting(entry)
    scales = {"k_scale": jnp.asarray([0.03, 0.06]), "v_scale": jnp.asarray([0.02, 0.04])}
    q = queries(entry, 5, "float32")
    found, right = (
        operation(q, cache, scene.tables, jnp.asarray(scene.lengths, jnp.int32), layer=1, scale=SCALE, **scales)
        for operation in (jaxkv.prefill_kv, jaxkv.decode_kv)
    )
    assert_close(found, np.asarray(right), roundings=64, magnitude=1)


@pytest.mark.parametrize("window", [None, 40])
def test_a_token_has_no_influence_on_those_that_do_not_see_it(window):
    scene, right_cache = setting(lengths=(150, 90))
    q, run = queries(ENTRY, 70, "float32", 2), program(scene, window=window)
    layout = scenes.layouts(ENTRY, num_heads=HEADS)["BLNHC"]
    expected = run(q, right_cache, 1)
    for position in (120, 60, 30):  # among the last 70 tokens, shortly before them, and long before them
        found = run(q, scene.holding(np.nan, 0, position).cache(layout, 1), 1)
        for one, right in zip(found, expected, strict=True):
            first = max(position - 80, 0)
            last = 70 if window is None else min(max(position + window - 80, 0), 70)
            assert np.isnan(one[0, first:last]).all()
            assert_same_bits(one[0, :first], right[0, :first])
            assert_same_bits(one[0, last:], right[0, last:])
            assert_same_bits(one[1], right[1])


@pytest.mark.parametrize("block", [-1, 2**31 - 1])
def test_tokens_of_a_block_outside_the_cache_have_entries_of_zeros(block):
    scene, cache = setting(lengths=(194,))
    size, tables = cache.layout.block_size, jnp.asarray(scene.tables)
    slots, zeros = tables[0, 1] * size + jnp.arange(size), [jnp.zeros((size, HEADS, n)) for n in ENTRY.sizes]
    cleared = jaxkv.write_kv(cache, *zeros, slots, layer=1)
    q, lengths = queries(ENTRY, 70, "float32", 1), jnp.asarray([194])
    right = jaxkv.prefill_kv(q, cleared, tables, lengths, layer=1, scale=SCALE)
    found = jaxkv.prefill_kv(q, cache, tables.at[0, 1].set(block), lengths, layer=1, scale=SCALE)
    assert_same_bits(found, right)
    assert (found != jaxkv.prefill_kv(q, cache, tables, lengths, layer=1, scale=SCALE)).any()


def temporary_bytes(tokens, columns, **options) -> int:
    """Temporary memory of a call that is compiled for one request with the heads of Llama 3.1 8B."""
    entry = jaxkv.KVEntry("f32", head_dim=128)
    layout = jaxkv.CacheLayout(num_layers=2, num_blocks=columns, block_size=64, num_heads=8, entry=entry)
    given = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1, tokens, 32, 128), (layout.size,))]
    given += [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((1, columns), (1,))]

    def call(q, buffer, tables, lengths):
        return jaxkv.prefill_kv(q, jaxkv.KVCache(buffer, layout), tables, lengths, layer=1, scale=0.1, **options)

    return jax.jit(call).lower(*given).compile().memory_analysis().temp_size_in_bytes


def test_temporary_memory_is_bounded():
    """By `gathered_bytes` and the queries, or by the window, not by the capacity of the tables."""
    token = 8 * 256 * 4
    few, many = (temporary_bytes(256, columns, gathered_bytes=1024 * token) for columns in (68, 1028))
    assert many - few < 2**16
    assert temporary_bytes(256, 1028, window=512) < many


@pytest.mark.parametrize(
    ("options", "calls"),
    [
        ({}, 2),
        ({"window": 100}, 1),  # with a window, to the new tokens only
        ({"implementation": "xla"}, 0),
        further({"causal": False}, 1),
        further({"causal": False, "window": (100, 3)}, 0),
        further({"logit_cap": 30.0}, 0),
    ],
)
@pytest.mark.parametrize("ragged", [False, further(True)])
def test_lowers_for_cuda(options, calls, ragged, monkeypatch):
    """How often cuDNN attends."""
    assume_available(monkeypatch, "mosaic_gpu")
    monkeypatch.setattr(cudnn, "unavailable_reasons", lambda capabilities: [])
    monkeypatch.setattr(cudnn._library(), "check_cudnn_version", lambda: cudnn.LEAST_VERSION)
    monkeypatch.setattr(cudnn._library(), "check_compute_capability", lambda capability: True)
    entry = jaxkv.KVEntry("bf16", head_dim=128)
    layout = jaxkv.CacheLayout(num_layers=2, num_blocks=8, block_size=64, num_heads=2, entry=entry)
    rows = (130,) if ragged else (2, 65)
    given = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((*rows, 8, 128), (layout.size,))]
    given += [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((2, 4), (2,), (3,))]

    def call(q, buffer, tables, lengths, sums):
        more = {**options, "cu_q_lens": sums} if ragged else options
        return jaxkv.prefill_kv(q, jaxkv.KVCache(buffer, layout), tables, lengths, layer=1, scale=0.1, **more)

    text = jax.jit(call).trace(*given).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@__cudnn$fmhaSoftmax(") == (0 if ragged and "window" in options else calls)


@pytest.mark.slow  # checks are those of `prefill_mla`, except for windows
def test_checked():
    scene, cache = setting(lengths=(150, 90))
    q, layout = queries(ENTRY, 20, "float32", 2), scenes.layouts(ENTRY, num_heads=HEADS)["BLNHC"]

    def call(cache, lengths, window=None):
        requests = jnp.asarray(scene.tables), lengths
        return jaxkv.prefill_kv(q, cache, *requests, layer=1, scale=SCALE, window=window)

    lengths = jnp.asarray([150, 90])
    assert_same_bits(jaxkv.checked(call)(cache, lengths), jax.jit(call)(cache, lengths))
    bad = scene.holding(np.nan, 0, 3).cache(layout, 1)
    with pytest.raises(ValueError, match="holds NaN and is attended to"):
        jaxkv.checked(call)(bad, lengths)
    jaxkv.checked(lambda *arguments: call(*arguments, window=50))(bad, lengths)  # no window includes the token


@pytest.mark.gpu(missing=tuple(cudnn.unsupported_reasons(jnp.bfloat16, 128, 128)))
class TestCuDNN:
    """The kernel that Hopper runs, against XLA's."""

    @pytest.mark.parametrize("window", [None, 1, 100, 300])
    @pytest.mark.parametrize(("heads", "query_heads"), [(8, 32), (1, 8), (4, 4)])
    def test_grouped_queries(self, heads, query_heads, window):
        rng = np.random.default_rng(0)
        q, k, v = (
            jnp.asarray(rng.standard_normal((2, 256, count, 128)), jnp.bfloat16)
            for count in (query_heads, heads, heads)
        )
        lens = jnp.asarray([256, 130])
        options = {"scale": 0.09, "ahead": 0, "window": window}
        found, right = (module.attention(q, k, v, lens, lens, **options) for module in (cudnn, expanded))
        for one, expected, name in zip(found, right, ("out", "lse"), strict=True):
            assert_close(one, np.asarray(expected, np.float64), dtype="bfloat16", roundings=6, magnitude=4, what=name)

    @pytest.mark.parametrize("ahead", [0, None])
    @pytest.mark.parametrize(("heads", "query_heads"), [(8, 32), (1, 8), (4, 4)])
    def test_ragged_grouped_queries(self, heads, query_heads, ahead):
        rng = np.random.default_rng(0)
        q, k, v = (
            jnp.asarray(rng.standard_normal((rows, count, 128)), jnp.bfloat16)
            for rows, count in ((256, query_heads), (512, heads), (512, heads))
        )
        q_starts, q_lens = jnp.asarray([0, 100, 130]), jnp.asarray([100, 29, 126])
        kv_starts, kv_lens = jnp.asarray([0, 130, 190]), jnp.asarray([130, 60, 300])
        if ahead == 0:
            kv_starts, kv_lens = q_starts, q_lens
        arrays, options = (q, k, v, q_starts, q_lens, kv_starts, kv_lens), {"scale": 0.09, "ahead": ahead}
        found, right = (module.ragged_attention(*arrays, **options) for module in (cudnn, expanded))
        for one, expected, name in zip(found, right, ("out", "lse"), strict=True):
            assert_close(one, np.asarray(expected, np.float64), dtype="bfloat16", roundings=6, magnitude=4, what=name)

    @pytest.mark.parametrize("window", [None, 100])
    def test_calls(self, window):
        entry = jaxkv.KVEntry("bf16", head_dim=128)
        scene = scenes.scene(entry, num_heads=2, lengths=LENGTHS)
        layout = scenes.layouts(entry, num_heads=2)["BLNHC"]
        check(scene, scene.cache(layout, 1), queries(entry, 70, "bfloat16"), window=window, gathered_bytes=2**20)
