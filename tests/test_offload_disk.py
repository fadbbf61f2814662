"""Blocks on disk: they survive the process, and what is not exactly the block that is asked for is refused by name."""

import os
import signal
import struct
import subprocess
import sys
import time
import zlib
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from compare import assert_same_bits
from jaxkv import offload
from jaxkv.offload import block_file
from test_offload import ENTRY, LAYOUT, SIZES, blocks_of, filled, names

KEY, OTHER = bytes(range(32)), bytes(32)


@pytest.fixture
def row():
    return filled(LAYOUT)[1][3]


@pytest.fixture
def disk(tmp_path):
    return offload.DiskPool(tmp_path, LAYOUT, model="m")


def reopened(tmp_path, **options):
    return offload.DiskPool(tmp_path, LAYOUT, **{"model": "m"} | options)


def test_bounds_of_pools_are_not_those_of_int32(tmp_path):
    disk = reopened(tmp_path, num_blocks=sys.maxsize)
    assert disk.num_blocks == offload.HostPool(LAYOUT, sys.maxsize, disk=disk).num_blocks == sys.maxsize


class TestFiles:
    def test_blocks_survive(self, disk, row, tmp_path):
        assert disk.store(KEY, row)
        for pool in (disk, reopened(tmp_path)):
            assert (len(pool), KEY in pool, OTHER in pool) == (1, True, False)
            assert_same_bits(pool.load(KEY), row)

    def test_pools_of_other_models_and_layouts_do_not_see_them(self, disk, row, tmp_path):
        disk.store(KEY, row)
        other = jaxkv.CacheLayout(**SIZES, entry=ENTRY, order="BHLNC", block_padding=8)
        assert KEY not in reopened(tmp_path, model="n")
        assert KEY not in offload.DiskPool(tmp_path, other, model="m")
        assert KEY in offload.DiskPool(tmp_path, jaxkv.CacheLayout(**SIZES | {"num_blocks": 3}, entry=ENTRY), model="m")

    def test_a_block_that_is_stored_again_is_replaced(self, disk, row):
        disk.store(KEY, row)
        disk.store(KEY, row[::-1].copy())
        assert_same_bits(disk.load(KEY), row[::-1])
        assert len(disk) == 1

    def test_the_least_recently_used_go_first(self, tmp_path, row):
        disk, keys = reopened(tmp_path, num_blocks=3), names(5)
        for key in keys[:3]:
            disk.store(key, row)
        disk.load(keys[0])
        assert disk.store(keys[3], row, held=keys[1:2])
        assert [key in disk for key in keys] == [True, True, False, True, False]
        assert not disk.store(keys[4], row, held=keys)
        assert len(list(disk.file(KEY).parent.iterdir())) == len(disk) == 3

    def test_files_that_were_never_finished_are_removed_in_time(self, disk, row, tmp_path):
        disk.store(KEY, row)
        old, young = (disk.file(OTHER).with_name(f"{name}{block_file.UNFINISHED}") for name in ("old", "young"))
        for file in (old, young):
            file.write_bytes(b"half a bl")
        os.utime(old, (time.time() - 3600,) * 2)
        assert len(reopened(tmp_path)) == 1
        assert (old.exists(), young.exists()) == (False, True)

    def test_foreign_files_are_let_be(self, disk, row, tmp_path):
        disk.store(KEY, row)
        for name in ("notes.txt", "no hex.block"):
            disk.file(KEY).with_name(name).write_text("mine")
        assert len(reopened(tmp_path)) == 1
        assert len(list(disk.file(KEY).parent.iterdir())) == 3

    def test_a_file_that_another_process_took_away_is_missing(self, disk, row):
        disk.store(KEY, row)
        disk.file(KEY).unlink()
        with pytest.raises(KeyError, match=KEY.hex()):
            disk.load(KEY)
        assert KEY not in disk

    def test_a_full_disk_leaves_nothing_of_the_block(self, disk, row, monkeypatch):
        def full(descriptor):
            raise OSError(28, "No space left on device")

        disk.store(OTHER, row)
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            disk.store(KEY, row)
        assert KEY not in disk
        assert list(disk.file(KEY).parent.iterdir()) == [disk.file(OTHER)]

    def test_a_file_that_cannot_be_read_now_is_not_forgotten(self, disk, row, monkeypatch):
        def many_open(*args):
            raise OSError(24, "Too many open files")

        disk.store(KEY, row)
        with monkeypatch.context() as patch:
            patch.setattr("jaxkv.offload.disk.read_block", many_open)
            with pytest.raises(OSError, match="Too many open files"):
                disk.load(KEY)
        assert_same_bits(disk.load(KEY), row)

    def test_misuse_is_told(self, disk, row, tmp_path):
        with pytest.raises(ValueError, match=r"`row` is bfloat16\[143\]: expected bfloat16\[144\]"):
            disk.store(KEY, row[1:])
        with pytest.raises(ValueError, match=r"`row` is uint16\[144\]: expected bfloat16\[144\]"):
            disk.store(KEY, row.view(np.uint16))
        with pytest.raises(ValueError, match="`model` is a NoneType: expected a string, such as"):
            reopened(tmp_path, model=None)
        with pytest.raises(ValueError, match="`num_blocks` is 0"):
            reopened(tmp_path, num_blocks=0)
        with pytest.raises(ValueError, match="too long: shorten `model`"):
            reopened(tmp_path, model="m" * 5000)
        with pytest.raises(ValueError, match="`layout` is None: expected a CacheLayout or a PackedLayout"):
            offload.DiskPool(tmp_path, None, model="m")


