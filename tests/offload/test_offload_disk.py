"""Blocks on disk: they survive the process, and files that are not exactly the requested block are rejected by name."""

import hashlib
import json
import os
import resource
import secrets
import signal
import struct
import subprocess
import sys
import time
import weakref
import zlib
from collections import Counter
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import offload
from jaxkv.offload import block_file, transfers
from offload.test_offload import ENTRY, LAYOUT, SIZES, blocks_of, filled, names
from support import forged_blocks
from support.compare import assert_same_bits

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
        ending = block_file.UNFINISHED
        old, young = (disk.file(OTHER).with_name(f"{disk.file(OTHER).name}.{n:08x}{ending}") for n in range(2))
        for file in (old, young):
            file.write_bytes(b"half a bl")
        os.utime(old, (time.time() - 3600,) * 2)
        assert len(reopened(tmp_path)) == 1
        assert (old.exists(), young.exists()) == (False, True)

    def test_what_is_not_a_file_of_the_pool_is_skipped_and_left_alone(self, disk, row, tmp_path):
        disk.store(KEY, row)
        folder, unfinished = disk.file(KEY).parent, f"{disk.file(OTHER).name}.00000000{block_file.UNFINISHED}"
        for name in ("notes.txt", "no hex.block", "AA.block", f"mine{block_file.UNFINISHED}"):
            (folder / name).write_text("mine")
        for name in (f"x{block_file.UNFINISHED}", disk.file(OTHER).name, unfinished):
            (folder / name).mkdir()
        for name in ("loop", f"loop{block_file.UNFINISHED}", "ab.block"):
            (folder / name).symlink_to(folder / name)
        (folder / "ac.block").symlink_to(disk.file(KEY))
        os.mkfifo(folder / "ad.block")
        there = set(os.listdir(folder))
        for name in there - {path.name for path in folder.iterdir() if path.is_symlink()}:
            os.utime(folder / name, (time.time() - 3600,) * 2)
        with pytest.warns(UserWarning, match=r"holds 12 entries that are not files of this pool.*such as '0000"):
            pool = reopened(tmp_path)
        assert (len(pool), KEY in pool, OTHER in pool) == (1, True, False)
        assert_same_bits(pool.load(KEY), row)
        assert set(os.listdir(folder)) == there

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

    def test_what_a_new_block_replaces_is_removed_only_after_it_is_written(self, tmp_path, row):
        disk, (old, older, new) = reopened(tmp_path, num_blocks=2), names(3)
        disk.store(older, row)
        disk.store(old, row)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (block_file.HEADER_BYTES, hard))
            with pytest.raises(OSError, match="File too large"):
                disk.store(new, row)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        for pool in (disk, reopened(tmp_path)):
            assert [key in pool for key in (old, older, new)] == [True, True, False]
            assert_same_bits(pool.load(older), row)
            assert_same_bits(pool.load(old), row)
        assert disk.store(new, row)
        assert {path.stem for path in disk.file(new).parent.iterdir()} == {old.hex(), new.hex()}

    def test_a_block_for_which_all_room_is_held_by_the_time_it_is_written_goes_again(self, tmp_path, row, monkeypatch):
        disk, (old, new), held = reopened(tmp_path, num_blocks=1), names(2), set()
        disk.store(old, row)

        def meanwhile(*args):
            block_file.write_block(*args)
            held.add(old)

        monkeypatch.setattr("jaxkv.offload.disk.write_block", meanwhile)
        assert not disk.store(new, row, held=held)
        assert (old in disk, new in disk) == (True, False)
        assert list(disk.file(old).parent.iterdir()) == [disk.file(old)]

    def test_a_pool_that_is_opened_with_less_room_keeps_to_it_from_the_next_store_on(self, disk, tmp_path, row):
        for key in names(5):
            disk.store(key, row)
        small = reopened(tmp_path, num_blocks=2)
        assert not small.store(KEY, row, held=names(2))
        assert len(list(disk.file(KEY).parent.iterdir())) == 5
        assert small.store(KEY, row)
        assert len(list(disk.file(KEY).parent.iterdir())) == len(small) == 2

    def test_a_file_that_cannot_be_read_now_is_not_forgotten(self, disk, row, monkeypatch):
        def many_open(*args):
            raise OSError(24, "Too many open files")

        disk.store(KEY, row)
        with monkeypatch.context() as patch:
            patch.setattr("jaxkv.offload.disk.read_block", many_open)
            with pytest.raises(OSError, match="Too many open files"):
                disk.load(KEY)
        assert_same_bits(disk.load(KEY), row)

    def test_misuse_is_reported(self, disk, row, tmp_path):
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
        for secret, found in (("s" * 32, "is a str"), (b"", "has 0 bytes"), (b"s" * 65, "has 65 bytes")):
            with pytest.raises(ValueError, match=f"^`secret` {found}: expected 1 to 64 bytes, such as `secrets"):
                reopened(tmp_path, secret=secret)
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
    file.write_bytes(contents[:8] + struct.pack("<I", 1) + contents[12:])


