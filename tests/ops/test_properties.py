"""Strides drawn at random: writes touch their own bytes only, reads are those of the packed cache, bit for bit.

The fuzzer (`jaxkv verify --calls`) draws the layouts of serving engines; here, strides are any that do not overlap.
"""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxkv
from jaxkv.testing import assert_caches_equal
from jaxkv.testing.buffers import packed_twin, to_cache
from jaxkv.testing.random_layouts import SMALL, draw_entry, draw_strides, pick
from support import oracle, scenes
from support.cases import random_numbers
from support.compare import assert_same_bits
from support.suites.base import dtype_of
from support.suites.writes import new_tokens, scales_of

EXAMPLES = settings.default.max_examples // 8
"""Of each test: an example takes seconds to compile.  `--hypothesis-profile long` runs ten times as many."""


@dataclass(frozen=True)
class Requests:
    """Two requests on shuffled blocks of a cache, and the slots at which their tokens are written, out of order."""

    layer: int
    tables: np.ndarray
    lengths: np.ndarray
    slots: np.ndarray
    """Of each token of the two requests, shuffled, with slots that are no slots among them."""
    kind: str


@st.composite
def cases(draw, kind):
    """A layout for a kind of entry, and requests in it.

    All of it comes from one seed: an example takes a second to compile, and drawn one by one, most would be dull.
    """
    rng = draw(random_numbers)
    layout = draw_strides(rng, draw_entry(rng, (kind,), SMALL))
    blocks = rng.permutation(layout.num_blocks).tolist()
    first = int(rng.integers(1, layout.num_blocks))
    tables = np.full((2, layout.num_blocks), scenes.UNUSED, np.int32)
    slots, lengths = [-1, -(2**31), layout.num_slots, 2**31 - 1], []
    for table, row in zip(tables, (blocks[:first], blocks[first:]), strict=True):
        table[: len(row)] = row
        lengths.append(int(rng.integers(len(row) * layout.block_size + 1)))
        slots += [slot(row, position, layout.block_size) for position in range(lengths[-1])]
    slots = rng.permutation(np.asarray(slots, np.int32))
    layer, kind = int(rng.integers(layout.num_layers)), pick(rng, "nan", "random")
    return layout, Requests(layer, tables, np.asarray(lengths, np.int32), slots, kind)


