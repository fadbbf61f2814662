"""`Workload`: one benchmarked call of an operation, with the bytes that it moves and the flops that it computes.

There is a subclass for each family of operations, and a table of them: `FAMILIES`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, cast

import jax
import jax.numpy as jnp
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


HEAD = 128
"""Values of a key without its rotary part, and of a value, in expanded heads."""


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

    @property
    def all_slots(self) -> np.ndarray:
        """Slots of all tokens, one request after the other."""
        sums, rows = self.running_sum, np.repeat(np.arange(len(self.lengths)), self.lengths)
        return self.slots(rows, np.arange(sums[-1]) - sums[rows])

    def slots(self, requests, positions) -> np.ndarray:
        """Slots of tokens by request and position."""
        blocks = self.tables[requests, positions // self.block_size]
        return (blocks * self.block_size + positions % self.block_size).astype(np.int32)


def unit_scales(entry: Entry) -> dict[str, float]:
    """Scales of 1 for the entries that need some, as keyword arguments."""
    names = ("k_scale", "v_scale") if isinstance(entry, jaxkv.KVEntry) else ("kv_scale",)
    return dict.fromkeys(names, 1.0) if entry.codec.scaled else {}


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
    head_dim: int = 128
    """Values of a key, and of a value, in caches of keys and values."""
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
    channel_decays: bool = False
    """Whether each value of a key decays by itself, with the heads of Kimi Linear instead of Qwen3-Next's."""
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
            ("channels" * self.channel_decays, ""),
            (f"w{self.window}", "w0"),
            (f"d{self.head_dim}", "d128"),
        )
        sizes = f"{self.requests}x{queries}{self.tokens}{self.varlen}"
        return "-".join([self.operation, sizes, str(self.layers), *(name for name, usual in unusual if name != usual)])

    @property
    def entry(self) -> Entry:
        """What the cache stores."""
        kind = next(iter(_DECLARED[self.operation].entries), jaxkv.MLAEntry)
        if kind is jaxkv.KVEntry:
            return jaxkv.KVEntry(self.format, head_dim=self.head_dim)  # type: ignore[arg-type]
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
            key = self.entry if indexer else jaxkv.IndexerEntry.for_latents(self.format, 128)
            groups = {"latent": jaxkv.Group(self.layers, latent), "indexer": jaxkv.Group(self.layers, key)}
            return jaxkv.PackedLayout(groups=groups, **sizes)["indexer" if indexer else "latent"]
        plain = jaxkv.CacheLayout(entry=self.entry, **heads, **sizes)
        if self.blocks == "plain":
            return plain
        if self.blocks == "planes":  # [layers, 2, blocks, tokens, heads, values], as vLLM allocates a layer
            head = self.entry.sizes[0]
            token, block = self.kv_heads * head, self.block_size * self.kv_heads * head
            plane = num_blocks * block
            strides = {"layer": 2 * plane, "block": block, "token": token, "head": head}
            places = {"strides": strides, "value_offset": plane, "size": 2 * plane * self.layers}
            return jaxkv.CacheLayout.from_strides(entry=self.entry, **places, **heads, **sizes)
        padding = -plain.block_nbytes % PADDED_TO or PADDED_TO
        return jaxkv.CacheLayout(entry=self.entry, block_padding=padding // plain.itemsize, **heads, **sizes)

    def fitted(self, limit: int) -> "Workload":
        """The same workload with as many layers as fit in `limit` bytes, at least one."""
        return with_fitting_layers(self, lambda workload: workload.layout.nbytes <= limit)

    def entry_shapes(self, count: int) -> Shapes:
        """Shapes and dtypes of the parts of `count` entries."""
        heads = () if self.entry.one_head else (self.kv_heads,)
        return [((count, *heads, n), "bfloat16") for n in self.entry.sizes]


class Write(Workload):
    """Stores the tokens of all requests."""

    @property
    def value_shapes(self) -> Shapes:
        """Shapes and dtypes of the parts of new entries, and of the cosines and sines by which keys are rotated."""
        parts = self.entry_shapes(int(self.lengths.sum()))
        return [*parts, (parts[1][0], "float32")] if self.rotated else parts

    def index(self, requests, rng):
        """The slots of all tokens."""
        return [], [requests.all_slots]

    def arguments(self, cache, values, index, layer):
        """The cache, the parts of new entries, and slots."""
        values, angles = (values[:-1], {"cos_sin": values[-1]}) if self.rotated else (values, {})
        positional, options = super().arguments(cache, values, index, layer)
        return positional, {**options, **angles}

    @property
    def traffic(self) -> int:
        """Bytes of the entries, of their values in bf16, and of cosines and sines."""
        angles = 4 * self.entry.sizes[1] if self.rotated else 0
        return self.entries * (self.entry.nbytes + 2 * sum(self.entry.sizes) + angles)


class WriteEntries(Write):
    """Stores the bytes of the tokens of all requests."""

    @property
    def value_shapes(self) -> Shapes:
        """Shape and dtype of the bytes."""
        heads = () if self.entry.one_head else (self.kv_heads,)
        return [((int(self.lengths.sum()), *heads, self.entry.nbytes), "uint8")]

    @property
    def traffic(self) -> int:
        """Bytes of the entries, read and written."""
        return 2 * self.entries * self.entry.nbytes


class Gather(Workload):
    """Reads the tokens of all requests."""

    @property
    def options(self):
        """`total`: the rows of the result."""
        return {"total": int(self.lengths.sum())}

    def index(self, requests, rng):
        """Block tables and the running sum of lengths."""
        return [], [requests.tables, requests.running_sum]

    @property
    def traffic(self) -> int:
        """Bytes of the entries, and of their values in bf16."""
        return self.entries * (self.entry.nbytes + 2 * sum(self.entry.sizes))


class Read(Gather):
    """Reads the tokens of all requests by their slots, in random order."""

    @property
    def options(self):
        """None."""
        return {}

    def index(self, requests, rng):
        """The slots of all tokens, shuffled."""
        return [], [rng.permutation(requests.all_slots)]


class GatherEntries(Gather):
    """Reads the bytes of the tokens of all requests."""

    @property
    def traffic(self) -> int:
        """Bytes of the entries, read and written."""
        return 2 * self.entries * self.entry.nbytes


class DecodeMLA(Workload):
    """Attention to latents: the result has the size of their values."""

    has_queries = True
    planned = True

    @property
    def value_shapes(self) -> Shapes:
        """Shapes and dtypes of the queries, one array for each part of an entry."""
        return [((*self.queries, n), "bfloat16") for n in self.entry.sizes]

    @property
    def options(self):
        """A softmax scale."""
        return {"scale": 192**-0.5}

    @property
    def traffic(self) -> int:
        """Bytes of entries, queries and results."""
        values = sum(self.entry.sizes) + self._value_dim
        return self.entries * self.entry.nbytes + 2 * np.prod(self.queries).item() * values

    @property
    def flops(self) -> int:
        """Flops of both products of attention."""
        return 2 * self.heads * self.keys * (sum(self.entry.sizes) + self._value_dim)

    @property
    def _value_dim(self) -> int:
        return cast(jaxkv.MLAEntry, self.entry).value_dim

    @property
    def keys(self) -> int:
        """The number of pairs of a query token and a token that it sees."""
        return self.q_len * int(self.lengths.sum())


class DecodeKV(DecodeMLA):
    """Attention to keys and values: queries and results together have the size of an entry."""

    @property
    def value_shapes(self) -> Shapes:
        """Shapes and dtypes of the queries."""
        return super().value_shapes[:1]

    @property
    def traffic(self) -> int:
        """Bytes of entries, queries and results."""
        return self.entries * self.entry.nbytes + 2 * np.prod(self.queries).item() * sum(self.entry.sizes)

    @property
    def flops(self) -> int:
        """Flops of both products of attention."""
        return 2 * self.heads * self.keys * sum(self.entry.sizes)


class PrefillMLA(DecodeMLA):
    """Attention of many query tokens to keys and values that are expanded from latents, for DeepSeek's heads."""

    planned = False

    @property
    def value_shapes(self) -> Shapes:
        """Shapes and dtypes of queries without and in their rotary part, and of the weights that expand latents."""
        latent, rope = self.entry.sizes
        shapes = *((*self.queries, n) for n in (HEAD, rope)), *[(self.heads, HEAD, latent)] * 2
        return [(shape, "bfloat16") for shape in shapes]

    @property
    def traffic(self) -> int:
        """Bytes of entries, queries, weights and results."""
        latent, rope = self.entry.sizes
        values = np.prod(self.queries).item() * (2 * HEAD + rope) + 2 * self.heads * HEAD * latent
        return self.entries * self.entry.nbytes + 2 * values

    @property
    def flops(self) -> int:
        """Flops of expanding each token once, and of both products of attention."""
        latent, rope = self.entry.sizes
        expanding = 2 * int(self.lengths.sum()) * latent * 2 * HEAD
        return self.heads * (expanding + 2 * self.keys * (2 * HEAD + rope))


class PrefillKV(DecodeKV):
    """Attention of many query tokens to gathered keys and values."""

    planned = False


class Sparse(DecodeMLA):
    """Attention to selected slots, and with a window to its slots as well: two lists, of the same cache."""

    planned = False
    usual_format = "fp8_ds_mla"

    def index(self, requests, rng):
        """Slots of distinct positions for each query token, in one list or two."""
        scores = rng.random((self.requests, self.q_len, self.tokens), np.float32)
        positions = scores.argpartition(self._slots, axis=-1)[..., : self._slots]
        slots = requests.slots(np.arange(self.requests)[:, None, None], positions)
        return np.split(slots, [self.window] if self.window else [], axis=-1), []

    def arguments(self, cache, values, index, layer):
        """As for other operations; the second list of slots with its cache."""
        slots, *others = index
        positional, options = super().arguments(cache, values, [slots], layer)
        extra = [jaxkv.ExtraCache(cache, other, layer) for other in others]
        return positional, {**options, **({"extra": extra[0]} if extra else {})}

    @property
    def _slots(self) -> int:
        """The number of slots of each query token."""
        return self.window + self.chosen

    @property
    def entries(self) -> int:
        """The number of selected entries, but at most all of a request: its query tokens select some of them again."""
        return self.requests * min(self.q_len * self._slots, self.tokens)

    @property
    def keys(self) -> int:
        """The number of pairs of a query token and a selected slot."""
        return self.requests * self.q_len * self._slots


class Logits(Workload):
    """Scores of the indexer."""

    has_queries = True
    usual_format = "indexer_fp8"

    @property
    def entry(self):
        """An indexer key."""
        return jaxkv.IndexerEntry(self.format)  # type: ignore[arg-type]

    @property
    def value_shapes(self) -> Shapes:
        """Shapes and dtypes of the queries and their weights."""
        return [((*self.queries, self.entry.sizes[0]), self.query_dtype), (self.queries, "float32")]

    @property
    def options(self):
        """`max_len`: the number of positions of the result."""
        return {"max_len": self.tokens}

    @property
    def traffic(self) -> int:
        """Bytes of entries, queries with their weights, and logits."""
        itemsize = jnp.dtype(self.query_dtype).itemsize
        queries = np.prod(self.queries).item() * (self.entry.sizes[0] * itemsize + 4)
        return self.entries * self.entry.nbytes + queries + 4 * self.requests * self.q_len * self.tokens

    @property
    def flops(self) -> int:
        """Flops of the product of queries and keys."""
        return 2 * self.heads * self.q_len * int(self.lengths.sum()) * self.entry.sizes[0]


class WriteState(Workload):
    """Stores a state of each request: those of a layer with the gated delta rule of Qwen3-Next."""

    usual_format = "state"

    @property
    def entry(self):
        """The states of the convolution and of the recurrence."""
        return jaxkv.StateEntry({"conv": ((8192, 3), "bfloat16"), "recurrent": ((32, 128, 128), "float32")})

    @property
    def value_shapes(self) -> Shapes:
        """Shapes and dtypes of the arrays of the states."""
        return [((self.requests, *shape), dtype) for _, shape, dtype in self.entry.arrays]

    def index(self, requests, rng):
        """The slot of each request: that of its first token."""
        return [], [requests.slots(np.arange(self.requests), np.zeros(self.requests, np.int32))]

    def arguments(self, cache, values, index, layer):
        """The cache, the states by name, and slots."""
        states = [self.entry.named(values)] if values else []
        return (cache, *states, *index), {"layer": layer}

    @property
    def traffic(self) -> int:
        """Bytes of the states, read and written."""
        return 2 * self.requests * self.entry.nbytes


class ReadState(WriteState):
    """Reads a state of each request."""

    @property
    def value_shapes(self) -> Shapes:
        """No arrays."""
        return []


class DecodeDeltaRule(Workload):
    """A decode step of a layer with the gated delta rule: 32 heads of 128 x 128, as of Qwen3-Next and Kimi Linear."""

    usual_format = "state"
    delta: ClassVar[tuple[int, int, int]] = (32, 128, 128)
    """H, K and V."""

    @property
    def entry(self):
        """The last three tokens before the convolution, and the states of the heads."""
        heads, keys, values = self.delta
        key_heads = heads if self.channel_decays else heads // 2
        channels = 2 * key_heads * keys + heads * values
        return jaxkv.StateEntry({"conv": ((3, channels), "float32"), "delta": (self.delta, "float32")})

    @property
    def value_shapes(self) -> Shapes:
        """Shapes and dtypes of the tokens and of the weight of the convolution."""
        taps, channels = self.entry.shapes["conv"]
        return [((self.requests, channels), "bfloat16"), ((channels, taps + 1), "bfloat16")]

    def index(self, requests, rng):
        """The slot of each request, whose state is updated in place; decays and rates."""
        heads, keys, _ = self.delta
        shape = self.requests, heads
        decays = -rng.uniform(0, 1, (*shape, keys if self.channel_decays else 1)).astype(np.float32)
        slots = requests.slots(np.arange(self.requests), np.zeros(self.requests, np.int32))
        return [], [slots, decays, rng.uniform(0, 1, shape).astype(np.float32)]

    def arguments(self, cache, values, index, layer):
        """Tokens, decays, rates, the weight, the cache, and the slots to read and to write."""
        (x, weight), (slots, *gates) = values, index
        return (x, *gates, weight, cache, slots, slots), {"layer": layer}

    @property
    def traffic(self) -> int:
        """Bytes of the states, read and written, and of the other arguments and the outputs, each once."""
        heads, keys, values = self.delta
        given = sum(2 * math.prod(shape) for shape, _ in self.value_shapes)
        floats = self.requests * heads * ((keys if self.channel_decays else 1) + 1 + values)
        return 2 * self.requests * self.entry.nbytes + given + 4 * floats


class Plan(Workload):
    """A plan for attention."""

    has_queries = True

    @property
    def options(self):
        """`num_heads` and `q_len` of the attention."""
        return {"num_heads": self.heads, "q_len": self.q_len}

    def index(self, requests, rng):
        """Block tables and lengths, passed as if each layer had its own, or XLA would compute the plan only once."""
        return [requests.tables, requests.lengths], []

    def arguments(self, cache, values, index, layer):
        """The cache, block tables and lengths."""
        return (cache, *index), self.options

    @property
    def traffic(self) -> int:
        """Bytes of block tables and lengths."""
        return 4 * (self.num_blocks + self.requests)


class TopK(Workload):
    """Selects `chosen` of `tokens` positions for each query token."""

    has_queries = True
    cached = False

    @property
    def value_shapes(self) -> Shapes:
        """Shape and dtype of the logits."""
        return [((self.requests, self.q_len, self.tokens), "float32")]

    def index(self, requests, rng):
        """No integer arguments."""
        return [], []

    def arguments(self, cache, values, index, layer):
        """Logits and k."""
        return values, {"k": self.chosen}

    @property
    def traffic(self) -> int:
        """Bytes of logits and positions."""
        return 4 * self.requests * self.q_len * (self.tokens + self.chosen)


class Merge(Workload):
    """Merges `tokens` partial results of each query."""

    has_queries = True
    cached = False

    @property
    def value_shapes(self) -> Shapes:
        """Shapes and dtypes of the partial results and their log-sum-exps."""
        parts = self.tokens, *self.queries
        return [((*parts, self.entry.sizes[0]), "bfloat16"), (parts, "float32")]

    def index(self, requests, rng):
        """No integer arguments."""
        return [], []

    def arguments(self, cache, values, index, layer):
        """Results and log-sum-exps."""
        return values, {}

    @property
    def traffic(self) -> int:
        """Bytes of all partial results and of the result, with their log-sum-exps."""
        return np.prod(self.queries).item() * (self.tokens + 1) * (2 * self.entry.sizes[0] + 4)


class ReadBlocks(Workload):
    """Reads all blocks, of all layers."""

    def index(self, requests, rng):
        """The ids of all blocks."""
        return [requests.blocks], []

    def arguments(self, cache, values, index, layer):
        """Cache, block ids and payloads."""
        return (cache, *index, *values), {}

    @property
    def traffic(self) -> int:
        """Bytes of the blocks, read and written."""
        return 2 * self.entries * self.layers * self.entry.nbytes


class WriteBlocks(ReadBlocks):
    """Overwrites all blocks."""

    @property
    def value_shapes(self) -> Shapes:
        """Shape and dtype of the payloads."""
        return [((self.num_blocks, self.layout.block_nbytes // self.layout.itemsize), str(self.layout.dtype))]


class CopyBlocks(ReadBlocks):
    """Copies half of the blocks to the other half."""

    @property
    def num_blocks(self) -> int:
        """Twice as many: blocks to copy from, and blocks to copy to."""
        return 2 * super().num_blocks

    def index(self, requests, rng):
        """Blocks to read and to overwrite."""
        return np.split(requests.blocks, 2), []


V3 = {"scoring": "sigmoid", "groups": 8, "groups_per_token": 4, "normalize": True, "scale": 2.5}
"""How DeepSeek V3 chooses experts."""


class Routing(Workload):
    """Chooses `chosen` of `tokens` experts for each of `requests` tokens, as DeepSeek V3 does."""

    cached = False

    @property
    def value_shapes(self) -> Shapes:
        """Shapes and dtypes of logits and biases."""
        return [((self.requests, self.tokens), "float32"), ((self.tokens,), "float32")]

    def arguments(self, cache, values, index, layer):
        """Logits, the number of experts per token, and the bias."""
        logits, bias = values
        return (logits, self.chosen), {"bias": bias, **V3}

    @property
    def traffic(self) -> int:
        """Bytes of logits, biases, and of an id and a weight per chosen expert."""
        return 4 * (self.requests + 1) * self.tokens + 8 * self.requests * self.chosen


MIXTURES = {64: (2048, 1408), 256: (7168, 2048)}
"""The width of tokens and the inner size of experts, by the number of experts: DeepSeek V2-Lite and V3."""
SMALL_MIXTURE = 256, 128
"""The same, for other numbers of experts."""


class Experts(Workload):
    """Sends each of `requests` tokens through `chosen` of `tokens` experts; `format` is that of their weights."""

    cached = False

    @property
    def value_shapes(self) -> Shapes:
        """Shapes and dtypes of the tokens, and of the weights of their experts."""
        return [((self.requests, self._sizes[0]), "bfloat16"), ((self.requests, self.chosen), "float32")]

    @property
    def _sizes(self):
        return MIXTURES.get(self.tokens, SMALL_MIXTURE)

    @cached_property
    def _experts(self):
        """int32 [T, K]: random ones, K different experts for each token."""
        scores = np.random.default_rng(0).random((self.requests, self.tokens), np.float32)
        return scores.argpartition(self.chosen - 1, axis=-1)[:, : self.chosen].astype(np.int32)

    def index(self, requests, rng):
        """The experts of each token; the experts' weights, which are made on the device."""
        width, inner = self._sizes
        keys = jax.random.split(jax.random.key(0), 3)
        shapes = (inner, width), (inner, width), (width, inner)
        matrices = [
            jax.random.normal(key, (self.tokens, *shape), jnp.bfloat16) * shape[1] ** -0.5
            for key, shape in zip(keys, shapes, strict=True)
        ]
        if self.format == "fp8":
            in_fp8 = (jax.lax.map(jaxkv.TileScaled.of, matrix) for matrix in matrices)
            matrices = [array for weight in in_fp8 for array in (weight.values, weight.scales)]
        return [self._experts], matrices

    def arguments(self, cache, values, index, layer):
        """Tokens, experts, their shares and their weights."""
        (x, shares), (experts, *matrices) = values, index
        if self.format == "fp8":
            matrices = list(map(jaxkv.TileScaled, matrices[::2], matrices[1::2]))
        return (x, experts, shares, *matrices), {}

    @property
    def traffic(self) -> int:
        """Bytes of the weights of chosen experts, tokens and results."""
        width, inner = self._sizes
        weights = np.unique(self._experts).size * 3 * width * inner * (1 if self.format == "fp8" else 2)
        return weights + 4 * self.requests * width

    @property
    def flops(self) -> int:
        """Flops of the three products."""
        width, inner = self._sizes
        return 6 * self.requests * self.chosen * width * inner


class Linear(Workload):
    """Multiplies `requests` tokens of `tokens` values with a weight in float8 that has `chosen` rows."""

    cached = False

    @property
    def value_shapes(self) -> Shapes:
        """Shape and dtype of the tokens."""
        return [((self.requests, self.tokens), "bfloat16")]

    def index(self, requests, rng):
        """The weight, made on the device."""
        matrix = jax.random.normal(jax.random.key(0), (self.chosen, self.tokens), jnp.bfloat16) * self.tokens**-0.5
        weight = jaxkv.TileScaled.of(matrix)
        return [], [weight.values, weight.scales]

    def arguments(self, cache, values, index, layer):
        """Tokens and the weight."""
        return (*values, jaxkv.TileScaled(*index)), {}

    @property
    def traffic(self) -> int:
        """Bytes of the weight, tokens and results."""
        return self.chosen * self.tokens + 2 * self.requests * (self.tokens + self.chosen)

    @property
    def flops(self) -> int:
        """Flops of the product."""
        return 2 * self.requests * self.chosen * self.tokens


FAMILIES: dict[str, type[Workload]] = {
    "write_mla": Write,
    "write_kv": Write,
    "write_indexer_k": Write,
    "write_entries": WriteEntries,
    "gather_mla": Gather,
    "gather_kv": Gather,
    "gather_indexer_k": Gather,
    "gather_entries": GatherEntries,
    "read_mla": Read,
    "read_kv": Read,
    "read_indexer_k": Read,
    "plan_decode": Plan,
    "decode_mla": DecodeMLA,
    "decode_kv": DecodeKV,
    "decode_mla_sparse": Sparse,
    "prefill_mla": PrefillMLA,
    "prefill_kv": PrefillKV,
    "indexer_logits": Logits,
    "select_topk": TopK,
    "merge_states": Merge,
    "select_experts": Routing,
    "write_state": WriteState,
    "read_state": ReadState,
    "decode_delta_rule": DecodeDeltaRule,
    "copy_blocks": CopyBlocks,
    "read_blocks": ReadBlocks,
    "write_blocks": WriteBlocks,
    "grouped_swiglu": Experts,
    "scaled_linear": Linear,
}
"""The family of each declared operation."""


def workload(operation: str, **sizes) -> Workload:
    """Makes a workload of `operation`; `sizes` are the other fields of `Workload`."""
    return FAMILIES[operation](operation=operation, **sizes)
