"""`Workload`: one benchmarked call, with the bytes that it moves and the flops that it computes."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np

import jaxkv
from jaxkv.ops import OPERATIONS
from jaxkv_kernels.formats.entries import Entry

_DECLARED = {operation.name: operation for operation in OPERATIONS}

Shapes = list[tuple[tuple[int, ...], str]]
"""Shapes and dtypes."""


class Requests(NamedTuple):
    """The places of the requests' tokens in the cache, as NumPy arrays."""

    tables: np.ndarray
    """int32 [B, M], shuffled blocks."""
    lengths: np.ndarray
    block_size: int
    blocks: np.ndarray
    """All blocks of the cache, shuffled; those of the tables come first."""

    @property
    def running_sum(self) -> np.ndarray:
        """The running sum of the lengths, from 0."""
        return np.cumsum([0, *self.lengths], dtype=np.int32)

    def slots(self, requests, positions) -> np.ndarray:
        """Slots of tokens by request and position."""
        blocks = self.tables[requests, positions // self.block_size]
        return (blocks * self.block_size + positions % self.block_size).astype(np.int32)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One call of `operation` for a number of requests with `tokens` tokens each, on a cache in cross-layer order.

    Operations that read attend to, gather or copy `tokens` cached tokens per request; writes store as many.  Queries,
    new values and results are bf16.  There is a subclass for each family of operations.
    """

    suite: str
    operation: str
    requests: int
    tokens: int
    layers: int
    heads: int = 1
    """Query heads."""
    q_len: int = 1
    """Query tokens per request."""
    kv_heads: int = 1
    chosen: int = 0
    """Slots that each query token attends to in sparse attention, or positions that it selects."""
    varlen: bool = False
    """Whether requests have random lengths of at most `tokens`."""
    format: str = "bf16"
    block_size: int = 64

    has_queries: ClassVar[bool] = False
    """Whether the call has queries, which read the cache; other calls move entries or blocks."""
    planned: ClassVar[bool] = False
    """Whether the call is passed a plan."""
    cached: ClassVar[bool] = True
    """Whether the call has a cache argument."""

    @property
    def name(self) -> str:
        """The name in tables: operation, requests x heads x q_len x tokens, layers.

        A `v` before the tokens means that requests have at most as many.  Heads are left out if there are no queries.
        Of the formats, only fp8 is part of the name: each other format is used with its own operation.
        """
        queries = f"{self.heads}x{self.q_len}x" if self.has_queries else ""
        sizes = f"{self.requests}x{queries}{self.tokens}{'v' * self.varlen}"
        return f"{self.operation}-{sizes}-{self.layers}{'-fp8' * (self.format == 'fp8')}"

    @property
    def entry(self) -> Entry:
        """What the cache stores."""
        kind = next(iter(_DECLARED[self.operation].entries), jaxkv.MLAEntry)
        if kind is jaxkv.KVEntry:
            return jaxkv.KVEntry(self.format, head_dim=128)
        return jaxkv.IndexerEntry() if kind is jaxkv.IndexerEntry else jaxkv.MLAEntry(self.format)

    @property
    def scales(self) -> dict[str, float]:
        """Scales of the entries, as keyword arguments."""
        names = ("k_scale", "v_scale") if isinstance(self.entry, jaxkv.KVEntry) else ("kv_scale",)
        return dict.fromkeys(names, 1.0) if self.entry.codec.scaled else {}

    @property
    def writer(self) -> str:
        """The operation that writes entries of this kind."""
        if isinstance(self.entry, jaxkv.KVEntry):
            return "write_kv"
        return "write_indexer_k" if isinstance(self.entry, jaxkv.IndexerEntry) else "write_mla"

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each request, int32 [requests]."""
        if not self.varlen:
            return np.full(self.requests, self.tokens, np.int32)
        drawn = np.random.default_rng(0).normal(0.7 * self.tokens, self.tokens / 4, self.requests)
        return np.clip(drawn, 1, self.tokens).astype(np.int32)

    @property
    def entries(self) -> int:
        """Entries of the cache that a call reads (once) or writes."""
        return int(self.lengths.sum()) * self.kv_heads

    @property
    def queries(self) -> tuple[int, int, int]:
        """The shape of queries, without their last axis."""
        return self.requests, self.q_len, self.heads

    @property
    def value_shapes(self) -> Shapes:
        """Shapes and dtypes of the random arguments of the call: queries, new values, payloads."""
        return []

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of the operation that are the same for all calls, without `layer` and scales."""
        return {}

    def index(self, requests: Requests, rng: np.random.Generator) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """The integer arguments of the call: slots or blocks of its layer, and those that all layers share."""
        return [], [requests.tables, requests.lengths]

    def arguments(self, cache, values, index, layer) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments of the operation."""
        positional = (*values, cache, *index) if self.has_queries else (cache, *values, *index)
        return positional, {"layer": layer, **self.scales, **self.options}

    @property
    def traffic(self) -> int:
        """Bytes that a call must move: entries, queries, new values and results, each once."""
        raise NotImplementedError

    @property
    def flops(self) -> int:
        """Flops of a call's matrix products, as if every query token saw every token."""
        return 0

    @property
    def least_seconds(self) -> float:
        """A lower bound of the time of a call, for a device with 5 TB/s and 1 Pflop/s."""
        return max(self.traffic / 5e12, self.flops / 1e15)

    @property
    def visited(self) -> list[int]:
        """The layers that successive calls use, in rotation.

        Copies use all layers, so that no call finds its data in the GPU's L2 cache.  Attention always uses the middle
        layer: one layer of most shapes is larger than the L2 cache, and published times also repeat calls on the same
        data.
        """
        return [self.layers // 2] if self.has_queries else list(range(self.layers))

    @property
    def num_blocks(self) -> int:
        """Blocks of the cache: as many as the requests need."""
        return int((-(-self.lengths // self.block_size)).sum())

    @property
    def layout(self) -> jaxkv.CacheLayout:
        """The layout of the cache; a single block if the operation has no cache argument."""
        return jaxkv.CacheLayout(
            num_layers=self.layers,
            num_blocks=self.num_blocks if self.cached else 1,
            block_size=self.block_size,
            num_heads=self.kv_heads,
            entry=self.entry,
        )

    def fitted(self, limit: int) -> "Workload":
        """The same workload with as many layers as fit in `limit` bytes, at least one."""
        layer_nbytes = replace(self, layers=1).layout.nbytes
        return replace(self, layers=max(1, min(self.layers, limit // layer_nbytes)))

    def entry_shapes(self, count: int) -> Shapes:
        """Shapes and dtypes of the parts of `count` entries."""
        heads = () if self.entry.one_head else (self.kv_heads,)
        return [((count, *heads, n), "bfloat16") for n in self.entry.sizes]
