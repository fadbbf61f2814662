"""Entry formats of your own, beside those of jaxkv: how the values of an entry are stored as bytes.

A format is a subclass of `Format` with a byte map (`fields`), which is made by `together` or `split_by_page`, and with
`encode` and `decode`, which convert between values and stored elements.  Once registered, it is chosen by its name:

    import jax.numpy as jnp

    import jaxkv
    from jaxkv import formats


    class Fixed8(formats.Format):
        "Keys and values from -4 to 4 in steps of 1/32."

        name = "fixed8"
        kinds = (jaxkv.KVEntry,)
        dtype = "int8"

        def fields(self, sizes, block_size):
            return formats.together(*((name, "int8", count) for name, count in sizes.items()))

        def encode(self, values, scales):
            steps = jnp.round(32 * jnp.concatenate(values, axis=-1).astype(jnp.float32))
            return jnp.clip(steps, -128, 127).astype(jnp.int8)

        def decode(self, row, sizes, scales, dtype):
            return [(field.read(row) / 32).astype(dtype) for field in self.fields(sizes, 1)]


    formats.register(Fixed8())
    entry = jaxkv.KVEntry("fixed8", head_dim=64)
    layout = jaxkv.CacheLayout(num_layers=2, num_blocks=8, block_size=16, entry=entry)
    k = v = jnp.linspace(-4, 3.5, 64)[None, None]  # one token, one head
    cache = jaxkv.write_kv(jaxkv.KVCache.zeros(layout), k, v, jnp.asarray([5]), layer=0)
    k, v = jaxkv.read_kv(cache, jnp.asarray([5]), layer=0, dtype="float32")

All operations then support it on `xla`.  Other implementations move its blocks, and reject other calls with a reason.
Type checkers know the names of jaxkv's own formats only.
"""

from jaxkv_kernels.formats.format import Field, Format, join, register, split_by_page, together

__all__ = ["Field", "Format", "join", "register", "split_by_page", "together"]
