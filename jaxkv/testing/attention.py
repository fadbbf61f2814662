"""How random calls of attention are drawn: dense and sparse, plans, partial results, and the indexer's selection."""

from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv import masks
from jaxkv.ops.attention import in_float
from jaxkv.testing.case import PER_HEAD, PER_TOKEN, SCALES, Case, Index, Shapes
from jaxkv.testing.indices import FAR, draw_lengths, draw_tables, past_the_limits, reveal
from jaxkv.testing.random_layouts import draw_entry_beside, draw_layout, pick
from jaxkv_kernels.formats.entries import Entry
from jaxkv_kernels.formats.format import FORMATS, Format

INVARIANT, MAX_LOGITS, IN_E4M3 = "batch_invariant", "return_max_logits", "queries in e4m3"
NUMBERS = "bfloat16", "float16", "float32"
"""The dtypes of entries that are not quantised: queries represent them exactly in the same dtype, and in float32."""
F32 = jnp.dtype("float32")
MOST_EXTRA_BYTES = 2**21
"""The most bytes of the second cache of sparse attention: each call fills a new one."""


SHARED = "prefix_tables"
"""The name of optional prefixes that requests share, in `extras`."""
PREFIXES = SHARED, "prefix_lens", "prefix_of"
"""Their arguments."""

WINDOWS = (64, 64), (3, 1), (127, -1), (-1, 2)
"""Windows of both sides that are drawn."""
TREE = "tree_mask"


def every_third(query, key):
    """A mask that is not made of intervals."""
    return (query - key) % 3 == 0


MASKS = masks.Chunked(48), masks.Chunked(128), masks.Prefix(3) | masks.Sliding(70, 2), every_third
"""Masks that are drawn."""


def _behind(window: int | tuple[int, int] | None) -> int | None:
    """How many tokens up to its own a query token sees; None for all."""
    if isinstance(window, tuple):
        return None if window[0] == -1 else window[0] + 1
    return window


class Queries(Case):
    """Operations with queries against all cached tokens of each request.  Their queries come before the cache."""

    def arguments(self, cache, values, draw, layer):
        """Queries, the cache, then tables and lengths."""
        (cache, *rest), keywords = super().arguments(cache, (), draw, layer)
        return (*values, cache, *rest), keywords

    @property
    def total(self) -> int:
        """Query tokens of all requests."""
        return self.requests * self.q_len

    @property
    def token_axes(self) -> tuple[int, ...]:
        """The lengths of the first axes of queries."""
        return (self.total,) if "cu_q_lens" in self.extras else (self.requests, self.q_len)

    def index(self, rng, live) -> Index:
        """Block tables and lengths; running sums of the query tokens of each request."""
        if "cu_q_lens" not in self.extras:
            return self.tables_and_lengths(rng, live, self.q_len), {}
        edges = np.sort(rng.integers(self.total + 1, size=self.requests))
        sums = np.r_[0, edges].astype(np.int32)
        return self.tables_and_lengths(rng, live, np.diff(sums)), {"cu_q_lens": sums}

    def tables_and_lengths(self, rng, live, q_lens):
        """Block tables and lengths; `q_lens` are the numbers of query tokens of the requests."""
        lengths = draw_lengths(rng, self.requests, self.columns * self.layout.block_size, self.layout.block_size)
        tables = draw_tables(rng, self.layout, self.columns, lengths)
        behind = _behind(dict(self.options).get("window"))
        first = 0 if behind is None else lengths - (q_lens - 1) - behind
        reveal(live, self.layout, tables, first, lengths)
        return tables, past_the_limits(rng, lengths, self.columns * self.layout.block_size)


