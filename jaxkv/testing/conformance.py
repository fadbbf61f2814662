"""Checks of kernels that others write: `assert_write_correct`, `assert_gather_correct`, `assert_attention_correct`.

A function under test has the signature of one of jaxkv's operations.  It runs on each of the given layouts, twice: what
it must not read or write is first NaN, then random bytes.
"""

import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv.testing.buffers import cache_of, get_entries, packed_twin, set_entries, stored_fields, to_bytes, to_cache
from jaxkv.testing.caches import differences
from jaxkv.testing.compare import EPSILON
from jaxkv.testing.reads import Memory, explain_read
from jaxkv_kernels.formats.entries import Entry

NAN, RANDOM, ZERO = "NaN", "random bytes", "zeros"
LARGE = 2**30
"""Caches of more bytes have zeros around their entries, in pages that the host does not allocate."""

Layouts = jaxkv.CacheLayout | Mapping[str, jaxkv.CacheLayout]
"""One layout, or several by name."""

K_SCALE, V_SCALE = 0.03, 0.02
"""Scales that differ, so that a kernel that mixes them up is found."""


def assert_write_correct(write: Callable[..., jaxkv.KVCache], layouts: Layouts) -> None:
    """Asserts that a function stores the entries of new tokens where they belong, and changes no other byte.

    Entries must equal those of `jaxkv.write_mla`, `write_kv` or `write_indexer_k`, bit for bit, and the rest of the
    buffer what it held before.  Some slots of the call are negative or past the cache, and must be skipped.

    Args:
      write: called as `write(cache, *parts, slot_mapping, layer=int)`, and returns the cache.  For an `MLAEntry`, parts
        are `kv_c` [T, R] and `k_pe` [T, P]; for a `KVEntry`, `k` [T, H, D] and `v` [T, H, Dv]; for an `IndexerEntry`,
        `k` [T, D], in `entry.input_dtype`.  `slot_mapping` is int32 [T].  If the caller passes scales to a format, they
        are float keyword arguments: `kv_scale`, or `k_scale` and `v_scale`.
      layouts: layouts by name, such as `every_layout(entry)`, or one layout.

    Raises:
      AssertionError: the bytes are wrong.  The message names the layout and, for the first entries that differ, the
        layer, block, head, token, field, and both values.
      ValueError: `layouts` are no layouts, or of an entry that has no such operation.

    An exception of `write` is raised with a note that names the layout.
    """
    for name, layout in _named(layouts):
        _check_write(write, name, layout)


def assert_gather_correct(gather: Callable[..., Any], layouts: Layouts) -> None:
    """Asserts that a function returns the entries of the tokens of requests, and reads no other memory.

    On a packed cache of one layer, results must equal those of `jaxkv.read_mla`, `read_kv` or `read_indexer_k`: exactly
    if the format stores floats as they are, and otherwise within 4 roundings of float32.  On each layout, they must
    equal those on the packed cache bit for bit.

    Args:
      gather: called as `gather(cache, block_tables, cu_seq_lens, layer=int, total=int, dtype=dtype)`, and returns the
        array, or the tuple of arrays, that `jaxkv.gather_mla`, `gather_kv` or `gather_indexer_k` returns: [total, ...]
        in `dtype`, and 0 in rows past the last token.  `block_tables` is int32 [B, M], `cu_seq_lens` int32 [B + 1];
        `dtype` is that of the entries, or float32 if they are quantised.  Scales are passed as to a write.
      layouts: layouts by name, such as `every_layout(entry)`, or one layout.

    Raises:
      AssertionError: a result is wrong.  The message names the layout, the request and the token, the layer, block and
        head, both values, and which memory was read that does not belong to the token, or which was not read.
      ValueError: as in `assert_write_correct`.

    An exception of `gather` is raised with a note that names the layout.
    """
    for name, layout in _named(layouts):
        _check_gather(gather, name, layout)