NBYTES = block_file.HEADER_BYTES + LAYOUT.block_nbytes


class TestDamage:
    def not_loaded(self, disk, error, message):
        """KEY's file reaches no cache, and from then on the pool does not list it; the error."""
        cache, before = filled(LAYOUT, seed=5)
        host = offload.HostPool(LAYOUT, 8, disk=disk)
        host.store(cache, [1], [OTHER])
        assert host.matched([OTHER, KEY]) == 2
        with pytest.raises(error, match=message) as raised:
            host.load(cache, [2, 3], [OTHER, KEY])
        assert_same_bits(blocks_of(cache, range(16)), before)
        assert host.matched([OTHER, KEY]) == 1
        assert host.stats.damaged == (error is offload.DamagedBlock)
        assert not disk.file(KEY).with_suffix(".damaged").exists() or error is offload.DamagedBlock
        host.flush()
        return raised.value

    def rejected(self, disk, message):
        """KEY's file is damaged: it is kept under another name, and the block can be stored again."""
        contents, kept = disk.file(KEY).read_bytes(), disk.file(KEY).with_suffix(".damaged")
        error = self.not_loaded(disk, offload.DamagedBlock, message)
        assert str(disk.file(KEY)) in str(error)
        assert f"it is kept as {kept.name}" in str(error)
        assert not disk.file(KEY).exists()
        assert kept.read_bytes() == contents

    def missed(self, disk, message):
        """KEY's file is of another pool: as if it were not there, and it stays as it is."""
        contents = disk.file(KEY).read_bytes()
        error = self.not_loaded(disk, KeyError, KEY.hex())
        assert message in str(error.__cause__)
        assert disk.file(KEY).read_bytes() == contents

    @pytest.mark.parametrize(
        ("damage", "message"),
        [
            (cut(0), "is truncated: it has 0 bytes"),
            (cut(100), "is truncated: it has 100 bytes"),
            (cut(NBYTES - 1), f"has {NBYTES - 1} bytes: expected {NBYTES}, a header and a block of the layout"),
            (lengthen, f"has {NBYTES + 1} bytes: expected {NBYTES}"),
            (flip(0), "is not a block: it begins with"),
            (flip(12), "was altered: the checksum of its header is"),
            (flip(60), "was altered: the checksum of its header is"),
            (flip(2000), "was altered: the checksum of its header is"),
            (flip(block_file.HEADER_BYTES, 0x80), "was altered: its contents do not have the digest"),
            (flip(-1), "was altered: its contents do not have the digest"),
        ],
    )
    def test_damaged_files_are_rejected(self, disk, row, damage, message):
        disk.store(KEY, row)
        damage(disk.file(KEY))
        self.rejected(disk, message)

    @pytest.mark.parametrize("secret", [None, b"s" * 32], ids=["checksum", "secret"])
    def test_every_flipped_byte_is_noticed(self, tmp_path, row, secret):
        disk = reopened(tmp_path, secret=secret)
        disk.store(KEY, row)
        contents = disk.file(KEY).read_bytes()
        version = range(8, 12)  # other versions are foreign, not damaged
        for place in [*range(400), *range(4000, len(contents), 7)]:
            disk.file(KEY).write_bytes(contents)
            flip(place)(disk.file(KEY))
            with pytest.raises(block_file.ForeignBlock if place in version else offload.DamagedBlock):
                block_file.read_block(disk.file(KEY), disk._description(KEY), disk._row, secret)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"order": "BHLNC", "block_padding": 8}, "holds a block of another fingerprint: '"),
            ({"entry": jaxkv.MLAEntry("f16", 8, 4)}, "another dtype: 'float16', expected 'bfloat16'"),
            ({"model": "n"}, "holds a block of another model: 'n', expected 'm'"),
            ({"secret": b"s" * 32}, "holds a block of another secret: '"),
        ],
    )
    def test_files_of_other_pools_that_were_moved_here_are_missed_and_left_alone(
        self, disk, row, tmp_path, options, message
    ):
        pool = {name: options.pop(name) for name in ("model", "secret") if name in options}
        layout = jaxkv.CacheLayout(**{**SIZES, "entry": ENTRY, **options})
        other = offload.DiskPool(tmp_path / "other", layout, **{"model": "m"} | pool)
        other.store(KEY, np.zeros(layout.block_nbytes // 2, layout.dtype))
        disk.store(KEY, row)
        os.replace(other.file(KEY), disk.file(KEY))
        self.missed(disk, message)

    def test_files_of_another_version_are_missed_and_left_alone(self, disk, row):
        disk.store(KEY, row)
        another_version(disk.file(KEY))
        self.missed(disk, "is of version 1 of the format: this program reads version 2")

    def test_a_file_under_the_name_of_another_key_is_rejected(self, disk, row):
        disk.store(KEY, row)
        disk.store(OTHER, row)
        os.replace(disk.file(OTHER), disk.file(KEY))
        self.rejected(disk, f"holds a block of another key: '{OTHER.hex()}', expected '{KEY.hex()}'")

    def test_a_rejected_block_can_be_stored_again(self, disk, row, tmp_path):
        disk.store(KEY, row)
        for _ in range(2):
            flip(-1)(disk.file(KEY))
            with pytest.raises(offload.DamagedBlock):
                disk.load(KEY)
            disk.store(KEY, row)
            for pool in (disk, reopened(tmp_path)):
                assert_same_bits(pool.load(KEY), row)

    def test_a_damaged_file_that_cannot_be_renamed_is_forgotten_all_the_same(self, disk, row):
        disk.store(KEY, row)
        flip(-1)(disk.file(KEY))
        disk.file(KEY).with_suffix(".damaged").mkdir()
        with pytest.raises(offload.DamagedBlock, match=r"it cannot be renamed to .*: .*Is a directory"):
            disk.load(KEY)
        assert KEY not in disk

    @pytest.mark.parametrize("secret", [None, b"s" * 32], ids=["checksum", "secret"])
    def test_forged_files_are_rejected_or_correct(self, tmp_path, row, secret):
        disk, rng, outcomes = reopened(tmp_path, secret=secret), np.random.default_rng(0), Counter()
        disk.store(KEY, row)
        contents, file, expected = disk.file(KEY).read_bytes(), disk.file(KEY), disk._description(KEY)
        kinds = [*forged_blocks.KINDS, forged_blocks.another_block] if secret else forged_blocks.KINDS
        for _ in range(3000):
            forged = forged_blocks.forged(rng, contents, kinds)
            file.write_bytes(forged)
            try:
                found = block_file.read_block(file, expected, disk._row, secret)
            except offload.DamagedBlock:
                outcomes["damaged"] += 1
            except block_file.ForeignBlock:
                assert forged[8:12] != contents[8:12] or pool_of(forged) != pool_of(contents)
                outcomes["foreign"] += 1
            else:
                assert_same_bits(found, row)
                outcomes["right"] += 1
        print(outcomes)
        assert outcomes["damaged"] > 2000
        assert min(outcomes["foreign"], outcomes["right"]) > 10


def pool_of(contents):
    """What of a file's description names the pool."""
    text, _ = forged_blocks.parts(contents)
    return {name: value for name, value in json.loads(text).items() if name != "key"}


class TestSecret:
    SECRET = b"known to those who share the folder"

    def test_a_pool_finds_blocks_of_its_own_secret_only(self, tmp_path, row):
        reopened(tmp_path, secret=self.SECRET).store(KEY, row)
        assert_same_bits(reopened(tmp_path, secret=self.SECRET).load(KEY), row)
        assert KEY not in reopened(tmp_path)
        assert KEY not in reopened(tmp_path, secret=secrets.token_bytes(32))

    @pytest.mark.parametrize("secret", [None, SECRET], ids=["checksum", "secret"])
    def test_only_a_secret_protects_against_people(self, tmp_path, row, secret):
        disk, rng = reopened(tmp_path, secret=secret), np.random.default_rng(0)
        disk.store(KEY, row)
        disk.file(KEY).write_bytes(forged := forged_blocks.another_block(rng, disk.file(KEY).read_bytes()))
        if secret is None:
            assert disk.load(KEY).tobytes() == forged[block_file.HEADER_BYTES :]
        else:
            with pytest.raises(offload.DamagedBlock, match="was altered: its contents do not have the digest"):
                disk.load(KEY)

    def test_the_digest_of_another_block_is_of_no_use(self, tmp_path, row):
        """A header names its key: blocks of one secret cannot be put in each other's place."""
        disk = reopened(tmp_path, secret=self.SECRET)
        disk.store(KEY, row)
        disk.store(OTHER, row[::-1].copy())
        ours, theirs = disk.file(KEY).read_bytes(), disk.file(OTHER).read_bytes()
        text, _ = forged_blocks.parts(ours)
        forged = bytearray(forged_blocks.with_checksums(text, theirs[block_file.HEADER_BYTES :]))
        forged[16:48] = theirs[16:48]
        forged[12:16] = struct.pack("<I", zlib.crc32(forged[16 : block_file.HEADER_BYTES]))
        disk.file(KEY).write_bytes(forged)
        with pytest.raises(offload.DamagedBlock, match="was altered: its contents do not have the digest"):
            disk.load(KEY)

    def test_neither_the_secret_nor_what_it_signs_is_shown(self, tmp_path, row):
        disk = reopened(tmp_path, secret=self.SECRET)
        disk.store(KEY, row)
        flip(-1)(disk.file(KEY))
        with pytest.raises(offload.DamagedBlock) as error:
            disk.load(KEY)
        kept = disk.file(KEY).with_suffix(".damaged").read_bytes()
        digest = block_file._digest(self.SECRET, kept[48:])  # it would make the altered block good
        for shown in (repr(disk), str(error.value), kept.decode("latin1")):
            for hidden in (self.SECRET.decode(), self.SECRET.hex(), digest.decode("latin1"), digest.hex()):
                assert hidden not in shown


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


def test_the_digest_is_that_of_the_file():
    """What other programs compute: of all bytes after it, CRC-32 or keyed BLAKE2b; and the header's CRC-32."""
    secret = b"secret"
    for key in (None, secret):
        description = block_file.Description("uint8", "0" * 32, "m", block_file.secret_id(key), "aa")
        contents = block_file._header(description, memoryview(b"abc"), key) + b"abc"
        checksum, digest = struct.unpack_from("<I32s", contents, 12)
        assert checksum == zlib.crc32(contents[16:4096])
        keyed = hashlib.blake2b(contents[48:], key=secret, digest_size=32, person=b"jaxkv block").digest()
        assert digest == (keyed if key else zlib.crc32(contents[48:]).to_bytes(32, "little"))