def slot(row, position, block_size):
    return row[position // block_size] * block_size + position % block_size


def check_write(layout, requests, write):
    """Writes into garbage and compares every byte; returns the cache and its packed twin, with other garbage."""
    entry, heads = layout.entry, layout.num_heads
    parts = new_tokens(entry, heads, len(requests.slots))
    keywords, scales = scales_of(entry, heads)
    before = scenes.garbage(layout, np.random.default_rng(5), requests.kind)
    cache = write(to_cache(layout, before), parts, jnp.asarray(requests.slots), requests.layer, keywords)
    encoded = oracle.encode(entry, parts, scales)
    expected = before.copy()
    entries = scenes.fetch(layout, expected, requests.layer)
    written = np.zeros(layout.num_slots, bool)
    for token, slot in enumerate(requests.slots):
        if 0 <= slot < layout.num_slots:
            entries[slot // layout.block_size, :, slot % layout.block_size] = encoded[token]
            written[slot] = True
    scenes.place(layout, expected, requests.layer, entries)
    assert_caches_equal(cache, to_cache(layout, expected), padding=True)
    # What no request holds is NaN in the twin, whatever stands there in the cache.
    entries[~written.reshape(layout.num_blocks, -1).repeat(heads, 0).reshape(entries.shape[:3])] = 0xFF
    twin = packed_twin(layout)
    packed = np.full(twin.nbytes, 0xFF, np.uint8)
    scenes.place(twin, packed, 0, entries)
    return cache, to_cache(twin, packed), keywords


def check_reads(cache, twin, requests, keywords, gather, attend):
    """Gathers and decodes from both caches and compares the bits."""
    cu_seq_lens = np.cumsum([0, *requests.lengths])
    tables, lengths = jnp.asarray(requests.tables), jnp.asarray(requests.lengths)
    total = int(cu_seq_lens[-1]) + 3
    results = []
    for each, layer in ((cache, requests.layer), (twin, 0)):
        gathered = gather(
            each, tables, jnp.asarray(cu_seq_lens), layer=layer, total=total, dtype=jnp.float32, **keywords
        )
        results.append(
            [*(gathered if isinstance(gathered, tuple) else (gathered,)), *attend(each, tables, lengths, layer)]
        )
    for found, expected in zip(*results, strict=True):
        assert_same_bits(found, expected)
    for part in results[0][:-2]:
        assert np.isfinite(np.asarray(part)).all()
    return results[0]


def queries(entry, heads, sizes, tokens):
    rng = np.random.default_rng(8)
    return [jnp.asarray(rng.standard_normal((2, tokens, heads, n)), dtype_of(entry)) for n in sizes]


@settings(max_examples=EXAMPLES)
@given(cases(jaxkv.MLAEntry), st.integers(1, 2))
def test_latents_on_any_layout(case, tokens):
    layout, requests = case
    q = queries(layout.entry, 2, layout.entry.sizes, tokens)

    def write(cache, parts, slots, layer, keywords):
        return jaxkv.write_mla(cache, parts[0][:, 0], parts[1][:, 0], slots, layer=layer, **keywords)

    def attend(cache, tables, lengths, layer):
        return jaxkv.decode_mla(*q, cache, tables, lengths, layer=layer, scale=0.2, return_lse=True, **keywords)

    cache, twin, keywords = check_write(layout, requests, write)
    found = check_reads(cache, twin, requests, keywords, jaxkv.gather_mla, attend)
    assert np.isfinite(np.asarray(found[-2].astype(jnp.float32))).all()


@settings(max_examples=EXAMPLES)
@given(cases(jaxkv.KVEntry), st.integers(1, 2), st.sampled_from([None, 1, 5, 64]))
def test_keys_and_values_on_any_layout(case, tokens, window):
    layout, requests = case
    (q,) = queries(layout.entry, 2 * layout.num_heads, layout.entry.sizes[:1], tokens)

    def write(cache, parts, slots, layer, keywords):
        return jaxkv.write_kv(cache, *parts, slots, layer=layer, **keywords)

    def attend(cache, tables, lengths, layer):
        options = {"scale": 0.2, "return_lse": True, "window": window}
        return jaxkv.decode_kv(q, cache, tables, lengths, layer=layer, **options, **keywords)

    cache, twin, keywords = check_write(layout, requests, write)
    found = check_reads(cache, twin, requests, keywords, jaxkv.gather_kv, attend)
    assert np.isfinite(np.asarray(found[-2].astype(jnp.float32))).all()


@settings(max_examples=EXAMPLES)
@given(cases(jaxkv.IndexerEntry), st.integers(1, 2))
def test_indexer_keys_on_any_layout(case, tokens):
    layout, requests = case
    (q,) = queries(layout.entry, 3, layout.entry.sizes, tokens)
    weights = jnp.asarray(np.random.default_rng(9).standard_normal((2, tokens, 3)), jnp.float32)

    def write(cache, parts, slots, layer, keywords):
        return jaxkv.write_indexer_k(cache, parts[0][:, 0], slots, layer=layer)

    def attend(cache, tables, lengths, layer):
        logits = jaxkv.indexer_logits(q, weights, cache, tables, lengths, layer=layer, max_len=100)
        return logits, jaxkv.select_topk(logits, 5)

    cache, twin, keywords = check_write(layout, requests, write)
    logits = np.asarray(check_reads(cache, twin, requests, keywords, jaxkv.gather_indexer_k, attend)[-2])
    seen = np.arange(100) < (requests.lengths[:, None] - (tokens - 1) + np.arange(tokens))[..., None]
    assert np.array_equal(np.isfinite(logits), seen)