def cut(length):
    return lambda file: os.truncate(file, length)


def flip(place, mask=1):
    def damage(file):
        contents = bytearray(file.read_bytes())
        contents[place] ^= mask
        file.write_bytes(contents)

    return damage


def lengthen(file):
    file.write_bytes(file.read_bytes() + b"\0")


def another_version(file):
    contents = file.read_bytes()
    file.write_bytes(contents[:8] + struct.pack("<I", 2) + contents[12:])


NBYTES = block_file.HEADER_BYTES + LAYOUT.block_nbytes


class TestDamage:
    def refused(self, disk, told):
        """Every pool refuses the file of KEY, keeps it, and reads nothing of it into a cache."""
        cache, before = filled(LAYOUT, seed=5)
        host = offload.HostPool(LAYOUT, 8, disk=disk)
        host.store(cache, [1], [OTHER])
        assert host.matched([OTHER, KEY]) == 2
        with pytest.raises(offload.DamagedBlock, match=told) as error:
            host.load(cache, [2, 3], [OTHER, KEY])
        assert str(disk.file(KEY)) in str(error.value)
        assert_same_bits(blocks_of(cache, range(16)), before)
        assert host.matched([OTHER, KEY]) == 1
        assert disk.file(KEY).exists()
        host.flush()

    @pytest.mark.parametrize(
        ("damage", "told"),
        [
            (cut(0), "is truncated: it has 0 bytes"),
            (cut(100), "is truncated: it has 100 bytes"),
            (cut(NBYTES - 1), f"is truncated: it has {NBYTES - 1} bytes, its header says {NBYTES}"),
            (lengthen, f"it has {NBYTES + 1} bytes, its header says {NBYTES}"),
            (flip(0), "is no block: it begins with"),
            (another_version, "is of version 2: this program reads version 1"),
            (flip(12), "was altered: its checksum is"),
            (flip(60), "was altered: its checksum is"),
            (flip(2000), "was altered: its checksum is"),
            (flip(block_file.HEADER_BYTES, 0x80), "was altered: its checksum is"),
            (flip(-1), "was altered: its checksum is"),
        ],
    )
    def test_damaged_files_are_refused(self, disk, row, damage, told):
        disk.store(KEY, row)
        damage(disk.file(KEY))
        self.refused(disk, told)

    def test_every_flipped_byte_is_noticed(self, disk, row):
        disk.store(KEY, row)
        contents = disk.file(KEY).read_bytes()
        expected = disk._description(KEY)
        for place in [*range(300), *range(4000, len(contents), 7)]:
            disk.file(KEY).write_bytes(contents)
            flip(place)(disk.file(KEY))
            with pytest.raises(offload.DamagedBlock):
                block_file.read_block(disk.file(KEY), expected)

    @pytest.mark.parametrize(
        ("layout", "model", "key", "told"),
        [
            ({"order": "BHLNC", "block_padding": 8}, "m", KEY, "holds a block of another fingerprint: '"),
            ({"entry": jaxkv.MLAEntry("f16", 8, 4)}, "m", KEY, "another dtype: 'float16', expected 'bfloat16'"),
            ({}, "n", KEY, "holds a block of another model: 'n', expected 'm'"),
            ({}, "m", OTHER, f"holds a block of another key: '{OTHER.hex()}', expected '{KEY.hex()}'"),
        ],
    )
    def test_files_of_others_that_were_moved_here_are_refused(self, disk, row, tmp_path, layout, model, key, told):
        other_layout = jaxkv.CacheLayout(**{**SIZES, "entry": ENTRY, **layout})
        other = offload.DiskPool(tmp_path / "other", other_layout, model=model)
        other.store(key, np.zeros(other_layout.block_nbytes // 2, other_layout.dtype))
        disk.store(KEY, row)
        os.replace(other.file(key), disk.file(KEY))
        self.refused(disk, told)

    def test_a_refused_block_can_be_stored_again(self, disk, row):
        disk.store(KEY, row)
        flip(-1)(disk.file(KEY))
        with pytest.raises(offload.DamagedBlock):
            disk.load(KEY)
        disk.store(KEY, row)
        assert_same_bits(disk.load(KEY), row)


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


@pytest.mark.parametrize("seconds", [0, 0.3])
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


def test_the_checksum_is_that_of_the_file():
    """What other programs compute: CRC-32 of all bytes after it."""
    description = block_file.Description("uint8", "f", "m", "k")
    contents = block_file._header(description, memoryview(b"abc")) + b"abc"
    (checksum,) = struct.unpack_from("<I", contents, 12)
    assert checksum == zlib.crc32(contents[16:])
