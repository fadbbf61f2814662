"""Grids follow the number of multiprocessors of the GPU."""

import re

import jax
import pytest
from jax.experimental import pallas  # noqa: F401 (its warnings at import are not ours)

import jaxkv
from jaxkv_kernels.mosaic_gpu.runtime.device import MULTIPROCESSORS, assumed_multiprocessors, multiprocessors
from support.available import assume_available

LATENTS = jaxkv.CacheLayout(num_layers=1, num_blocks=64, block_size=64, num_heads=1, entry=jaxkv.MLAEntry("bf16"))
KEYS = jaxkv.CacheLayout(num_layers=1, num_blocks=64, block_size=64, num_heads=1, entry=jaxkv.IndexerEntry("bf16"))
EXPERT = [("bfloat16", 16, *shape) for shape in ((512, 256), (512, 256), (256, 512))]


def cache_of(layout):
    return layout.dtype, layout.size


def copied(buffer, src, dst):
    return jaxkv.copy_blocks(jaxkv.KVCache(buffer, LATENTS), src, dst).buffer


def written(buffer, kv_c, k_pe, slots):
    return jaxkv.write_mla(jaxkv.KVCache(buffer, LATENTS), kv_c, k_pe, slots, layer=0).buffer


def scored(buffer, q, weights, block_tables, seq_lens):
    options = {"layer": 0, "max_len": 512}
    return jaxkv.indexer_logits(q, weights, jaxkv.KVCache(buffer, KEYS), block_tables, seq_lens, **options)


def written_tokens(count):
    return cache_of(LATENTS), ("bfloat16", count, 512), ("bfloat16", count, 64), ("int32", count)


def tokens(count):
    return ("bfloat16", count, 256), ("int32", count, 4), ("float32", count, 4), *EXPERT


QUERIES = ("bfloat16", 4, 1, 64, 128), ("float32", 4, 1, 64), ("int32", 4, 8), ("int32", 4)
CALLS = {
    "blocks": (copied, (cache_of(LATENTS), ("int32", 2000), ("int32", 2000)), lambda count: [6 * count] * 2),
    "entries": (written, written_tokens(1000), lambda count: [500 if count == 132 else 250]),
    "logits": (scored, (cache_of(KEYS), *QUERIES), lambda count: [count]),
    "experts of one token": (jaxkv.grouped_swiglu, tokens(1), lambda count: [count] * 2),
    "experts": (jaxkv.grouped_swiglu, tokens(9), lambda count: [1, count, count]),
}


@pytest.mark.parametrize("count", [132, 114, 78])
@pytest.mark.parametrize("name", CALLS)
def test_grids_follow_the_device(name, count, monkeypatch):
    assume_available(monkeypatch, "mosaic_gpu")
    function, operands, expected = CALLS[name]
    arrays = [jax.ShapeDtypeStruct(shape, dtype) for dtype, *shape in operands]
    with assumed_multiprocessors(count):
        program = str(jax.make_jaxpr(function)(*arrays))
    assert [int(ctas) for ctas in re.findall(r"Mesh\(grid=\((\d+)", program)] == expected(count)


def test_a_machine_without_a_gpu_lowers_for_132(monkeypatch):
    assert multiprocessors() == MULTIPROCESSORS == 132
    with assumed_multiprocessors(78):
        assert multiprocessors() == 78
    gpu = type("Device", (), {"core_count": 114})()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [gpu])
    assert multiprocessors() == 114
