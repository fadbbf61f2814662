"""A write and a decode with the installed wheel, and the recorded measurements in it."""

import jax.numpy as jnp

import jaxkv
from jaxkv.bench import recorded

layout = jaxkv.CacheLayout(num_layers=3, num_blocks=4, block_size=64, entry=jaxkv.MLAEntry("bf16"))
cache = jaxkv.KVCache.zeros(layout)
cache = jaxkv.write_mla(cache, jnp.ones((1, 512)), jnp.ones((1, 64)), jnp.asarray([130]), layer=1)
out = jaxkv.decode_mla(
    jnp.ones((1, 16, 512)), jnp.ones((1, 16, 64)), cache, jnp.asarray([[2]]), jnp.asarray([3]), layer=1, scale=0.01
)
assert out.shape == (1, 16, 512)
assert float(out.min()) > 0
assert len(recorded.rows()) > 10
print("wheel ok:", jaxkv.__version__)
