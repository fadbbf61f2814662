"""How random calls of each operation are drawn: a subclass of `Case` per family, and the table `FAMILIES`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv.dispatch import backends
from jaxkv.fuzz.case import PER_HEAD, Case, Index, Shapes
from jaxkv.fuzz.indices import FAR, draw_distinct, draw_lengths, draw_tables, reveal
from jaxkv.fuzz.layouts import pick
from jaxkv.fuzz.products import Experts, Linear, Routing
from jaxkv.ops import OPERATIONS as DECLARED
from jaxkv_kernels.formats.entries import Entry
from jaxkv_kernels.formats.format import Format

TRIES = 300
"""Draws before an operation counts as unsupported.  GPU kernels support only some sizes and layouts."""


class Write(Case):
    """Stores entries at distinct slots."""

    effect = "writes"

    @property
    def value_shapes(self) -> Shapes:
        """Shapes and dtypes of the parts of the new entries."""
        return [(shape, self.dtype) for shape in self.entry_shapes(self.count)]

    def index(self, rng, live) -> Index:
        """The slots to write."""
        return (draw_distinct(rng, live.size, self.count),), {}


class WriteState(Write):
    """Stores states at distinct slots."""

    def arguments(self, cache, values, draw, layer):
        """The cache, the states by name, and slots."""
        states = dict(zip(self.layout.entry.named_sizes, values, strict=True))
        return (cache, states, *draw.index), {"layer": layer}


class ReadState(Case):
    """Reads states, some of them twice, and of slots outside the cache."""

    def index(self, rng, live) -> Index:
        """The slots to read."""
        outside = rng.random(self.count) < pick(rng, 0, 0.1, 1)
        slots = np.where(outside, rng.choice([*FAR, live.size], self.count), rng.integers(live.size, size=self.count))
        live[slots[~outside]] = True
        return (slots,), {}


class Gather(Case):
    """Reads runs of tokens."""

    @classmethod
    def optional(cls):
        """`seq_starts`: the position at which each run starts."""
        return ("seq_starts", PER_HEAD)

    @classmethod
    def sizes(cls, rng, layout, fields):
        """The options `total` (rows of the result) and `dtype` (of the result)."""
        return {"options": {"total": fields["count"], "dtype": fields["dtype"]}}

    def index(self, rng, live) -> Index:
        """Block tables and the running sum of lengths."""
        ends = draw_lengths(rng, self.requests, self.columns * self.layout.block_size, self.layout.block_size)
        given = "seq_starts" in self.extras
        starts = rng.integers(ends + 1) if given else np.zeros_like(ends)
        tables = draw_tables(rng, self.layout, self.columns, ends)
        reveal(live, self.layout, tables, starts, ends)
        keywords = {"seq_starts": starts.astype(np.int32)} if given else {}
        return (tables, np.cumsum([0, *(ends - starts)])), keywords


class GatherEntries(Gather):
    """Reads the bytes of entries."""

    @classmethod
    def sizes(cls, rng, layout, fields):
        """The option `total`."""
        return {"options": {"total": fields["count"]}}

    def arguments(self, cache, values, draw, layer):
        """Those of a gather, without scales."""
        return super().arguments(cache, values, draw._replace(scales={}), layer)


class Queries(Case):
    """Operations with queries against all cached tokens of each request.  Their queries come before the cache."""

    def arguments(self, cache, values, draw, layer):
        """Queries, the cache, then tables and lengths."""
        (cache, *rest), keywords = super().arguments(cache, (), draw, layer)
        return (*values, cache, *rest), keywords

    def index(self, rng, live) -> Index:
        """Block tables and lengths."""
        return self.tables_and_lengths(rng, live, self.q_len), {}

    def tables_and_lengths(self, rng, live, q_lens):
        """Block tables and lengths; `q_lens` are the numbers of query tokens of the requests."""
        lengths = draw_lengths(rng, self.requests, self.columns * self.layout.block_size, self.layout.block_size)
        tables = draw_tables(rng, self.layout, self.columns, lengths)
        window = dict(self.options).get("window")
        first = 0 if window is None else lengths - (q_lens - 1) - window
        reveal(live, self.layout, tables, first, lengths)
        return tables, lengths


class DecodeMLA(Queries):
    """Attention to latents."""

    result = "attention"

    @classmethod
    def optional(cls) -> tuple[str, ...]:
        """`cu_q_lens` (ragged query tokens) and `sinks`."""
        return ("cu_q_lens", "sinks", PER_HEAD)

    @classmethod
    def sizes(cls, rng, layout, fields):
        """Options of attention, and a dtype of the queries that represents the entries exactly."""
        options = {"scale": pick(rng, 0.03, 0.07, 0.11), "logit_cap": pick(rng, None, None, 2.0, 30.0)}
        options |= {"window": pick(rng, None, None, None, 1, 64, 300)}
        options |= {"causal": options["window"] is not None or pick(rng, True, True, False)}
        own = str(layout.entry.dtype)
        dtype = fields["dtype"]
        if own in ("bfloat16", "float16", "float32"):
            dtype = jnp.dtype(pick(rng, own, own, "float32"))
        return {"options": {**options, "return_lse": True}, "dtype": dtype}

    @property
    def total(self) -> int:
        """Query tokens of all requests."""
        return self.requests * self.q_len

    @property
    def value_shapes(self) -> Shapes:
        """Shapes and dtypes of the queries, one array for each part of an entry."""
        tokens = (self.total,) if "cu_q_lens" in self.extras else (self.requests, self.q_len)
        return [((*tokens, self.heads, n), self.dtype) for n in self.layout.entry.sizes]

    def index(self, rng, live) -> Index:
        """Block tables and lengths; running sums of the query tokens of each request, and sinks."""
        q_lens, keywords = self.q_len, {}
        if "cu_q_lens" in self.extras:
            edges = np.sort(rng.integers(self.total + 1, size=self.requests))
            keywords["cu_q_lens"] = np.r_[0, edges].astype(np.int32)
            q_lens = np.diff(keywords["cu_q_lens"])
        if "sinks" in self.extras:
            keywords["sinks"] = rng.normal(size=self.heads).astype(np.float32)
        return self.tables_and_lengths(rng, live, q_lens), keywords


class DecodeKV(DecodeMLA):
    """Grouped-query attention."""

    @classmethod
    def sizes(cls, rng, layout, fields):
        """Query heads, a multiple of the cache's heads."""
        return {**super().sizes(rng, layout, fields), "heads": layout.num_heads * pick(rng, 1, 2, 5, 8, 16)}

    @property
    def value_shapes(self) -> Shapes:
        """Shapes and dtypes of the queries."""
        return super().value_shapes[:1]


