"""Caches full of garbage with one layer of known entries in them, on every kind of layout, and their packed twins."""

from dataclasses import dataclass, replace
from functools import cache, lru_cache

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv.testing.buffers import entry_bytes, packed_twin, to_cache
from jaxkv.testing.named_layouts import APART as APART
from jaxkv.testing.named_layouts import ONE_ARRAY as ONE_ARRAY
from jaxkv.testing.named_layouts import keys_apart, whole_entries
from support import oracle

UNUSED = 2_147_480_000
"""What stands in block tables past a request's last block."""

BLOCKS = 16

SMALLEST = {"fp8_v41": 64, "fp8_v41_split": 64, "fp4_v41": 32, "fp4_v41_split": 32, "nvfp4": 32, "kvfp4": 32}
"""The fewest values of an array, of formats that store values in larger groups than others."""


def entry_of(kind, label, *sizes):
    """The entry of a format with these sizes, or with the smallest that the format can store.

    For values in another format than keys, `label` has both, as `Entry.label`.
    """
    name, *values = label.split("+")
    least = max(SMALLEST.get(each, 0) for each in (name, *values))
    return kind(name, *(max(size, least) for size in sizes), **({"value_format": values[0]} if values else {}))


MLA_ENTRIES = [entry_of(jaxkv.MLAEntry, name, 128, 16) for name in jaxkv.MLAEntry.formats]
KV_ENTRIES = [entry_of(jaxkv.KVEntry, name, 16, 8) for name in jaxkv.KVEntry.formats]
MIXED = (
    "bf16+int8", "int8+nvfp4", "fp8+kvfp4", "fp8_e5m2+int4", "nvfp4+f16", "kvfp4+f32", "int4+fp8", "f32+bf16",
    "f16+fp8_e5m2", "bf16+fp8",
)  # fmt: skip
"""Labels of entries whose values have another format than their keys: each format is that of keys, and of values."""
MIXED_ENTRIES = [entry_of(jaxkv.KVEntry, label, 32, 16) for label in MIXED]
INDEXER_ENTRY = jaxkv.IndexerEntry()
INDEXER_ENTRIES = [jaxkv.IndexerEntry(name) for name in jaxkv.IndexerEntry.formats]


def is_split(entry):
    """Whether pages hold some parts of all tokens, then others."""
    whole = isinstance(entry, jaxkv.StateEntry) or len(entry.format_names) > 1
    regions = None if whole else oracle.FORMATS[entry.format].page_parts
    return regions is not None and len(regions(entry)) > 1


layouts = cache(whole_entries)
"""Every kind of layout of entries that lie together, by name."""

apart = keys_apart
"""A layout whose keys and values lie apart."""


def shapes_of(layout):
    """A cache of shapes, for what needs no values."""
    return jax.eval_shape(lambda: jaxkv.KVCache.zeros(layout))


@cache
def layout_names(entry):
    """Names of the kinds of layout that differ for an entry: with one head, the six orders are two layouts."""
    names = {}
    for name, layout in layouts(entry, num_heads=1 if entry.one_head else 2).items():
        names.setdefault(layout, name)
    return [*names.values()]


def place(layout, buffer, layer, entries):
    """Stores entries, bytes [B, H, N, nbytes], as `layer` of the byte buffer; returns which bytes it wrote."""
    written = np.zeros(buffer.shape, bool)
    for target, source in ((buffer, entries), (written, np.ones(entries.shape, bool))):
        if is_split(layout.entry):
            parts = np.split(source, _edges(layout.entry), axis=-1)
            flat = np.concatenate([part.reshape(*source.shape[:2], -1) for part in parts], axis=-1)
            source = flat.reshape(source.shape)
        for view, places in zip(entry_bytes(layout, target), run_places(layout), strict=True):
            view[layer] = source[..., places]
    return written


def fetch(layout, buffer, layer):
    """What `place` stores: entries [B, H, N, nbytes] of `layer`; 0 in padding that planes do not have."""
    pages = [view[layer] for view in entry_bytes(layout, np.asarray(buffer))]
    entries = np.zeros((*pages[0].shape[:3], layout.entry.nbytes), np.uint8)
    for page, places in zip(pages, run_places(layout), strict=True):
        entries[..., places] = page
    if not is_split(layout.entry):
        return entries
    flat = entries.reshape(*entries.shape[:2], -1)
    parts = np.split(flat, [edge * layout.block_size for edge in _edges(layout.entry)], axis=-1)
    return np.concatenate([part.reshape(*entries.shape[:3], -1) for part in parts], axis=-1)


def run_places(layout):
    """Which bytes of an entry each view of `entry_bytes` has."""
    return [np.s_[:]] if layout.value_offset is None else oracle.planes(layout.entry)


