"""Gradients of attention through pages equal those of dense attention in float64, on every layout and for every mask."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import dispatch, masks
from support import dense_gradients, oracle, scenes
from support.cases import FEW, further
from support.dense_gradients import SCALE, Paged, dense, slots_of
from support.opaque import Opaque

BLOCK = 4
SIZES = dict(num_layers=2, num_blocks=8, block_size=BLOCK)
MLA, KV = jaxkv.MLAEntry("f32", latent=8, rope=4), jaxkv.KVEntry("f32", head_dim=8, value_dim=4)
TABLES, LENGTHS = np.asarray([[3, 1], [3, 6]], np.int32), (7, 6)
"""The requests share a block."""
TREE = np.stack([np.eye(3, dtype=bool), np.tri(3, dtype=bool)])


def layout_of(entry, name=None):
    """A layout, by default one whose layers lie apart."""
    sizes = {**SIZES, "num_heads": 1 if entry.one_head else 2}
    if name in scenes.APART:
        return scenes.apart(entry, name, **sizes)
    return scenes.layouts(entry, **sizes)[name or "BLNHC"]


def seen_by(counts, *, tables=TABLES, lengths=LENGTHS, tree_mask=None, **options):
    """Which slots each of the last `counts` query tokens of the requests sees, bool [T, slots]."""
    found = []
    for b, (table, length, count) in enumerate(zip(tables, lengths, counts, strict=True)):
        tree = None if tree_mask is None else tree_mask[b]
        rows = np.zeros((count, SIZES["num_blocks"] * BLOCK), bool)
        shown = oracle.seen_by_last(length, count, tree=tree, **options)
        for position, slot in enumerate(slots_of(table, length, BLOCK)):
            if 0 <= slot < rows.shape[1]:
                rows[:, slot] |= shown[:, position]
        found.append(rows)
    return np.concatenate(found)


def queries(entry, *rows, heads=4):
    """One array of queries for each part of keys."""
    rng = np.random.default_rng(5)
    sizes = entry.sizes if entry.one_head else entry.sizes[:1]
    return [rng.standard_normal((*rows, heads, size)).astype(entry.dtype) for size in sizes]


def model_of(entry, seen, **options):
    """The dense model of a call, whose arguments are arrays of queries, sinks if there are, and parts of entries."""
    count = 2 if entry.one_head else 1

    def model(*arrays):
        qs, sinks, parts = arrays[:count], arrays[count:-2], arrays[-2:]
        q, (k, v) = jnp.concatenate(qs, axis=-1), parts
        if entry.one_head:
            k, v = jnp.concatenate(parts, axis=-1), parts[0]
        out, lse = dense(q.reshape(-1, *q.shape[-2:]), k, v, seen, **options, **dict(zip(("sinks",), sinks)))
        return out.reshape(*q.shape[:-1], -1), lse.reshape(q.shape[:-1])

    return model


def check(entry, seen, floats, call, *, name=None, roundings=64, **options):
    """Compares the gradients of `call(*floats, cache)` with those of the dense model."""
    paged = Paged.of(layout_of(entry, name), seen.any(axis=0), layer=1)
    dense_gradients.check(call, model_of(entry, seen, **options), floats, paged, roundings=roundings)


def decode(*arrays, implementation="xla", tables=TABLES, lengths=LENGTHS, **options):
    """out and lse of arrays of queries, sinks if there are, and a cache."""
    *arrays, cache = arrays
    count = 2 if cache.layout.entry.one_head else 1
    if arrays[count:]:
        options["sinks"] = arrays[count]
    operation = jaxkv.decode_mla if count == 2 else jaxkv.decode_kv
    return operation(
        *arrays[:count], cache, jnp.asarray(tables), jnp.asarray(lengths), layer=1, scale=SCALE, return_lse=True,
        implementation=implementation, **options,
    )  # fmt: skip


def layouts():
    """Entries and names of layouts: numbers of 16 bits in each kind of layout, most of them further cases."""
    for entry in (jaxkv.MLAEntry("bf16", 8, 8), jaxkv.KVEntry("bf16", 8, 8)):
        apart = () if entry.one_head else scenes.APART
        for name in (*scenes.layout_names(entry), *apart):
            if name != "packed, uint8":  # a buffer of integers has no gradient
                default = name in (*FEW, "packed, bfloat16", "two arrays")
                yield pytest.param(entry, name, marks=() if default else pytest.mark.ci)


@pytest.mark.parametrize(("entry", "name"), [*layouts()])
def test_every_layout(entry, name):
    check(entry, seen_by((3, 3)), queries(entry, 2, 3), decode, name=name, roundings=8)


ALL = {"tree_mask": TREE, "window": (4, 1), "logit_cap": 2.0}


@pytest.mark.parametrize(
    ("entry", "options"),
    [
        (MLA, {"causal": False, "window": (2, 1)}),
        (KV, ALL),
        *(
            further(entry, options)
            for entry in (MLA, KV)
            for options in (
                {},
                {"causal": False},
                {"window": 2},
                {"mask": masks.Prefix(2) | masks.Sliding(1, 0)},
                {"mask": lambda q, k: (q - k) % 2 == 0},
                {"tree_mask": TREE},
                {"logit_cap": 2.0},
            )
        ),
    ],
)
def test_every_mask(entry, options):
    shown = {name: value for name, value in options.items() if name != "logit_cap"}
    given = {name: jnp.asarray(x) if name == "tree_mask" else x for name, x in options.items()}
    sinks = np.linspace(-1, 2, 4, dtype=np.float32)
    cap = {"logit_cap": options.get("logit_cap")}
    check(entry, seen_by((3, 3), **shown), [*queries(entry, 2, 3), sinks], partial(decode, **given), **cap)


@pytest.mark.parametrize(("entry", "window"), [(KV, 3), further(KV, None), further(MLA, 3), further(MLA, None)])
def test_ragged_queries(entry, window):
    seen = np.concatenate([seen_by((1, 4), window=window), np.zeros((1, SIZES["num_blocks"] * BLOCK), bool)])
    sums = jnp.asarray([0, 1, 5])
    check(entry, seen, queries(entry, 6), partial(decode, cu_q_lens=sums, window=window))


@pytest.mark.parametrize("entry", [MLA, further(KV)])
def test_shared_prefixes(entry):
    seen = seen_by((2, 2))
    seen[2:, slots_of([7, 2], 5, BLOCK)] = True  # the prefix of the second request
    prefixes = {"prefix_tables": [[0, 4], [7, 2]], "prefix_lens": [8, 5], "prefix_of": [-1, 1]}
    given = {name: jnp.asarray(x) for name, x in prefixes.items()}
    check(entry, seen, queries(entry, 2, 2), partial(decode, **given))


OUTSIDE = np.asarray([[3, -1], [99, 6]], np.int32)


@pytest.mark.parametrize("entry", [KV, further(MLA)])
def test_blocks_outside_the_cache(entry):
    check(entry, seen_by((1, 1), tables=OUTSIDE), queries(entry, 2), partial(decode, tables=OUTSIDE))


def test_sparse_decodes():
    rng = np.random.default_rng(0)
    slots = np.stack([rng.permutation(20)[:6] for _ in range(6)]).reshape(2, 3, 6).astype(np.int32)
    slots[0, 1, 2:], slots[1, 0] = -1, 99
    counts = np.full((2, 3), 5, np.int32)
    seen = np.zeros((6, SIZES["num_blocks"] * BLOCK), bool)
    for row, some in enumerate(slots.reshape(6, -1)):
        seen[row, [slot for slot in some[:5] if 0 <= slot < seen.shape[1]]] = True

    def call(q_latent, q_pe, sinks, cache):
        return jaxkv.decode_mla_sparse(
            q_latent, q_pe, cache, jnp.asarray(slots), counts=jnp.asarray(counts), sinks=sinks, layer=1, scale=SCALE,
            logit_cap=2.0, return_lse=True, implementation="xla",
        )  # fmt: skip

    check(MLA, seen, [*queries(MLA, 2, 3), np.linspace(-1, 2, 4, dtype=np.float32)], call, logit_cap=2.0)