class Plan(Case):
    """A plan, which is checked by running attention with it."""

    result = "attention"

    @classmethod
    def optional(cls):
        """`batch_invariant`, and what the attention has."""
        return ("batch_invariant", *DecodeMLA.optional())

    @classmethod
    def sizes(cls, rng, layout, fields):
        """The fields of the attention."""
        return (DecodeMLA if layout.entry.one_head else DecodeKV).sizes(rng, layout, fields)

    @property
    def attention(self) -> DecodeMLA:
        """The attention that the plan is for."""
        kind, operation = (DecodeMLA, "decode_mla") if self.layout.entry.one_head else (DecodeKV, "decode_kv")
        fields: dict[str, Any] = {**vars(self), "operation": operation}
        return kind(**fields)

    @property
    def value_shapes(self) -> Shapes:
        """Shapes and dtypes of the attention's queries."""
        return self.attention.value_shapes

    def index(self, rng, live) -> Index:
        """Block tables and lengths."""
        return self.attention.index(rng, live)

    def arguments(self, cache, values, draw, layer):
        """The arguments of `plan_decode`."""
        keywords = {name: dict(self.options)[name] for name in ("window", "causal")}
        keywords |= {"num_heads": self.heads, "dtype": self.dtype, "batch_invariant": "batch_invariant" in self.extras}
        if "cu_q_lens" in self.extras:
            tokens = {"cu_q_lens": draw.keywords["cu_q_lens"], "total": self.attention.total}
        else:
            tokens = {"q_len": self.q_len}
        return (cache, *draw.index), {**keywords, **tokens}

    def run(self, cache, values, draw, layer, implementation):
        """Attention with the plan."""
        plan = super().run(cache, values, draw, layer, implementation)
        args, keywords = self.attention.arguments(cache, values, draw, layer)
        return self.attention.function(*args, **keywords, plan=plan, implementation=implementation)

    def expected(self, cache, values, draw, layer):
        """Attention without a plan."""
        return self.attention.expected(cache, values, draw, layer)