def assert_attention_correct(
    attend: Callable[..., Any],
    layouts: Layouts,
    *,
    num_query_heads: int | None = None,
    q_len: int | None = None,
    return_lse: bool = True,
) -> None:
    """Asserts that a function attends to the tokens of requests, and reads no other memory.

    On a packed cache of one layer, results must equal attention in float64 to the values of the stored entries.  An
    element may be off by 4 roundings of the queries' dtype (64 if that is float32) of 1 plus its size, and one of `lse`
    by 64 roundings of float32 of 4 plus its size.  On each layout, results must equal those on the packed cache bit for
    bit.  Requests have 0, 1 and several tokens, and lengths around the block size.  Table entries past the lengths
    name blocks full of NaN, or no blocks of the cache.

    Args:
      attend: called as `attend(*queries, cache, block_tables, seq_lens, layer=int, scale=float, return_lse=True)`, and
        returns out and lse, as `jaxkv.decode_mla` and `decode_kv` do.  `queries` are `q_latent` [B, Hq, R] and `q_pe`
        [B, Hq, P] for an `MLAEntry`, and `q` [B, Hq, D] for a `KVEntry`, in `entry.input_dtype`; `block_tables` is
        int32 [B, M], `seq_lens` int32 [B].  Scales are passed as to a write.  For requests without tokens, out is 0 and
        lse -inf.
      layouts: layouts by name, such as `every_layout(entry)`, or one layout.
      num_query_heads: Hq, by default 4 for each head of the cache.
      q_len: query tokens per request (Q): queries and results then have an axis after B, and query token t sees the
        first `seq_lens - Q + t + 1` tokens.  By default, there is one and no such axis.
      return_lse: whether the function is called with `return_lse=True`.  Otherwise it is called without, and returns
        out alone.

    Raises:
      AssertionError: a result is wrong.  The message names the layout, the request and the head, both values, and which
        memory was read that does not belong to the request (layer, block, head, token, field), or which was not read.
      ValueError: as in `assert_write_correct`.

    An exception of `attend` is raised with a note that names the layout.
    """
    for name, layout in _named(layouts):
        if not isinstance(layout.entry, jaxkv.MLAEntry | jaxkv.KVEntry):
            raise ValueError(f"`layouts` are of {layout.entry}: expected an MLAEntry or a KVEntry")
        heads = num_query_heads or 4 * layout.num_heads
        if heads % layout.num_heads:
            raise ValueError(f"`num_query_heads` is {heads}: expected a multiple of the cache's {layout.num_heads}")
        _check_attention(attend, name, layout, heads, q_len, return_lse)


