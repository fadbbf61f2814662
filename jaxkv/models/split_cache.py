"""`SplitCache`: the latents of all tokens in host memory, and on the device the indexer's keys of all tokens.

Sparse attention reads only the latents that the indexer selects.  In every layer of a step, new latents are stored in
host memory, and what the new tokens attend to comes to the device:

- The last tokens of requests attend to rows of `HotRows`, which keep what earlier steps have selected.  Only the other
  selected tokens are copied from host memory.
- The queries of a chunk of a prompt select nearly all cached tokens together.  The blocks of its request are therefore
  copied as a whole, to a cache of one layer (`staged`) that all layers use one after the other.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxkv.cache import KVCache
from jaxkv.layout.layout import CacheLayout
from jaxkv.offload.hot_rows import HostEntries, HotRows
from jaxkv.ops.blocks import copy_blocks
from jaxkv.ops.slots import slots_for
from jaxkv.ops.writes import write_mla


class SplitLayouts(NamedTuple):
    """The layouts of the two parts of a `SplitCache`, each in memory of its own."""

    latents: CacheLayout
    keys: CacheLayout


class Staging(NamedTuple):
    """The blocks that chunks of prompts attend to; NumPy arrays on the host, JAX arrays inside a program."""

    blocks: Any
    """int32 [S], the distinct blocks, which each layer copies to the device; -1 where there are fewer."""
    tables: Any
    """int32 [B, M], the block tables of the chunks, with places in `blocks` instead of ids; -1 after their ends."""

    @classmethod
    def of(cls, tables: np.ndarray, seq_lens: np.ndarray, *, count: int, block_size: int) -> Self:
        """The blocks of the first `seq_lens` [B] tokens of requests with these block tables [B, M].

        There are at most `count` distinct ones.
        """
        used = np.arange(tables.shape[1]) < -(-seq_lens[:, None] // block_size)
        found, places = np.unique(tables[used], return_inverse=True)
        staging = cls(np.full(count, -1, np.int32), np.full_like(tables, -1))
        staging.blocks[: len(found)] = found
        staging.tables[used] = places
        return staging


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class SplitCache:
    """The cache of a model with sparse latent attention, of which the latents are in host memory.

    Block tables and slots are those of host memory and of the indexer's keys, which have the same blocks.  A pytree
    like a cache: donate it to `step`, and go on with the returned one.  Host memory is updated in place.
    A step needs the `places` of its batches.
    """

    keys: KVCache
    """The indexer's keys of all tokens."""
    hot: HotRows
    """The rows of running requests, and the address of the host memory."""
    staged: KVCache
    """One layer of the blocks that chunks of prompts attend to."""
    places: tuple[Any, ...] = ()
    """During a step, where the latents of each batch come to the device.  It is a `Staging` for chunks of prompts and,
    for the last tokens of requests, the number int32 [B] of each row's request in `hot`, too large for empty rows."""

    @classmethod
    def zeros(
        cls, host: HostEntries, keys: CacheLayout, *, num_requests: int, rows: int, max_tokens: int
    ) -> "SplitCache":
        """A cache without tokens, on the device of the host memory.

        Args:
          host: host memory of the model's latents (`Model.split_layouts`); keep it as long as the result is in use.
          keys: the layout of the indexer's keys.
          num_requests: the most running requests.
          rows: rows per request and layer on the device, at least as many as a query token attends to.
          max_tokens: the most tokens of a request, and of all requests together whose chunks one step processes.
        """
        hot = HotRows.zeros(host, num_requests=num_requests, rows=rows, max_tokens=max_tokens)
        size = host.layout.block_size
        staged = CacheLayout(
            num_layers=1,
            num_blocks=-(-max_tokens // size),
            block_size=size,
            entry=host.layout.entry,
            dtype=host.layout.dtype,
        )
        return cls(KVCache.zeros(keys, device=host.device), hot, KVCache.zeros(staged, device=host.device))

    @property
    def layout(self) -> CacheLayout:
        """The layout of the indexer's keys, which has the blocks of the tables."""
        return self.keys.layout

    def write(self, place, block_tables, kv_c, k_pe, positions, *, layer, kv_scale=None, implementation=None) -> Self:
        """Stores the latents of new tokens, after loading the blocks that chunks attend to.

        Args:
          place: that of the batch, one of `places`; Q is 1 if it is not a `Staging`.
          block_tables: int32 [B, M].
          kv_c: float [B, Q, R], latents after their norm.
          k_pe: float [B, Q, P], rotary keys after RoPE.
          positions: int32 [B, Q]; negative for padding.
          layer: int, or traced int32 scalar.
          kv_scale: as in `jaxkv.write_mla`.
          implementation: as in `HotRows.fetch`.
        """
        kv_c, k_pe = (x.reshape(-1, x.shape[-1]) for x in (kv_c, k_pe))
        if not isinstance(place, Staging):
            arrays = (self._of_all(place, x) for x in (kv_c, k_pe, positions, block_tables))
            options = {"layer": layer, "kv_scale": kv_scale, "implementation": implementation}
            return replace(self, hot=self.hot.write_mla(*arrays, **options))
        copied = {"layer": 0, "host_layer": layer, "implementation": implementation}
        every = jnp.arange(self.staged.layout.num_slots, dtype=jnp.int32)
        staged = self.hot.load(
            self.staged, every, slots_for(place.blocks[None], every[None], self.hot.host)[0], **copied
        )
        slots = slots_for(place.tables, positions, staged).reshape(-1)
        staged = write_mla(staged, kv_c, k_pe, slots, layer=0, kv_scale=kv_scale, implementation=implementation)
        host_slots = slots_for(block_tables, positions, self.hot.host).reshape(-1)
        return replace(self, staged=staged, hot=self.hot.store(staged, slots, host_slots, **copied))

    def find(self, place, block_tables, positions, *, layer, implementation=None) -> "Latents":
        """Copies the tokens that new tokens attend to to the device.  `write` must have stored the new ones.

        Args:
          place: as in `write`.
          block_tables: int32 [B, M].
          positions: int32 [B, Q, K], positions of tokens in their request; negative where masked.
          layer: int, or traced int32 scalar.
          implementation: as in `HotRows.fetch`.
        """
        if isinstance(place, Staging):
            return Latents(self, self.staged, slots_for(place.tables, positions, self.staged), 0)
        of_all = self._of_all(place, positions), self._of_all(place, block_tables)
        hot, slots = self.hot.fetch(*of_all, layer=layer, implementation=implementation)
        return Latents(replace(self, hot=hot), hot.cache, slots.at[place].get(mode="fill", fill_value=-1), layer)

    def _of_all(self, requests, x) -> jax.Array:
        """Rows x [B, ...] of some requests, as an array with a row for each request of `hot`; the others are -1."""
        return jnp.full((self.hot.num_requests, *x.shape[1:]), -1, x.dtype).at[requests].set(x, mode="drop")

    def forget(self, request) -> Self:
        """Empties the rows of the request with this number, before another request has it."""
        numbers = jnp.arange(self.hot.num_requests, dtype=jnp.int32)
        return replace(self, hot=self.hot.forget(numbers == request))

    def copy_block(self, source, target, *, implementation=None) -> Self:
        """Copies the contents of a block to another block, both on the device and in host memory.

        Args:
          source: int32 [1], its id.
          target: int32 [1], the id of the other; nothing is copied if one of them is negative.
          implementation: as in `HotRows.fetch`.
        """
        keys, host = copy_blocks(self.keys, source, target, implementation=implementation), self.hot.host
        slots = jnp.arange(host.block_size, dtype=jnp.int32)
        here, there = (slots_for(block[None], slots[None], host)[0] for block in (source, target))
        there = jnp.where(here >= 0, there, -1)

        def of_layer(layer, cache: SplitCache) -> SplitCache:
            options = {"layer": 0, "host_layer": layer, "implementation": implementation}
            staged = cache.hot.load(cache.staged, slots, here, **options)
            return replace(cache, staged=staged, hot=cache.hot.store(staged, slots, there, **options))

        return lax.fori_loop(0, host.num_layers, of_layer, replace(self, keys=keys))


class Latents(NamedTuple):
    """Latents on the device."""

    cache: SplitCache
    """The `SplitCache` after they have been copied."""
    on_device: KVCache
    """The cache that holds them."""
    slots: jax.Array
    """int32 [B, Q, K], their slots in it; -1 where masked."""
    layer: Any
    """Their layer in it."""