class Sparse(DecodeMLA):
    """Attention to selected slots."""

    @classmethod
    def optional(cls):
        """`counts` (how many slots are used), `sinks`, and `extra` (more slots of the same cache, as of another)."""
        return ("counts", "sinks", "extra")

    @classmethod
    def sizes(cls, rng, layout, fields):
        """The options of dense attention that sparse attention has."""
        found = super().sizes(rng, layout, fields)
        options = {name: value for name, value in found["options"].items() if name not in ("window", "causal")}
        return {**found, "options": options}

    def index(self, rng, live) -> Index:
        """Slots, some of them masked, of one or two caches."""
        live |= rng.random(live.size) < rng.random()
        keywords: dict[str, np.ndarray] = {}
        slots, counts = self._slots(rng, live, self.count)
        if "counts" in self.extras:
            keywords["counts"] = counts
        if "extra" in self.extras:
            keywords["extra_slots"], keywords["extra_counts"] = self._slots(rng, live, self.count // 2 + 1)
        if "sinks" in self.extras:
            keywords["sinks"] = rng.normal(size=self.heads).astype(np.float32)
        return (slots,), keywords

    def _slots(self, rng, live, size: int) -> tuple[np.ndarray, np.ndarray]:
        """`size` slots per query token, and how many of them are used, if the case has counts."""
        shape, known = (self.requests, self.q_len, size), np.flatnonzero(live)
        slots = rng.choice(known, shape) if known.size else np.full(shape, -1)
        masked = rng.random(shape) < pick(rng, 0, 0.1, 1)
        slots = np.where(masked, rng.choice([*FAR, live.size], shape), slots)
        counts = rng.integers(size + 1, size=shape[:2]) if "counts" in self.extras else np.full(shape[:2], size)
        unread = np.arange(size) >= counts[..., None]
        slots = np.where(unread, rng.integers(live.size, size=shape), slots)
        return slots.astype(np.int32), counts.astype(np.int32)

    def arguments(self, cache, values, draw, layer):
        """Queries, the cache and its slots; slots of the cache in the place of another."""
        keywords = dict(draw.keywords)
        more = [keywords.pop(name, None) for name in ("extra_slots", "extra_counts")]
        args, found = super().arguments(cache, values, draw._replace(keywords=keywords), layer)
        if "extra" in self.extras:
            slots, counts = more
            counts = counts if "counts" in self.extras else None
            found["extra"] = jaxkv.ExtraCache(cache, slots, layer, counts, draw.scales.get("kv_scale"))
        return args, found


class Logits(Queries):
    """Scores of the indexer."""

    result = "logits"

    @classmethod
    def sizes(cls, rng, layout, fields):
        """The heads of an indexer, and a dtype of queries that represents the keys exactly."""
        dtype = jnp.dtype(pick(rng, *_exact_queries(layout.entry)))
        return {"heads": pick(rng, 4, 16, 64), "dtype": dtype, "options": {"max_len": fields["count"]}}

    @property
    def value_shapes(self) -> Shapes:
        """Shapes and dtypes of the queries and their weights."""
        queries = self.requests, self.q_len, self.heads
        return [((*queries, self.layout.entry.sizes[0]), self.dtype), (queries, jnp.dtype("float32"))]


def _exact_queries(entry: Entry) -> tuple[str, ...]:
    """The dtypes of indexer queries that represent keys of `entry` exactly, so that scores have no rounding error."""
    own = str(entry.dtype)
    if own in ("bfloat16", "float16", "float32"):
        return (own, own, "float32", *(["float8_e4m3fn"] if own == "bfloat16" else []))
    factored = type(entry.codec).decode_factored is not Format.decode_factored
    return ("bfloat16", "float32", "float8_e4m3fn") if factored else ("float32",)


class TopK(Case):
    """Selects the largest logits, many of which are equal."""

    @classmethod
    def sizes(cls, rng, layout, fields):
        """k, the number of positions to select."""
        return {"options": {"k": pick(rng, 1, 7, 64, 512)}}

    def index(self, rng, live) -> Index:
        """Logits, and -inf past the end of each row."""
        shape = self.requests, self.q_len, self.columns * self.layout.block_size
        logits = np.round(rng.standard_normal(shape, np.float32), int(rng.integers(1, 7)))
        return (), {"logits": np.where(np.arange(shape[-1]) < rng.integers(shape[-1] + 1), logits, -np.inf)}

    def arguments(self, cache, values, draw, layer):
        """Logits and k."""
        return (), {**dict(self.options), **draw.keywords}


class Merge(Case):
    """Merges partial results, some of them empty."""

    result = "attention"

    @classmethod
    def sizes(cls, rng, layout, fields):
        """The number of partial results, and heads."""
        return {"count": pick(rng, 1, 2, 3, 9), "heads": pick(rng, 1, 3, 16)}

    @property
    def value_shapes(self) -> Shapes:
        """Shapes and dtypes of the partial results."""
        shape = self.count, self.requests, self.q_len, self.heads, self.layout.entry.sizes[0]
        return [(shape, self.dtype)]

    def index(self, rng, live) -> Index:
        """The log-sum-exps of the partial results."""
        shape = self.count, self.requests, self.q_len, self.heads
        lses = rng.standard_normal(shape, np.float32)
        empty = rng.random(shape) < pick(rng, 0, 0.1, 0.5)
        return (), {"lses": np.where(empty, rng.choice([-np.inf, np.inf, np.nan], shape), lses).astype(np.float32)}

    def arguments(self, cache, values, draw, layer):
        """Results and log-sum-exps."""
        return tuple(values), dict(draw.keywords)


class Blocks(Case):
    """Whole blocks, in all layers."""

    effect = "moves blocks"

    @classmethod
    def sizes(cls, rng, layout, fields):
        """The number of blocks."""
        return {"count": pick(rng, 1, 3, 9, layout.num_blocks)}

    def arguments(self, cache, values, draw, layer):
        """Cache, block ids and payloads."""
        return (cache, *draw.index, *values), {}


class ReadBlocks(Blocks):
    """Reads blocks, some of which occur twice."""

    def index(self, rng, live) -> Index:
        """Blocks to read."""
        blocks = self.layout.num_blocks
        src = rng.integers(blocks, size=self.count)
        return (np.where(rng.random(self.count) < 0.1, rng.choice([*FAR, blocks], self.count), src),), {}


class CopyBlocks(ReadBlocks):
    """Copies blocks; some of them are also overwritten."""

    def index(self, rng, live) -> Index:
        """Blocks to read, and distinct ones to overwrite."""
        (src,), keywords = super().index(rng, live)
        return (src, draw_distinct(rng, self.layout.num_blocks, self.count)), keywords


class WriteBlocks(Blocks):
    """Writes payloads."""

    @property
    def value_shapes(self) -> Shapes:
        """Shape and dtype of the payloads."""
        return [((self.count, self.layout.block_nbytes // self.layout.itemsize), self.layout.dtype)]

    def index(self, rng, live) -> Index:
        """Distinct blocks."""
        return (draw_distinct(rng, self.layout.num_blocks, self.count),), {}


FAMILIES: dict[str, type[Case]] = {
    "write_mla": Write,
    "write_kv": Write,
    "write_indexer_k": Write,
    "gather_mla": Gather,
    "gather_kv": Gather,
    "gather_indexer_k": Gather,
    "gather_entries": GatherEntries,
    "plan_decode": Plan,
    "decode_mla": DecodeMLA,
    "decode_kv": DecodeKV,
    "decode_mla_sparse": Sparse,
    "indexer_logits": Logits,
    "select_topk": TopK,
    "merge_states": Merge,
    "write_state": WriteState,
    "read_state": ReadState,
    "copy_blocks": CopyBlocks,
    "read_blocks": ReadBlocks,
    "write_blocks": WriteBlocks,
    "select_experts": Routing,
    "grouped_swiglu": Experts,
    "scaled_linear": Linear,
}
"""The family of each declared operation."""

OPERATIONS = tuple(operation.name for operation in DECLARED)
"""Names of the operations.  Seed s draws a case of operation number s modulo their count."""


def draw_case(seed: int, implementation: str) -> Case | str:
    """A case of this seed that the implementation supports; otherwise the reasons against the last one drawn."""
    rng, operation = np.random.default_rng(seed), DECLARED[seed % len(DECLARED)]
    kernels = {backend.name: backend.kernels for backend in backends.BACKENDS}[implementation]
    reasons: tuple[str, ...] = ()
    for _ in range(TRIES if operation.name in kernels else 1):
        case = FAMILIES[operation.name].drawn(rng, operation)
        draw, layout = case.draw(np.random.default_rng(0)), case.layout
        cache: Any = jax.eval_shape(lambda layout=layout: jaxkv.KVCache.zeros(layout))
        values = [jax.ShapeDtypeStruct(*value) for value in case.value_shapes]
        args, keywords = case.arguments(cache, values, draw, jnp.int32(0))
        reasons = jaxkv.explain(case.function, *args, **keywords).reasons[implementation]
        if not reasons:
            return case
    return f"{operation.name}: {'; '.join(reasons)}"
