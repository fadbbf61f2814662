"""`Model.compiler_options`: engines use them, and steps with them have the bits of steps without them."""

import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import models, serving
from support.compare import assert_same_bits

FOLDER = Path(__file__).parents[1] / "data" / "models"
SIZES = {"num_blocks": 8, "max_requests": 2, "chunk": 16}
RUNS, STEPS, REQUESTS = 5, 100, 8


@pytest.mark.ci
@pytest.mark.parametrize("drafts", [None, serving.MTP()])
def test_engines_compile_with_the_options_of_the_model(drafts, monkeypatch):
    values = json.loads((FOLDER / "deepseek_v3" / "config.json").read_text())
    config = models.ModelConfig.from_json({**values, "num_nextn_predict_layers": 1})
    model = models.random_model(config, mtp=drafts is not None)
    monkeypatch.setattr(models.Model, "compiler_options", lambda self, *, prefill: {f"no_such_option_{prefill}": "1"})
    served = serving.Engine(model, drafts=drafts, **SIZES)
    served.submit([3, 1, 4], max_tokens=1)
    with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_option_True"):
        list(served.run())


def test_options_depend_on_the_device_and_on_the_step(monkeypatch):
    mesh, config = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1]), models.ModelConfig.read(FOLDER / "llama")
    one, divided = (
        jax.eval_shape(partial(models.random_model, config, parallel=parallel))
        for parallel in (None, models.TensorParallel(mesh, "x"))
    )
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert one.compiler_options(prefill=True) == {}
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    concurrent, unmerged = "xla_gpu_command_buffer_scheduling_mode", "xla_gpu_dot_merger_threshold_mb"
    assert one.compiler_options().keys() == {concurrent}
    assert one.compiler_options(prefill=True).keys() == {concurrent, unmerged}
    assert divided.compiler_options() == {}
    assert divided.compiler_options(prefill=True).keys() == {unmerged}


@partial(jax.jit, donate_argnums=1)
def decode(model, cache, tokens, length, tables):
    """The cache, the logits and the next tokens of requests of that length, the new token included."""
    lengths = jnp.full(len(tokens), length)
    slots = jaxkv.slots_for(tables, lengths[:, None] - 1, cache)[:, 0]
    cache, logits = models.decode(model, cache, tokens, lengths, tables, slots)
    return cache, logits, logits.argmax(-1).astype(jnp.int32)


@pytest.mark.gpu(missing=() if jax.default_backend() == "gpu" else ("needs CUDA graphs",))
def test_kernels_side_by_side_have_the_bits_of_a_chain():
    """Both programs come from one lowering, so that they differ in nothing else; several runs may show a race."""
    values = json.loads((FOLDER / "deepseek_v2_lite" / "config.json").read_text())
    sizes = {"hidden_size": 512, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    sizes |= {"v_head_dim": 128, "intermediate_size": 1024, "moe_intermediate_size": 256, "num_hidden_layers": 3}
    model = models.random_model(models.ModelConfig.from_json({**values, **sizes}), dtype="bfloat16")
    blocks = -(-(STEPS) // 64)
    tables = jnp.asarray(np.random.default_rng(0).permutation(REQUESTS * blocks).reshape(REQUESTS, -1), jnp.int32)
    cache, first = model.cache(REQUESTS * blocks), jnp.arange(REQUESTS, dtype=jnp.int32)
    lowered = decode.lower(model, cache, first, jnp.int32(1), tables)
    chain, concurrent = lowered.compile(), lowered.compile(compiler_options=model.compiler_options())

    def run(program):
        cache, tokens, every = model.cache(REQUESTS * blocks), first, []
        for length in range(1, STEPS + 1):
            cache, logits, tokens = program(model, cache, tokens, jnp.int32(length), tables)
            every.append(logits)
        return cache.buffer, jnp.stack(every)

    right = run(chain)
    for _ in range(RUNS):
        for found, expected in zip(run(concurrent), right, strict=True):
            assert_same_bits(found, expected)
