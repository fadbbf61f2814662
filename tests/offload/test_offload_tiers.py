"""A pool on the host with one on disk behind it; processes that end while they write."""

import os
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import offload
from jaxkv.offload import block_file, transfers
from offload.pools import ENTRY, KEY, LAYOUT, SIZES, blocks_of, filled, flip, names, reopened
from support.cases import further
from support.compare import assert_same_bits


class TestBehindTheHost:
    def test_evicted_blocks_are_found_on_disk(self, disk):
        cache, before = filled(LAYOUT)
        host, keys = offload.HostPool(LAYOUT, 4, disk=disk), names(16)
        for start in range(0, 16, 4):
            assert host.store(cache, range(start, start + 4), keys[start : start + 4]) == 4
        assert (host.matched(keys), len(host)) == (16, 4)
        assert (host.stats.host_hits, host.stats.disk_hits) == (4, 12)
        cache = host.load(cache, range(15, -1, -1), keys)
        assert_same_bits(blocks_of(cache, range(16)), before[::-1])
        host.flush()
        assert (host.stats.read, host.stats.written, host.stats.loaded) == (12, 16, 16)
        assert min(host.stats.read_rate, host.stats.write_rate) > 0

    def test_a_new_process_finds_them(self, disk, tmp_path):
        cache, before = filled(LAYOUT)
        first = offload.HostPool(LAYOUT, 8, disk=disk)
        first.store(cache, range(8), names(8))
        first.flush()
        second = offload.HostPool(LAYOUT, 8, disk=reopened(tmp_path))
        cache = second.load(jaxkv.KVCache.zeros(LAYOUT), range(8), names(8))
        assert_same_bits(blocks_of(cache, range(8)), before[:8])
        assert second.matched(names(8)) == 8
        assert second.stats.host_hits == 8  # they stay in host memory

    def test_a_load_evicts_nothing_that_it_needs(self, disk):
        cache, before = filled(LAYOUT)
        host, keys = offload.HostPool(LAYOUT, 4, disk=disk), names(5)
        for block in (4, 0, 1, 2, 3):
            host.store(cache, [block], [keys[block]])
        cache = host.load(cache, [8, 9], [keys[4], keys[0]])  # the one on disk, and the next to go
        assert_same_bits(blocks_of(cache, [8, 9]), before[[4, 0]])
        assert host.matched(keys) == 5
        assert (host.stats.host_hits, host.stats.disk_hits) == (4, 1)
        assert host.matched(keys[:1] + keys[2:]) == 4
        assert host.stats.disk_hits == 1  # block 1 went

    @pytest.mark.parametrize("held", [False, True])
    @pytest.mark.parametrize(("room", "chunk"), [(1, 1), (4, 1), (32, 4)])
    def test_a_load_of_more_than_the_bound_goes_by_portions(self, tmp_path, monkeypatch, room, chunk, held):
        layout = jaxkv.CacheLayout(**SIZES | {"num_blocks": 100}, entry=ENTRY)
        (cache, before), keys = filled(layout), names(100)
        disk = offload.DiskPool(tmp_path, layout, model="m")
        for key, row in zip(keys, before, strict=True):
            disk.store(key, row)
        host, arrays, most = offload.HostPool(layout, room, disk=disk), [], [0]
        to_pinned, load = transfers.to_pinned, disk.load

        def tracked(rows, sharding):
            array = to_pinned(rows, sharding)
            arrays.append((weakref.ref(array), len(rows)))
            return array

        def counted(key):
            most[0] = max(most[0], sum(count for array, count in arrays if array() is not None))
            return load(key)

        monkeypatch.setattr(transfers, "to_pinned", tracked)
        monkeypatch.setattr(disk, "load", counted)
        if held:
            host.hold(keys)
        cache = host.load(cache, range(99, -1, -1), keys)
        assert_same_bits(blocks_of(cache, range(100)), before[::-1])
        assert host.stats.read == 100
        assert len(host) <= room
        # Beside the chunk that is being read.
        assert most[0] <= room - chunk + chunk * held
        assert not host._holds or held

    def test_what_is_loaded_is_what_was_stored(self, tmp_path):
        """While blocks are overwritten as soon as they are stored, evicted, written to disk and read back."""
        rng, (cache, rows) = np.random.default_rng(1), filled(LAYOUT)
        contents = np.broadcast_to(np.arange(26, dtype=rows.dtype)[:, None], (26, rows.shape[1]))
        host = offload.HostPool(LAYOUT, 5, disk=reopened(tmp_path, num_blocks=7))
        held, write = {}, jax.jit(jaxkv.write_blocks, donate_argnums=0)
        keys, loads = names(25), 0
        for _ in range(100):
            blocks, numbers = rng.permutation(16)[:4].astype(np.int32), rng.permutation(25)[:4]
            cache = write(cache, blocks, contents[numbers])
            host.store(cache, blocks, [keys[number] for number in numbers])
            cache = write(cache, blocks, contents[[25] * 4])
            held |= dict.fromkeys(blocks.tolist(), 25)
            wanted = [number for number in rng.permutation(25).tolist() if keys[number] in host][: rng.integers(1, 5)]
            targets = rng.permutation(16)[: len(wanted)].astype(np.int32)
            try:
                cache = host.load(cache, targets, [keys[number] for number in wanted])
                held |= dict(zip(targets.tolist(), wanted, strict=True))
                loads += 1
            except KeyError:
                pass  # evicted from disk in the background; the cache is unchanged
            except offload.LoadFailed as error:
                cache = error.cache
                for target in targets.tolist():
                    held.pop(target, None)
            assert_same_bits(blocks_of(cache, [*held]), contents[[*held.values()]])
        host.flush()
        assert loads > 50
        assert host.stats.read > 0

    def test_a_block_that_is_damaged_in_a_later_portion_leaves_the_cache(self, disk, row):
        keys = names(12)
        for key in keys:
            disk.store(key, row)
        flip(-1)(disk.file(keys[9]))
        (cache, before), host = filled(LAYOUT), offload.HostPool(LAYOUT, 4, disk=disk)
        with pytest.raises(offload.LoadFailed, match=r"a load of 12 blocks stopped half-way: .*was altered") as failed:
            host.load(cache, range(12), keys)
        assert isinstance(failed.value.__cause__, offload.DamagedBlock)
        assert_same_bits(blocks_of(failed.value.cache, range(8)), np.stack([row] * 8))
        assert_same_bits(blocks_of(failed.value.cache, range(12, 16)), before[12:])
        assert host.matched(keys) == 9
        assert not host._holds

    def test_a_hold_keeps_a_block_on_disk(self, tmp_path):
        cache, _ = filled(LAYOUT)
        host = offload.HostPool(LAYOUT, 1, disk=reopened(tmp_path, num_blocks=2))
        host.store(cache, [0], names(1))
        host.hold(names(1))
        for turn in range(3):
            host.store(cache, [1], names(1, f"{turn}"))
            host.flush()
        host.release(names(1))
        assert names(1)[0] in host

    def test_what_could_not_be_written_is_tried_again(self, disk, monkeypatch):
        cache, before = filled(LAYOUT)
        host, keys = offload.HostPool(LAYOUT, 8, disk=disk), names(8)

        def full_for_one(path, *args):
            if path == disk.file(keys[2]):
                raise OSError(28, "No space left on device")
            block_file.write_block(path, *args)

        with monkeypatch.context() as patch:
            patch.setattr("jaxkv.offload.disk.write_block", full_for_one)
            assert host.store(cache, range(8), keys) == 8
            with pytest.raises(OSError, match="No space left"):
                host.flush()
        assert len(disk) == 7
        host.flush()
        assert_same_bits(np.stack([disk.load(key) for key in keys]), before[:8])

    def test_a_full_disk_stops_nobody(self, disk, monkeypatch):
        def full(*args):
            raise OSError(28, "No space left on device")

        cache, _ = filled(LAYOUT)
        host = offload.HostPool(LAYOUT, 1, disk=disk)
        monkeypatch.setattr("jaxkv.offload.disk.write_block", full)
        host.store(cache, [0], names(1))
        with pytest.raises(OSError, match="No space left"):
            host.flush()
        with pytest.warns(UserWarning, match="1 blocks are evicted that could not be written to disk: .*No space left"):
            assert host.store(cache, [1], names(1, "b")) == 1
        assert names(1)[0] not in host

    def test_the_disk_pool_has_the_same_blocks(self, disk):
        other = jaxkv.CacheLayout(**SIZES, entry=ENTRY, order="BHLNC", block_padding=8)
        with pytest.raises(ValueError, match="`disk` holds other blocks"):
            offload.HostPool(other, 8, disk=disk)


