"""The fingerprint of a model, which identifies the entries that it computes."""

import hashlib
import math

import jax
import jax.numpy as jnp
from jax import lax

from jaxkv_kernels.tile_scaled import TileScaled


def fingerprint(model) -> str:
    """A stable name (32 hex digits) of the model, the same on every device.

    Models may use each other's cached entries only if their fingerprints are equal.  The fingerprint covers the
    configuration, and every weight with its path, shape and dtype.  All weights are read once, on the devices that hold
    them.

    Args:
      model: from `load` or `random_model`.
    """
    digest = hashlib.sha256(f"jaxkv model 3 {model.config}".encode())
    weights = jax.tree.leaves(model.params, is_leaf=lambda weight: isinstance(weight, TileScaled))
    if any(isinstance(weight, TileScaled) and weight.e4m3_products for weight in weights):
        digest.update(b" e4m3 products")  # with the same weights, but other entries
    leaves, _ = jax.tree_util.tree_flatten_with_path(model.params)
    checksums = [_checksum(weight) for _, weight in leaves]
    for (path, weight), checksum in zip(leaves, jax.device_get(checksums), strict=True):
        digest.update(f" {jax.tree_util.keystr(path)} {weight.shape} {weight.dtype} {checksum}".encode())
    return digest.hexdigest()[:32]


@jax.jit
def _checksum(weight) -> jax.Array:
    """A uint32 checksum of a weight: the sum of its values' bits, each mixed with the value's index.

    Sums are modulo 2**32, so the order of summation does not matter.  The mixing is a bijection of the bits, so
    changing one value always changes the sum.  It is not linear, so that several flipped signs or doubled values do not
    cancel.
    """
    bits = lax.bitcast_convert_type(weight, f"uint{8 * weight.dtype.itemsize}").astype(jnp.uint32)
    place = jnp.zeros(bits.shape, jnp.uint32)
    for axis in range(bits.ndim):
        stride = math.prod(bits.shape[axis + 1 :]) % 2**32
        place += lax.broadcasted_iota(jnp.uint32, bits.shape, axis) * jnp.uint32(stride)
    mixed = bits + place * jnp.uint32(2654435761)  # Knuth's multiplicative hash spreads neighbours over all bits
    for multiplier in (0x85EBCA6B, 0xC2B2AE35):  # of MurmurHash3's finalizer
        mixed = (mixed ^ mixed >> 16) * jnp.uint32(multiplier)
    return jnp.sum(mixed ^ mixed >> 16, dtype=jnp.uint32)