class DecodeMLA(Queries):
    """Attention to latents."""

    result = "attention"
    masked: ClassVar[bool] = True
    """Whether the operation has `mask` and `tree_mask`."""

    @classmethod
    def optional(cls) -> tuple[str, ...]:
        """`cu_q_lens` (ragged query tokens), `sinks`, shared prefixes, and queries in e4m3 with a scale."""
        return ("cu_q_lens", "sinks", SHARED, IN_E4M3, *SCALES)

    @classmethod
    def sizes(cls, rng, layout, fields):
        """Options of attention, and a dtype of the queries that represents the entries exactly."""
        options = {"scale": pick(rng, 0.03, 0.07, 0.11), "logit_cap": pick(rng, None, None, 2.0, 30.0)}
        options |= {"window": pick(rng, None, None, None, 1, 64, 300, *WINDOWS)}
        options |= {"causal": isinstance(options["window"], int) or pick(rng, True, True, False)}
        dtype, own = fields["dtype"], str(layout.entry.input_dtype)
        if any(FORMATS[name].dtype in NUMBERS for name in layout.entry.format_names):
            dtype = jnp.dtype(pick(rng, own, own, "float32"))
        extras = fields["extras"]
        if cls.masked:
            options["mask"] = rng.choice(np.asarray([None, *MASKS], object)) if rng.random() < 0.3 else None
            extras += (TREE,) if options["causal"] and rng.random() < 0.2 else ()
        if IN_E4M3 in extras:
            dtype = layout.entry.input_dtype  # to which the operations convert queries
        if options["window"] is not None or options.get("mask") is not None:
            extras = _without(SHARED, extras)
        return {"options": {**options, "return_lse": True}, "dtype": dtype, "extras": extras}

    @property
    def value_shapes(self) -> Shapes:
        """Shapes and dtypes of the queries, one array for each part of an entry."""
        dtype = jnp.dtype("float8_e4m3fn") if IN_E4M3 in self.extras else self.dtype
        return [((*self.token_axes, self.heads, n), dtype) for n in self.layout.entry.sizes]

    def index(self, rng, live) -> Index:
        """What `Queries` has; sinks, the scale of queries in e4m3, shared prefixes, and trees."""
        index, keywords = super().index(rng, live)
        keywords = {**keywords, **self.of_heads(rng)}
        if SHARED in self.extras:
            keywords |= self._prefixes(rng, live)
        if TREE in self.extras:
            ragged = "cu_q_lens" in self.extras
            shape = (self.total, self.q_len + 1) if ragged else (self.requests, self.q_len, self.q_len)
            keywords[TREE] = rng.random(shape) < pick(rng, 0.2, 0.8)
        return index, keywords

    def of_heads(self, rng) -> dict[str, np.ndarray]:
        """Arguments per query head."""
        keywords = {}
        if "sinks" in self.extras:
            keywords["sinks"] = rng.normal(size=self.heads).astype(np.float32)
        if IN_E4M3 in self.extras:
            shape = (self.heads,) if PER_HEAD in self.extras else ()
            keywords["q_scale"] = np.asarray(rng.uniform(0.25, 1, shape), np.float32)
        return keywords

    def _prefixes(self, rng, live) -> dict[str, np.ndarray]:
        """One prefix of all requests, or up to three, which some requests have."""
        count, most = min(self.count, 3), self.columns * self.layout.block_size
        lengths = draw_lengths(rng, count, most, self.layout.block_size)
        tables = draw_tables(rng, self.layout, self.columns, lengths).astype(np.int32)
        reveal(live, self.layout, tables, 0, lengths)
        lengths = past_the_limits(rng, lengths, most).astype(np.int32)
        if count == 1:
            return {"prefix_tables": tables[0], "prefix_lens": lengths[0]}
        of = rng.integers(-1, count + 1, self.requests).astype(np.int32)
        return {"prefix_tables": tables, "prefix_lens": lengths, "prefix_of": of}

    def expected(self, cache, values, draw, layer):
        """The same call by `xla`, with the queries to which those in e4m3 are converted, in float32."""
        if IN_E4M3 not in self.extras:
            return super().expected(cache, values, draw, layer)
        count = len(self.layout.entry.sizes) if self.layout.entry.one_head else 1
        keywords, options = dict(draw.keywords), dict(self.options)
        stored = [q.astype("float8_e4m3fn") for q in values[:count]]
        scale = jnp.float32(options["scale"])
        queries, options["scale"] = in_float(stored, keywords.pop("q_scale"), scale, self.dtype)
        case = replace(self, options=tuple(options.items()))
        values = [*(q.astype(jnp.float32) for q in queries), *values[count:]]
        return case.run(cache, values, draw._replace(keywords=keywords), layer, "xla")


