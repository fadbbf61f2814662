"""Real models: the attention of recorded Hugging Face decode steps, recomputed from a paged cache."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from support.compare import assert_same_bits

FILES = {path.stem: path for path in (Path(__file__).parents[1] / "data" / "huggingface").glob("*.npz")}
FAMILIES = [
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v3_no_q_lora",
    "deepseek_v3_yarn",
    "glm4_moe_lite",
    "minicpm3",
    "youtu",
]
BLOCK_SIZE = 16
ORDERS = ("BLNHC", "LBNHC")

families = pytest.mark.parametrize("family", FAMILIES)
orders = pytest.mark.parametrize("order", ORDERS)


def test_all_recordings_are_here():
    assert sorted(FILES) == FAMILIES


def load(family):
    """The arrays of a recording by name."""
    with np.load(FILES[family]) as recorded:
        return dict(recorded)


def fill(recorded, order):
    """A cache with the recorded entries of every layer on shuffled blocks among NaN, and the tables."""
    layers, tokens, latent = recorded["kv_c"].shape
    cu_seq_lens = recorded["cu_seq_lens"]
    assert cu_seq_lens[-1] == tokens
    needed = -(-np.diff(cu_seq_lens) // BLOCK_SIZE)
    entry = jaxkv.MLAEntry("f32", latent=latent, rope=recorded["k_pe"].shape[-1])
    layout = jaxkv.CacheLayout(
        num_layers=layers, num_blocks=int(needed.sum()) + 3, block_size=BLOCK_SIZE, entry=entry, order=order
    )
    blocks = iter(np.random.default_rng(0).permutation(layout.num_blocks))
    tables = np.full((len(needed), needed.max() + 1), np.iinfo(np.int32).max, np.int32)
    for row, count in zip(tables, needed, strict=True):
        row[:count] = [next(blocks) for _ in range(count)]
    slots = jaxkv.ragged_slots(jnp.asarray(tables), jnp.asarray(cu_seq_lens), layout, total=tokens)
    cache = jaxkv.KVCache(jnp.full(layout.size, jnp.nan, jnp.float32), layout)
    for layer in range(layers):
        cache = jaxkv.write_mla(cache, recorded["kv_c"][layer], recorded["k_pe"][layer], slots, layer=layer)
    return cache, jnp.asarray(tables)


@orders
@families
def test_paged_decode_is_the_models_own_attention(family, order):
    recorded = load(family)
    cache, tables = fill(recorded, order)
    layers, requests, _, _ = recorded["q_latent"].shape
    assert (layers, requests) == recorded["out"].shape[:2] == (2, 3)
    lengths = jnp.asarray(np.diff(recorded["cu_seq_lens"]))
    for layer in range(layers):
        latents = jaxkv.decode_mla(
            recorded["q_latent"][layer],
            recorded["q_pe"][layer],
            cache,
            tables,
            lengths,
            layer=layer,
            scale=float(recorded["scale"]),
        )
        out = np.einsum("bhr,hvr->bhv", np.asarray(latents, np.float64), recorded["w_uv"][layer].astype(np.float64))
        truth = recorded["out"][layer].astype(np.float64)
        for request in range(requests):
            error = np.linalg.norm(out[request] - truth[request]) / np.linalg.norm(truth[request])
            assert error < 1e-5, (layer, request)


@orders
@families
def test_gathered_entries_are_the_models_own(family, order):
    recorded = load(family)
    cache, tables = fill(recorded, order)
    cu_seq_lens = jnp.asarray(recorded["cu_seq_lens"])
    total = int(cu_seq_lens[-1])
    for layer in range(cache.layout.num_layers):
        kv_c, k_pe = jaxkv.gather_mla(cache, tables, cu_seq_lens, layer=layer, total=total, dtype=jnp.float32)
        assert_same_bits(kv_c, recorded["kv_c"][layer])
        assert_same_bits(k_pe, recorded["k_pe"][layer])
