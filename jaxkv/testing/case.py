"""Random calls: `Case` holds what is static (layout, shapes, options), and `Draw` the contents of one call."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Self

import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv.ops.operation import Operation
from jaxkv.testing.random_layouts import draw_entry, draw_layout, pick
from jaxkv_kernels.formats.entries import Entry

PER_HEAD, PER_TOKEN = SCALES = "scales per head", "scales per token"
"""Which scales of entries and queries are passed, if they have any: without these, one for all."""

Shapes = list[tuple[tuple[int, ...], Any]]
"""Shapes and dtypes."""

Index = tuple[tuple[np.ndarray, ...], dict[str, np.ndarray]]
"""Integer arrays passed by position, and arrays passed by keyword."""


class Draw(NamedTuple):
    """The contents of one call, on the host.  Random values are made on the device, from `key`."""

    key: np.ndarray
    """uint32, a seed."""
    layer: np.ndarray
    live: np.ndarray
    """bool [slots]: slots that the call may read; the others hold NaN."""
    scales: Mapping[str, np.ndarray]
    """Scales of a quantised entry, as keyword arguments of writes and reads."""
    index: tuple[np.ndarray, ...]
    """Integer arrays passed by position: tables and lengths, slots, or blocks."""
    keywords: Mapping[str, np.ndarray]
    """Arrays passed by keyword."""


def _write_states(cache: jaxkv.KVCache, *arrays, **options) -> jaxkv.KVCache:
    """`write_state`, with the arrays of the states by position, and slots after them."""
    *values, slots = arrays
    entry: Any = cache.layout.entry
    return jaxkv.write_state(cache, entry.named(values), slots, **options)


@dataclass(frozen=True)
class Case:
    """The static part of random calls, for which one program is compiled.  Each family of operations has a subclass."""

    operation: str
    layout: jaxkv.CacheLayout
    requests: int
    columns: int
    """Columns of the block tables."""
    q_len: int
    heads: int
    """Query heads."""
    count: int
    """Tokens to write, rows to gather, slots per query token, positions of logits, partial results, or blocks."""
    dtype: Any
    """Dtype of queries, new values or results."""
    options: tuple[tuple[str, Any], ...]
    """Static keyword arguments."""
    extras: tuple[str, ...]
    """Names of the optional arguments that are passed, and of `SCALES`."""

    effect: ClassVar[Literal["reads", "writes", "updates states", "moves blocks"]] = "reads"
    """What the call does to the cache.  It decides how the result is checked."""
    result: ClassVar[Literal["bits", "attention", "logits", "sums"]] = "bits"
    """How the result of a read is compared: bit for bit, or within roundings."""

    @classmethod
    def drawn(cls, rng: np.random.Generator, operation: Operation) -> Self:
        """A random case of `operation`."""
        layout = draw_layout(rng, cls.entry(rng, operation))
        fields: dict[str, Any] = {
            "requests": pick(rng, 1, 2, 3, 5, 17),
            "columns": pick(rng, 1, 2, 5, layout.num_blocks),
            "q_len": pick(rng, 1, 1, 2, 5),
            "heads": pick(rng, 1, 3, 16, 20, 64, 128),
            "count": pick(rng, 1, 7, 64, 200, 513),
            "dtype": jnp.dtype(pick(rng, "bfloat16", "float16", "float32")),
            "extras": tuple(name for name in cls.optional() if rng.random() < 0.5),
            "options": {},
        }
        fields |= cls.sizes(rng, layout, fields)
        fields["options"] = tuple(fields["options"].items())
        return cls(operation.name, layout, **fields)

    @classmethod
    def entry(cls, rng: np.random.Generator, operation: Operation) -> Entry:
        """A random entry of the cache."""
        return draw_entry(rng, operation.entries or (jaxkv.MLAEntry,))

    @classmethod
    def optional(cls) -> tuple[str, ...]:
        """The names that `extras` may contain."""
        return SCALES

    @classmethod
    def sizes(cls, rng: np.random.Generator, layout: jaxkv.CacheLayout, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The fields that this family draws in its own way, by name; they replace those in `fields`."""
        return {}

    @property
    def function(self):
        """The operation."""
        return getattr(jaxkv, self.operation)

    @property
    def writer(self) -> Any:
        """The operation that writes entries of the cache."""
        if isinstance(self.layout.entry, jaxkv.KVEntry):
            return jaxkv.write_kv
        if isinstance(self.layout.entry, jaxkv.StateEntry):
            return _write_states
        return jaxkv.write_indexer_k if isinstance(self.layout.entry, jaxkv.IndexerEntry) else jaxkv.write_mla

    @property
    def value_shapes(self) -> Shapes:
        """Shapes and dtypes of the random arguments of the call: queries, new values, blocks."""
        return []

    def entry_shapes(self, count: int) -> list[tuple[int, ...]]:
        """Shapes of the parts of `count` entries."""
        if isinstance(self.layout.entry, jaxkv.StateEntry):
            return [(count, *shape) for shape in self.layout.entry.shapes.values()]
        heads = () if self.layout.entry.one_head else (self.layout.num_heads,)
        return [(count, *heads, n) for n in self.layout.entry.sizes]

    def index(self, rng: np.random.Generator, live: np.ndarray) -> Index:
        """Draws the integer arguments of a call, and marks the slots that it may read in `live`."""
        raise NotImplementedError

    def draw(self, rng: np.random.Generator) -> Draw:
        """Draws the contents of one call."""
        layers, live = self.layout.num_layers, np.zeros(self.layout.num_slots, bool)
        outside = rng.random() < 0.05
        layer = rng.choice([-1, layers, 2**31 - 1]) if outside else rng.integers(layers)
        index, keywords = self.index(rng, live)
        index = tuple(np.asarray(array, np.int32) for array in index)
        key = np.asarray(rng.integers(2**32), np.uint32)
        return Draw(key, np.asarray(layer, np.int32), live, self._scales(rng), index, keywords)

    def arguments(self, cache, values, draw: Draw, layer) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments of the operation."""
        return (cache, *values, *draw.index), {**dict(self.options), **draw.keywords, **draw.scales, "layer": layer}

    def run(self, cache, values, draw: Draw, layer, implementation: str):
        """The result to be checked."""
        args, keywords = self.arguments(cache, values, draw, layer)
        return self.function(*args, **keywords, implementation=implementation)

    def expected(self, cache, values, draw: Draw, layer):
        """The expected result: the same call by `xla`, on a packed cache."""
        return self.run(cache, values, draw, layer, "xla")

    def _scales(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        if not any(self.layout.entry.scaled):
            return {}
        if isinstance(self.layout.entry, jaxkv.MLAEntry):
            return {"kv_scale": np.asarray(rng.uniform(0.01, 0.04), np.float32)}
        shape = (self.layout.num_heads,) if PER_HEAD in self.extras else ()
        if PER_TOKEN in self.extras:
            shape = self.layout.num_blocks, self.layout.block_size, self.layout.num_heads
        names = zip(("k_scale", "v_scale"), self.layout.entry.scaled, strict=True)
        return {name: np.asarray(rng.uniform(0.01, 0.04, shape), np.float32) for name, scaled in names if scaled}

    def __str__(self):
        layout, entry, strides = self.layout, self.layout.entry, self.layout.strides
        options = "".join(
            f" {name}={value}"
            for name, value in self.options
            if name in ("scale", "logit_cap", "window", "causal", "mask")
        )
        options += "".join(f" {name}" for name in self.extras)
        values = ""
        if (own := layout.value_strides) is not None:
            values = f", values {own.layer}/{own.block}/{own.head}/{own.token} +{layout.value_offset}"
        return (
            f"{self.operation} {entry.label} {'+'.join(map(str, entry.sizes))} {self.dtype.name} "
            f"[{self.requests}, {self.q_len}, {self.heads}] x {self.columns} columns, {self.count}{options}; "
            f"L={layout.num_layers} B={layout.num_blocks} N={layout.block_size} H={layout.num_heads} {layout.order} "
            f"strides {strides.layer}/{strides.block}/{strides.head}/{strides.token} +{layout.offset}{values} "
            f"of {' and '.join(map(str, filter(None, (layout.size, layout.value_size))))} {layout.dtype}"
        )
