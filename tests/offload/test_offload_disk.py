"""Blocks on disk: they survive the process, and files that are not exactly the requested block are rejected by name."""

import hashlib
import json
import os
import resource
import secrets
import shutil
import socket
import struct
import sys
import time
import zlib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread

import numpy as np
import pytest

import jaxkv
from jaxkv import offload
from jaxkv.offload import block_file
from offload.pools import ENTRY, KEY, LAYOUT, OTHER, SIZES, blocks_of, filled, flip, names, reopened
from support import forged_blocks
from support.compare import assert_same_bits


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
        with pytest.raises(ValueError, match=r"`row` is \[0\]: expected bfloat16\[144\]"):
            disk.store(KEY, [0])
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


def lengthen(file):
    file.write_bytes(file.read_bytes() + b"\0")


def another_version(file):
    contents = file.read_bytes()
    file.write_bytes(contents[:8] + struct.pack("<I", 1) + contents[12:])


NBYTES = block_file.HEADER_BYTES + LAYOUT.block_nbytes


def files(disk):
    return sorted(os.listdir(disk.file(KEY).parent))


class TestLimit:
    """`num_blocks` is a limit of the folder, whichever pool wrote the blocks and whenever."""

    def test_it_holds_from_the_opening_on(self, disk, tmp_path, row):
        for place, key in enumerate(names(5)):
            disk.store(key, row)
            os.utime(disk.file(key), (place, place))
        disk.load(names(5)[1])  # now used last
        small = reopened(tmp_path, num_blocks=2)
        assert files(small) == sorted(small.file(names(5)[n]).name for n in (1, 4))
        assert [key in small for key in names(5)] == [False, True, False, False, True]
        assert small.store(KEY, row)
        assert [key in small for key in names(5)] == [False, True, False, False, False]
        assert len(small) == len(files(small)) == 2
        with pytest.raises(KeyError):  # as if another process had removed it
            disk.load(names(1)[0])

    def test_pools_that_share_a_folder_keep_to_it_together(self, tmp_path, row):
        one, two = (reopened(tmp_path, num_blocks=2) for _ in range(2))
        for pool, keys in ((one, names(6)), (two, names(6, "b")), (one, names(1, "c"))):
            for key in keys:
                assert pool.store(key, row)
                assert len(files(pool)) <= 2
        assert [key in one for key in (names(6, "b")[-1], names(1, "c")[0])] == [True, True]  # it has listed the folder
        assert_same_bits(one.load(names(6, "b")[-1]), row)

    def test_blocks_that_are_held_stay_and_those_of_others_go(self, tmp_path, row):
        ours, theirs = reopened(tmp_path, num_blocks=2), reopened(tmp_path)
        for key in names(2):
            ours.store(key, row)
        for key in names(3, "b"):
            theirs.store(key, row)
        ours.store(names(1)[0], row[::-1].copy(), held=names(2))  # written again, and only then are theirs seen
        assert files(ours) == sorted(ours.file(key).name for key in names(2))
        theirs.store(KEY, row)
        assert not ours.store(OTHER, row, held=names(2))
        assert len(files(ours)) == 3  # nothing was written, so the folder was not listed
        assert_same_bits(ours.load(names(1)[0]), row[::-1])

    def test_large_folders_are_listed_seldom(self, tmp_path, row, monkeypatch):
        monkeypatch.setattr("jaxkv.offload.disk.SCANNED_SHARE", 2)
        disk, other, listed = reopened(tmp_path, num_blocks=7), reopened(tmp_path), []
        monkeypatch.setattr(disk, "_list_again", lambda: (listed.append(len(disk)), type(disk)._list_again(disk)))
        for key in names(5, "b"):
            other.store(key, row)
        for key in names(9):
            disk.store(key, row)
        assert listed == [3, 7]  # with the fourth and the eighth block
        assert len(files(disk)) == len(disk) == 7

    def test_files_may_vanish_at_any_time(self, tmp_path, row):
        """Pools of several threads, which share nothing but the folder, remove each other's files."""

        def fill(number):
            pool, found = reopened(tmp_path, num_blocks=3), Counter()
            rng = np.random.default_rng(number)
            for key in rng.permutation(names(16)).tolist():
                pool.store(key, row)
                try:
                    assert_same_bits(pool.load(names(16)[rng.integers(16)]), row)
                    found["right"] += 1
                except KeyError:
                    found["missing"] += 1
            return found

        with ThreadPoolExecutor(3) as threads:
            found = sum(threads.map(fill, range(3)), Counter())
        assert found["right"]
        assert found["missing"]
        disk = reopened(tmp_path, num_blocks=3)
        # Two pools that find a file too many may each remove one.
        assert 0 < len(disk) == len(files(disk)) <= 3
        for key in names(3):
            disk.store(key, row)
        assert len(disk) == len(files(disk)) == 3

    def test_files_that_cannot_be_removed_are_reported(self, disk, tmp_path, row, monkeypatch):
        def refuse(*args, **kwargs):
            raise PermissionError(1, "Operation not permitted")

        for key in names(2):
            disk.store(key, row)
        monkeypatch.setattr("pathlib.Path.unlink", refuse)
        with pytest.raises(PermissionError):
            reopened(tmp_path, num_blocks=1)


def fifo(path):
    os.mkfifo(path)


def listening(path):
    with socket.socket(socket.AF_UNIX) as server:
        os.chdir(path.parent)  # the names of sockets are short
        server.bind(path.name)


def link_to_a_block(path):
    shutil.copy(path.with_name("copy"), path.with_name("moved"))
    path.symlink_to(path.with_name("moved"))


KINDS = {
    "FIFO": fifo,
    "folder": Path.mkdir,
    "socket": listening,
    "symbolic link": link_to_a_block,
}


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

    @pytest.mark.parametrize(
        ("kind", "make"), [*KINDS.items(), ("symbolic link", lambda path: path.symlink_to("/dev/zero"))]
    )
    @pytest.mark.parametrize("secret", [None, b"s" * 32], ids=["checksum", "secret"])
    def test_what_is_not_a_file_is_rejected_without_waiting(self, tmp_path, row, monkeypatch, kind, make, secret):
        monkeypatch.chdir(tmp_path)
        disk, outcome = reopened(tmp_path, secret=secret), []
        disk.store(KEY, row)
        os.replace(disk.file(KEY), disk.file(KEY).with_name("copy"))
        make(disk.file(KEY))

        def load():
            try:
                outcome.append(disk.load(KEY))
            except Exception as error:
                outcome.append(error)

        thread = Thread(target=load, daemon=True)
        thread.start()
        thread.join(10)
        assert [type(found) for found in outcome] == [offload.DamagedBlock], "the load waits, or accepts it"
        assert f"{disk.file(KEY)} is not a block but a {kind}: expected a regular file; it is kept as" in str(
            outcome[0]
        )
        assert KEY not in disk
        assert disk.store(KEY, row)
        assert_same_bits(disk.load(KEY), row)

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
