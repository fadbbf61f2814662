"""Calls drawn at random: a case fixes what is static (operation, layout, shapes), a draw the contents of one call."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv.dispatch import backends
from jaxkv_kernels.formats.entries import Entry

OPERATIONS = (
    "decode_mla",
    "write_mla",
    "gather_mla",
    "decode_kv",
    "write_kv",
    "gather_kv",
    "decode_mla_sparse",
    "write_indexer_k",
    "gather_indexer_k",
    "indexer_logits",
    "copy_blocks",
    "read_blocks",
    "write_blocks",
)
"""Those that work on caches."""

TRIES = 300
"""Cases to draw before an operation is given up: kernels take the sizes of real models, and only some layouts."""

PER_HEAD = "scales per head"

MOST_BYTES = 2**25
"""Of a cache, which every call fills anew."""

FAR = (-1, -7, -(2**31), 2**31 - 1)
"""Blocks and slots that no cache has."""


class Draw(NamedTuple):
    """The contents of one call, on the host; the random values are made from `key` on the device."""

    key: np.ndarray
    """uint32, a seed."""
    layer: np.ndarray
    live: np.ndarray
    """bool [slots]: those that the call may read; the others hold NaN."""
    scales: Mapping[str, np.ndarray]
    """Keyword arguments of a quantised entry, for writing and reading."""
    index: tuple[np.ndarray, ...]
    """Positional arguments of integers: tables and lengths, slots, or blocks."""
    keywords: Mapping[str, np.ndarray]
    """Arrays that go by keyword."""


@dataclass(frozen=True)
class Case:
    """What a compiled program is made for."""

    operation: str
    layout: jaxkv.CacheLayout
    requests: int
    columns: int
    """Of the block tables."""
    q_len: int
    heads: int
    """Query heads."""
    count: int
    """Tokens to write, rows to gather, slots a query token, positions of logits, or blocks."""
    dtype: Any
    """Of queries, new values or results."""
    options: tuple[tuple[str, Any], ...]
    """Static keyword arguments."""
    extras: tuple[str, ...]
    """Optional arrays that are given, and whether scales are per head."""

    def __str__(self):
        layout, entry, strides = self.layout, self.layout.entry, self.layout.strides
        options = "".join(
            f" {name}={value}" for name, value in self.options if name in ("scale", "logit_cap", "window")
        )
        return (
            f"{self.operation} {entry.format} {'+'.join(map(str, entry.sizes))} {self.dtype.name} "
            f"[{self.requests}, {self.q_len}, {self.heads}] x {self.columns} columns, {self.count}{options}; "
            f"L={layout.num_layers} B={layout.num_blocks} N={layout.block_size} H={layout.num_heads} {layout.order} "
            f"strides {strides.layer}/{strides.block}/{strides.head}/{strides.token} "
            f"+{layout.offset} of {layout.size} {layout.dtype}"
        )

    @property
    def function(self):
        """The operation."""
        return getattr(jaxkv, self.operation)

    @property
    def writer(self) -> Any:
        """The operation that stores entries of the cache."""
        if isinstance(self.layout.entry, jaxkv.KVEntry):
            return jaxkv.write_kv
        return jaxkv.write_indexer_k if isinstance(self.layout.entry, jaxkv.IndexerEntry) else jaxkv.write_mla

    @property
    def value_shapes(self) -> list[tuple[tuple[int, ...], Any]]:
        """Shapes and dtypes of the random values that the call takes: queries, new values, blocks."""
        sizes, queries = self.layout.entry.sizes, (self.requests, self.q_len, self.heads)
        match self.operation:
            case "decode_mla" | "decode_mla_sparse":
                return [((*queries, n), self.dtype) for n in sizes]
            case "decode_kv":
                return [((*queries, sizes[0]), self.dtype)]
            case "indexer_logits":
                return [((*queries, sizes[0]), self.dtype), (queries, jnp.dtype("float32"))]
            case "write_mla" | "write_kv" | "write_indexer_k":
                return [(shape, self.dtype) for shape in self.entry_shapes(self.count)]
            case "write_blocks":
                return [((self.count, self.layout.block_nbytes // self.layout.itemsize), self.layout.dtype)]
        return []

    def entry_shapes(self, count: int) -> list[tuple[int, ...]]:
        """Shapes of the parts of that many entries."""
        heads = () if self.layout.entry.one_head else (self.layout.num_heads,)
        return [(count, *heads, n) for n in self.layout.entry.sizes]

    def arguments(self, cache, values, draw: Draw, layer) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments of the operation."""
        keywords = {**dict(self.options), **draw.keywords}
        if self.operation in ("copy_blocks", "read_blocks", "write_blocks"):
            return (cache, *draw.index, *values), keywords
        keywords |= {**draw.scales, "layer": layer}
        if self.operation.startswith(("decode", "indexer")):
            return (*values, cache, *draw.index), keywords
        return (cache, *values, *draw.index), keywords

    def draw(self, rng: np.random.Generator) -> Draw:
        """A call."""
        layers, live = self.layout.num_layers, np.zeros(self.layout.num_slots, bool)
        outside = rng.random() < 0.05
        layer = rng.choice([-1, layers, 2**31 - 1]) if outside else rng.integers(layers)
        index, keywords = _DRAWERS[self.operation](self, rng, live)
        index = tuple(np.asarray(array, np.int32) for array in index)
        key = np.asarray(rng.integers(2**32), np.uint32)
        return Draw(key, np.asarray(layer, np.int32), live, _scales(self, rng), index, keywords)


