"""The workloads of `grouped_swiglu` and `scaled_linear`."""

from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv.bench.workload import Shapes, Workload

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
