"""Recipes for several devices, on `jax.shard_map`.

Inside `shard_map`, a function sees one device with its cache and its requests, and the operations of jaxkv work as on
one device.  The specs depend on what is divided over the devices.  Below, `P` is `jax.sharding.PartitionSpec` and `x` a
mesh axis of n devices; specs that are not mentioned are `P()` (replicated).

- **Data parallel** divides the requests.  Each device has its own cache (`zeros`).  Queries, new tokens, block tables,
  lengths and slots are `P("x")`; tables and slots name blocks of the device's own cache.
- **Tensor parallel, MLA** divides the query heads: `q_latent`, `q_pe` and the results are `P(None, "x")`.  All heads
  share the latents, so every device holds the whole cache (`KVCache.zeros(layout, device=...)` with a replicated
  sharding) and writes all tokens.
- **Tensor parallel, GQA** divides the KV heads H together with their query heads.  Each device has its own cache
  (`zeros`), of a layout of H / n heads; `k`, `v`, `q` and the results are `P(None, "x")`.  H must be a multiple of n.
- **Context parallel** divides the tokens of each request (`context`).  Each device has its own cache (`zeros`), of a
  layout with `shards=TokenShards(n, interleave)`, written at `context.local_slots` and read by `context.decode_mla` or
  `context.decode_kv`; the V3.2 indexer has `context.indexer_logits`, `context.select_topk` and
  `context.decode_mla_sparse`.  Everything else is replicated.

The caches of all devices form one `KVCache`, whose buffer is the concatenation of theirs; its spec is `P("x")`:

    cache = parallel.zeros(layout, mesh, "x")
    step = jax.shard_map(step, mesh=mesh, in_specs=(P("x"), ...), out_specs=(P("x"), ...))
    cache, out = jax.jit(step, donate_argnums=0)(cache, ...)

Pallas kernels on GPUs need `check_vma=False` in `shard_map`, because JAX cannot track there which values vary over the
mesh.  On a mesh with explicit axes, place the arguments according to the specs before the call (`jax.device_put`).

`transfer_blocks` copies blocks to a cache on other devices, for prefill on some devices and decode on others.
`permute_blocks` does so inside `shard_map`, between the caches of one mesh.
`convert_blocks` converts payloads of blocks between caches that divide heads or tokens in other ways.

With several processes, each runs the same program after `jax.distributed.initialize()`, on a mesh of the devices of all
processes.
"""

from jaxkv.parallel import context
from jaxkv.parallel.caches import zeros
from jaxkv.parallel.conversion import convert_blocks
from jaxkv.parallel.permute import permute_blocks
from jaxkv.parallel.transfer import transfer_blocks

__all__ = [
    "context",
    "convert_blocks",
    "permute_blocks",
    "transfer_blocks",
    "zeros",
]