def draw_case(seed: int, implementation: str) -> Case | str:
    """The case of a seed, one that the implementation takes; why not, if there is none."""
    rng, operation = np.random.default_rng(seed), OPERATIONS[seed % len(OPERATIONS)]
    kernels = {backend.name: backend.kernels for backend in backends.BACKENDS}[implementation]
    reasons: tuple[str, ...] = ()
    for _ in range(TRIES if operation in kernels else 1):
        case = _case(rng, operation)
        draw, layout = case.draw(np.random.default_rng(0)), case.layout
        cache: Any = jax.eval_shape(lambda layout=layout: jaxkv.KVCache.zeros(layout))
        values = [jax.ShapeDtypeStruct(*value) for value in case.value_shapes]
        args, keywords = case.arguments(cache, values, draw, jnp.int32(0))
        reasons = jaxkv.explain(case.function, *args, **keywords).reasons[implementation]
        if not reasons:
            return case
    return f"{operation}: {'; '.join(reasons)}"


def _pick(rng: np.random.Generator, *choices) -> Any:
    return choices[rng.integers(len(choices))]


def _case(rng: np.random.Generator, operation: str) -> Case:
    entry = _entry(rng, operation)
    kv_heads = 1 if entry.one_head else _pick(rng, 1, 2, 4, 8)
    layout = _layout(rng, entry, kv_heads)
    while layout.nbytes > MOST_BYTES:
        layout = _layout(rng, entry, kv_heads)
    floats = ("bfloat16", "float16", "float32")
    if operation.startswith("decode") and str(entry.dtype) in floats:
        floats = (str(entry.dtype), str(entry.dtype), "float32")  # those that hold the entries exactly
    dtype = jnp.dtype(_pick(rng, *floats))
    heads, count = _pick(rng, 1, 3, 16, 20, 64, 128), _pick(rng, 1, 7, 64, 200, 513)
    extras = tuple(name for name in ("counts", "sinks", "seq_starts", PER_HEAD) if rng.random() < 0.5)
    options: dict[str, Any] = {}
    if operation.startswith("decode"):
        options = {"scale": _pick(rng, 0.03, 0.07, 0.11), "logit_cap": _pick(rng, None, None, 2.0, 30.0)}
        options["return_lse"] = True
    if operation == "decode_kv":
        heads = kv_heads * _pick(rng, 1, 2, 5, 8, 16)
        options["window"] = _pick(rng, None, None, 1, 64, 300)
    if operation == "indexer_logits":
        heads, options = _pick(rng, 4, 16, 64), {"max_len": count}
        dtype = jnp.dtype(_pick(rng, "bfloat16", "float32", "float8_e4m3fn"))
    if operation.startswith("gather"):
        options = {"total": count, "dtype": dtype}
    if operation.endswith("blocks"):
        count = _pick(rng, 1, 3, 9, layout.num_blocks)
    requests, columns, q_len = (
        _pick(rng, 1, 2, 3, 5, 17),
        _pick(rng, 1, 2, 5, layout.num_blocks),
        _pick(rng, 1, 1, 2, 5),
    )
    return Case(operation, layout, requests, columns, q_len, heads, count, dtype, tuple(options.items()), extras)


