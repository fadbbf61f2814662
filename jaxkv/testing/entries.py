"""How random writes and reads of entries and states are drawn, and those of whole blocks."""

import numpy as np

import jaxkv
from jaxkv.testing.case import SCALES, Case, Index, Shapes
from jaxkv.testing.indices import FAR, draw_distinct, draw_lengths, draw_tables, reveal
from jaxkv.testing.random_layouts import draw_delta_state, pick


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


ROTATED = "cos_sin"


class RotatedWrite(Write):
    """Stores latents, or keys and values; some of these writes rotate the rotary keys or the keys.

    Some values of formats `fp8` and `fp8_e5m2` already have the dtype in which they are stored.
    """

    @classmethod
    def optional(cls):
        """`cos_sin`, by which keys are rotated."""
        return (ROTATED, *SCALES)

    @classmethod
    def sizes(cls, rng, layout, fields):
        """The option `interleaved`, of writes that rotate keys; only pairs of values can be rotated."""
        if layout.entry.codec.scaled and layout.entry.values_dtype is not None and not rng.integers(3):
            return {"dtype": layout.entry.values_dtype, "extras": ()}
        rotary, interleaved = _rotary(layout.entry), bool(rng.integers(2))
        if not rotary or rotary % 2:
            return {"extras": tuple(name for name in fields["extras"] if name != ROTATED)}
        return {"options": {"interleaved": interleaved} if ROTATED in fields["extras"] else {}}

    def index(self, rng, live) -> Index:
        """The slots to write; cosines and sines with which all products are exact, on every device."""
        index, keywords = super().index(rng, live)
        if ROTATED in self.extras:
            shape = self.count, _rotary(self.layout.entry)
            keywords[ROTATED] = rng.choice([0, 1, -1, 0.5, -0.25], shape).astype(np.float32)
        return index, keywords

    def _scales(self, rng):
        return {} if self.dtype == self.layout.entry.values_dtype else super()._scales(rng)


def _rotary(entry) -> int:
    """How many values of a token or head a write can rotate: those of a rotary part, or of a key."""
    return entry.sizes[0 if isinstance(entry, jaxkv.KVEntry) else 1]


class WriteEntries(Write):
    """Stores the bytes of entries."""

    @property
    def value_shapes(self) -> Shapes:
        """Shape and dtype of the bytes."""
        layout = self.layout
        heads = () if layout.entry.one_head else (layout.num_heads,)
        return [((self.count, *heads, layout.entry.nbytes), "uint8")]

    def arguments(self, cache, values, draw, layer):
        """Those of a write, without scales."""
        return super().arguments(cache, values, draw._replace(scales={}), layer)


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


class DecodeDeltaRule(Case):
    """Decode steps of the gated delta rule: states in place, to other slots, and of new requests; and padding."""

    effect = "updates states"

    @classmethod
    def entry(cls, rng, operation):
        """States of the rule."""
        return draw_delta_state(rng)

    @classmethod
    def optional(cls):
        """`decay` per value of a key; without it, a decay per head."""
        return ("decays of channels",)

    @property
    def _sizes(self) -> tuple[int, int, int, int]:
        """W - 1, H, K and C."""
        shapes = self.layout.entry.shapes
        (taps, channels), (heads, keys, _) = shapes["conv"], shapes["delta"]
        return taps, heads, keys, channels

    @property
    def value_shapes(self) -> Shapes:
        """Shapes and dtypes of the tokens and of the weight of the convolution."""
        taps, _, _, channels = self._sizes
        return [((self.count, channels), self.dtype), ((channels, taps + 1), self.dtype)]

    def index(self, rng, live) -> Index:
        """The slots to read, which no other token writes, and those to write; decays and rates."""
        written = draw_distinct(rng, live.size, self.count)
        free = [*np.setdiff1d(np.arange(live.size), written), *FAR]
        read = np.where(rng.random(self.count) < 0.5, written, rng.choice(free, self.count))
        _, heads, keys, _ = self._sizes
        decay = -rng.uniform(0, 2, (self.count, heads, keys if self.extras else 1)).astype(np.float32)
        return (read, written), {"decay": decay, "rate": rng.uniform(0, 1, (self.count, heads)).astype(np.float32)}

    def arguments(self, cache, values, draw, layer):
        """Tokens, decays, rates and weights, the cache, and slots."""
        x, weight = values
        return (x, draw.keywords["decay"], draw.keywords["rate"], weight, cache, *draw.index), {"layer": layer}


class Read(ReadState):
    """Reads entries, likewise."""

    @classmethod
    def sizes(cls, rng, layout, fields):
        """The option `dtype`, of the result."""
        return {"options": {"dtype": fields["dtype"]}}


class Gather(Case):
    """Reads runs of tokens."""

    @classmethod
    def optional(cls):
        """`seq_starts`: the position at which each run starts."""
        return ("seq_starts", *SCALES)

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
