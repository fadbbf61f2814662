"""`Workload`: one benchmarked call, with the bytes that it moves and the flops that it computes."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np

import jaxkv
from jaxkv.ops import OPERATIONS
from jaxkv_kernels.formats.entries import Entry

_DECLARED = {operation.name: operation for operation in OPERATIONS}

Shapes = list[tuple[tuple[int, ...], str]]
"""Shapes and dtypes."""

LENGTHS: dict[str, Callable[[int, int], np.ndarray]] = {
    "": lambda requests, tokens: np.full(requests, tokens),
    "v": lambda requests, tokens: np.clip(
        np.random.default_rng(0).normal(0.7 * tokens, tokens / 4, requests), 1, tokens
    ),
    "u": lambda requests, tokens: np.random.default_rng(1).integers(tokens // 4, tokens + 1, requests),
    "t": lambda requests, tokens: np.asarray([4641, tokens, 1730, 1696]),
}
"""Lengths of `requests` requests of at most `tokens` tokens: equal, normal, uniform from a quarter on, and those of
ThunderMLA's published case."""

DTYPE_NAMES = {"float8_e4m3fn": "e4m3"}
"""Short names of dtypes of queries, for names of workloads."""

PADDED_TO = 4096
"""Padded blocks are a multiple of this many bytes, a page of memory."""

COLD_NBYTES = 120_000_000
"""Twice the L2 cache of an H200."""


def with_fitting_layers(sizes, fits: Callable[[Any], bool]) -> Any:
    """`sizes`, a dataclass, with as many of its `layers` as fit, at least one."""
    fewer = (replace(sizes, layers=layers) for layers in range(sizes.layers, 0, -1))
    return next(filter(fits, fewer), replace(sizes, layers=1))


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


def unit_scales(entry: Entry) -> dict[str, float]:
    """Scales of 1 for the entries that need some, as keyword arguments."""
    names = ("k_scale", "v_scale") if isinstance(entry, jaxkv.KVEntry) else ("kv_scale",)
    return dict.fromkeys(names, 1.0) if entry.codec.scaled else {}


