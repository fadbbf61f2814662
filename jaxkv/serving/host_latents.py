"""`HostLatents`, an option of `Engine`: latents in host memory, of which the device has those that were used last."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax

from jaxkv.checks import positive_int
from jaxkv.models.model import Model
from jaxkv.models.parallel.base import OneDevice
from jaxkv.models.split_cache import SplitCache
from jaxkv.offload import Connector, HostEntries
from jaxkv.serving.drafts import Drafts
from jaxkv_kernels.hot_rows import HotMap


class LatentMemory(NamedTuple):
    """Bytes of an engine's cache with `HostLatents`."""

    host: int
    """The latents of all blocks, in host memory."""
    per_request: int
    """Of each running request on the device: its rows in all layers, and which tokens they hold."""
    requests: int
    """All of these."""
    staged: int
    """One layer of the prompts that a step processes, on the device."""
    keys: int
    """The indexer's keys of all blocks, on the device."""

    @property
    def device(self) -> int:
        """All of the device."""
        return self.requests + self.staged + self.keys


@dataclass(frozen=True)
class HostLatents:
    """Makes an engine keep the latents of all blocks in host memory; for models with sparse latent attention.

    The device has the indexer's keys of all blocks and, for each running request and layer, the latents that the
    request has attended to last.  A request needs as many rows of latents on the device however long it is, so that
    more and longer requests run at once.  The tokens are the same.

    Args:
      rows: the latents on the device per running request and layer, a multiple of the block size.  At least as many as
        a query token attends to (2,048 in DeepSeek V3.2), and at most 32,768 on GPUs.  With more, fewer are copied from
        host memory.  Default: twice as many as a query token attends to, or those of the longest request, whichever is
        less; rounded up to blocks.

    Raises:
      ValueError: `rows` is neither None nor a positive int.
    """

    rows: int | None = None

    def __post_init__(self):
        if self.rows is not None:
            object.__setattr__(self, "rows", positive_int("rows", self.rows))

    def check(self, model: Model, *, order: str, drafts: Drafts | None, connectors: Sequence[Connector]) -> None:
        """ValueError if an engine cannot combine this with its model or with another option."""
        try:
            model.split_layouts(1)
        except ValueError as error:
            raise ValueError(f"`host_latents` is {self}: {error}") from None
        if not isinstance(model.parallel, OneDevice):
            raise ValueError(
                f"`host_latents` is {self}, and `model` has `parallel` {type(model.parallel).__name__}: expected a "
                "model on one device, because rows and host memory are those of one device; leave out `host_latents`, "
                "or serve the model by `Replicas` with DataParallel, which has an engine per device"
            )
        if order != "BLNHC":
            raise ValueError(
                f"`host_latents` is {self}, and `order` is {order!r}: expected BLNHC, the order of the blocks in host "
                "memory; leave out one of the two"
            )
        if drafts is not None:
            raise ValueError(
                f"`host_latents` is {self}, and `drafts` is {drafts}: expected one of the two, because rows on the "
                "device are fetched for one token per request and step; leave out `drafts` or `host_latents`"
            )
        if connectors:
            raise ValueError(
                f"`host_latents` is {self}, and `connectors` are given: expected one of the two, because connectors "
                "store and load blocks whose latents are on the device; leave out `connectors` or `host_latents`"
            )

    def rows_of(self, model: Model, *, block_size: int, max_len: int) -> int:
        """Rows per request and layer.

        Args:
          model: the model.
          block_size: tokens per block.
          max_len: the most tokens of a request, a multiple of the block size.

        Raises:
          ValueError: these are too few, or not a multiple of the block size.
        """
        model.split_layouts(1, block_size)  # raises an error if there is no indexer
        indexer = model.config.indexer
        assert indexer is not None
        least = min(indexer.topk, max_len)
        if self.rows is None:
            return min(-(-2 * least // block_size) * block_size, max_len)
        if self.rows < least or self.rows % block_size:
            raise ValueError(
                f"`host_latents` has {self.rows} `rows`: expected a multiple of the block size {block_size}, at least "
                f"{least}, the tokens that a query token attends to"
            )
        return self.rows

    def memory(
        self, model: Model, *, num_blocks: int, max_requests: int, max_len: int, block_size: int | None = None
    ) -> LatentMemory:
        """The sizes of the cache of an engine with these options; `max_len` is rounded up to blocks.

        Raises:
          ValueError: as from `rows_of` and `Model.split_layouts`.
        """
        latents, keys = model.split_layouts(num_blocks, block_size)
        size = latents.block_size
        max_len = -(-max_len // size) * size
        rows = self.rows_of(model, block_size=size, max_len=max_len)
        of_token = latents.nbytes // latents.num_slots
        per_request = rows * of_token + latents.num_layers * 4 * HotMap(max_len, rows).width
        staged = max_len * of_token // latents.num_layers
        return LatentMemory(latents.nbytes, per_request, max_requests * per_request, staged, keys.nbytes)

    def caches(
        self, model: Model, *, num_blocks: int, block_size: int, max_requests: int, max_len: int
    ) -> Callable[[], SplitCache]:
        """Allocates host memory; returns a function that makes caches without tokens, whose latents are in it.

        Only the last of these caches may be in use.  `max_len` is a multiple of the block size.
        """
        rows = self.rows_of(model, block_size=block_size, max_len=max_len)
        latents, keys = model.split_layouts(num_blocks, block_size)
        (device,) = jax.tree.leaves(model.params)[0].devices()
        host = HostEntries(latents, device=device)
        return partial(SplitCache.zeros, host, keys, num_requests=max_requests, rows=rows, max_tokens=max_len)
