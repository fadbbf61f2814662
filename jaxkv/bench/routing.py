"""The workload of `select_experts`."""

from jaxkv.bench.workload import Shapes, Workload

V3 = {"scoring": "sigmoid", "groups": 8, "groups_per_token": 4, "normalize": True, "scale": 2.5}
"""How DeepSeek V3 chooses experts."""


class Routing(Workload):
    """Chooses `chosen` of `tokens` experts for each of `requests` tokens, as DeepSeek V3 does."""

    cached = False

    @property
    def value_shapes(self) -> Shapes:
        """Shapes and dtypes of logits and biases."""
        return [((self.requests, self.tokens), "float32"), ((self.tokens,), "float32")]

    def arguments(self, cache, values, index, layer):
        """Logits, the number of experts per token, and the bias."""
        logits, bias = values
        return (logits, self.chosen), {"bias": bias, **V3}

    @property
    def traffic(self) -> int:
        """Bytes of logits, biases, and of an id and a weight per chosen expert."""
        return 4 * (self.requests + 1) * self.tokens + 8 * self.requests * self.chosen