def _edges(entry):
    """Where the regions of a split page part an entry, in bytes."""
    return np.cumsum(oracle.FORMATS[entry.format].page_parts(entry))[:-1]


def garbage(layout, rng, kind="nan"):
    """A byte buffer of NaN (0xff is NaN in every format), or of random bytes."""
    if kind == "nan":
        return np.full(layout.nbytes, 0xFF, np.uint8)
    return rng.integers(0, 256, layout.nbytes, np.uint8)


@dataclass(frozen=True)
class Scene:
    """Requests whose entries stand in a cache, with everything that must not be read poisoned."""

    entry: object
    num_heads: int
    block_size: int
    lengths: tuple[int, ...]
    tables: np.ndarray
    entries: np.ndarray
    """Bytes [B, H, N, nbytes] of a layer; NaN in slots that no request uses."""
    scales: tuple | None
    kind: str = "nan"

    def cache(self, layout, layer):
        """The scene as `layer` of a cache of that layout, garbage elsewhere."""
        buffer = garbage(layout, np.random.default_rng(1), self.kind)
        place(layout, buffer, layer, self.entries)
        return to_cache(layout, buffer)

    def twin(self, layout):
        """The scene in the packed cache."""
        return self.cache(packed_twin(layout), 0)

    def slots(self, request):
        """Slots of the tokens of a request."""
        positions = np.arange(self.lengths[request])
        return self.tables[request, positions // self.block_size] * self.block_size + positions % self.block_size

    def parts(self, request):
        """The parts of a request's entries, float64 [S, H, n_i], in order of position."""
        slots = self.slots(request)
        rows = self.entries[slots // self.block_size, :, slots % self.block_size]
        return oracle.decode(self.entry, rows, self.oracle_scales)

    def holding(self, value, request, position, part=slice(None)):
        """The scene with `value` in a part of the stored elements of a request's token."""
        entries, slot = self.entries.copy(), self.slots(request)[position]
        entries.view(self.entry.dtype)[slot // self.block_size, :, slot % self.block_size, part] = value
        return replace(self, entries=entries)

    @property
    def oracle_scales(self):
        """Scales as the oracle takes them: [H, 1] where they are per head."""
        if self.scales is None:
            return (1.0, 1.0)
        scales = [1.0 if scale is None else scale for scale in self.scales]
        return tuple(np.asarray(s, np.float64)[..., None] if np.ndim(s) else float(s) for s in scales)

    def scale_arguments(self):
        """Keyword arguments that bring the scales to an operation."""
        if self.scales is None:
            return {}
        if isinstance(self.entry, jaxkv.MLAEntry):
            return {"kv_scale": float(self.scales[0])}
        named = zip(("k_scale", "v_scale"), self.scales, strict=True)
        return {name: jnp.asarray(scale, jnp.float32) for name, scale in named if scale is not None}


@lru_cache(maxsize=32)
def scene(entry, *, num_heads=1, block_size=64, lengths=None, num_blocks=BLOCKS, seed=0, kind="nan"):
    """Requests of lengths round a block's edge (or those given) on shuffled blocks."""
    rng = np.random.default_rng(seed)
    n = block_size
    lengths = tuple(lengths or (0, 1, n - 1, n, n + 1, 3 * n + 2))
    needed = [-(-length // n) for length in lengths]
    assert sum(needed) <= num_blocks
    blocks = iter(rng.permutation(num_blocks))
    tables = np.full((len(lengths), max(needed) + 2), UNUSED, np.int32)
    scales = None
    if any(entry.scaled):
        scales = (0.03, 0.03) if isinstance(entry, jaxkv.MLAEntry) else (rng.uniform(0.01, 0.04, num_heads), 0.02)
        scales = tuple(scale if own else None for scale, own in zip(scales, entry.scaled, strict=True))
    values = [rng.standard_normal((num_blocks, num_heads, n, size)).astype(np.float32) for size in entry.sizes]
    draft = Scene(entry, num_heads, n, lengths, tables, np.empty(0), scales, kind)
    spread = tuple(s[:, None] if np.ndim(s) > 1 else s for s in draft.oracle_scales)
    encoded = oracle.encode(entry, values, spread)
    entries = np.full(encoded.shape, 0xFF, np.uint8)
    for request, count in enumerate(needed):
        tables[request, :count] = [next(blocks) for _ in range(count)]
        slots = draft.slots(request)
        entries[slots // n, :, slots % n] = encoded[slots // n, :, slots % n]
    for array in (tables, entries):
        array.setflags(write=False)  # tests share scenes
    return replace(draft, entries=entries)