WRITER = """
import sys
import numpy as np
import jaxkv
from jaxkv import offload
layout = jaxkv.CacheLayout(num_layers=2, num_blocks=64, block_size=64, entry=jaxkv.MLAEntry("bf16"))
cache = jaxkv.KVCache.zeros(layout)
host = offload.HostPool(layout, 64, disk=offload.DiskPool(sys.argv[1], layout, model="m"))
for turn in range(10_000):
    host.store(cache, range(16), [f"{turn} {i}".encode().ljust(32) for i in range(16)])
    if not turn:
        print("ready", flush=True)
"""


@pytest.mark.parametrize("seconds", [further(0), 0.3])
def test_a_process_that_is_killed_leaves_a_readable_pool(tmp_path, seconds):
    root = Path(jaxkv.__file__).parents[1]
    paths = {"PYTHONPATH": os.pathsep.join(map(str, (root, root / "kernels")))}
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    with subprocess.Popen(command, env=os.environ | paths, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        while not list(tmp_path.glob("*/*.block")) and process.poll() is None:
            time.sleep(0.01)
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)
    layout = jaxkv.CacheLayout(num_layers=2, num_blocks=64, block_size=64, entry=jaxkv.MLAEntry("bf16"))
    pool = offload.DiskPool(tmp_path, layout, model="m")
    assert len(pool) > 0
    for key in list(pool._keys):
        assert not pool.load(key).view(np.uint8).any()
    pool.store(KEY, np.ones(layout.block_nbytes // 2, jnp.bfloat16))
    assert KEY in offload.DiskPool(tmp_path, layout, model="m")
