"""`LatentPieces` for Pallas's interpreter."""

import jax.numpy as jnp
from jax import lax

from jaxkv_kernels.mosaic_gpu.latent_pieces import SCALES_NBYTES, LatentPieces
from jaxkv_kernels.mosaic_gpu.sizes import HALF, ROPE, TILE


class InterpretedLatentPieces(LatentPieces):
    """The same without inline PTX; arrays in registers are bf16 [64, columns]."""

    def load_half(self, halves, rest, piece, half):
        """Returns [64, 256]."""
        values = _from_e4m3(halves[piece])
        if not self.scaled:
            return values.astype(jnp.bfloat16)
        scales = lax.bitcast_convert_type(rest[...][:, :SCALES_NBYTES].reshape(TILE, -1, 4), jnp.float32)
        scales = jnp.repeat(lax.dynamic_slice_in_dim(scales, 2 * half, 2, axis=1), HALF // 2, axis=1)
        return (values * scales).astype(jnp.bfloat16)

    def load_rope(self, rest):
        """Returns [64, 64]."""
        if not self.scaled:
            return _from_e4m3(rest[...]).astype(jnp.bfloat16)
        return lax.bitcast_convert_type(rest[...][:, SCALES_NBYTES:].reshape(TILE, ROPE, 2), jnp.bfloat16)

    def store_half(self, into, stage, loaded):
        """Stores [64, 256]."""
        into[stage] = loaded

    def store_parts(self, into, rope, half):
        """Stores the five tiles."""
        for n, part in enumerate((rope, *jnp.split(half, HALF // ROPE, axis=1))):
            into[n] = part


def _from_e4m3(stored):
    return lax.bitcast_convert_type(stored, jnp.float8_e4m3fn).astype(jnp.float32)
