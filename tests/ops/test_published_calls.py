"""The calls of other libraries' tests (`published_calls.py`), compared with float64: on XLA, and on GPUs in full size.

A GPU implementation runs what it supports by its own reasons; `gaps` lists how those against a call may begin.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv.testing.buffers import entry_bytes, to_cache
from ops.published_calls import ABSENT, ATTENTION, GATHERS
from support import oracle, scenes
from support.arrays import as_float64
from support.available import assume_available
from support.cases import further, slow
from support.compare import assert_close
from support.hopper import on_hopper
from support.suites.base import Suite
from support.triton.runs import on_gpu

AXES = {"L": "layer", "B": "block", "N": "token", "H": "head", "2": "value"}
LARGEST = 200
"""What the largest value is stored as in float8 in the published tests."""
MOST_BLOCKS = 1024
"""Blocks of a cache to gather from on CPUs."""
MOST_ROWS = 4
"""Query tokens of a request, and heads, that are compared with the oracle, which attends one by one."""


def layouts_of(case) -> list[jaxkv.CacheLayout]:
    """The layouts that view the cache: one or, as latents have one head, one for each KV head."""
    heads = case.heads[1]
    counts = {"L": case.num_layers, "B": case.num_blocks, "N": case.block_size, "H": heads, "2": 2}
    step = case.sizes[0]
    steps = {"layer": 0, "head": 0}
    for axis in reversed(case.shape[:-1]):
        steps[AXES[axis]] = step
        step *= counts[axis]
    values = steps.pop("value", None)
    sizes = {"num_layers": case.num_layers, "num_blocks": case.num_blocks, "block_size": case.block_size, "size": step}
    view = partial(jaxkv.CacheLayout.from_strides, **sizes, strides=steps, value_offset=values)
    form, (size, value_size) = case.formats[0], case.sizes
    if not case.latents:
        return [view(entry=jaxkv.KVEntry(form, size), num_heads=heads)]
    entry = jaxkv.MLAEntry(form, value_size, size - value_size)
    return [view(entry=entry, offset=head * steps["head"]) for head in range(heads)]


@lru_cache(maxsize=1)  # of cases that follow one another
def stored(case):
    """The caches, block tables, scales, and the parts of the entries of each request, of each cache.

    The last layer has the requests, in random blocks, and everything else is NaN.
    """
    rng, size = np.random.default_rng(0), case.block_size
    layouts, lengths = layouts_of(case), [length for _, length in case.requests]
    needed = [-(-length // size) for length in lengths]
    ends = np.cumsum(needed)
    blocks = rng.permutation(np.r_[rng.choice(case.num_blocks - 1, ends[-1] - 1, replace=False), case.num_blocks - 1])
    tables = np.full((len(lengths), max(needed)), -1, np.int32)
    for table, end, count in zip(tables, ends, needed, strict=True):
        table[:count] = blocks[end - count : end]
    buffer, parts = np.full(layouts[0].nbytes, 0xFF, np.uint8), []
    for layout in layouts:
        entry, heads = layout.entry, layout.num_heads
        values = [rng.standard_normal((len(blocks), heads, size, n)).astype(np.float32) for n in entry.sizes]
        scaled = entry.codec.scaled
        scales = tuple(np.float32(np.abs(x).max() / LARGEST) for x in values) if scaled else (1.0, 1.0)
        rows = oracle.encode(entry, values, scales)
        for view, places in zip(entry_bytes(layout, buffer), scenes.run_places(layout), strict=True):
            view[-1][blocks] = rows[..., places]
        tokens = [rows[end - count : end].swapaxes(1, 2) for end, count in zip(ends, needed, strict=True)]
        tokens = [x.reshape(-1, heads, x.shape[-1])[:n] for x, n in zip(tokens, lengths, strict=True)]
        parts.append([oracle.decode(entry, x, scales) for x in tokens])
    whole = to_cache(layouts[0], buffer)
    named = dict(zip("kv", map(float, scales), strict=True)) if scaled else {}
    return [jaxkv.KVCache(whole.buffer, layout) for layout in layouts], tables, named, parts


def cache_of(case):
    """The fields of a case that its cache depends on."""
    return replace(
        case, heads=(1, case.heads[1]), window=(-1, -1), causal=True, sinks=False, logit_cap=None, prefill=False
    )


def calls_of(case, caches, scales, q, tables, lengths, sums, sinks) -> Iterator[tuple]:
    """(operation, arguments, options) for each cache; q [T, Hq, D] and the others may be `ShapeDtypeStruct`s."""
    counts, shares = [count for count, _ in case.requests], len(caches)
    options = {"layer": case.num_layers - 1, "scale": scales["q"] * case.sizes[0] ** -0.5, "causal": case.causal}
    options |= {"window": None if case.window == (-1, -1) else case.window, "logit_cap": case.logit_cap}
    if len(set(counts)) == 1:
        lead = (len(counts), counts[0])
    else:
        lead, options["cu_q_lens"] = (sum(counts),), sums

    def parts(q, share):
        mine = q.shape[1] // shares
        mine = q[:, share * mine : (share + 1) * mine].reshape(*lead, mine, -1)
        return jnp.split(mine, [case.sizes[1]], axis=-1) if case.latents else [mine]

    for share, cache in enumerate(caches):
        mine = parts(q, share) if isinstance(q, jax.Array) else jax.eval_shape(partial(parts, share=share), q)
        heads = mine[0].shape[-2]
        if sinks is not None:
            options["sinks"] = sinks[share * heads : (share + 1) * heads]
        if case.latents:
            yield jaxkv.decode_mla, (*mine, cache, tables, lengths), options
        else:
            entry = {name: scales[name[0]] for name in ("k_scale", "v_scale") if cache.layout.entry.codec.scaled}
            operation = jaxkv.prefill_kv if case.prefill else jaxkv.decode_kv
            yield operation, (*mine, cache, tables, lengths), {**options, **entry}


def requests_of(case):
    """Lengths, and the running sum of query tokens."""
    counts, lengths = zip(*case.requests, strict=True)
    return jnp.asarray(lengths, jnp.int32), jnp.asarray(np.cumsum([0, *counts]), jnp.int32)


def sinks_of(case):
    """Random sinks, as the published tests draw them."""
    return np.random.default_rng(2).standard_normal(case.heads[0]).astype(np.float32) if case.sinks else None


def check(case, q, found, parts, scale, sinks):
    """Compares some query tokens and heads of the results [T, Hq, Dv] of a cache, q [T, Hq, D], with the oracle."""
    edges, rng, heads = np.cumsum([0, *(count for count, _ in case.requests)]), np.random.default_rng(3), q.shape[1]
    for first, (count, length), (keys, values) in zip(edges, case.requests, parts, strict=False):
        rows = np.unique(np.linspace(0, count - 1, MOST_ROWS).astype(int))
        some = np.sort(rng.permutation(heads)[:MOST_ROWS])
        of = some * keys.shape[1] // heads
        seen = [oracle.seen(length - count + t, length, case.window, causal=case.causal) for t in rows]
        options = {"seen": np.stack(seen), "logit_cap": case.logit_cap, "sinks": None if sinks is None else sinks[some]}
        right, _ = oracle.attention(q[first + rows][:, some], keys[:, of], values[:, of], scale, **options)
        roundings = 6 if case.prefill else 4  # which also rounds keys and values to the dtype of the queries
        assert_close(found[first + rows][:, some], right, roundings=roundings, magnitude=1)


def some(calls):
    """A few cases, by name, that have every value."""
    return {f"{calls.name}-{i}": case for i, (case, few) in enumerate(calls.cases()) if few}


class PublishedCalls(Suite):
    """Attention, and gathers of float8."""

    def check_attention(self, case):
        """Runs a call on each cache of the case."""
        caches, tables, stored_scales, parts = stored(cache_of(case))
        tokens = sum(count for count, _ in case.requests)
        wide = np.random.default_rng(1).standard_normal((tokens, case.heads[0], case.sizes[0])).astype(np.float32)
        float8 = case.formats[1] == "float8_e4m3fn"
        scales = {"q": float(np.abs(wide).max() / LARGEST) if float8 else 1.0, **stored_scales}
        q, sinks = jnp.asarray(wide / scales["q"], case.formats[1]), sinks_of(case)
        wide = as_float64(q)
        heads = case.heads[0] // len(caches)
        arrays = q, jnp.asarray(tables), *requests_of(case), sinks
        for share, (operation, args, options) in enumerate(calls_of(case, caches, scales, *arrays)):
            found = self.run(operation, *args, **options)
            mine = slice(share * heads, (share + 1) * heads)
            right = [
                oracle.keys_and_values(caches[share].layout.entry, *x) if case.latents else x for x in parts[share]
            ]
            found = found.reshape(tokens, heads, -1)
            check(case, wide[:, mine], found, right, options["scale"], sinks)

    def check_all(self, cases):
        """Those that the implementation supports."""
        for case in cases:
            try:
                self.check_attention(case)
            except pytest.skip.Exception:
                continue
            except AssertionError as error:
                error.add_note(repr(case))
                raise

    @pytest.mark.slow
    def test_all_gathers(self):
        for name in GATHERS.keys() - SPECIAL:
            self.check_gather(name, GATHERS[name])

    def check_gather(self, name, case):
        """Gathers whole blocks."""
        (cache,), tables, scales, (parts,) = stored(cache_of(case))
        absent = np.asarray(ABSENT.get(name, np.zeros_like(tables)), bool)
        lengths, _ = requests_of(case)
        sums = jnp.asarray(np.r_[0, np.cumsum(lengths)], jnp.int32)
        options = {"total": int(sums[-1]), "dtype": jnp.bfloat16, "layer": case.num_layers - 1}
        options |= {"k_scale": scales["k"], "v_scale": scales["v"]}
        found = self.run(jaxkv.gather_kv, cache, jnp.asarray(np.where(absent, -1, tables)), sums, **options)
        of_absent = np.repeat(absent.reshape(-1), case.block_size)
        for values, right in zip(found, zip(*parts, strict=True), strict=True):
            assert_close(values, np.where(of_absent[:, None, None], 0, np.concatenate(right)), roundings=2, magnitude=0)


SPECIAL = [name for name in GATHERS if " x " not in name]


BY_DEFAULT = "test_decode_with_paged_kv"
every_test = pytest.mark.parametrize("calls", ATTENTION, ids=lambda calls: calls.name)


class TestXLA(PublishedCalls):
    implementation = "xla"

    @pytest.mark.parametrize(
        "calls",
        [x if x.name == BY_DEFAULT else further(x) if i % 3 == 0 else slow(x) for i, x in enumerate(ATTENTION)],
        ids=lambda calls: calls.name,
    )
    def test_attention(self, calls):
        case, *_ = some(calls).values()
        self.check_attention(replace(case, **calls.on_cpu))

    @pytest.mark.slow
    @pytest.mark.timeout(3600)
    @every_test
    def test_all_attention(self, calls):
        self.check_all(dict.fromkeys(replace(case, **calls.on_cpu) for case, _ in calls.cases()))

    @pytest.mark.parametrize("name", [name if name in ABSENT else further(name) for name in SPECIAL])
    def test_gathers(self, name):
        self.check_gather(name, replace(GATHERS[name], num_blocks=min(MOST_BLOCKS, GATHERS[name].num_blocks)))


SOME = {name: case for calls in ATTENTION for name, case in some(calls).items()}


class OnGPUs(PublishedCalls):
    """In full size."""

    @pytest.mark.parametrize("name", SOME)
    def test_attention(self, name):
        self.check_attention(SOME[name])

    @pytest.mark.slow
    @pytest.mark.timeout(3600)
    @every_test
    def test_all_attention(self, calls):
        self.check_all(case for case, _ in calls.cases())

    @pytest.mark.parametrize("name", SPECIAL)
    def test_gathers(self, name):
        self.check_gather(name, GATHERS[name])


@on_gpu
class TestTriton(OnGPUs):
    implementation = "triton"


@on_hopper
class TestMosaicGPU(OnGPUs):
    implementation = "mosaic_gpu"
    gaps = (
        "entries of",  # quantised heads are of 128 or 256 values
        "query tokens x heads",  # quantised entries with more than 16 rows per head
    )


GAPS = {"triton": TestTriton, "mosaic_gpu": TestMosaicGPU}


@pytest.mark.ci
@pytest.mark.parametrize("implementation", GAPS)
def test_what_a_gpu_implementation_does_not_support_is_declared(implementation, monkeypatch):
    assume_available(monkeypatch, implementation)
    found = set()
    for case in SOME.values():
        shape, tokens = jax.ShapeDtypeStruct, sum(count for count, _ in case.requests)
        caches = [jaxkv.KVCache(shape((x.size,), x.dtype), x) for x in layouts_of(case)]
        q = shape((tokens, case.heads[0], case.sizes[0]), case.formats[1])
        pages = max(-(-length // case.block_size) for _, length in case.requests)
        arrays = q, shape((len(case.requests), pages), jnp.int32), *requests_of(case), sinks_of(case)
        for operation, args, options in calls_of(case, caches, dict.fromkeys("qkv", 1.0), *arrays):
            reasons = jaxkv.explain(operation, *args, **options).reasons[implementation]
            assert all(reason.startswith(GAPS[implementation].gaps) for reason in reasons), (case, reasons)
            found.add(bool(reasons))
    assert False in found, "it supports some of them"
