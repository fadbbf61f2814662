"""A connector outside the library, whose blocks are shared by processes."""

import multiprocessing
from contextlib import closing

import jax
import numpy as np
import pytest

import jaxkv
from offload import other_process
from offload.connector_suite import ConnectorSuite
from offload.shared_memory import SharedMemoryBlocks

LAYOUT = jaxkv.CacheLayout(num_layers=2, num_blocks=6, block_size=4, entry=jaxkv.MLAEntry("bf16"))


class TestSharedMemoryBlocks(ConnectorSuite):
    def connectors(self, layout, folder):
        first = SharedMemoryBlocks(layout, 64)
        self.opened += [second := SharedMemoryBlocks(layout, 64, first.table.name), first]
        return first, second


def keys_for(count):
    return [bytes([n]) * 32 for n in range(count)]


@pytest.fixture
def cache():
    values = np.random.default_rng(0).standard_normal(LAYOUT.size, np.float32)
    return jaxkv.KVCache(jax.device_put(values.astype(LAYOUT.dtype)), LAYOUT)


@pytest.fixture
def blocks():
    with closing(SharedMemoryBlocks(LAYOUT, 4)) as blocks:
        yield blocks


def test_another_process_reads_a_block(blocks, cache):
    blocks.offer(cache, np.asarray([5, 2], np.int32), keys_for(2))
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe(duplex=False)
    arguments = (*blocks.table.rows.shape, blocks.table.name, keys_for(2)[1:], there)
    process = spawn.Process(target=other_process.read, args=arguments)
    process.start()
    there.close()
    with here:
        found = here.recv_bytes(), here.recv_bytes()
    process.join()
    assert process.exitcode == 0
    assert found == (np.asarray(jaxkv.read_blocks(cache, np.asarray([2], np.int32))).tobytes(), b"no jax")


def test_the_least_recently_used_blocks_are_evicted(blocks, cache):
    keys = keys_for(6)
    for n in range(4):
        blocks.offer(cache, np.asarray([n], np.int32), [keys[n]])
    blocks.pull(keys[:1], None).poll(0)
    blocks.offer(cache, np.asarray([4, 5], np.int32), keys[4:])
    assert [key in blocks for key in keys] == [True, False, False, True, True, True]


def test_a_table_of_another_size_is_rejected(blocks):
    with pytest.raises(ValueError, match="another size"):
        SharedMemoryBlocks(LAYOUT, 5, blocks.table.name)
