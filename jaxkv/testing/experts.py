"""How random calls without a cache are drawn: `select_experts`, `grouped_swiglu` and `scaled_linear`."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv.testing.case import Case, Index, Shapes
from jaxkv.testing.indices import FAR
from jaxkv.testing.random_layouts import pick

ALPHA, LIMIT = 1.7, 1.5
"""Of GPT-OSS's activation; so low a limit cuts some values."""


class Experts(Case):
    """Tokens through the experts that they chose, of which some do not exist."""

    result = "sums"

    @classmethod
    def sizes(cls, rng, layout, fields):
        """The number of experts, those chosen per token, the width of tokens, the inner size; float8 weights or not.

        Last, the inner size of the expert of all tokens, or 0; and whether the activation is GPT-OSS's, with biases.
        """
        count, sizes = pick(rng, 1, 3, 8, 40), (20, 64, 64, 128, 192)
        inner = pick(rng, *sizes)
        options = {
            "experts": count,
            "chosen": pick(rng, 1, 2, 6),
            "width": pick(rng, *sizes),
            "inner": inner,
            "fp8": pick(rng, False, False, True),
            "shared": pick(rng, 0, 0, inner, 2 * inner, 72),
            "biased": pick(rng, False, False, True),
        }
        return {"count": pick(rng, 1, 2, 33, 200), "options": options}

    @property
    def value_shapes(self) -> Shapes:
        """Shapes and dtypes of tokens and weights."""
        count, _, width, inner, _, shared, biased = self._sizes
        matrices = [(count, inner, width), (count, inner, width), (count, width, inner)]
        if shared:
            matrices += [(shared, width), (shared, width), (width, shared)]
        biases = [matrix[:2] for matrix in matrices[:3]] if biased else []
        return [(shape, self.dtype) for shape in ((self.count, width), *matrices, *biases)]

    @property
    def _sizes(self):
        return tuple(size for _, size in self.options)

    def index(self, rng, live) -> Index:
        """Ids of experts, few of them for some draws, and the weights of the chosen ones."""
        count, chosen, *_ = self._sizes
        experts = rng.integers(max(count // pick(rng, 1, 1, 4), 1), size=(self.count, chosen))
        missing = rng.random(experts.shape) < pick(rng, 0, 0.1, 1)
        experts = np.where(missing, rng.choice([*FAR, count], experts.shape), experts)
        weights = rng.random(experts.shape, np.float32)
        # As routers make them: with a sum of 1, results and their errors have the size of one expert's.
        return (experts,), {"weights": weights / weights.sum(axis=-1, keepdims=True)}

    def arguments(self, cache, values, draw, layer):
        """Tokens, experts and their weights."""
        *_, in_float8, shared, biased = self._sizes
        tokens, *matrices = values
        options: dict[str, Any] = {"shared": tuple(matrices[3:6])} if shared else {}
        if biased:
            options |= {"biases": tuple(matrices[-3:]), "alpha": ALPHA, "limit": LIMIT}
        matrices = _in_float8(matrices[:3]) if in_float8 else matrices[:3]
        return (tokens, draw.index[0], draw.keywords["weights"], *matrices), options

    def run(self, cache, values, draw, layer, implementation):
        """The result for matrices with which sums are about 1."""
        biases = 3 if self._sizes[-1] else 0
        values = [value if n in (0, *range(len(values) - biases, len(values))) else _unit(value)
                  for n, value in enumerate(values)]  # fmt: skip
        return super().run(cache, values, draw, layer, implementation)


class Routing(Case):
    """The experts of random logits."""

    result = "sums"

    @classmethod
    def sizes(cls, rng, layout, fields):
        """The number of experts, those chosen per token, how they are scored, and groups."""
        experts, groups = pick(rng, (8, 1), (64, 1), (160, 8), (256, 8))
        options = {
            "experts": experts,
            "per_token": pick(rng, 1, 2, 6, 8),
            "scoring": pick(rng, "softmax", "sigmoid", "sqrtsoftplus"),
            "groups": groups,
            "groups_per_token": min(groups, pick(rng, 1, 4)),
            "normalize": pick(rng, False, True),
            "biased": pick(rng, False, True),
        }
        return {"count": pick(rng, 1, 2, 33, 200), "options": options}

    @property
    def value_shapes(self) -> Shapes:
        """Shapes and dtypes of logits and biases."""
        experts = dict(self.options)["experts"]
        return [((self.count, experts), jnp.float32), ((experts,), jnp.float32)]

    def index(self, rng, live) -> Index:
        """No integers."""
        return (), {}

    def arguments(self, cache, values, draw, layer):
        """Logits, the bias, and the options."""
        options = dict(self.options)
        del options["experts"]
        bias = values[1] if options.pop("biased") else None
        return (values[0], options.pop("per_token")), {**options, "bias": bias}

    def run(self, cache, values, draw, layer, implementation):
        """The weight of each expert, 0 if it is not chosen."""
        ids, weights = super().run(cache, values, draw, layer, implementation)
        return jnp.zeros(values[0].shape).at[jnp.arange(self.count)[:, None], ids].add(weights)


class Linear(Case):
    """Tokens times a weight in float8."""

    result = "sums"

    @classmethod
    def sizes(cls, rng, layout, fields):
        """The width of tokens, and that of results."""
        sizes = 20, 64, 128, 256, 320
        return {
            "count": pick(rng, 1, 2, 33, 300),
            "options": {"width": pick(rng, *sizes), "results": pick(rng, *sizes)},
        }

    @property
    def value_shapes(self) -> Shapes:
        """Shapes and dtypes of tokens and the weight."""
        (_, width), (_, results) = self.options
        return [((self.count, width), self.dtype), ((results, width), self.dtype)]

    def index(self, rng, live) -> Index:
        """No integers."""
        return (), {}

    def arguments(self, cache, values, draw, layer):
        """Tokens and the weight in float8."""
        return (values[0], *_in_float8(values[1:])), {}

    def run(self, cache, values, draw, layer, implementation):
        """The result for a weight with which sums are about 1."""
        return super().run(cache, [values[0], _unit(values[1])], draw, layer, implementation)


def _unit(matrix):
    """A matrix scaled by a power of two, so that its products with tokens are about 1."""
    return matrix * 2.0 ** -round(math.log2(matrix.shape[-1]) / 2)


def _in_float8(matrices) -> list[Any]:
    """Matrices, arrays or their shapes, with a scale per tile."""
    quantise = jaxkv.TileScaled.of
    return [jax.eval_shape(quantise, m) if isinstance(m, jax.ShapeDtypeStruct) else quantise(m) for m in matrices]
