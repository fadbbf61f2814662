"""Random calls of `xla`, with which the fuzzer compares all others, against the float64 oracle."""

import itertools
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv.testing import families, random_layouts
from jaxkv.testing.buffers import address_map, packed_twin, to_bytes, to_cache
from support import oracle, scenes
from support.arrays import as_float64
from support.cases import slow
from support.compare import assert_close, assert_same_bits

MOST_ROWS = 200
"""Queries of a call: the oracle attends one by one."""
CALLS = 4
SEEDS = 60
"""Random cases per operation; all but one per test are `slow`, because each takes a second or more."""


def drawn_for(*operations):
    """Parametrises `operation` and `seed`."""
    pairs = itertools.product(operations, range(SEEDS))
    return pytest.mark.parametrize(("operation", "seed"), [next(pairs), *(slow(*pair) for pair in pairs)])


def scales_of(case, draw):
    """The scales of an entry as the oracle takes them."""
    scales = [np.asarray(scale)[..., None] if np.ndim(scale) else scale for scale in draw.scales.values()]
    scales = [scale.reshape(-1, *scale.shape[2:]) if np.ndim(scale) > 2 else scale for scale in scales]
    return (*scales, *scales)[:2] if scales else (1.0, 1.0)


def by_slot(layout, buffer):
    """The entries of a packed cache's bytes, [slots, heads, nbytes]."""
    return scenes.fetch(layout, buffer, 0).swapaxes(1, 2).reshape(layout.num_slots, layout.num_heads, -1)


def spread(layout, layer, rows, before):
    """The bytes `before`, with `rows` [slots, heads, nbytes] as the entries of `layer`."""
    twin, where = packed_twin(layout, layout.dtype), address_map(layout)
    packed = np.full(twin.nbytes, 0xFF, np.uint8)
    pages = rows.reshape(layout.num_blocks, layout.block_size, layout.num_heads, -1).swapaxes(1, 2)
    scenes.place(twin, packed, 0, pages)
    elements, mine = before.reshape(where.layer.size, -1).copy(), where.layer == layer
    elements[mine] = packed.reshape(twin.size, -1)[where.place[mine]]
    return elements.reshape(-1)


def filled(case, draw, rng):
    """A cache with random entries where the call may read, NaN elsewhere; their parts [slots, heads, n_i], float64."""
    layout, entry, scales = case.layout, case.layout.entry, scales_of(case, draw)
    shape = layout.num_slots, layout.num_heads
    rows = oracle.encode(entry, [rng.standard_normal((*shape, n)).astype(np.float32) for n in entry.sizes], scales)
    with np.errstate(invalid="ignore"):
        parts = oracle.decode(entry, rows, scales)
    rows[~draw.live] = 0xFF
    return to_cache(layout, spread(layout, layer_of(case, draw) or 0, rows, scenes.garbage(layout, rng))), parts


def layer_of(case, draw):
    """The layer, or None if it is outside the cache."""
    return int(draw.layer) if 0 <= draw.layer < case.layout.num_layers else None


def called(case, cache, draw, rng):
    """The result of the call, and its random values."""
    values = [jnp.asarray(rng.standard_normal(shape).astype(np.float32)).astype(d) for shape, d in case.value_shapes]
    return case.run(cache, values, draw, jnp.asarray(draw.layer), "xla"), values


