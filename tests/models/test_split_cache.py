"""`SplitCache`, latents in host memory; `tests/serving/test_host_latents.py` has the tokens of models with it."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import models
from jaxkv.models.split_cache import SplitCache, Staging
from jaxkv.offload import HostEntries
from support.recorded import FOLDER

BLOCK = 4


def split(layouts):
    host = HostEntries(layouts.latents)
    return SplitCache.zeros(host, layouts.keys, num_requests=2, rows=8, max_tokens=16), host


def test_blocks_that_chunks_attend_to_are_staged_once():
    tables = np.asarray([[5, 3, 8], [3, 7, 9], [-1, -1, -1], [9, 4, 6]], np.int32)
    found = Staging.of(tables, np.asarray([5, 12, 0, 4], np.int32), count=6, block_size=BLOCK)
    assert found.blocks.tolist() == [3, 5, 7, 9, -1, -1]
    assert found.tables.tolist() == [[1, 0, -1], [0, 2, 3], [-1, -1, -1], [3, -1, -1]]
    assert all(array.dtype == np.int32 for array in found)


def test_other_layouts_are_rejected():
    config = models.ModelConfig.read(FOLDER / "deepseek_v32")
    model = jax.eval_shape(lambda: models.random_model(config))
    cache, _host = split(model.split_layouts(3, BLOCK))
    model.check_cache(cache)
    fewer = model.split_layouts(2, BLOCK)
    with pytest.raises(ValueError, match=r"expected those of `model\.split_layouts`"):
        model.check_cache(replace(cache, keys=split(fewer)[0].keys))
    with pytest.raises(ValueError, match="whose attention has no indexer over latents"):
        jax.eval_shape(lambda: models.random_model(models.ModelConfig.read(FOLDER / "llama"))).check_cache(cache)


def test_a_block_is_copied_on_the_device_and_in_host_memory():
    config = models.ModelConfig.read(FOLDER / "deepseek_v32")
    layouts = jax.eval_shape(lambda: models.random_model(config)).split_layouts(4, BLOCK)
    cache, host = split(layouts)
    host.blocks[:] = np.arange(host.blocks.size).reshape(host.blocks.shape) % 100
    before = host.blocks.copy()
    buffer = jnp.arange(cache.keys.buffer.size) % 100
    cache = replace(cache, keys=replace(cache.keys, buffer=buffer.astype(layouts.keys.dtype)))
    copied = jax.jit(SplitCache.copy_block)
    for source, target in ((0, 2), (-1, 3), (1, -1)):
        cache = copied(cache, np.asarray([source], np.int32), np.asarray([target], np.int32))
    jax.block_until_ready(cache)
    assert (host.blocks == before[[0, 1, 0, 3]]).all()
    keys = np.asarray(cache.keys.buffer).reshape(4, -1)
    assert (keys[2] == keys[0]).all()
    assert (keys[3] == np.arange(keys.size).reshape(keys.shape)[3] % 100).all()
