"""One cache over many devices: recipes on `jax.shard_map`, whose function sees one device, its cache and its requests.

Inside `shard_map` the operations of jaxkv are those of one device.  What is divided decides the specs; `P` is
`jax.sharding.PartitionSpec`, `x` a mesh axis of n devices, and every spec not named is `P()` (replicated):

- **Data parallel** divides the requests: a cache for each device (`zeros`), and queries, new tokens, block tables,
  lengths and slots `P("x")`.  Tables and slots name blocks of the device's own cache.
- **Tensor parallel, MLA** divides the query heads: `q_latent`, `q_pe` and the results `P(None, "x")`.  The latents
  have one head for all of them, so every device holds the whole cache (`KVCache.zeros(layout, device=...)` with a
  replicated sharding) and writes all tokens.
- **Tensor parallel, GQA** divides the KV heads H and the query heads Hq with them: a cache for each device (`zeros`) of
  a layout of H / n heads; `k`, `v`, `q` and the results `P(None, "x")`.  H must be a multiple of n.
- **Context parallel** divides the tokens of each request (`context`): a cache for each device (`zeros`), written at
  `context.local_slots` and read by `context.decode_mla`, `context.decode_kv`, or with V3.2's indexer by what is in
  `context.sparse`; all else is replicated.

A cache for each device is `P("x")` in the specs, for it is one array of all the buffers:

    cache = parallel.zeros(layout, mesh, "x")
    step = jax.shard_map(step, mesh=mesh, in_specs=(P("x"), ...), out_specs=(P("x"), ...))
    cache, out = jax.jit(step, donate_argnums=0)(cache, ...)

Pallas's GPU kernels need `check_vma=False` in the `shard_map`: JAX cannot follow there what varies over the mesh.  On
a mesh of explicit axes, arguments lie as the specs say before the call (`jax.device_put`).

`transfer_blocks` copies blocks to a cache on other devices: prefill on some, decode on others.

Several processes run the same program after `jax.distributed.initialize()`, on a mesh of all their devices.
"""

from jaxkv.parallel import context as context
from jaxkv.parallel.caches import zeros as zeros
from jaxkv.parallel.transfer import transfer_blocks as transfer_blocks
