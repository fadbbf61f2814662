"""One of two processes that serve a model together, each with pools of its own; `test_processes.py` starts both.

python pools_of_processes.py ADDRESS NUMBER FOLDER
"""

import sys
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import pytest

import jaxkv
from jaxkv import models, serving
from jaxkv.offload import Connector, DiskPool, HostPool
from jaxkv.serving.tiers import Tiers
from support.recorded import FOLDER, recorded

BLOCK, NUM_BLOCKS, TOKENS = 16, 14, 8
LONG, SHORT = -1, slice(1, 4)
"""A prompt of 12 full blocks, and prompts that need all blocks of the cache."""


def main(address, number, folder):
    jax.config.update("jax_num_cpu_devices", 2)
    jax.distributed.initialize(address, num_processes=2, process_id=int(number), initialization_timeout=60)
    line, square = jax.make_mesh((4,), ("x",)), jax.make_mesh((2, 2), ("x", "y"))
    parts = [(0, 1), (2, 3)][int(number)]
    model = check("llama", models.ContextParallel(line, "x", interleave=2), devices=4, parts=parts)
    without_some_blocks_of_one_process(model, Path(folder, "blocks"))  # the same folder for both processes
    rejected(model)
    check("llama", models.TensorParallel(square, "x"), devices=2, parts=(int(number),))
    check("deepseek_v3", models.TensorParallel(line, "x"), devices=1, parts=(0,))
    print("equal")


def check(family, parallel, *, devices, parts):
    """Blocks that were evicted from the cache come back from the pools of both processes.  Returns the model."""
    whole = models.load(FOLDER / family).layout(1, BLOCK).block_nbytes
    model, prompts = models.load(FOLDER / family, parallel=parallel), recorded(family)
    assert (model.cache_devices, model.cache_parts) == (devices, parts)
    pool = pool_of(model)
    assert pool.block_nbytes * devices == whole * len(parts)
    store_and_load(model)
    engine = served(model, pool, [prompts[LONG], *prompts[SHORT], prompts[LONG]])
    assert (engine.prefix_stats.loaded, pool.stats.loaded, engine.tiers.failures) == (12 * BLOCK, 12, 0)
    return model


def store_and_load(model):
    """A pool stores and loads the parts of this process, without the other one."""
    zeros, keys = model.cache(4, BLOCK), [b"first", b"second"]
    values = np.arange(zeros.buffer.size).astype(zeros.buffer.dtype)
    buffer = jax.make_array_from_callback(values.shape, zeros.buffer.sharding, lambda place: values[place])
    pool, cache = pool_of(model), jaxkv.KVCache(buffer, zeros.layout)
    assert pool.store(cache, [1, 3], keys) == 2
    with pytest.raises(KeyError):
        pool.load(cache, [0], [b"third"])
    cache = pool.load(pool.warm_up(cache), [2, 0], keys)
    assert cache.buffer.sharding == buffer.sharding
    for shard in cache.buffer.addressable_shards:
        before = values[shard.index].reshape(4, -1)
        np.testing.assert_array_equal(np.asarray(shard.data).reshape(4, -1), before[[3, 1, 1, 3]])


def rejected(model):
    class Other(Connector):
        layout, devices = model.layout(1, BLOCK), model.cache_devices
        __contains__ = offer = pull = None

    make = {"model": model, "num_blocks": NUM_BLOCKS, "block_size": BLOCK}
    with pytest.raises(ValueError, match="is a Other, and the cache is on devices of several processes: expected a Ho"):
        serving.Engine(**make, connectors=[Other()])
    with pytest.raises(ValueError, match=r"has the parts \(0, 1, 2, 3\) of 4, and the devices of this process have"):
        serving.Engine(**make, connectors=[HostPool(model.layout(1, BLOCK), 4, devices=4)])
    pool, cache, layout = pool_of(model), model.cache(4, BLOCK), model.layout(4, BLOCK)
    with (
        mock.patch.object(jax, "process_count", return_value=3),
        pytest.raises(ValueError, match="devices of 2 of 3 processes: expected a model on devices of all"),
    ):
        Tiers([pool], cache, layout, None)


def without_some_blocks_of_one_process(model, folder):
    """What one process lacks is computed in both."""
    prompts, second = recorded("llama"), jax.process_index() == 1
    small = pool_of(model, 4 if second else 64)
    engine = served(model, small, [prompts[LONG], *prompts[SHORT], prompts[LONG]])
    assert (engine.prefix_stats.loaded, engine.tiers.failures) == (0, 0)

    full = pool_of(model, folder=folder)
    keys = served(model, full, [prompts[LONG]]).keys(prompts[LONG][0], block_size=BLOCK)
    full.flush()
    file = full.disk.file
    if second:
        file(keys[9]).unlink()
    pool = pool_of(model, folder=folder)  # it does not list the block that is missing
    engine = served(model, pool, [prompts[LONG]])
    assert (engine.prefix_stats.loaded, engine.tiers.failures) == (9 * BLOCK, 0)
    pool.flush()

    pool = pool_of(model, folder=folder)  # it lists blocks that it cannot load
    if second:
        file(keys[4]).unlink()
        file(keys[2]).write_bytes(b"damaged")
    engine = served(model, pool, [prompts[LONG], *prompts[SHORT], prompts[LONG], *prompts[SHORT], prompts[LONG]])
    # Those before the damaged one; those of the other prompts; those before the missing one, which was still listed
    # when the prompt was computed; and all.
    loaded = 2 + (3 + 4 + 4) + 4 + 12
    assert (engine.prefix_stats.loaded, engine.tiers.failures) == (loaded * BLOCK, 2)
    assert pool.stats.damaged == second


def pool_of(model, num_blocks=64, folder=None):
    layout, parts = model.layout(1, BLOCK), {"devices": model.cache_devices, "parts": model.cache_parts}
    disk = None if folder is None else DiskPool(folder, layout, model=models.fingerprint(model), **parts)
    return HostPool(layout, num_blocks, disk=disk, **parts)


def served(model, pool, prompts):
    """Serves prompts, one after the other; returns the engine."""
    sizes = {"num_blocks": NUM_BLOCKS, "block_size": BLOCK, "max_requests": 2, "chunk": 64}
    engine = serving.Engine(model, **sizes, connectors=[pool])
    if jax.process_index() == 1:
        serving.follow(engine)
    else:
        leader = serving.Leader(engine)
        for prompt, right in prompts:
            request = leader.submit(prompt, max_tokens=TOKENS, stop=())
            list(leader.run())
            assert request.generated == right[:TOKENS]
        leader.close()
    assert not engine.unfinished
    assert engine.pool.num_free == NUM_BLOCKS
    return engine


if __name__ == "__main__":
    main(*sys.argv[1:])
