"""`jaxkv bench ops --sparse-step`: DeepSeek V3.2's attention in all layers, in place."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv.bench import ops, sparse_step, timing
from jaxkv.bench.kernel_times import KernelTimes
from jaxkv.bench.sparse_step import SparseStep
from jaxkv.cli import main

SMALL = SparseStep(requests=2, tokens=100, layers=3, heads=4, indexer_heads=2, chosen=16)
CEILINGS = timing.Ceilings(read=4.5e12, copy=4e12, matmul=8e14)


def test_a_step_is_the_operations_of_each_layer():
    inputs, before = SMALL.inputs(), SMALL.cache()
    latents, keys = SMALL.groups(SMALL.num_blocks)
    cache, out = jax.jit(lambda cache: SMALL.attend(cache, inputs, implementation="xla"))(before)
    slots = np.asarray(jaxkv.slots_for(inputs.tables, inputs.lengths[:, None] - 1, before))[:, 0]
    running = jnp.asarray([0, *np.cumsum(inputs.lengths)], jnp.int32)
    for layer in range(SMALL.layers):
        latent, rope = jaxkv.gather_mla(cache, inputs.tables, running, total=200, layer=layer, implementation="xla")
        # e4m3 keeps 3 bits after the leading one, and scales are powers of two: values below 4 are off by 1/8 at most.
        np.testing.assert_allclose(np.asarray(latent, np.float32)[[99, 199]], inputs.latent, atol=0.125)
        np.testing.assert_array_equal(np.asarray(rope)[[99, 199]], inputs.rope)
    expected = before
    for layer in range(SMALL.layers):
        expected = jaxkv.write_mla(expected, inputs.latent, inputs.rope, slots, layer=layer, implementation="xla")
        indexer = jaxkv.write_indexer_k(expected.view(keys), inputs.key, slots, layer=layer, implementation="xla")
        expected = indexer.view(latents)
    np.testing.assert_array_equal(np.asarray(cache.buffer), np.asarray(expected.buffer))
    assert out.shape == (2, 1, 4, 512)
    assert 0 < np.abs(np.asarray(out, np.float32)).max() < 5


def test_the_cache_is_updated_in_place():
    memory = sparse_step.compiled(SMALL, SMALL.inputs(), implementation="xla").memory_analysis()
    assert memory.alias_size_in_bytes >= SMALL.groups(SMALL.num_blocks)[0].nbytes


def test_a_program_that_copies_the_cache_is_reported(monkeypatch):
    def copied(self, cache, inputs, *, implementation):
        return cache.buffer[::-1] + 1, cache.buffer[1:]

    monkeypatch.setattr(SparseStep, "attend", copied)
    with pytest.raises(RuntimeError, match=r"the program copies the cache: of its \d+ bytes, \d+ are updated in place"):
        sparse_step.compiled(SMALL, SMALL.inputs())


def test_limits_are_those_of_the_operations():
    limits = SparseStep().limits(CEILINGS)
    assert list(limits) == ["write_mla", "write_indexer_k", "indexer_logits", "select_topk", "decode_mla_sparse"]
    assert limits["decode_mla_sparse"] == 2 * 64 * 128 * 2048 * (576 + 512) / 8e14
    assert limits["indexer_logits"] > 64 * 32768 * 132 / 4.5e12


def test_layers_that_do_not_fit_are_left_out():
    step = SparseStep()
    nbytes = step.groups(step.num_blocks)[0].nbytes
    assert nbytes == pytest.approx(64 * 32768 * 788 * 61, rel=0.01)
    assert step.fitted(nbytes) == step
    assert step.fitted(nbytes - 1).layers < 61
    assert step.fitted(0).layers == 1


@pytest.mark.parametrize("traced", [False, True])
def test_the_command_prints_times_and_limits_and_writes_json(traced, monkeypatch, tmp_path, capsys):
    kernels = ("write", 1e-6), ("attend", 3e-6)
    found = KernelTimes(12e-6, kernels * SMALL.layers) if traced else None
    monkeypatch.setattr(sparse_step, "kernels_of", lambda run, *, repeats: found)
    monkeypatch.setattr(ops, "measure_ceilings", lambda device, *, repeats: CEILINGS)
    monkeypatch.setattr(sparse_step, "SMALL_STEP", SMALL)
    monkeypatch.setattr(sparse_step, "SparseStep", lambda: replace(SMALL, layers=2))
    file = tmp_path / "step.json"
    assert (
        main(["bench", "ops", "--sparse-step", "--implementation", "xla", "--repeats", "2", "--json", str(file)]) == 0
    )
    printed = capsys.readouterr().out
    assert "DeepSeek V3.2's attention of 2 requests x 100 tokens with 4 heads" in printed
    assert "decode_mla_sparse" in printed
    assert ("3.00 attend (1 per layer)" in printed) == traced
    recorded = json.loads(file.read_text())
    assert recorded["step"]["chosen"] == 16
    assert recorded["seconds_per_layer"]["burst"] > 0
