"""How random calls of `write_state` and `read_state` are drawn."""

import numpy as np

from jaxkv.fuzz.case import Case, Index, Shapes
from jaxkv.fuzz.indices import FAR, draw_distinct
from jaxkv.fuzz.layouts import pick


class WriteState(Case):
    """Stores states at distinct slots."""

    effect = "writes"

    @property
    def value_shapes(self) -> Shapes:
        """Shapes and dtypes of the arrays of the new states."""
        return [(shape, self.dtype) for shape in self.entry_shapes(self.count)]

    def index(self, rng, live) -> Index:
        """The slots to write."""
        return (draw_distinct(rng, live.size, self.count),), {}

    def arguments(self, cache, values, draw, layer):
        """The cache, the states by name, and slots."""
        states = dict(zip(self.layout.entry.shapes, values, strict=True))
        return (cache, states, *draw.index), {"layer": layer}


class ReadState(Case):
    """Reads states, some of them twice, and of slots outside the cache."""

    def index(self, rng, live) -> Index:
        """The slots to read."""
        outside = rng.random(self.count) < pick(rng, 0, 0.1, 1)
        slots = np.where(outside, rng.choice([*FAR, live.size], self.count), rng.integers(live.size, size=self.count))
        live[slots[~outside]] = True
        return (slots,), {}
