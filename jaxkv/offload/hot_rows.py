"""`HotRows`: a cache of latents in host memory, of which the device has the rows that sparse attention used last."""

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.cache import KVCache
from jaxkv.checks import Dims, block_ids, check_cache, describe, index_below, int32, layer_index, positive_int
from jaxkv.dispatch import run
from jaxkv.layout.layout import CacheLayout
from jaxkv.ops.rows import read_rows
from jaxkv.ops.slots import slots_for
from jaxkv.ops.writes import write_mla
from jaxkv_kernels import calls
from jaxkv_kernels.addressing import MAX_SLOTS, one_array
from jaxkv_kernels.formats.entries import MLAEntry
from jaxkv_kernels.hot_rows import HostMemory, HotMap


class HostEntries:
    """The entries of all tokens of a cache, in host memory that kernels of the device can access.

    `HotRows` reads and writes the memory by its address.  Keep this object until all programs that use it have ended.

    Args:
      layout: a layout of `MLAEntry` whose blocks are runs (order BLNHC).
      device: the device whose kernels access the memory; default the first one.

    Raises:
      ValueError: `layout` is not such a layout.
      MemoryError: there is not so much memory.
    """

    def __init__(self, layout: CacheLayout, *, device: jax.Device | None = None):
        if not isinstance(layout, CacheLayout) or not isinstance(layout.entry, MLAEntry):
            raise ValueError(f"`layout` is {layout!r}: expected a CacheLayout of MLAEntry")
        if not layout.pages.blocks_are_runs or layout.packed:
            raise ValueError(f"`layout` has blocks that are not runs of their own: expected order BLNHC\n{layout}")
        self.layout = layout
        self.device = jax.devices()[0] if device is None else device
        self._memory = HostMemory(layout.nbytes, self.device)

    @property
    def blocks(self) -> np.ndarray:
        """The memory as rows, one per block: `layout.dtype` [num_blocks, elements per block].  It is writable."""
        return self._memory.bytes.view(self.layout.dtype).reshape(self.layout.num_blocks, -1)

    @property
    def address(self) -> np.ndarray:
        """The address of the memory, as int32 [2], the low half first."""
        return self._memory.words

    def store(self, cache: KVCache, blocks, targets, *, implementation=None) -> None:
        """Copies blocks of a cache, such as those of a prefilled prompt, to blocks of the host memory.

        It waits for the copy.  Call `HotRows.forget` for a request whose tokens are replaced.

        Args:
          cache: a cache with the same blocks as `layout`, but any number of them.
          blocks: block ids [n] of the cache.
          targets: block ids [n] of the host memory.
          implementation: that of `read_blocks`.

        Raises:
          ValueError: the cache has other blocks, or ids are invalid.
        """
        check_cache(cache, MLAEntry)
        if cache.layout.fingerprint != self.layout.fingerprint:
            raise ValueError(f"`cache` has other blocks than the host memory:\n{cache.layout}\nexpected\n{self.layout}")
        blocks = block_ids("blocks", blocks, cache.layout.num_blocks)
        targets = block_ids("targets", targets, self.layout.num_blocks, distinct=True)
        if len(blocks) != len(targets):
            raise ValueError(f"`blocks` has {len(blocks)} ids and `targets` {len(targets)}: expected as many")
        self.blocks[targets] = np.asarray(read_rows(cache, blocks, implementation=implementation))


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class HotRows:
    """For each request and layer, rows on the device that hold the tokens that sparse attention used last.

    Like a cache, it is a pytree: pass it through `jit`, donate it, and go on with the returned one.  Host memory is
    updated in place, so the old one must not be used again.  Requests are numbered 0 to B - 1, as in `block_tables`.

        host = HostEntries(layout)                                    # as many blocks as host memory has room for
        hot = HotRows.zeros(host, num_requests=16, rows=4096, max_tokens=131072)
        hot = hot.write_mla(kv_c, k_pe, positions, block_tables, layer=i)          # new tokens
        hot, slots = hot.fetch(selected, block_tables, layer=i)                    # positions from `select_topk`
        out = jaxkv.decode_mla_sparse(q_latent, q_pe, hot.cache, slots, layer=i, scale=scale)
    """

    cache: KVCache
    """The rows: row r of request b is slot b * rows + r."""
    maps: jax.Array
    """int32 [L, B, max_tokens + 2 * rows]: which rows hold which tokens, and the order of their use (`HotMap`)."""
    address: jax.Array
    """int32 [2], the address of the host memory."""
    writes: jax.Array
    """int32 [1], the number of writes to host memory.  It orders later reads after them."""
    host: CacheLayout = field(metadata={"static": True})
    """The layout of the host memory."""
    hot: HotMap = field(metadata={"static": True})

    @classmethod
    def zeros(cls, host: HostEntries, *, num_requests: int, rows: int, max_tokens: int) -> "HotRows":
        """Rows that hold no tokens.

        Per layer and request, the device stores `rows` entries and `max_tokens + 2 * rows` int32.

        Args:
          host: the host memory; keep it as long as the result is in use.
          num_requests: B.
          rows: rows per request and layer, a multiple of the block size, at least as many as one call of `fetch`
            selects tokens.
          max_tokens: the most tokens of a request.

        Raises:
          ValueError: an argument is not such a number, or slots do not fit in int32.
        """
        if not isinstance(host, HostEntries):
            raise ValueError(f"`host` is {describe(host)}: expected HostEntries")
        num_requests, rows = positive_int("num_requests", num_requests), positive_int("rows", rows)
        hot = HotMap(positive_int("max_tokens", max_tokens), rows)
        size = host.layout.block_size
        if rows % size or num_requests * rows > MAX_SLOTS:
            raise ValueError(
                f"`rows` is {rows}: expected a multiple of the block size {size}, below 2**31 for all "
                f"{num_requests} requests together"
            )
        entry, layers = host.layout.entry, host.layout.num_layers
        layout = CacheLayout(
            num_layers=layers, num_blocks=num_requests * rows // size, block_size=size, entry=entry,
            dtype=host.layout.dtype,
        )  # fmt: skip
        with jax.default_device(host.device):
            maps = jnp.broadcast_to(hot.empty(), (layers, num_requests, hot.width))
            cache, writes = KVCache.zeros(layout), jnp.zeros(1, jnp.int32)
            return cls(cache, maps, jnp.asarray(host.address), writes, host.layout, hot)

    @property
    def num_requests(self) -> int:
        """B, the number of requests."""
        return self.maps.shape[1]

    def fetch(self, positions, block_tables, *, layer, implementation=None) -> tuple["HotRows", jax.Array]:
        """Makes the selected tokens of each request available on the device.

        Tokens that are in no row are copied from host memory, over those of the same request and layer that were used
        least recently.  Calls of `fetch` and `write_mla` use tokens; among those that one call uses, rows keep their
        order.

        Args:
          positions: int32 [B, Q, K], positions of tokens in their request, such as those from `select_topk`.  Negative
            ones and those without a slot in host memory are masked.  Q * K is at most `rows`.
          block_tables: int32 [B, M], the blocks of each request in host memory.
          layer: int, or traced int32 scalar.
          implementation: "triton" (kernels that read host memory), "xla" (callbacks of the host), or None for the best.

        Returns:
          The new HotRows, and slots int32 [B, Q, K] in its `cache`, for `decode_mla_sparse`: -1 where masked.

        Raises:
          ValueError: a shape, dtype or static layer is wrong, or Q * K is more than `rows`.
        """
        dims = self._dims()
        dims.check_ints("positions", positions, "B Q K")
        return self._fetch(dims, positions, block_tables, layer, implementation, copied=True)

    def write_mla(self, kv_c, k_pe, positions, block_tables, *, layer, kv_scale=None, implementation=None) -> "HotRows":
        """Stores new tokens, in rows on the device and in host memory.

        Args:
          kv_c: float [T, R], latents after their norm, with T = B * Q: Q tokens of each request.
          k_pe: float [T, P], rotary keys after RoPE.
          positions: int32 [B, Q], their positions; those that are negative or without a slot are skipped.  The
            positions of a request must differ.  Q is at most `rows`.
          block_tables: int32 [B, M], the blocks of each request in host memory.
          layer: int, or traced int32 scalar.
          kv_scale: as in `jaxkv.write_mla`.
          implementation: as in `fetch`.

        Raises:
          ValueError: a shape, dtype, static layer or scale is wrong.
        """
        dims = self._dims()
        dims.check_ints("positions", positions, "B Q")
        new, slots = self._fetch(dims, positions, block_tables, layer, implementation, copied=False)
        options = {"layer": layer, "implementation": implementation}
        cache = write_mla(new.cache, kv_c, k_pe, slots.reshape(-1), kv_scale=kv_scale, **options)
        host_slots = slots_for(block_tables, positions, self.host)
        places = {"host_layer": layer, **options}
        return replace(new, cache=cache).store(cache, slots.reshape(-1), host_slots.reshape(-1), **places)

    def load(self, cache: KVCache, slots, host_slots, *, layer, host_layer, implementation=None) -> KVCache:
        """Copies entries from host memory to another cache on the device, such as those of the blocks of a prompt.

        Args:
          cache: a cache with entries of the same format, of any number of layers; donate it.
          slots: int32 [n], slots of the cache.
          host_slots: int32 [n], the slots in host memory.  Entries of which one of the two slots is invalid, such as
            -1, are skipped.
          layer: of the cache: int, or traced int32 scalar.
          host_layer: of host memory: int, or traced int32 scalar.
          implementation: as in `fetch`.

        Returns:
          The cache.

        Raises:
          ValueError: a shape, dtype or static layer is wrong, or the cache has other entries.
        """
        fields = self._copied(cache, slots, host_slots, layer, host_layer)
        return KVCache(run(calls.LoadRows(**fields), implementation), cache.layout)

    def store(self, cache: KVCache, slots, host_slots, *, layer, host_layer, implementation=None) -> "HotRows":
        """Copies entries of a cache on the device to host memory; the arguments and errors are those of `load`.

        Rows that hold these tokens keep what they hold: `forget` the requests whose tokens are replaced.

        In one program, store the cache that `load` returned, or one computed from it: nothing else orders a store after
        a load.
        """
        call = calls.StoreRows(**self._copied(cache, slots, host_slots, layer, host_layer))
        return replace(self, writes=run(call, implementation))

    def forget(self, which) -> "HotRows":
        """Empties the rows of the requests that bool [B] selects, such as those that begin now.  ValueError if not."""
        self._dims().check("which", which, "B", ("bool",))
        return replace(self, maps=self.hot.forget(self.maps, which))

    def _copied(self, cache: KVCache, slots, host_slots, layer, host_layer) -> dict[str, Any]:
        """The fields of a call that copies entries between `cache` and host memory."""
        entry, dims = check_cache(cache, MLAEntry), Dims()
        if entry != self.host.entry or cache.layout.dtype != self.host.dtype:
            raise ValueError(
                f"`cache` has {entry} in a buffer of {cache.layout.dtype}: expected {self.host.entry} in "
                f"{self.host.dtype}, as host memory has"
            )
        dims.check_ints("slots", slots, "n")
        dims.check_ints("host_slots", host_slots, "n")
        at = index_below("host_layer", host_layer, self.host.num_layers, "layers of the host memory")
        fields = {**self._fields(), "pages": cache.layout.pages, "buffer": one_array(cache.buffer)}
        places = {"slots": int32(slots), "host_slots": int32(host_slots)}
        return {**fields, **places, "layer": layer_index(layer, cache), "host_layer": at}

    def _dims(self) -> Dims:
        return Dims(B=(self.num_requests, "the requests of these rows"))

    def _fields(self) -> dict[str, Any]:
        """The fields of a `HotRowsCall` that do not depend on the cache's contents."""
        return {
            "pages": self.cache.layout.pages,
            "host_pages": self.host.pages,
            "entry": self.host.entry,
            "address": self.address,
            "writes": self.writes,
        }

    def _fetch(self, dims, positions, block_tables, layer, implementation, *, copied) -> tuple["HotRows", jax.Array]:
        dims.check_ints("block_tables", block_tables, "B M")
        requests, *shape = positions.shape
        if (count := int(np.prod(shape))) > self.hot.rows:
            raise ValueError(
                f"`positions` has {count} tokens per request: expected at most {self.hot.rows}, the rows of a request"
            )
        call = calls.FetchRows(
            buffer=one_array(self.cache.buffer),
            layer=layer_index(layer, self.cache),
            maps=self.maps,
            positions=int32(positions).reshape(requests, -1),
            block_tables=int32(block_tables),
            hot=self.hot,
            copied=copied,
            **self._fields(),
        )
        buffer, maps, slots = run(call, implementation)
        return replace(self, cache=KVCache(buffer, self.cache.layout), maps=maps), slots.reshape(positions.shape)
