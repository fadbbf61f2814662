"""Named shapes: the calls that are benchmarked, with what they move and compute."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

import jaxkv
from jaxkv_kernels.formats.entries import Entry

MLA_LAYERS = 61
"""DeepSeek V3's."""

BLOCK_OPERATIONS = ("copy_blocks", "read_blocks")
OPERATIONS = (
    "write_mla",
    "gather_mla",
    "decode_mla",
    "decode_mla_sparse",
    "write_kv",
    "gather_kv",
    "decode_kv",
    "write_indexer_k",
    "indexer_logits",
    *BLOCK_OPERATIONS,
)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One call: `operation` for `requests` of `tokens` each, on a cross-layer cache (packed where `layers` is 1).

    Reads attend to, gather or copy `tokens` cached tokens a request; writes store as many.  Queries, new values and
    results are bf16.
    """

    suite: str
    operation: str
    requests: int
    tokens: int
    layers: int
    heads: int = 1
    """Query heads."""
    q_len: int = 1
    """Query tokens a request."""
    kv_heads: int = 1
    chosen: int = 0
    """Slots that each query token attends to (sparse attention)."""
    varlen: bool = False
    """Requests have random lengths of at most `tokens`."""
    format: str = "bf16"
    block_size: int = 64

    @property
    def name(self) -> str:
        """Operation, requests x heads x q_len x tokens (v: at most as many), layers; no heads where no queries are.

        Of the formats only fp8 is told: the others come with one operation each.
        """
        queries = f"{self.heads}x{self.q_len}x" if self.has_queries else ""
        sizes = f"{self.requests}x{queries}{self.tokens}{'v' * self.varlen}"
        return f"{self.operation}-{sizes}-{self.layers}{'-fp8' * (self.format == 'fp8')}"

    @property
    def has_queries(self) -> bool:
        """Whether it is attention, or the indexer's."""
        return self.operation.startswith(("decode", "indexer"))

    @property
    def entry(self) -> Entry:
        """What the cache stores."""
        if "kv" in self.operation:
            return jaxkv.KVEntry(self.format, head_dim=128)
        return jaxkv.IndexerEntry() if "indexer" in self.operation else jaxkv.MLAEntry(self.format)

    @property
    def scales(self) -> dict[str, float]:
        """Of the entries, as keyword arguments."""
        names = ("k_scale", "v_scale") if "kv" in self.operation else ("kv_scale",)
        return dict.fromkeys(names, 1.0) if self.entry.codec.scaled else {}

    @property
    def writer(self) -> str:
        """The operation that stores such entries."""
        if "kv" in self.operation:
            return "write_kv"
        return "write_indexer_k" if "indexer" in self.operation else "write_mla"

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
        if self.chosen:
            return self.requests * self.q_len * self.chosen
        heads = self.layers if self.operation in BLOCK_OPERATIONS else self.kv_heads
        return int(self.lengths.sum()) * heads

    @property
    def traffic(self) -> int:
        """Bytes that a call must move: entries, and queries, new values and results."""
        cached, values = self.entries * self.entry.nbytes, sum(self.entry.sizes)
        queries = self.requests * self.q_len * self.heads
        if self.operation in BLOCK_OPERATIONS:
            return 2 * cached
        if not self.has_queries:
            return cached + 2 * self.entries * values
        if self.operation == "indexer_logits":
            return cached + 2 * queries * (values + 1) + 4 * self.requests * self.q_len * self.tokens
        if self.operation == "decode_kv":
            return cached + 2 * queries * values
        return cached + 2 * queries * (values + self.entry.sizes[0])

    @property
    def flops(self) -> int:
        """Operations of a call's matrix products, as if every query token saw every token."""
        if not self.has_queries:
            return 0
        keys = self.entries if self.chosen else self.q_len * int(self.lengths.sum())
        value = {"indexer_logits": 0, "decode_kv": 0}.get(self.operation, self.entry.sizes[0])
        return 2 * self.heads * keys * (sum(self.entry.sizes) + value)

    @property
    def least_seconds(self) -> float:
        """How long a call takes at the least, on devices of 5 TB/s and 1 Pflop/s."""
        return max(self.traffic / 5e12, self.flops / 1e15)

    @property
    def visited(self) -> list[int]:
        """Layers that successive calls work on: all in turn, so that no call finds its data in a GPU's cache.

        Attention works on the middle layer, most shapes of which are larger than that cache; published numbers, too,
        are of calls on the same data.
        """
        return [self.layers // 2] if self.has_queries else list(range(self.layers))

    @property
    def layout(self) -> jaxkv.CacheLayout:
        """Of the cache: as many blocks as the requests need, and as many again where they are copied to others."""
        blocks = int((-(-self.lengths // self.block_size)).sum())
        return jaxkv.CacheLayout(
            num_layers=self.layers,
            num_blocks=2 * blocks if self.operation == "copy_blocks" else blocks,
            block_size=self.block_size,
            num_heads=self.kv_heads,
            entry=self.entry,
        )

    def fitted(self, limit: int) -> "Workload":
        """The same with the most layers, at least one, of which the cache takes at most `limit` bytes."""
        a_layer = replace(self, layers=1).layout.nbytes
        return replace(self, layers=max(1, min(self.layers, limit // a_layer)))


def _cpu() -> Iterator[Workload]:
    """Every operation, in a second each on two cores."""
    for layers in (1, 4):
        for operation in ("write_mla", "gather_mla"):
            yield Workload(suite="cpu", operation=operation, requests=2, tokens=4096, layers=layers)
        yield Workload(suite="cpu", operation="decode_mla", requests=2, heads=16, tokens=2048, layers=layers)
    cross = partial(Workload, suite="cpu", layers=4)
    yield cross(operation="decode_mla", requests=4, heads=16, q_len=2, tokens=1024, varlen=True)
    yield cross(operation="decode_mla_sparse", requests=2, heads=16, tokens=4096, chosen=1024, format="fp8_ds_mla")
    yield cross(operation="write_kv", requests=2, tokens=2048, kv_heads=4)
    yield cross(operation="gather_kv", requests=2, tokens=2048, kv_heads=4)
    yield cross(operation="decode_kv", requests=2, heads=16, tokens=2048, kv_heads=4)
    yield cross(operation="write_indexer_k", requests=2, tokens=4096)
    yield cross(operation="indexer_logits", requests=2, heads=16, tokens=4096)
    yield cross(operation="copy_blocks", requests=1, tokens=2048)
    yield cross(operation="read_blocks", requests=1, tokens=2048)


def _peers() -> Iterator[Workload]:
    """Dense decoding: many requests and few, 128 heads (arithmetic decides) and 16 (memory does), lengths that vary."""
    sizes = (
        (128, 128, 1, 4096),
        (128, 128, 1, 16384),
        (128, 128, 2, 4096),
        (128, 64, 1, 4096),
        (64, 16, 1, 4096),
        (128, 16, 1, 8192),
        (1, 128, 1, 65536),
        (1, 16, 1, 65536),
        (8, 128, 1, 16384),
        (1, 128, 1, 4096),
        (1, 16, 1, 4096),
        (64, 128, 1, 4096),
    )
    for layers in (1, MLA_LAYERS):
        mla = partial(Workload, suite="peers", operation="decode_mla", layers=layers)
        for requests, heads, q_len, tokens in sizes:
            yield mla(requests=requests, heads=heads, q_len=q_len, tokens=tokens)
        for heads in (128, 16):
            yield mla(requests=128, heads=heads, tokens=8192, varlen=True)


def _copies() -> Iterator[Workload]:
    """A prefill's 8,192 tokens, a decoding step's 128, and 64 whole blocks."""
    mla = partial(Workload, suite="copies", layers=MLA_LAYERS)
    yield mla(operation="write_mla", requests=8, tokens=1024)
    yield mla(operation="write_mla", requests=128, tokens=1)
    yield mla(operation="gather_mla", requests=8, tokens=1024)
    yield mla(operation="write_kv", requests=8, tokens=1024, kv_heads=8)
    yield mla(operation="gather_kv", requests=8, tokens=1024, kv_heads=8)
    yield mla(operation="write_indexer_k", requests=8, tokens=1024)
    yield mla(operation="copy_blocks", requests=1, tokens=4096)
    yield mla(operation="read_blocks", requests=1, tokens=4096)


def _models() -> Iterator[Workload]:
    """Grouped-query attention of 64 heads on 8, fp8 entries, and DeepSeek V3.2's sparse attention and indexer."""
    for layers in (1, MLA_LAYERS):
        model = partial(Workload, suite="models", layers=layers)
        sparse = partial(model, operation="decode_mla_sparse", chosen=2048, format="fp8_ds_mla")
        yield model(operation="decode_kv", requests=64, heads=64, tokens=4096, kv_heads=8)
        yield model(operation="decode_kv", requests=64, heads=64, tokens=4096, kv_heads=8, format="fp8")
        yield model(operation="decode_mla", requests=128, heads=16, tokens=8192, format="fp8")
        yield sparse(requests=128, heads=128, tokens=8192)
        yield sparse(requests=128, heads=128, q_len=2, tokens=32768)
        yield sparse(requests=64, heads=64, tokens=8192)
        yield model(operation="indexer_logits", requests=64, heads=64, tokens=32768)


WORKLOADS = {workload.name: workload for made in (_cpu, _peers, _copies, _models) for workload in made()}
"""Every shape, by name."""

SUITES = tuple(dict.fromkeys(workload.suite for workload in WORKLOADS.values()))