def _entry(rng: np.random.Generator, operation: str) -> Entry:
    """An entry that the operation takes: of a real model's sizes, or small ones."""
    kind = {"mla": jaxkv.MLAEntry, "kv": jaxkv.KVEntry, "indexer": jaxkv.IndexerEntry}
    name = next((name for name in kind if name in operation.split("_")), _pick(rng, *kind))
    if name == "indexer":
        return jaxkv.IndexerEntry(head_dim=_pick(rng, 128, 128, 32))
    form = _pick(rng, *kind[name].formats)
    if name == "kv":
        head_dim, value_dim = _pick(rng, (128, 128), (64, 64), (128, 128), (192, 128), (10, 4))
        return jaxkv.KVEntry(form, head_dim=head_dim, value_dim=value_dim)
    latent, rope = _pick(rng, (512, 64), (512, 64), (512, 64), (256, 32), (128, 8))
    return jaxkv.MLAEntry(form, latent=latent, rope=rope)


def _layout(rng: np.random.Generator, entry: Entry, heads: int) -> jaxkv.CacheLayout:
    """Any of the six orders, padded or not, a group of a packed block, or explicit strides with gaps."""
    sizes: dict[str, Any] = {
        "num_layers": _pick(rng, 1, 2, 3, 4),
        "num_blocks": _pick(rng, 2, 5, 12, 24, 64),
        "block_size": _pick(rng, 1, 3, 16, 32, 61, 64, 64, 64, 128),
    }
    kind = _pick(rng, "order", "order", "packed", "gaps")
    if kind == "packed":
        own = jaxkv.Group(sizes["num_layers"], entry, heads)
        others = {"keys": jaxkv.Group(2, jaxkv.IndexerEntry()), "more": jaxkv.Group(1, jaxkv.MLAEntry("bf16", 24, 8))}
        names = rng.permutation(["own", *others])[: rng.integers(1, 4)].tolist()
        groups = {name: others.get(name, own) for name in dict.fromkeys([*names, "own"])}
        blocks = {key: sizes[key] for key in ("num_blocks", "block_size")}
        order = _pick(rng, "BLNHC", "BLHNC", "BHLNC")
        return jaxkv.PackedLayout(groups=groups, order=order, dtype=_pick(rng, None, "uint8"), **blocks)["own"]
    sizes |= {"entry": entry, "num_heads": heads}
    dtype = _pick(rng, None, None, "uint8")
    itemsize = entry.dtype.itemsize if dtype is None else 1
    if kind == "order" or isinstance(entry, jaxkv.IndexerEntry):  # whose tokens cannot lie apart
        padding = _pick(rng, 0, 0, 16, 48) // itemsize
        if rng.random() < 0.2:
            padding = 3 * entry.nbytes // itemsize
        return jaxkv.CacheLayout(**sizes, order=_pick(rng, *jaxkv.ORDERS), block_padding=padding, dtype=dtype)
    unit = 16 // itemsize
    token = heads * entry.nbytes // itemsize + unit * int(rng.integers(3))
    layer = token * (sizes["block_size"] + int(rng.integers(2)))
    offset = unit * int(rng.integers(3))
    block = layer * sizes["num_layers"] + _pick(rng, 0, offset, token)
    strides = {"layer": layer, "block": block, "head": entry.nbytes // itemsize, "token": token}
    size = offset + block * sizes["num_blocks"]
    return jaxkv.CacheLayout.from_strides(**sizes, strides=strides, offset=offset, size=size, dtype=dtype)


def _scales(case: Case, rng: np.random.Generator) -> dict[str, np.ndarray]:
    if case.layout.entry.format != "fp8":
        return {}
    if isinstance(case.layout.entry, jaxkv.MLAEntry):
        return {"kv_scale": np.asarray(rng.uniform(0.01, 0.04), np.float32)}
    shape = (case.layout.num_heads,) if PER_HEAD in case.extras else ()
    return {name: np.asarray(rng.uniform(0.01, 0.04, shape), np.float32) for name in ("k_scale", "v_scale")}


def _tables(case: Case, rng: np.random.Generator, lengths: np.ndarray) -> np.ndarray:
    """Tables [B, M]: blocks of one request alone or shared, anything past the lengths, seldom an unknown block."""
    blocks, size = case.layout.num_blocks, case.layout.block_size
    shape = case.requests, case.columns
    if case.requests * case.columns <= blocks and rng.random() < 0.7:
        tables = rng.permutation(blocks)[: case.requests * case.columns].reshape(shape)
    else:
        tables = rng.integers(blocks, size=shape)
    used = np.arange(case.columns) * size < lengths[:, None]
    if rng.random() < 0.1:
        used &= rng.random(shape) < 0.7
    return np.where(used, tables, rng.choice([*FAR, blocks, int(rng.integers(blocks))], shape))


def _lengths(case: Case, rng: np.random.Generator) -> np.ndarray:
    """Lengths [B] of at most what a table holds, often round the edges of blocks and of GPU tiles."""
    size, most = case.layout.block_size, case.columns * case.layout.block_size
    near = rng.choice([size, 64, 128], case.requests) * rng.integers(0, 9, case.requests)
    near += rng.integers(-1, 2, case.requests)
    found = np.where(rng.random(case.requests) < 0.5, near, rng.integers(most + 1, size=case.requests))
    return np.clip(np.where(rng.random(case.requests) < 0.1, most, found), 0, most)


def _reveal(case: Case, live: np.ndarray, tables: np.ndarray, first, last) -> None:
    """Marks the slots of the tokens [first, last) of each request as live."""
    size = case.layout.block_size
    for row, begin, end in zip(tables, np.broadcast_to(first, last.shape), last, strict=True):
        positions = np.arange(max(begin, 0), end)
        blocks = row[positions // size].astype(np.int64)
        known = (blocks >= 0) & (blocks < case.layout.num_blocks)
        live[(blocks * size + positions % size)[known]] = True


def _attention(case: Case, rng, live):
    lengths = _lengths(case, rng)
    tables = _tables(case, rng, lengths)
    window = dict(case.options).get("window")
    first = 0 if window is None else lengths - (case.q_len - 1) - window
    _reveal(case, live, tables, first, lengths)
    return (tables, lengths), {}


def _gather(case: Case, rng, live):
    ends = _lengths(case, rng)
    given = "seq_starts" in case.extras
    starts = rng.integers(ends + 1) if given else np.zeros_like(ends)
    tables = _tables(case, rng, ends)
    _reveal(case, live, tables, starts, ends)
    keywords = {"seq_starts": starts.astype(np.int32)} if given else {}
    return (tables, np.cumsum([0, *(ends - starts)])), keywords


def _sparse(case: Case, rng, live):
    live |= rng.random(live.size) < rng.random()
    shape, known = (case.requests, case.q_len, case.count), np.flatnonzero(live)
    slots = rng.choice(known, shape) if known.size else np.full(shape, -1)
    masked = rng.random(shape) < _pick(rng, 0, 0.1, 1)
    slots = np.where(masked, rng.choice([*FAR, live.size], shape), slots)
    keywords: dict[str, np.ndarray] = {}
    if "counts" in case.extras:
        counts = rng.integers(case.count + 1, size=shape[:2])
        unread = np.arange(case.count) >= counts[..., None]
        slots = np.where(unread, rng.integers(live.size, size=shape), slots)
        keywords["counts"] = counts.astype(np.int32)
    if "sinks" in case.extras:
        keywords["sinks"] = rng.normal(size=case.heads).astype(np.float32)
    return (slots,), keywords


def _write(case: Case, rng, live):
    return (_some(rng, live.size, case.count),), {}


def _copy(case: Case, rng, live):
    blocks = case.layout.num_blocks
    src = rng.integers(blocks, size=case.count)
    src = np.where(rng.random(case.count) < 0.1, rng.choice([*FAR, blocks], case.count), src)
    return (src, _some(rng, blocks, case.count)), {}


def _read_blocks(case: Case, rng, live):
    return _copy(case, rng, live)[0][:1], {}


def _write_blocks(case: Case, rng, live):
    return (_some(rng, case.layout.num_blocks, case.count),), {}


def _some(rng, size: int, count: int) -> np.ndarray:
    """`count` of range(size), none twice, and some that are outside."""
    found = rng.choice([*FAR, size], count)
    inside = rng.permutation(size)[:count]
    inside = np.where(rng.random(inside.size) < 0.1, found[: inside.size], inside)
    found[: inside.size] = inside
    return rng.permutation(found)


_DRAWERS = {
    "decode_mla": _attention,
    "decode_kv": _attention,
    "indexer_logits": _attention,
    "decode_mla_sparse": _sparse,
    "write_mla": _write,
    "write_kv": _write,
    "write_indexer_k": _write,
    "gather_mla": _gather,
    "gather_kv": _gather,
    "gather_indexer_k": _gather,
    "copy_blocks": _copy,
    "read_blocks": _read_blocks,
    "write_blocks": _write_blocks,
}
