"""Blocks of four groups survive their process, move to other blocks and to other layouts, bit for bit."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import offload
from offload import four_groups
from offload.four_groups import ELSEWHERE, GROUPS, LAYOUT, contents, each_group, filled, keys
from support.compare import assert_same_bits


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """The folder of a pool whose process was killed while it wrote, and what its cache held."""
    folder, root = tmp_path_factory.mktemp("blocks"), Path(jaxkv.__file__).parents[1]
    paths = {"PYTHONPATH": os.pathsep.join(map(str, (root, root / "kernels", root / "tests")))}
    command = [sys.executable, four_groups.__file__, str(folder)]
    with subprocess.Popen(command, env=os.environ | paths, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    return folder, [*np.load(folder / "contents.npz").values()]


def reloaded(folder):
    """A cache of garbage into whose blocks `ELSEWHERE` the request was loaded."""
    cache = jaxkv.KVCache(jnp.full(LAYOUT["latent"].size, 0xFF, jnp.uint8), LAYOUT["latent"])
    cache = jax.device_put(cache, jax.devices()[0])
    host = offload.HostPool(LAYOUT, 32, disk=offload.DiskPool(folder, LAYOUT, model="m"))
    for name, blocks in ELSEWHERE.items():
        count = len(blocks) - blocks.count(-1)
        cache = host.load(cache, blocks[:count], keys()[name][:count])
    return cache


def assert_contents(found, expected):
    found = jax.tree.leaves(found)
    assert len(found) == len(expected)
    for x, right in zip(found, expected, strict=True):
        assert_same_bits(x, right.view(np.asarray(x).dtype))  # files of NumPy do not know bfloat16


@pytest.mark.ci
def test_another_process_finds_them(killed):
    folder, expected = killed
    assert_contents(each_group(reloaded(folder), *ELSEWHERE.values()), expected)


def test_they_are_converted_to_another_layout(killed):
    folder, expected = killed
    sizes = {name: table.block_size for name, table in LAYOUT.tables.items()}
    groups = dict(reversed(GROUPS.items()))
    other = jaxkv.PackedLayout(
        num_blocks=25, block_size=sizes, groups=groups, order="BHLNC", dtype="uint16", alignment=2
    )
    assert other.fingerprint != LAYOUT.fingerprint
    source = reloaded(folder)
    target = jaxkv.KVCache(jnp.full(other["latent"].size, 0xFFFF, jnp.uint16), other["latent"])
    for name, blocks in ELSEWHERE.items():
        rows = jaxkv.convert_blocks(jaxkv.read_blocks(source, jnp.asarray(blocks)), LAYOUT, other, table=name)
        moved = jnp.asarray([24 - block if block >= 0 else -1 for block in blocks])
        target = jaxkv.write_blocks(target, moved, rows)
    tables = [[24 - block if block >= 0 else -1 for block in blocks] for blocks in ELSEWHERE.values()]
    assert_contents(jax.jit(lambda cache: contents(cache, other, tables))(target), expected)


def test_blocks_are_converted_only_as_those_of_their_table():
    rows = jnp.zeros((1, LAYOUT["latent"].block_nbytes), jnp.uint8)
    with pytest.raises(ValueError, match="`table` is None: expected one of '', 'window', 'state', the table of these"):
        jaxkv.convert_blocks(rows, LAYOUT, LAYOUT)
    with pytest.raises(ValueError, match="`table` is 'local': expected one of '', 'window', 'state'"):
        jaxkv.convert_blocks(rows, LAYOUT, LAYOUT, table="local")
    with pytest.raises(ValueError, match="`table` is 'window': expected one of ''"):
        jaxkv.convert_blocks(rows, LAYOUT["state"], LAYOUT["state"], table="window")
    swapped = GROUPS | {"local": jaxkv.Group(2, jaxkv.KVEntry("bf16", head_dim=8), 2, table="window", window=13)}
    sizes = {name: table.block_size for name, table in LAYOUT.tables.items()}
    other = jaxkv.PackedLayout(num_blocks=20, block_size=sizes, groups=swapped)
    with pytest.raises(ValueError, match="`window` of group 'local' is 12 in `src` and 13 in `dst`"):
        jaxkv.convert_blocks(rows, LAYOUT, other, table="state")


def test_blocks_of_all_tables_are_copied():
    cache = filled()
    source, target = [3, 4, 6], [0, 1, 2]
    copied = jaxkv.copy_blocks(cache, jnp.asarray(source), jnp.asarray(target))
    assert_same_bits(jaxkv.read_blocks(copied, jnp.asarray(target)), jaxkv.read_blocks(cache, jnp.asarray(source)))


def test_keys_of_tables_differ():
    first = {name: found[0] for name, found in keys().items()}
    assert len(set(first.values())) == 3
    about = {"block_size": 4, "layout_fingerprint": "f", "model": "m"}
    assert offload.prefix_keys(range(8), **about) == offload.prefix_keys(range(8), table="", **about)
    assert offload.prefix_keys(range(8), **about) != offload.prefix_keys(range(8), table="a", **about)
    with pytest.raises(ValueError, match="`table` is a NoneType: expected a string"):
        offload.prefix_keys(range(8), table=None, **about)