def _without(name: str, names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(other for other in names if other != name)


class DecodeKV(DecodeMLA):
    """Grouped-query attention."""

    @classmethod
    def sizes(cls, rng, layout, fields):
        """Query heads, a multiple of the cache's heads."""
        found = {**super().sizes(rng, layout, fields), "heads": layout.num_heads * pick(rng, 1, 2, 5, 8, 16)}
        if layout.entry.quantised:
            # Some kernels support few rows of quantised heads, and attention to a prefix has those of all requests.
            found["extras"] = _without(SHARED, found["extras"])
        return found

    @property
    def value_shapes(self) -> Shapes:
        """Shapes and dtypes of the queries."""
        return super().value_shapes[:1]


class PrefillMLA(DecodeMLA):
    """Attention to keys and values that are expanded from latents."""

    masked = False

    @classmethod
    def optional(cls) -> tuple[str, ...]:
        """`cu_q_lens` (ragged query tokens) and `sinks`."""
        return ("cu_q_lens", "sinks")

    @classmethod
    def sizes(cls, rng, layout, fields):
        """Few heads, because their keys and values are expanded, and chunks of one token or of many."""
        found = super().sizes(rng, layout, fields)
        options = {**found["options"], "expanded_bytes": pick(rng, 1, 2**28)}
        return {**found, "heads": pick(rng, 1, 3, 16), "options": options}

    @property
    def value_shapes(self) -> Shapes:
        """Shapes and dtypes of queries without and in their rotary part, and of the weights that expand latents."""
        (latent, rope), (nope, value) = self.layout.entry.sizes, (128, 128) if self.heads > 1 else (40, 24)
        (queries, _), _ = super().value_shapes
        shapes = *((*queries[:-1], n) for n in (nope, rope)), *((self.heads, n, latent) for n in (nope, value))
        return [(shape, self.dtype) for shape in shapes]

    def run(self, cache, values, draw, layer, implementation):
        """The result for weights with which the values of keys are about 1."""
        queries, weights = values[:2], values[2:]
        weights = [(weight * weight.shape[-1] ** -0.5).astype(weight.dtype) for weight in weights]
        return super().run(cache, [*queries, *weights], draw, layer, implementation)

    def expected(self, cache, values, draw, layer):
        """The same call by `xla`, with arguments of the same dtype: expanded keys are rounded to it."""
        return super().expected(cache, [value.astype(self.dtype) for value in values], draw, layer)


class PrefillKV(DecodeKV):
    """Attention to gathered keys and values."""

    masked = False

    @classmethod
    def optional(cls) -> tuple[str, ...]:
        """`cu_q_lens` (ragged query tokens) and `sinks`."""
        return ("cu_q_lens", "sinks", *SCALES)

    @classmethod
    def sizes(cls, rng, layout, fields):
        """Chunks of one token or of many."""
        found = super().sizes(rng, layout, fields)
        return {**found, "options": {**found["options"], "gathered_bytes": pick(rng, 1, 2**28)}}

    def expected(self, cache, values, draw, layer):
        """The same call by `xla`, with queries of the same dtype: gathered keys are rounded to it."""
        return super().expected(cache, [value.astype(self.dtype) for value in values], draw, layer)


class Plan(Case):
    """A plan, which is checked by running attention with it."""

    result = "attention"

    @classmethod
    def optional(cls):
        """`batch_invariant`, and what the attention has, but for scales that not all implementations support."""
        return (INVARIANT, *(name for name in DecodeMLA.optional() if name != PER_TOKEN))

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
        keywords = {name: dict(self.options)[name] for name in ("window", "causal", "mask")}
        keywords |= {name: array for name, array in draw.keywords.items() if name == TREE}
        keywords |= {"num_heads": self.heads, "dtype": self.dtype, INVARIANT: INVARIANT in self.extras}
        keywords |= {name: array for name, array in draw.keywords.items() if name in PREFIXES}
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

    masked = False

    @classmethod
    def optional(cls):
        """`counts` (how many slots are used), `extra` (slots of another cache), and other options."""
        return ("counts", "sinks", "extra", INVARIANT, MAX_LOGITS, IN_E4M3, PER_HEAD)

    @classmethod
    def sizes(cls, rng, layout, fields):
        """The options of dense attention that sparse attention has, and the layout of the other cache."""
        found = super().sizes(rng, layout, fields)
        options = {name: value for name, value in found["options"].items() if name not in ("window", "causal")}
        if "extra" in fields["extras"]:
            options["extra"] = draw_layout(rng, draw_entry_beside(rng, layout.entry), MOST_EXTRA_BYTES)
            own = str(options["extra"].entry.dtype)
            if own in NUMBERS and own != str(found["dtype"]):
                found |= {"dtype": F32, "extras": tuple(name for name in fields["extras"] if name != IN_E4M3)}
        return {**found, "options": options}

    @property
    def _extra(self) -> jaxkv.CacheLayout | None:
        """The layout of the other cache."""
        return dict(self.options).get("extra")

    @property
    def value_shapes(self) -> Shapes:
        """Shapes and dtypes of the queries, and of the parts of all entries of the other cache."""
        entries = [] if self._extra is None else [((self._extra.num_slots, n), F32) for n in self.layout.entry.sizes]
        return super().value_shapes + entries

    def index(self, rng, live) -> Index:
        """Slots, some of them masked, of one or two caches; what the other cache holds, and where."""
        live |= rng.random(live.size) < rng.random()
        keywords: dict[str, np.ndarray] = {}
        slots, counts = self._slots(rng, live, self.count)
        if "counts" in self.extras:
            keywords["counts"] = counts
        if self._extra is not None:
            known = rng.random(self._extra.num_slots) < rng.random()
            keywords["extra_live"] = np.where(known, np.arange(known.size), -1).astype(np.int32)
            keywords["extra_layer"] = np.asarray(rng.integers(self._extra.num_layers), np.int32)
            keywords["extra_slots"], keywords["extra_counts"] = self._slots(rng, known, self.count // 2 + 1)
        return (slots,), {**keywords, **self.of_heads(rng)}

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
        """Queries, the cache and its slots; the other cache and its slots."""
        queries, entries = values[:2], values[2:]
        more = {name: array for name, array in draw.keywords.items() if name.startswith("extra_")}
        keywords = {name: array for name, array in draw.keywords.items() if name not in more}
        args, found = super().arguments(cache, queries, draw._replace(keywords=keywords), layer)
        if self._extra is not None:
            scale = np.float32(0.03) if self._extra.entry.codec.scaled else None
            arrays = *entries, more["extra_live"], more["extra_layer"]
            if isinstance(entries[0], jax.ShapeDtypeStruct):
                other = jax.eval_shape(partial(jaxkv.KVCache.zeros, self._extra))
            else:
                other = _filled(*arrays, layout=self._extra, scale=scale)
            counts = more["extra_counts"] if "counts" in self.extras else None
            found["extra"] = jaxkv.ExtraCache(other, more["extra_slots"], more["extra_layer"], counts, scale)
        return args, {**found, **{name: name in self.extras for name in (INVARIANT, MAX_LOGITS)}}

    def expected(self, cache, values, draw, layer):
        """The same call by `xla`, which is not batch-invariant."""
        if INVARIANT not in self.extras:
            return super().expected(cache, values, draw, layer)
        case = replace(self, extras=tuple(name for name in self.extras if name != INVARIANT))
        return case.expected(cache, values, draw, layer)


def _filled(kv_c, k_pe, slots, layer, *, layout, scale):
    """A cache with entries at `slots` of a layer, and NaN everywhere else."""
    bits = jnp.dtype(f"uint{8 * layout.itemsize}")
    nan = jax.lax.bitcast_convert_type(jnp.full(layout.size, np.iinfo(bits).max, bits), layout.dtype)
    cache = jaxkv.KVCache(nan, layout)
    return jaxkv.write_mla(cache, kv_c, k_pe, slots, layer=layer, kv_scale=scale, implementation="xla")


BY_TOKEN = "lengths per query token"


class Logits(Queries):
    """Scores of the indexer."""

    result = "logits"

    @classmethod
    def optional(cls) -> tuple[str, ...]:
        """Ragged query tokens, or as many of each request with lengths of their own."""
        return ("cu_q_lens", BY_TOKEN)

    @classmethod
    def sizes(cls, rng, layout, fields):
        """The heads of an indexer, and a dtype of queries that represents the keys exactly."""
        dtype = jnp.dtype(pick(rng, *_exact_queries(layout.entry)))
        return {"heads": pick(rng, 4, 16, 64), "dtype": dtype, "options": {"max_len": fields["count"]}}

    @property
    def value_shapes(self) -> Shapes:
        """Shapes and dtypes of the queries and their weights."""
        queries = *self.token_axes, self.heads
        return [((*queries, self.layout.entry.sizes[0]), self.dtype), (queries, jnp.dtype("float32"))]

    def index(self, rng, live) -> Index:
        """What `Queries` has, or the lengths of query tokens, some of which see fewer tokens than the request has."""
        (tables, lengths), keywords = super().index(rng, live)
        if BY_TOKEN in self.extras and "cu_q_lens" not in self.extras:
            shape = self.requests, self.q_len
            lengths = np.where(rng.random(shape) < 0.5, lengths[:, None], lengths[:, None] // rng.integers(1, 9, shape))
        return (tables, lengths), keywords


def _exact_queries(entry: Entry) -> tuple[str, ...]:
    """The dtypes of indexer queries that represent keys of `entry` exactly, so that scores have no rounding error."""
    own = str(entry.dtype)
    if own in NUMBERS:
        return (own, own, "float32", *(["float8_e4m3fn"] if own == "bfloat16" else []))
    factored = type(entry.codec).decode_factored is not Format.decode_factored
    return ("bfloat16", "float32", "float8_e4m3fn") if factored else ("float32",)


class TopK(Case):
    """Selects the largest logits, many of which are equal."""

    @classmethod
    def optional(cls) -> tuple[str, ...]:
        """`lengths`: how many logits of each row take part; `block_tables`: slots instead of positions."""
        return ("lengths", "block_tables")

    @classmethod
    def sizes(cls, rng, layout, fields):
        """k, the number of positions to select."""
        return {"options": {"k": pick(rng, 1, 7, 64, 512)}}

    def index(self, rng, live) -> Index:
        """Logits, and -inf past the end of each row."""
        shape = self.requests, self.q_len, self.columns * self.layout.block_size
        logits = np.round(rng.standard_normal(shape, np.float32), int(rng.integers(1, 7)))
        found = {"logits": np.where(np.arange(shape[-1]) < rng.integers(shape[-1] + 1), logits, -np.inf)}
        if "lengths" in self.extras:
            lengths = rng.choice([*FAR, *rng.integers(shape[-1] + 2, size=9)], shape[:-1]).astype(np.int32)
            unread = np.arange(shape[-1]) >= lengths[..., None]
            found |= {"logits": np.where(unread, np.float32(np.nan), found["logits"]), "lengths": lengths}
        if "block_tables" in self.extras:
            blocks = [*FAR[:2], *rng.integers(self.layout.num_blocks, size=9)]
            found["block_tables"] = rng.choice(blocks, (self.requests, self.columns)).astype(np.int32)
        return (), found

    def arguments(self, cache, values, draw, layer):
        """Logits and k, lengths, and block tables with the size of blocks."""
        size = {"block_size": self.layout.block_size} if "block_tables" in self.extras else {}
        return (), {**dict(self.options), **draw.keywords, **size}


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