def writer(entry: Entry) -> str:
    """The operation that writes entries of this kind."""
    if isinstance(entry, jaxkv.KVEntry):
        return "write_kv"
    return "write_indexer_k" if isinstance(entry, jaxkv.IndexerEntry) else "write_mla"


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
    window: int = 0
    """Slots, besides `chosen`, of each query token's own tokens: `chosen` then are slots of a second cache."""
    varlen: str = ""
    """How the lengths of requests are drawn, a key of `LENGTHS`; if empty, all have `tokens` tokens."""
    format: str = ""
    """Of the entries; by default `usual_format`."""
    query_dtype: str = "bfloat16"
    blocks: str = "plain"
    """`plain`; `packed`: latents and indexer keys of all layers share a block; `padded` to a multiple of 4 KiB;
    `planes`: the keys of a layer, then its values."""
    cold: bool = False
    """Whether successive calls use other values and results, so that the GPU's L2 cache has none of their data."""
    rotated: bool = False
    """Whether `write_mla` rotates the rotary keys that it stores."""
    block_size: int = 64

    has_queries: ClassVar[bool] = False
    """Whether the call has queries, which read the cache; other calls move entries or blocks."""
    planned: ClassVar[bool] = False
    """Whether the call is passed a plan."""
    cached: ClassVar[bool] = True
    """Whether the call has a cache argument."""
    usual_format: ClassVar[str] = "bf16"
    """The format of entries that is not part of the name."""

    def __post_init__(self):
        if not self.format:
            object.__setattr__(self, "format", self.usual_format)

    @property
    def name(self) -> str:
        """The name in tables: operation, requests x heads x q_len x tokens, layers, and what is unusual.

        A letter after the tokens is a key of `LENGTHS`.  Heads are left out if there are no queries.
        """
        queries = f"{self.heads}x{self.q_len}x" if self.has_queries else ""
        unusual = (
            (self.format, self.usual_format),
            (DTYPE_NAMES.get(self.query_dtype, self.query_dtype), "bfloat16"),
            (self.blocks, "plain"),
            ("rotated" * self.rotated, ""),
            ("cold" * self.cold, ""),
            (f"w{self.window}", "w0"),
        )
        sizes = f"{self.requests}x{queries}{self.tokens}{self.varlen}"
        return "-".join([self.operation, sizes, str(self.layers), *(name for name, usual in unusual if name != usual)])

    @property
    def entry(self) -> Entry:
        """What the cache stores."""
        kind = next(iter(_DECLARED[self.operation].entries), jaxkv.MLAEntry)
        if kind is jaxkv.KVEntry:
            return jaxkv.KVEntry(self.format, head_dim=128)  # type: ignore[arg-type]
        return jaxkv.IndexerEntry() if kind is jaxkv.IndexerEntry else jaxkv.MLAEntry.typical(self.format)

    @property
    def scales(self) -> dict[str, float]:
        """Scales of the entries, as keyword arguments."""
        return unit_scales(self.entry)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each request, int32 [requests]."""
        return LENGTHS[self.varlen](self.requests, self.tokens).astype(np.int32)

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
        """The integer arguments of the call: those of its layer (such as slots), and those that all layers share."""
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
    def sets(self) -> int:
        """How many sets of values and results successive calls use in turn."""
        return -(-COLD_NBYTES // (self.traffic - self.entries * self.entry.nbytes)) if self.cold else 1

    @property
    def layout(self) -> jaxkv.CacheLayout:
        """The layout of the cache; a single block if the operation has no cache argument."""
        return self.layout_of(self.num_blocks if self.cached else 1)

    def layout_of(self, num_blocks: int) -> jaxkv.CacheLayout:
        """The layout of a cache of `num_blocks` blocks."""
        sizes = {"num_blocks": num_blocks, "block_size": self.block_size}
        heads = {"num_layers": self.layers, "num_heads": self.kv_heads}
        if self.blocks == "packed":
            indexer = isinstance(self.entry, jaxkv.IndexerEntry)
            latent = jaxkv.MLAEntry("fp8_ds_mla") if indexer else self.entry
            key = self.entry if indexer else jaxkv.IndexerEntry.beside(self.format, 128)
            groups = {"latent": jaxkv.Group(self.layers, latent), "indexer": jaxkv.Group(self.layers, key)}
            return jaxkv.PackedLayout(groups=groups, **sizes)["indexer" if indexer else "latent"]
        plain = jaxkv.CacheLayout(entry=self.entry, **heads, **sizes)
        if self.blocks == "plain":
            return plain
        if self.blocks == "planes":  # [layers, 2, blocks, tokens, heads, values], as vLLM allocates a layer
            head = self.entry.sizes[0]
            token, block = self.kv_heads * head, self.block_size * self.kv_heads * head
            plane = num_blocks * block
            strides = {"layer": 2 * plane, "part": plane, "block": block, "token": token, "head": head}
            return jaxkv.CacheLayout.from_strides(
                entry=self.entry, strides=strides, size=2 * plane * self.layers, **heads, **sizes
            )
        padding = -plain.block_nbytes % PADDED_TO or PADDED_TO
        return jaxkv.CacheLayout(entry=self.entry, block_padding=padding // plain.itemsize, **heads, **sizes)

    def fitted(self, limit: int) -> "Workload":
        """The same workload with as many layers as fit in `limit` bytes, at least one."""
        return with_fitting_layers(self, lambda workload: workload.layout.nbytes <= limit)

    def entry_shapes(self, count: int) -> Shapes:
        """Shapes and dtypes of the parts of `count` entries."""
        heads = () if self.entry.one_head else (self.kv_heads,)
        return [((count, *heads, n), "bfloat16") for n in self.entry.sizes]
