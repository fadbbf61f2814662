"""Meshes with explicit axes, whose arrays have shardings in their types."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxkv
from support.compare import assert_same_bits
from support.many_devices import mesh_of, on_several_devices

pytestmark = on_several_devices
SIZES = {"num_layers": 2, "num_blocks": 4, "block_size": 4, "entry": jaxkv.KVEntry("f32", head_dim=16)}
LAYOUT = jaxkv.CacheLayout(**SIZES, num_heads=2)
KEYS, SLOTS = jnp.arange(64.0).reshape(2, 2, 16), jnp.asarray([0, 9])


def write(cache, k, slots):
    return jaxkv.write_kv(cache, k, k, slots, layer=1)


def put(array, *axes):
    return jax.device_put(array, NamedSharding(mesh_of(2), P(*axes)))


@pytest.mark.parametrize("jit", [False, True])
def test_divided_arrays_are_rejected(jit):
    call, cache = jax.jit(write) if jit else write, jaxkv.KVCache.zeros(LAYOUT)
    expected = "inside `jax.shard_map`"
    with pytest.raises(ValueError, match=rf"write_kv: k is divided over explicit axes of a mesh, .*'x'.*{expected}"):
        call(cache, put(KEYS, None, "x"), SLOTS)
    divided = jaxkv.KVCache(put(cache.buffer, "x"), LAYOUT)
    with pytest.raises(ValueError, match=rf"write_kv: buffer is divided over explicit axes of a mesh, .*{expected}"):
        call(divided, KEYS, SLOTS)


def test_operations_inside_shard_map():
    """As the message says: each device has a cache of its own heads."""
    own = jaxkv.CacheLayout(**SIZES)
    with jax.set_mesh(mesh_of(2)):
        divided = jax.shard_map(
            lambda k: write(jaxkv.KVCache.zeros(own), k, SLOTS).buffer, in_specs=P(None, "x"), out_specs=P("x")
        )(put(KEYS, None, "x"))
    for device, part in enumerate(jnp.split(jax.device_get(divided), 2)):
        right = write(jaxkv.KVCache.zeros(own), KEYS[:, device : device + 1], SLOTS)
        assert_same_bits(part, right.buffer)


def test_undivided_arrays_of_such_a_mesh():
    cache = jaxkv.KVCache.zeros(LAYOUT, device=NamedSharding(mesh_of(2), P()))
    right = write(jaxkv.KVCache.zeros(LAYOUT), KEYS, SLOTS)
    assert_same_bits(write(cache, put(KEYS), put(SLOTS)).buffer, right.buffer)
