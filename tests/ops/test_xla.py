"""The suites of all operations on XLA, which supports every call."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv_kernels.calls import GroupedSwiglu
from jaxkv_kernels.experts import expert_groups
from jaxkv_kernels.scores import capped
from jaxkv_kernels.xla import experts
from jaxkv_kernels.xla.paged import chunks_seen, query_ranges
from support import suites
from support.compare import assert_close
from support.suites.experts import arguments as expert_arguments


class TestWrites(suites.Writes, suites.RotatedWrites, suites.WriteEntries):
    implementation = "xla"


class TestGathers(suites.Gathers, suites.GatherEntries):
    implementation = "xla"


class TestReads(suites.Reads):
    implementation = "xla"


class TestDecodeMLA(suites.DecodeMLA, suites.UnseenByMLA):
    implementation = "xla"


class TestDecodeKV(suites.DecodeKV, suites.UnseenByKV):
    implementation = "xla"


class TestMLAWindowsOfBothSides(suites.MLAWindowsOfBothSides):
    implementation = "xla"


class TestKVWindowsOfBothSides(suites.KVWindowsOfBothSides):
    implementation = "xla"


class TestMLAMasks(suites.MLAMasks):
    implementation = "xla"


class TestKVMasks(suites.KVMasks):
    implementation = "xla"


class TestMLATreeMasks(suites.MLATreeMasks):
    implementation = "xla"


class TestKVTreeMasks(suites.KVTreeMasks):
    implementation = "xla"


@pytest.mark.ci  # as for keys and values
class TestMLASharedPrefixes(suites.MLASharedPrefixes):
    implementation = "xla"


class TestKVSharedPrefixes(suites.KVSharedPrefixes):
    implementation = "xla"


class TestDecodeMLASparse(suites.DecodeMLASparse):
    implementation = "xla"


class TestMaxLogits(suites.MaxLogits):
    implementation = "xla"


class TestTokenScales(suites.TokenScales):
    implementation = "xla"


class TestExtraSlots(suites.ExtraSlots):
    implementation = "xla"
    forms = (
        ("f32", "bf16"),
        ("fp8", "fp8_ds_mla"),
        ("f16", "fp8"),
        (jaxkv.MLAEntry.typical("fp8_v41"), jaxkv.MLAEntry.typical("fp4_v41")),
        (jaxkv.MLAEntry.typical("fp8_v4"), jaxkv.MLAEntry.typical("fp8_v41_split")),
    )


class TestIndexer(suites.Indexer):
    implementation = "xla"


class TestMerge(suites.Merge):
    implementation = "xla"


class TestStates(suites.States):
    implementation = "xla"


class TestDeltaRule(suites.DeltaRule):
    implementation = "xla"


class TestBlocks(suites.Blocks):
    implementation = "xla"


class TestExperts(suites.Experts):
    implementation = "xla"


class TestRouting(suites.Routing):
    implementation = "xla"


class TestLinear(suites.Linear):
    implementation = "xla"


class TestMLACombinations(suites.MLACombinations):
    implementation = "xla"


class TestKVCombinations(suites.KVCombinations):
    implementation = "xla"


@pytest.mark.parametrize("tokens", [1, 5, 300])
def test_all_experts_at_once_and_one_by_one_give_the_same(tokens, monkeypatch):
    """GPUs compute all experts, some tokens at a time; CPUs only those that are chosen."""
    monkeypatch.setattr(experts, "MOST_RESULTS", 100 * 8 * 128)
    x, ids, weights, gate, up, down = expert_arguments(tokens, dtype="float32")
    ids = ids.at[0, 0].set(-1)
    call = GroupedSwiglu(
        x=x, experts=ids, weights=weights, gate=gate, up=up, down=down, shared=None, biases=None, limit=None, alpha=None
    )
    some = jax.jit(experts.by_tiles)(call)
    every = jax.jit(experts.all_experts)(call)
    assert_close(every, np.asarray(some, np.float64), roundings=64, magnitude=1)


@pytest.mark.parametrize(
    ("tokens", "count", "tile", "align"), [(1, 3, 8, 8), (40, 5, 16, 8), (700, 9, 24, 8), (33, 4, 5, 1)]
)
def test_choices_are_grouped_by_expert(tokens, count, tile, align):
    ids = np.random.default_rng(0).integers(-1, count, (tokens, 4)).astype(np.int32)
    ids[ids == 2] = 1
    groups = expert_groups(jnp.asarray(ids), count, tile=tile, align=align)
    rows, places = np.asarray(groups.rows), np.asarray(groups.tokens)
    known = ids >= 0
    assert (rows[~known] == len(places)).all()
    assert (places[rows[known]] == np.argwhere(known)[:, 0]).all()
    found = set()
    for expert, start, size in zip(*(np.asarray(x)[: groups.count] for x in groups[2:5]), strict=True):
        inside = known & (rows >= start) & (rows < start + size)
        assert start % align == size % align == 0
        assert 0 < size <= tile
        assert inside.any()
        assert (ids[inside] == expert).all()
        assert not found & set(rows[inside])
        found |= set(rows[inside])
    assert len(found) == known.sum()


@pytest.mark.parametrize(("window", "ahead"), [(None, 0), (None, None), (None, 2), (9, 0), (9, 20), (30, None)])
@pytest.mark.parametrize("trailing", [False, True])
def test_only_chunks_that_some_query_token_sees_are_loaded(window, ahead, trailing):
    rng, chunk = np.random.default_rng(0), 8
    for _ in range(20):
        tokens, lengths = int(rng.integers(1, 6)), rng.integers(0, 70, 3)
        after = rng.integers(1 - tokens, lengths + 1) if trailing else np.zeros(3, int)
        more = jnp.asarray(after, jnp.int32) if after.any() else None
        begins, ends = query_ranges(jnp.asarray(lengths, jnp.int32), tokens, window, ahead, more)
        positions, key = (lengths - after)[:, None] - tokens + np.arange(tokens), np.arange(70)
        behind, beyond = 999 if window is None else window - 1, 999 if ahead is None else ahead
        seen = (key >= positions[..., None] - behind) & (key <= positions[..., None] + beyond)
        seen &= key < lengths[:, None, None]
        found = (key >= np.asarray(begins)[..., None]) & (key < np.asarray(ends)[..., None])
        assert (found == seen).all()
        first, last = chunks_seen(begins, ends, ends, chunk)
        chunks = np.flatnonzero(seen.any(axis=(0, 1))) // chunk
        assert range(int(first), int(last)) == (range(chunks[0], chunks[-1] + 1) if chunks.size else range(0))


@pytest.mark.parametrize("cap", [2.0**-126, 1e-9, 0.3, 50.0, 1e7, 2.0**126])
def test_scores_are_capped_to_a_few_roundings(cap):
    rng = np.random.default_rng(0)
    ratios = np.r_[0, 2.0 ** rng.uniform(-40, 20, 4000), 2.0**-13 * rng.uniform(0.9, 1.1, 500)]
    scores = np.float32(np.clip(ratios * cap, 2.0**-120, 3e38) * rng.choice([-1, 1], ratios.size))
    found = np.asarray(capped(jnp.asarray(scores), cap), np.float64)
    expected = cap * np.tanh(scores.astype(np.float64) / cap)
    np.testing.assert_allclose(found, expected, rtol=8 * 2.0**-24, atol=2.0**-126)