def cases(operation, seed):
    """(case, draw, random numbers) of calls that the oracle can make in little time."""
    number, step = families.OPERATIONS.index(operation), len(families.OPERATIONS)
    found = (families.draw_case(number + (seed * 50 + i) * step, "xla") for i in range(50))
    case = next(case for case in found if case.requests * case.q_len * case.heads <= MOST_ROWS)
    for call in range(CALLS):
        rng = np.random.default_rng([seed, call])
        yield case, case.draw(rng), rng


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Small caches."""
    monkeypatch.setattr(random_layouts, "MOST_BYTES", 2**19)


@drawn_for("write_mla", "write_kv", "write_indexer_k", "write_entries")
def test_writes(operation, seed):
    for case, draw, rng in cases(operation, seed):
        layout, entry = case.layout, case.layout.entry
        before = scenes.garbage(layout, rng, "random")
        found, values = called(case, to_cache(layout, before), draw, rng)
        parts = [np.asarray(x.astype(jnp.float32)).reshape(case.count, layout.num_heads, -1) for x in values]
        if "cos_sin" in draw.keywords:
            keys = 0 if isinstance(entry, jaxkv.KVEntry) else 1
            angles, interleaved = draw.keywords["cos_sin"][:, None], dict(case.options)["interleaved"]
            turned = jnp.asarray(rotated(parts[keys], angles, interleaved=interleaved))
            parts[keys] = np.asarray(turned.astype(values[keys].dtype).astype(jnp.float32))
        expected = before
        if (layer := layer_of(case, draw)) is not None:
            twin, where = packed_twin(layout, layout.dtype), address_map(layout)
            packed, mine = np.zeros((twin.size, layout.itemsize), np.uint8), where.layer == layer
            packed[where.place[mine]] = before.reshape(where.layer.size, -1)[mine]
            rows = by_slot(twin, packed.reshape(-1))
            scales, inside = scales_of(case, draw), np.clip(draw.index[0], 0, layout.num_slots - 1)
            scales = [s[inside] if np.ndim(s) > 2 else s for s in scales]
            encoded = oracle.encode(entry, parts, scales) if operation != "write_entries" else parts[0]
            for row, slot in zip(encoded, draw.index[0], strict=True):
                if 0 <= slot < layout.num_slots:
                    rows[slot] = row
            expected = spread(layout, layer, rows, before)
        assert_same_bits(to_bytes(found), expected, str(case))


def rotated(x, cos_sin, *, interleaved):
    """x [T, H, P] with its pairs turned, rounded to float32 once."""
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else np.split(x, 2, axis=-1)
    cos, sin = np.split(cos_sin.astype(np.float64), 2, axis=-1)
    pairs = [a * cos - b * sin, b * cos + a * sin]
    if interleaved:
        return np.stack(pairs, axis=-1).reshape(x.shape).astype(np.float32)
    return np.concatenate(pairs, axis=-1).astype(np.float32)


def slots_of(case, table, positions):
    """Slots of the tokens at these positions; -1 in blocks that the cache does not have."""
    size = case.layout.block_size
    blocks = table[positions // size].astype(np.int64)
    known = (blocks >= 0) & (blocks < case.layout.num_blocks)
    return np.where(known, blocks * size + positions % size, -1)


@drawn_for("gather_kv", "gather_mla", "gather_indexer_k")
def test_gathers(operation, seed):
    for case, draw, rng in cases(operation, seed):
        cache, parts = filled(case, draw, rng)
        found, _ = called(case, cache, draw, rng)
        tables, edges = draw.index
        starts = draw.keywords.get("seq_starts", np.zeros(case.requests, np.int32))
        slots = [
            slots_of(case, *run) for run in zip(tables, map(np.arange, starts, starts + np.diff(edges)), strict=True)
        ]
        slots = np.concatenate(slots)[: case.count] if layer_of(case, draw) is not None else np.zeros(0, np.int64)
        slots = np.pad(slots.astype(np.int64), (0, case.count - slots.size), constant_values=-1)
        assert_entries(found, parts, slots, str(case))


@drawn_for("read_kv", "read_mla", "read_indexer_k")
def test_reads(operation, seed):
    for case, draw, rng in cases(operation, seed):
        cache, parts = filled(case, draw, rng)
        found, _ = called(case, cache, draw, rng)
        (slots,) = draw.index
        known = (slots < case.layout.num_slots) & (layer_of(case, draw) is not None)
        assert_entries(found, parts, np.where(known, slots, -1), str(case))


def assert_entries(found, parts, slots, what):
    """Compares arrays with the parts [slots, heads, n_i] at `slots`, which are zeros at negative ones."""
    for array, part in zip(found if isinstance(found, tuple) else (found,), parts, strict=True):
        right = np.where((slots >= 0)[:, None, None], part[np.maximum(slots, 0)], 0).reshape(array.shape)
        # Numbers below the smallest normal float16 have the error of that one.
        magnitude = 2.0**-14 if str(array.dtype) == "float16" else 0
        assert_close(array, right, roundings=2, magnitude=magnitude, what=what)


@drawn_for("decode_mla_sparse", "decode_mla", "decode_kv")
def test_attention(operation, seed):
    for case, draw, rng in cases(operation, seed):
        cache, parts = filled(case, draw, rng)
        (out, lse, *_), values = called(case, cache, draw, rng)
        queries = [as_float64(x) for x in values]
        if "q_scale" in draw.keywords:
            count = 1 if operation == "decode_kv" else 2
            queries[:count] = [
                oracle.without_scale(x, draw.keywords["q_scale"], case.layout.entry.input_dtype) for x in values[:count]
            ]
        if layer_of(case, draw) is None:
            parts = [part[:0] for part in parts]
        seen = seen_by_sparse if operation == "decode_mla_sparse" else seen_by_dense
        options = dict(case.options)
        keywords = {"logit_cap": options["logit_cap"], "sinks": draw.keywords.get("sinks")}
        right_out, right_lse = np.zeros(out.shape), np.full(lse.shape, -np.inf)
        for place, keys_and_values in seen(case, draw, parts, queries):
            q = np.concatenate([part[place] for part in queries[: 1 if operation == "decode_kv" else 2]], axis=-1)
            (right_out[place],), (right_lse[place],) = oracle.attention(
                q[None], *keys_and_values, options["scale"], **keywords
            )
        cap, exact = options["logit_cap"] or 0, str(out.dtype) == "float32"
        size = 1 + 4 / 64 * cap if exact else 1
        assert_close(out, right_out, roundings=64 if exact else 4, magnitude=size, what=f"out, {case}")
        # As in the fuzzer: the error is that of scores of size 4 or the cap, even if the only score is 0 by chance.
        scores = 4 + cap
        found = np.asarray(lse, np.float64) + scores
        assert_close(found, right_lse + scores, dtype="float32", roundings=64, magnitude=scores, what=f"lse, {case}")


def read(entry, parts, slots):
    """Keys and values [S, H, n] of the slots that the cache has."""
    slots = slots[(slots >= 0) & (slots < len(parts[0]))]
    rows = [part[slots] for part in parts]
    return oracle.keys_and_values(entry, *rows) if entry.one_head else rows


def prefix_slots(case, draw):
    """The slots of the prefix of each request."""
    tables, lengths = (np.asarray(draw.keywords.get(name, 0)) for name in ("prefix_tables", "prefix_lens"))
    tables, lengths = tables.reshape(lengths.size, -1), np.clip(lengths.reshape(-1), 0, None)
    for prefix in draw.keywords.get("prefix_of", np.zeros(case.requests, int)):
        if not 0 <= prefix < len(tables):
            yield np.zeros(0, np.int64)
        else:
            length = min(lengths[prefix], tables.shape[1] * case.layout.block_size)
            yield slots_of(case, tables[prefix], np.arange(length))


def seen_by_dense(case, draw, parts, queries):
    """(index of a query token, keys and values that it sees) of all query tokens."""
    options, (tables, lengths) = dict(case.options), draw.index
    edges, shared = draw.keywords.get("cu_q_lens", np.arange(case.requests + 1) * case.q_len), prefix_slots(case, draw)
    for request, (first, last, before) in enumerate(zip(edges[:-1], edges[1:], shared, strict=True)):
        ragged, tree = "cu_q_lens" in draw.keywords, draw.keywords.get("tree_mask")
        if tree is not None:
            tree = tree[first:last] if ragged else tree[request]
        length = int(np.clip(lengths[request], 0, case.columns * case.layout.block_size))
        masks = {"causal": options["causal"], "mask": options.get("mask"), "tree": tree}
        seen = oracle.seen_by_last(length, last - first, options["window"], **masks)
        for token in range(last - first):
            slots = np.concatenate([before, slots_of(case, tables[request], np.flatnonzero(seen[token]))])
            yield (first + token,) if ragged else (request, token), read(case.layout.entry, parts, slots)


def seen_by_sparse(case, draw, parts, queries):
    """The same, of slots of one or two caches."""
    more, options = draw.keywords, dict(case.options)
    second, entry = [], case.layout.entry
    if "extra" in options:
        own = options["extra"].entry
        scales = (np.float32(0.03),) * 2 if own.codec.scaled else (1.0, 1.0)
        values = [x.astype(np.float32)[:, None] for x in queries[2:]]
        second = oracle.decode(own, oracle.encode(own, values, scales), scales)
    for place in np.ndindex(case.requests, case.q_len):
        count = more["counts"][place] if "counts" in more else None
        found = [read(entry, parts, draw.index[0][place][:count].astype(np.int64))]
        if "extra" in options:
            count = more["extra_counts"][place] if "counts" in case.extras else None
            found.append(read(options["extra"].entry, second, more["extra_slots"][place][:count].astype(np.int64)))
        yield place, [np.concatenate(arrays) for arrays in zip(*found, strict=True)]


@pytest.mark.ci
@drawn_for("decode_kv", "decode_mla")
def test_prefill(operation, seed):
    """`prefill_kv` and `prefill_mla` of the calls of dense attention, without masks and prefixes, in known blocks."""
    for case, draw, rng in cases(operation, seed):
        tables, lengths = draw.index
        tables = np.where((tables >= 0) & (tables < case.layout.num_blocks), tables, 0)
        draw = draw._replace(index=(tables, lengths), live=np.ones_like(draw.live), layer=np.int32(0))
        cache, parts = filled(case, draw, rng)
        extras = tuple(name for name in case.extras if name not in ("prefix_tables", "tree_mask"))
        keywords = {name: array for name, array in draw.keywords.items() if name in ("cu_q_lens", "sinks")}
        unmasked = tuple((name, value) for name, value in case.options if name != "mask")
        case, draw = replace(case, extras=extras, options=unmasked), draw._replace(keywords=keywords)
        options = {**dict(case.options), **keywords, "layer": 0, "implementation": "xla"}
        requests, least = (cache, tables, lengths), int(rng.integers(1, 2**16))
        queries = [jnp.asarray(rng.standard_normal(shape).astype(np.float32)) for shape, _ in case.value_shapes]
        if operation == "decode_kv":
            out, lse = jaxkv.prefill_kv(*queries, *requests, **options, gathered_bytes=least, **draw.scales)
            seen_queries, w_uv = np.asarray(queries[0], np.float64), None
        else:
            nope, value, latent = 24, 16, case.layout.entry.sizes[0]
            shapes = (*queries[0].shape[:-1], nope), (case.heads, nope, latent), (case.heads, value, latent)
            q_nope, w_uk, w_uv = (rng.standard_normal(shape).astype(np.float32) / shape[-1] ** 0.5 for shape in shapes)
            arrays = map(jnp.asarray, (q_nope, queries[1], w_uk, w_uv))
            out, lse = jaxkv.prefill_mla(*arrays, *requests, expanded_bytes=least, **options, **draw.scales)
            absorbed = np.einsum("...hn,hnr->...hr", q_nope.astype(np.float64), w_uk)
            seen_queries = np.concatenate([absorbed, np.asarray(queries[1])], axis=-1)
        right_out, right_lse = np.zeros(out.shape), np.full(lse.shape, -np.inf)
        more = {"logit_cap": options["logit_cap"], "sinks": keywords.get("sinks")}
        for place, (keys, values) in seen_by_dense(case, draw, parts, queries):
            if w_uv is not None:  # only the latents are values
                values = np.einsum("skr,hvr->shv", parts_of_latents(values, w_uv), w_uv.astype(np.float64))
                keys = np.broadcast_to(keys, (len(keys), case.heads, keys.shape[-1]))
            (right_out[place],), (right_lse[place],) = oracle.attention(
                seen_queries[place][None], keys, values, options["scale"], **more
            )
        cap = options["logit_cap"] or 0
        assert_close(out, right_out, roundings=64, magnitude=1 + 4 / 64 * cap, what=f"out, {case}")
        assert_close(
            np.asarray(lse, np.float64) + 4 + cap, right_lse + 4 + cap, dtype="float32", roundings=64,
            magnitude=4 + cap, what=str(case),
        )  # fmt: skip


def parts_of_latents(values, w_uv):
    """The latents of values, which in some formats include rotary parts."""
    return values[..., : w_uv.shape[-1]]