def _check_write(write: Callable[..., jaxkv.KVCache], name: str, layout: jaxkv.CacheLayout) -> None:
    entry, layer, rng = layout.entry, layout.num_layers // 2, np.random.default_rng(0)
    chosen = rng.permutation(layout.num_slots)[: max(1, min(layout.num_slots // 2, 256))]
    slots = rng.permutation([*chosen, -1, -(2**31), layout.num_slots, 2**31 - 1]).astype(np.int32)
    args, scales = (*_parts(layout, rng, slots.size), jnp.asarray(slots)), _scales(entry)
    row_of, twin = {slot: row for row, slot in enumerate(slots.tolist())}, packed_twin(layout)

    def note(found: int, block: int, token: int) -> str:
        slot = block * layout.block_size + token
        written = found == layer and slot in row_of
        return f" (slot {slot}, {f'row {row_of[slot]} of the call' if written else 'not to be written'})"

    for around in _surroundings(layout):
        expected, packed = _filled(layout, around), np.zeros(twin.nbytes, np.uint8)
        set_entries(twin, packed, 0, get_entries(layout, expected, layer))
        right = _operations(entry).write(to_cache(twin, packed), *args, layer=0, **scales, implementation="xla")
        set_entries(layout, expected, layer, get_entries(twin, to_bytes(right), 0))
        where = _where(name, layout, layer, around)
        cache = _called(where, write, _on_device(layout, _filled(layout, around)), *args, layer=layer, **scales)
        if not isinstance(cache, jaxkv.KVCache) or cache.layout != layout:
            raise AssertionError(f"{where}: write returned {cache!r}, expected a KVCache of the same layout")
        if wrong := differences(layout, to_bytes(cache), expected, padding=True, note=note):
            raise AssertionError(f"{where}:\n  {wrong}")


def _check_gather(gather: Callable[..., Any], name: str, layout: jaxkv.CacheLayout) -> None:
    scene, entry = _Requests(layout), layout.entry
    rows = [(request, position) for request, length in enumerate(scene.lengths) for position in range(length)]
    sums, total = jnp.asarray(np.cumsum([0, *scene.lengths]), jnp.int32), len(rows) + 3
    dtype = jnp.dtype(jnp.float32) if entry.quantised else entry.dtype

    def call(cache, tables, layer):
        found = gather(cache, tables, sums, layer=layer, total=total, dtype=dtype, **scene.scales)
        return found if isinstance(found, tuple | list) else (found,)

    def source(index: tuple[int, ...]) -> _Source:
        if index[0] >= len(rows):
            return _Source("row past the last token", ())
        request, position = rows[index[0]]
        block, token = scene.place(request, position)
        head = 0 if entry.one_head else index[1]
        text = f"token {position} of request {request}, which is block {block}, head {head}, token {token}"
        return _Source(text, ((request, position),), head)

    right = [np.pad(values, [(0, 3)] + [(0, 0)] * (values.ndim - 1)) for values in scene.values]
    names = tuple(entry.named_sizes)
    # Formats that store floats need no rounding.  Others multiply by scales.
    limits = [_Limit(4 if entry.quantised else 0, "float32", 0.0)] * len(names)
    _check_reads(name, scene, call, names, right, limits, source, dtype)


def _check_attention(
    attend: Callable[..., Any],
    name: str,
    layout: jaxkv.CacheLayout,
    heads: int,
    q_len: int | None,
    return_lse: bool,
) -> None:
    scene, entry = _Requests(layout), layout.entry
    sizes, tokens = entry.sizes if entry.one_head else entry.sizes[:1], () if q_len is None else (q_len,)
    rng, dtype = np.random.default_rng(2), entry.input_dtype
    queries = [jnp.asarray(rng.standard_normal((len(scene.lengths), *tokens, heads, n)), dtype) for n in sizes]
    lengths = jnp.asarray(scene.lengths, jnp.int32)
    scale = 1.5 * sum(sizes) ** -0.5  # not the one that a kernel may compute from the size of a key
    options = {"scale": scale, **scene.scales} | ({"return_lse": True} if return_lse else {})

    def call(cache, tables, layer):
        found = attend(*queries, cache, tables, lengths, layer=layer, **options)
        return found if isinstance(found, tuple | list) else (found,)

    def source(index: tuple[int, ...]) -> _Source:
        request, (query, head) = index[0], (0, index[1]) if q_len is None else index[1:3]
        length = scene.lengths[request]
        seen = range(length - (q_len or 1) + query + 1)
        text = f"request {request} of {length} tokens, "
        text += f"query head {head}" if q_len is None else f"query token {query}, query head {head}"
        return _Source(text, tuple((request, position) for position in seen), head * layout.num_heads // heads)

    right = _attention(scene, queries, scale)
    if q_len is None:
        right = [x[:, 0] for x in right]
    limits = _Limit(64 if dtype == jnp.float32 else 4, str(dtype), 1.0), _Limit(64, "float32", 4.0)
    count = 2 if return_lse else 1
    _check_reads(name, scene, call, ("out", "lse")[:count], right[:count], limits[:count], source)


class _Operations(NamedTuple):
    """jaxkv's operations on a kind of entry."""

    write: Any
    read: Any


def _operations(entry: Entry) -> _Operations:
    if isinstance(entry, jaxkv.MLAEntry):
        return _Operations(jaxkv.write_mla, jaxkv.read_mla)
    if isinstance(entry, jaxkv.KVEntry):
        return _Operations(jaxkv.write_kv, jaxkv.read_kv)
    if isinstance(entry, jaxkv.IndexerEntry):
        return _Operations(jaxkv.write_indexer_k, jaxkv.read_indexer_k)
    raise ValueError(f"`layouts` are of {entry}: expected an MLAEntry, a KVEntry or an IndexerEntry")


def _named(layouts: Layouts) -> Iterator[tuple[str, jaxkv.CacheLayout]]:
    """The layouts to check, with their names."""
    if isinstance(layouts, jaxkv.CacheLayout):
        layouts = {layouts.order: layouts}
    if not isinstance(layouts, Mapping) or not layouts:
        given = layouts if isinstance(layouts, Mapping) else f"a {type(layouts).__name__}"
        raise ValueError(f"`layouts` is {given}: expected a CacheLayout, or some by name, as of every_layout(entry)")
    for name, layout in layouts.items():
        if not isinstance(layout, jaxkv.CacheLayout):
            raise ValueError(f"`layouts[{name!r}]` is a {type(layout).__name__}: expected a CacheLayout")
        _operations(layout.entry)
        yield name, layout


def _where(name: str, layout: jaxkv.CacheLayout, layer: int, around: str) -> str:
    """The layout in words, for messages."""
    steps = [f"strides {_steps(layout.strides)}, offset {layout.offset}"]
    if layout.value_strides is not None:
        steps.append(f"of values {_steps(layout.value_strides)}, offset {layout.value_offset}")
    return f"layout {name!r} ({'; '.join(steps)}), layer {layer}, {around} around the entries"


def _steps(strides: jaxkv.Strides) -> str:
    return ", ".join(f"{axis} {getattr(strides, axis)}" for axis in ("layer", "block", "head", "token"))


def _called(where: str, function: Callable[..., Any], *args, **keywords) -> Any:
    """The result of the function under test; its exceptions name the layout."""
    try:
        return jax.block_until_ready(function(*args, **keywords))
    except Exception as error:
        error.add_note(where)
        raise


def _surroundings(layout: jaxkv.CacheLayout) -> Sequence[str]:
    return (ZERO,) if layout.nbytes > LARGE else (NAN, RANDOM)


def _filled(layout: jaxkv.CacheLayout, around: str) -> np.ndarray:
    """The bytes of a cache that holds nothing but what is `around` entries; the same ones in each call."""
    if around == RANDOM:
        return np.random.default_rng(1).integers(0, 256, layout.nbytes, np.uint8)
    if around == NAN:
        return np.full(layout.nbytes, 0xFF, np.uint8)
    # The host allocates the pages of this memory that are written.  They begin at addresses at which JAX on CPUs uses
    # memory as it is; NumPy's do not.
    return np.frombuffer(mmap.mmap(-1, layout.nbytes), np.uint8)


def _on_device(layout: jaxkv.CacheLayout, buffer: np.ndarray) -> jaxkv.KVCache:
    if layout.nbytes <= LARGE:
        return to_cache(layout, buffer)
    return jax.device_put(cache_of(layout, buffer.view(layout.dtype)))  # without a copy, where the device allows it


def _parts(layout: jaxkv.CacheLayout, rng: np.random.Generator, count: int) -> list[jax.Array]:
    """New values of `count` tokens."""
    heads = () if layout.entry.one_head else (layout.num_heads,)
    shapes = [(count, *heads, n) for n in layout.entry.sizes]
    return [jnp.asarray(rng.standard_normal(shape), layout.entry.input_dtype) for shape in shapes]


def _scales(entry: Entry) -> dict[str, float]:
    if isinstance(entry, jaxkv.MLAEntry):
        return {"kv_scale": K_SCALE} if any(entry.scaled) else {}
    scales = {"k_scale": K_SCALE, "v_scale": V_SCALE}
    return {name: scale for (name, scale), own in zip(scales.items(), entry.scaled, strict=False) if own}


@dataclass(frozen=True)
class _Requests:
    """Requests whose tokens are stored in a layout, in blocks that do not follow each other."""

    layout: jaxkv.CacheLayout

    @cached_property
    def blocks(self) -> list[list[int]]:
        """The blocks of each request."""
        size, free = self.layout.block_size, np.random.default_rng(3).permutation(self.layout.num_blocks).tolist()
        return [[free.pop() for _ in range(-(-length // size))] for length in self.lengths]

    @cached_property
    def lengths(self) -> list[int]:
        """Lengths around the block size, as many as the blocks suffice for."""
        n, left, found = self.layout.block_size, self.layout.num_blocks, []
        for length in dict.fromkeys((n + 1, 0, n - 1, 1, 3 * n + 2, n)):
            if (needed := -(-length // n)) <= left:
                found.append(length)
                left -= needed
        return sorted(found)

    def tables(self, around: str) -> jax.Array:
        """Block tables; past the lengths they hold blocks of which no request has any, or numbers of no blocks."""
        used = {block for blocks in self.blocks for block in blocks}
        free = [block for block in range(self.layout.num_blocks) if block not in used]
        found = np.resize(
            np.asarray(free if around == NAN and free else [2_147_480_000, -1], np.int32),
            (len(self.blocks), max(map(len, self.blocks)) + 2),
        )
        for row, blocks in zip(found, self.blocks, strict=True):
            row[: len(blocks)] = blocks
        return jnp.asarray(found)

    def place(self, request: int, position: int) -> tuple[int, int]:
        """The block of a token, and its index there."""
        block, token = divmod(position, self.layout.block_size)
        return self.blocks[request][block], token

    @cached_property
    def places(self) -> tuple[np.ndarray, np.ndarray]:
        """The blocks of all tokens, request by request, and their indices there."""
        found = [self.place(request, p) for request, n in enumerate(self.lengths) for p in range(n)]
        blocks, tokens = np.asarray(found, np.int64).reshape(-1, 2).T
        return blocks, tokens

    @property
    def scales(self) -> dict[str, float]:
        """Keyword arguments."""
        return _scales(self.layout.entry)

    @cached_property
    def twin(self) -> jaxkv.KVCache:
        """The tokens in a packed cache of one layer, with NaN in all other slots."""
        layout, (blocks, tokens) = packed_twin(self.layout), self.places
        slots = jnp.asarray(blocks * layout.block_size + tokens, jnp.int32)
        parts = _parts(layout, np.random.default_rng(4), slots.size)
        cache = to_cache(layout, _filled(layout, NAN))
        return _operations(layout.entry).write(cache, *parts, slots, layer=0, **self.scales, implementation="xla")

    @cached_property
    def values(self) -> list[np.ndarray]:
        """The values of all tokens as float64 [T, ...], request by request, as `read_*` returns them in float32."""
        blocks, tokens = self.places
        slots = jnp.asarray(blocks * self.layout.block_size + tokens, jnp.int32)
        found = _operations(self.layout.entry).read(
            self.twin, slots, layer=0, dtype=jnp.float32, **self.scales, implementation="xla"
        )
        return [np.asarray(part, np.float64) for part in (found if isinstance(found, tuple) else (found,))]

    def stored(self, layer: int, around: str) -> np.ndarray:
        """The bytes of a cache of the layout with the tokens in `layer`."""
        found, (blocks, tokens) = _filled(self.layout, around), self.places
        source = {field.name: view for field, view in stored_fields(self.twin.layout, to_bytes(self.twin))}
        for field, view in stored_fields(self.layout, found):
            if field.name != "padding":
                view[layer][blocks, :, tokens] = source[field.name][0][blocks, :, tokens]
        return found


class _Source(NamedTuple):
    """What an element of a result must be computed from."""

    text: str
    tokens: tuple[tuple[int, int], ...]
    """(request, position) of each token."""
    head: int = 0


class _Limit(NamedTuple):
    """The tolerance of an element: `roundings` of `dtype` of its size plus `magnitude`."""

    roundings: int
    dtype: str
    magnitude: float


def _check_reads(
    name: str,
    scene: _Requests,
    call: Callable[..., Any],
    names: Sequence[str],
    right: Sequence[np.ndarray],
    limits: Sequence[_Limit],
    source: Callable[[tuple[int, ...]], _Source],
    dtype: Any = None,
) -> None:
    """Runs a function that reads on a packed cache and on the layout, and compares its results."""
    packed, layout = scene.twin.layout, scene.layout
    alone = _Requests(packed)
    where = _where("packed cache of one layer", packed, 0, NAN)
    found = _results(where, call, scene.twin, alone.tables(NAN), 0, names, right, dtype)
    for part, values, limit, result in zip(names, right, limits, found, strict=True):
        wrong = _beyond(result, values, limit)
        if wrong.any():
            _fail(where, alone, 0, NAN, call, names, found, right, part, wrong, source)
    layer = layout.num_layers // 2
    for around in _surroundings(layout):
        where = _where(name, layout, layer, around)
        cache = _on_device(layout, scene.stored(layer, around))
        results = _results(where, call, cache, scene.tables(around), layer, names, right, dtype)
        for part, result, expected in zip(names, results, found, strict=True):
            wrong = _bits(result) != _bits(expected)
            if wrong.any():
                _fail(where, scene, layer, around, call, names, results, found, part, wrong, source)


def _results(where, call, cache, tables, layer, names, right, dtype) -> list[np.ndarray]:
    """The results of the function under test; AssertionError if their number, shapes or dtypes are wrong."""
    found = _called(where, call, cache, tables, layer)
    if len(found) != len(names):
        count = f"{len(found)} result{'s' * (len(found) != 1)}"
        raise AssertionError(f"{where}: {count}, expected {', '.join(names)}")
    for name, result, values in zip(names, found, right, strict=True):
        if result.shape != values.shape or (dtype is not None and result.dtype != dtype):
            expected = f"{'floats' if dtype is None else dtype} {list(values.shape)}"
            raise AssertionError(f"{where}: {name} is {result.dtype}{list(result.shape)}, expected {expected}")
    return [np.asarray(result) for result in found]


def _beyond(found: np.ndarray, right: np.ndarray, limit: _Limit) -> np.ndarray:
    """Where results differ by more than the limit."""
    found = found.astype(np.float64)
    with np.errstate(invalid="ignore"):
        tolerance = limit.roundings * EPSILON[limit.dtype] * (np.abs(right) + limit.magnitude)
        close = np.abs(found - right) <= tolerance
    return ~(close | (found == right))


def _bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")


def _fail(where, scene, layer, around, call, names, found, expected, part, wrong, source) -> None:
    """Raises AssertionError: where a result is wrong, and which memory it was computed from."""
    number, index = names.index(part), tuple(np.argwhere(wrong)[0].tolist())
    a, b = (float(results[number][index]) for results in (found, expected))
    made_of, layout = source(index), scene.layout
    text = f"{where}:\n  {part}{list(index)} is {a:.6g}, expected {b:.6g} ({made_of.text}); "
    text += f"{wrong.sum():,} of {wrong.size:,} elements are wrong."
    if part == "lse" and np.isclose(a * np.log(2), b, rtol=1e-3):
        text += "\n  It is the logarithm with base 2, expected the natural one."
    if layout.nbytes > LARGE:
        raise AssertionError(f"{text}\n  The cache is too large to find out which memory it reads.")
    tables, leading = scene.tables(around), index[: found[0].ndim - 1]

    def row(buffer: np.ndarray) -> bytes:
        return b"".join(np.asarray(x)[leading].tobytes() for x in call(to_cache(layout, buffer), tables, layer))

    places = [(*scene.place(*token), f"token {token[1]} of request {token[0]}") for token in made_of.tokens]
    memory = Memory(layout, layer, made_of.head, places, scene.stored(layer, NAN))
    raise AssertionError(f"{text}\n  {explain_read(memory, row)}")


def _attention(scene: _Requests, queries: Sequence[jax.Array], scale: float) -> Sequence[np.ndarray]:
    """Attention in float64: out [B, Q, Hq, Dv] and lse [B, Q, Hq]."""
    entry, first = scene.layout.entry, 0
    q = np.concatenate([np.asarray(part, np.float64) for part in queries], axis=-1)
    q = q.reshape(len(scene.lengths), -1, *q.shape[-2:])
    if isinstance(entry, jaxkv.MLAEntry):
        keys = np.concatenate(scene.values, axis=-1)[:, None]
        values = keys[..., : entry.value_dim]
    else:
        keys, values = scene.values
    group = q.shape[2] // keys.shape[1]
    out, lse = np.zeros((*q.shape[:3], values.shape[-1])), np.full(q.shape[:3], -np.inf)
    for request, length in enumerate(scene.lengths):
        k, v = (np.repeat(x[first : first + length], group, axis=1) for x in (keys, values))
        first += length
        for token in range(q.shape[1]):
            seen = length - q.shape[1] + token + 1
            if seen > 0:
                scores = np.einsum("hd,shd->hs", q[request, token], k[:seen]) * scale
                top = scores.max(axis=1, keepdims=True)
                p = np.exp(scores - top)
                out[request, token] = np.einsum("hs,shd->hd", p / p.sum(axis=1, keepdims=True), v[:seen])
                lse[request, token] = top[:, 0] + np.log(p.sum(axis=1))
    return out, lse
